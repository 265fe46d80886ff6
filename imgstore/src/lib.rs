//! The content-addressed layer store.
//!
//! Read it from the bottom: [`mod@format`] is what the bytes mean, [`origin`] is where they live, [`tree`] and [`source`]
//! turn directories and archives into a tree, [`build`] turns a tree into a published layer, [`store`] reads layers back,
//! [`fetch`] brings segments in on demand. No module here mounts anything or runs a daemon.

pub mod build;
pub mod credentials;
pub mod disk;
pub mod fetch;
pub mod format;
pub mod ids;
pub mod image;
pub mod media;
pub mod origin;
pub mod process;
pub mod registry;
pub mod source;
pub mod store;
pub mod tree;
