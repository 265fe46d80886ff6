//! Reading layers back from an origin, and keeping what was read.

pub mod cache;
pub mod export;
pub mod gc;
pub mod layer;
pub mod lease;
pub mod meta_file;
pub mod reader;
pub mod tags;
pub mod tar_export;
pub mod verify;
