//! Serves images as the read-only files of one FUSE mount.
//!
//! [`mount::FuseMount`] is the whole interface: mount, add and remove images, unmount. Below it, `tree` knows which names
//! and handles exist (tested without a mount) and `wire` translates between the kernel's requests and that tree.
//! Reads are answered from whatever thread the image answers on; the loop threads never wait for one.

pub mod mount;
mod tree;
mod wire;
