//! Files that the library knows, opened and registered once and kept: opening costs 3FS nothing, but registering costs two
//! descriptors and a look at the file, and packs are read over and over.
//!
//! Bounded: the one that was used longest ago is let go. A kept file stands for a name that may meanwhile mean another
//! file (a damaged pack that was replaced), so the name is looked at again after as long as 3FS itself would be unsure of
//! it, and after every read that failed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::mount;
use super::sys::Library;

/// Most files kept.
pub(super) const FILES_MAX: usize = 64;
/// How long a name is taken to mean the same file: 3FS's own time-out of directory entries.
const NAME_AGE_MAX: Duration = Duration::from_secs(30);

/// A file that is open and registered.
#[derive(Debug)]
pub(super) struct RegisteredFile {
    library: &'static Library,
    file: File,
    inode: u64,
    size: u64,
}

impl RegisteredFile {
    fn open(library: &'static Library, path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let (inode, size) = (file.metadata()?.ino(), mount::size(&file)?);
        library.register(file.as_fd())?;
        Ok(Self {
            library,
            file,
            inode,
            size,
        })
    }

    /// Its size when it was opened.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// For preparing reads.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        // Before it is closed: a number that is closed but registered could not be registered again.
        self.library.deregister(self.file.as_fd());
    }
}

#[derive(Debug)]
struct Kept {
    object: String,
    file: Arc<RegisteredFile>,
    looked_at: Instant,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Files {
    library: &'static Library,
    /// Used last at the end.
    kept: Mutex<Vec<Kept>>,
}

impl Files {
    /// None yet.
    pub(super) fn new(library: &'static Library) -> Self {
        Self {
            library,
            kept: Mutex::new(Vec::new()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, object: &str) -> Option<Kept> {
        let mut kept = self.lock();
        let at = kept.iter().position(|k| k.object == object)?;
        Some(kept.remove(at))
    }

    fn keep(&self, new: Kept) {
        let mut let_go = Vec::new();
        let mut kept = self.lock();
        let_go.extend(kept.extract_if(.., |k| k.object == new.object));
        kept.push(new);
        while kept.len() > FILES_MAX {
            let_go.push(kept.remove(0));
        }
        drop(kept);
        // Closed here, outside of the lock.
        drop(let_go);
    }

    /// The file of an object, at `path`.
    ///
    /// # Errors
    /// What the file system or the library said.
    pub(super) fn open(&self, object: &str, path: &Path) -> io::Result<Arc<RegisteredFile>> {
        if let Some(mut kept) = self.take(object) {
            if kept.looked_at.elapsed() > NAME_AGE_MAX
                && std::fs::metadata(path)?.ino() == kept.file.inode
            {
                kept.looked_at = Instant::now();
            }
            if kept.looked_at.elapsed() <= NAME_AGE_MAX {
                let file = Arc::clone(&kept.file);
                self.keep(kept);
                return Ok(file);
            }
        }
        let file = Arc::new(RegisteredFile::open(self.library, path)?);
        self.keep(Kept {
            object: object.to_owned(),
            file: Arc::clone(&file),
            looked_at: Instant::now(),
        });
        Ok(file)
    }

    /// Lets an object's file go: the next read opens it anew.
    pub(super) fn forget(&self, object: &str) {
        drop(self.take(object));
    }

    /// Lets all go.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }
}
