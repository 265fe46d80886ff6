//! The spool: one unlinked temporary file that holds contents which arrive as a stream.
//!
//! It only grows; contents refer to it by offset and keep it open. It has no name, so nothing is left behind whatever dies.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::SourceError;
use crate::ids::to_u64;

/// An append-only temporary file.
#[derive(Debug)]
pub(super) struct Spool {
    dir: PathBuf,
    file: std::fs::File,
    shared: Arc<OwnedFd>,
    len: u64,
}

impl Spool {
    pub(super) fn new(dir: &Path) -> Result<Self, SourceError> {
        let fail = |e: io::Error| SourceError::io(dir, "make a spool file in", e);
        let file = tempfile::tempfile_in(dir).map_err(fail)?;
        let shared = Arc::new(OwnedFd::from(file.try_clone().map_err(fail)?));
        Ok(Self {
            dir: dir.to_owned(),
            file,
            shared,
            len: 0,
        })
    }

    /// The file, for contents that refer to it.
    pub(super) fn file(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.shared)
    }

    /// Where the next byte goes.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), SourceError> {
        self.file
            .write_all_at(bytes, self.len)
            .map_err(|e| SourceError::io(&self.dir, "write to a spool file in", e))?;
        self.len += to_u64(bytes.len());
        Ok(())
    }
}
