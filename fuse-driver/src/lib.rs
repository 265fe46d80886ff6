//! Serves images as the read-only files of one FUSE mount.
//!
//! [`mount::FuseMount`] is the whole interface: mount, add and remove images, unmount. Below it, `tree` knows which names
//! and handles exist (tested without a mount) and `wire` translates between the kernel's requests and that tree.
//! Reads are answered from whatever thread the image answers on; the loop threads never wait for one.
//! [`disk_file::DiskFile`] is the other kind of mount: one writable disk, as a single file.

pub mod disk_file;
pub mod mount;
mod tree;
mod wire;
