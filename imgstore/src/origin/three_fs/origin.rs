//! `3fs:/mount/path`: ranges of packs through the user-space I/O library, all else through the mount.
//!
//! The program starts without the library: it is loaded when such an origin is opened, and if that fails the error says how
//! to do without. A range is cut where chunks end, read through one ring in batches, and is whole or an error.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::files::{Files, RegisteredFile};
use super::pool::{Pool, PoolError};
use super::ring::RingError;
use super::sys::Library;
use super::{CHUNK_BYTES, LAG, chunks};
use crate::ids::to_usize;
use crate::origin::dir::DirOrigin;
use crate::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

/// Names the library, if the loader does not find it.
pub const LIBRARY_VARIABLE: &str = "DSEC_HF3FS_LIB";
/// What the loader looks for otherwise.
const LIBRARY_NAME: &str = "libhf3fs_api_shared.so";
/// Longest wait for the 3FS client, by default.
const PATIENCE: Duration = Duration::from_secs(10);

/// How the origin is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreeFsOptions {
    /// The library: a path, or a name where the loader looks.
    pub library: OsString,
    /// Longest wait for the 3FS client to answer one range.
    pub patience: Duration,
}

impl Default for ThreeFsOptions {
    fn default() -> Self {
        Self {
            library: LIBRARY_NAME.into(),
            patience: PATIENCE,
        }
    }
}

impl ThreeFsOptions {
    /// The defaults, with the library that the environment names.
    pub fn from_env() -> Self {
        let mut options = Self::default();
        if let Some(library) = std::env::var_os(LIBRARY_VARIABLE) {
            options.library = library;
        }
        options
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct ThreeFsOrigin {
    root: PathBuf,
    /// The same folder through the mount.
    dir: DirOrigin,
    files: Files,
    pool: Pool,
    patience: Duration,
}

/// A library is loaded once; its functions live as long as the process.
fn library(name: &OsString) -> Result<&'static Library, String> {
    static LOADED: Mutex<Vec<(OsString, &'static Library)>> = Mutex::new(Vec::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, library)) = loaded.iter().find(|(known, _)| known == name) {
        return Ok(library);
    }
    let library: &'static Library = Box::leak(Box::new(Library::load(name)?));
    loaded.push((name.clone(), library));
    Ok(library)
}

impl ThreeFsOrigin {
    /// Opens an existing folder with the library that the environment names.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the folder or the library is missing, or the folder is not on 3FS.
    pub fn open(root: &Path) -> Result<Self, OriginError> {
        Self::open_with(root, &ThreeFsOptions::from_env())
    }

    /// As [`ThreeFsOrigin::open`], making the folder first if it is missing.
    ///
    /// # Errors
    /// As for [`ThreeFsOrigin::open`].
    pub fn create_root(root: &Path) -> Result<Self, OriginError> {
        drop(DirOrigin::create_root(root)?);
        Self::open(root)
    }

    /// Opens an existing folder.
    ///
    /// # Errors
    /// As for [`ThreeFsOrigin::open`].
    pub fn open_with(root: &Path, options: &ThreeFsOptions) -> Result<Self, OriginError> {
        let refused = |reason: String| OriginError::Unavailable {
            origin: format!("3fs:{}", root.display()),
            object: String::new(),
            reason,
        };
        let dir = DirOrigin::open(root)?.assume_three_fs();
        let name = options.library.display();
        let library = library(&options.library).map_err(|e| {
            refused(format!(
                "cannot load 3FS's library `{name}` ({e}); set {LIBRARY_VARIABLE} to its path, or use `dir:{}`, which reads the same objects through the mount",
                root.display()
            ))
        })?;
        let mount = library.mount_point(root).ok_or_else(|| {
            refused(format!(
                "`{}` is not on a 3FS mount; use `dir:{}`",
                root.display(),
                root.display()
            ))
        })?;
        Ok(Self {
            root: root.to_owned(),
            dir,
            files: Files::new(library),
            pool: Pool::new(library, mount),
            patience: options.patience,
        })
    }

    fn unavailable(&self, object: &str, reason: &PoolError) -> OriginError {
        OriginError::Unavailable {
            origin: self.address(),
            object: object.to_owned(),
            reason: reason.to_string(),
        }
    }

    fn failed(&self, object: &str, range: ByteRange, error: &RingError) -> OriginError {
        let (origin, object) = (self.address(), object.to_owned());
        match error {
            RingError::Hole { .. } | RingError::Short { .. } => OriginError::WrongAnswer {
                origin,
                object,
                expected: format!("{} bytes at offset {}", range.len, range.start),
                found: error.to_string(),
            },
            _ => OriginError::Unavailable {
                origin,
                object,
                reason: error.to_string(),
            },
        }
    }

    fn open_file(&self, object: &str) -> Result<Arc<RegisteredFile>, OriginError> {
        let opened = self.files.open(object, &self.dir.path(object));
        opened.map_err(|e| match self.dir.error(object, &e) {
            OriginError::NotFound { object, .. } => OriginError::NotFound {
                origin: self.address(),
                object,
            },
            _ => OriginError::Unavailable {
                origin: self.address(),
                object: object.to_owned(),
                reason: e.to_string(),
            },
        })
    }

    /// An object of another size than it should have; the next look opens it anew.
    fn other_size(&self, object: &str, expected: String, found: u64) -> OriginError {
        self.files.forget(object);
        OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected: format!("an object of {expected} bytes"),
            found: format!("one of {found}"),
        }
    }

    fn fetch_range(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        let file = self.open_file(object)?;
        let end = range.start.saturating_add(range.len);
        if end > file.size() {
            return Err(self.other_size(object, format!("at least {end}"), file.size()));
        }
        let deadline = Instant::now() + self.patience;
        let mut lent = match self.pool.lend(deadline) {
            Ok(lent) => lent,
            Err(e) => return Err(self.unavailable(object, &e)),
        };
        let mut out = Vec::with_capacity(to_usize(range.len));
        let pieces = chunks::pieces(range);
        let read = lent.worker().read(&file, &pieces, self.patience, &mut out);
        if let Err(error) = read {
            self.files.forget(object);
            return Err(self.failed(object, range, &error));
        }
        Ok(out)
    }
}

impl Drop for ThreeFsOrigin {
    fn drop(&mut self) {
        self.close();
    }
}

impl Origin for ThreeFsOrigin {
    fn address(&self) -> String {
        format!("3fs:{}", self.root.display())
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.fetch_range(object, range)
    }

    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        let file = self.open_file(object)?;
        if file.size() == size {
            return Ok(());
        }
        Err(self.other_size(object, size.to_string(), file.size()))
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.dir.fetch_all(object, max_len)
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.dir.create(object, content)
    }

    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        self.dir.create_from_file(object, path)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.files.forget(object);
        self.dir.replace(object, content)
    }

    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        self.files.forget(object);
        self.dir.replace_from_file(object, path)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.dir.list(prefix)
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.dir.size(object)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.dir.list_info(prefix)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.files.forget(object);
        self.dir.remove(object)
    }

    fn close(&self) {
        self.files.clear();
        self.pool.close();
    }

    fn lag(&self) -> Duration {
        LAG
    }

    fn chunk_bytes(&self) -> Option<u64> {
        Some(CHUNK_BYTES)
    }

    fn staging(&self) -> Option<PathBuf> {
        self.dir.staging()
    }
}
