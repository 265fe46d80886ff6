//! Reading layers back from an origin, and keeping what was read.

pub mod bundle;
pub mod cache;
pub mod copy;
pub mod export;
pub mod fsck_origin;
pub mod gc;
pub mod layer;
pub mod lease;
pub mod meta_file;
pub(crate) mod places;
pub mod reader;
pub mod repair;
mod repair_named;
mod repair_packs;
pub(crate) mod runs;
pub mod tags;
pub mod tar_export;
pub mod touched_files;
pub mod trace;
pub(crate) mod transfer;
pub mod verify;
