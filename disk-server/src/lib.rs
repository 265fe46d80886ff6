//! Serves one disk: to the kernel through ublk, as a file through FUSE, or to a virtual machine over a socket (NBD).
//!
//! ```text
//! dsec disk attach ── starts ──► this process, one a disk
//!                                 ├─ DiskFolder     holds the folder's lock, writes only below it
//!                                 ├─ way            NBD socket, FUSE file, or ublk device: requests
//!                                 └─ control        DISK/control: status, snapshot, merge, restack, detach
//! ```
//! A process a disk: what one guest can make it do ends with that guest (decision 0014). Nothing here talks to an origin.

pub mod client;
pub mod control;
pub mod error;
mod listener;
pub mod nbd;
pub mod serve;
mod way;

pub use way::Way;
