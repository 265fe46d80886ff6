//! Reading layers back from an origin, and keeping what was read.

pub mod cache;
pub mod export;
pub mod layer;
pub mod reader;
pub mod tar_export;
pub mod verify;
