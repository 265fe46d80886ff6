//! Reading layers back from an origin.

pub mod export;
pub mod layer;
pub mod reader;
pub mod tar_export;
pub mod verify;
