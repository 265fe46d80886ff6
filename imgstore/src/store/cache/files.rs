//! The reading half of the cache: finds frames by digest. Used by the data plane, which never writes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::disk::{CacheDisk, RealDisk};
use super::health::Health;
use super::names;
use crate::ids::Digest;

/// See the head of this file. Clones share what they know of the disk.
#[derive(Debug, Clone)]
pub struct SegmentFiles {
    segments: PathBuf,
    disk: Arc<dyn CacheDisk>,
    trouble: Arc<Trouble>,
}

/// Errors of the disk; the lock is only taken while there are some.
#[derive(Debug, Default)]
struct Trouble {
    errors: AtomicU32,
    health: Mutex<Health>,
}

impl Trouble {
    fn may_ask(&self) -> bool {
        if self.errors.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        health.may_ask(Instant::now())
    }

    fn note<T>(&self, result: io::Result<T>, path: &Path) -> io::Result<T> {
        if result.is_ok() && self.errors.load(Ordering::Relaxed) == 0 {
            return result;
        }
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        match &result {
            Ok(_) => {
                self.errors.store(0, Ordering::Relaxed);
                if health.worked() {
                    tracing::info!(path = %path.display(), "the cache's disk can be read again");
                }
            }
            Err(error) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                if health.failed(Instant::now()) {
                    tracing::error!(path = %path.display(), %error, "the cache's disk is failing; reading around it for a while");
                }
            }
        }
        result
    }
}

impl SegmentFiles {
    /// The cache below `root`; nothing is created.
    pub fn new(root: &Path) -> Self {
        Self::on(root, Arc::new(RealDisk))
    }

    /// The cache below `root` on this disk.
    pub fn on(root: &Path, disk: Arc<dyn CacheDisk>) -> Self {
        Self {
            segments: root.join(names::SEGMENTS),
            disk,
            trouble: Arc::default(),
        }
    }

    /// Where the frame of `digest` is, if it is there.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        names::segment_path(&self.segments, digest)
    }

    /// Reads a frame of at most `len_max` bytes; `None` when it is not cached, and while the disk is given up. A longer file is
    /// cut off: it cannot be the frame, and decoding it fails.
    ///
    /// # Errors
    /// What the disk said. After [`super::health::ERRORS_MAX`] errors in a row it is not asked for
    /// [`super::health::FAILING_PAUSE`].
    pub fn read(&self, digest: &Digest, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        if !self.trouble.may_ask() {
            return Ok(None);
        }
        let path = self.path(digest);
        self.trouble.note(self.disk.read(&path, len_max), &path)
    }

    /// Whether a frame is there; no, while the disk is given up.
    ///
    /// # Errors
    /// What the disk said.
    pub fn contains(&self, digest: &Digest) -> io::Result<bool> {
        if !self.trouble.may_ask() {
            return Ok(false);
        }
        let path = self.path(digest);
        // That a name is there says nothing about a disk that cannot be read: only errors are noted.
        match self.disk.stat(&path) {
            Ok(stat) => Ok(stat.is_some()),
            Err(error) => self.trouble.note(Err(error), &path),
        }
    }

    /// Removes a frame that was found damaged; one that is gone already is fine.
    ///
    /// # Errors
    /// What the disk said.
    pub fn remove(&self, digest: &Digest) -> io::Result<()> {
        match self.disk.remove(&self.path(digest)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}
