//! Why a disk is not served, or a server did not do what it was asked.

use std::io;
use std::path::{Path, PathBuf};

use fuse_driver::mount::FuseError;
use imgstore::disk::DiskError;
use ublk_driver::UblkError;

/// See the head of this file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The disk itself.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The FUSE file.
    #[error(transparent)]
    Fuse(#[from] FuseError),
    /// The ublk device.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// A file, socket or thread.
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Somebody uses what is to go away or to be made.
    #[error("{0}")]
    InUse(String),
    /// No server has this disk.
    #[error("disk `{0}` is not attached; `dsec disk attach` does that")]
    NotAttached(PathBuf),
    /// A server that is not there any more, or answers something else.
    #[error("the server of disk `{folder}` {what}; its log is `{log}`", log = folder.join("server.log").display(), folder = folder.display())]
    Silent {
        /// The disk.
        folder: PathBuf,
        /// What it did.
        what: String,
    },
    /// The server says no.
    #[error("{0}")]
    Refused(String),
}

impl ServeError {
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
