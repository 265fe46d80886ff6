//! 3FS: as a mounted file system (`dir:`), and through its user-space I/O library (`3fs:`).
//!
//! `mount` has what a `dir:` origin does differently on a 3FS mount, `chunks` cuts ranges where 3FS cuts files. `origin`
//! is `3fs:`: pack ranges go through shared-memory rings (`ring`, `pool`) of a library that is loaded when the origin is
//! opened (`sys`, the one place with `unsafe`), from files that are registered once (`files`); everything else goes
//! through the mount. `docs/three-fs.md` says what is respected and why. None of it has run on a 3FS cluster:
//! the tests use a stand-in with the semantics of a mount, and a library of the same ABI over a folder.

use std::time::Duration;

pub(crate) mod chunks;
mod files;
pub(crate) mod mount;
pub mod origin;
mod pool;
mod ring;
mod sys;

/// The chunk size of 3FS's root unless it was set otherwise. Reads are cut here: pieces of this size, so aligned, do not
/// cross chunks of any larger size either, for all are powers of two.
pub const CHUNK_BYTES: u64 = 1 << 20;
/// A host remembers for 5 s that a name did not exist; asked for longer, so that the last asking is a new one.
pub const LAG: Duration = Duration::from_secs(6);
