//! Reading layers back from an origin.

pub mod layer;
pub mod reader;
pub mod verify;
