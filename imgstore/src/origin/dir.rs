//! A directory as origin; also right on a 3FS mount.
//!
//! Publishing writes a temporary file in the same file system, syncs it, and gives it its final name with `link(2)`,
//! which fails if the name is taken: no object is overwritten, and none is visible half-written. Only the small mutable
//! objects, and objects that were found damaged, are replaced, with `rename(2)`. The directory is synced before the call
//! returns, so that a tag never survives a power loss that what it names does not; where that cannot be done (3FS), names
//! are durable by themselves. [`steps`] lets tests lose power in between. Whether the directory is on 3FS is asked once, when
//! it is opened; `three_fs/mount` has what is done differently there.

pub mod steps;

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::three_fs::{self, chunks, mount};
use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use crate::format::names;
use crate::ids::{to_u64, to_usize};
use crate::process::Process;

use steps::{Step, Steps};

/// Age in which a temporary file of a build that still runs has long been written to: its packs grow, then get their names.
const LEFTOVER_AGE: Duration = Duration::from_hours(48);
/// Objects are written in pieces of this many bytes: on a FUSE mount each is a request.
const WRITE_BYTES: usize = 1 << 20;
/// Folders whose objects never change.
const IMMUTABLE: [&str; 4] = ["packs/", "meta/", "chunks/", "manifests/"];

/// A directory that holds an origin.
#[derive(Debug)]
pub struct DirOrigin {
    root: PathBuf,
    /// Whether it is on a 3FS mount.
    three_fs: bool,
    /// Makes temporary names unique within the process; the process makes them unique, and `create_new` makes sure.
    next_tmp: AtomicU64,
    /// Folders whose own names are durable.
    durable: Mutex<HashSet<PathBuf>>,
    /// Told of every change, in tests.
    steps: Option<Arc<dyn Steps>>,
}

/// A temporary file that is removed unless it is moved away.
struct TmpFile {
    path: PathBuf,
}

impl Drop for TmpFile {
    fn drop(&mut self) {
        // It may have been renamed away. What a killed process leaves is removed by a later `create_root`.
        drop(fs::remove_file(&self.path));
    }
}

impl DirOrigin {
    fn at(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            three_fs: false,
            next_tmp: AtomicU64::new(0),
            durable: Mutex::default(),
            steps: None,
        }
    }

    /// The same, with someone who is told of every change before it is made.
    #[must_use]
    pub fn with_steps(self, steps: Arc<dyn Steps>) -> Self {
        Self {
            steps: Some(steps),
            ..self
        }
    }

    /// Opens an existing directory.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when it is missing or no directory.
    pub fn open(root: &Path) -> Result<Self, OriginError> {
        let origin = Self::at(root);
        match fs::metadata(root) {
            Ok(meta) if meta.is_dir() => origin.recognised(),
            Ok(_) => Err(origin.unavailable("", &io::Error::from(io::ErrorKind::NotADirectory))),
            Err(e) => Err(origin.unavailable("", &e)),
        }
    }

    /// The same, knowing whether it is on 3FS.
    fn recognised(mut self) -> Result<Self, OriginError> {
        let asked = mount::is_three_fs(&self.root);
        self.three_fs = asked.map_err(|e| self.unavailable("", &e))?;
        Ok(self)
    }

    /// Takes the directory for one on 3FS, whatever its file system says.
    #[must_use]
    pub(crate) fn assume_three_fs(mut self) -> Self {
        self.three_fs = true;
        self
    }

    /// Opens a directory, making it first if it is missing.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when it cannot be made.
    pub fn create_root(root: &Path) -> Result<Self, OriginError> {
        let origin = Self::at(root);
        let missing = !root.is_dir();
        if missing {
            fs::create_dir_all(root).map_err(|e| origin.unavailable("", &e))?;
        }
        let origin = origin.recognised()?;
        if missing && let Some(parent) = root.parent() {
            let synced = origin.sync_dir(parent);
            synced.map_err(|e| origin.unavailable("", &e))?;
        }
        origin.remove_leftovers();
        Ok(origin)
    }

    /// Removes temporary files that nobody has written to for [`LEFTOVER_AGE`]. A failure costs space and nothing else.
    fn remove_leftovers(&self) {
        let old = |entry: &fs::DirEntry| {
            let written = entry.metadata().and_then(|meta| meta.modified());
            written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFTOVER_AGE))
        };
        let Ok(entries) = fs::read_dir(self.root.join(names::TMP)) else {
            return;
        };
        for entry in entries.flatten().filter(old) {
            if let Err(error) = fs::remove_file(entry.path()) {
                tracing::debug!(path = %entry.path().display(), %error, "leftover stays");
            }
        }
    }

    fn unavailable(&self, object: &str, error: &io::Error) -> OriginError {
        OriginError::Unavailable {
            origin: self.address(),
            object: object.to_owned(),
            reason: error.to_string(),
        }
    }

    pub(crate) fn error(&self, object: &str, error: &io::Error) -> OriginError {
        if error.kind() == io::ErrorKind::NotFound {
            OriginError::NotFound {
                origin: self.address(),
                object: object.to_owned(),
            }
        } else {
            self.unavailable(object, error)
        }
    }

    pub(crate) fn path(&self, object: &str) -> PathBuf {
        self.root.join(object)
    }

    /// Writes a temporary file, synced and closed: 3FS is sure of a file's length only then.
    fn write_tmp(&self, content: &mut dyn Read) -> io::Result<TmpFile> {
        let folder = self.root.join(names::TMP);
        fs::create_dir_all(&folder)?;
        let (tmp, file) = loop {
            let n = self.next_tmp.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{}{n}", Process::file_prefix()));
            self.step(Step::Create(&path))?;
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => break (TmpFile { path }, file),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        };
        // From a `dyn Read`, so that the standard library does not use `copy_file_range`, which 3FS lacks.
        let mut writer = BufWriter::with_capacity(WRITE_BYTES, file);
        io::copy(content, &mut writer)?;
        let file = writer
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?;
        self.step(Step::Sync(&tmp.path))?;
        file.sync_all()?;
        Ok(tmp)
    }

    fn step(&self, step: Step<'_>) -> io::Result<()> {
        self.steps.as_ref().map_or(Ok(()), |s| s.before(step))
    }

    /// Makes the names in a folder durable. A file system that cannot is left alone: there they are durable when made.
    fn sync_dir(&self, folder: &Path) -> io::Result<()> {
        self.step(Step::SyncDir(folder))?;
        if self.three_fs {
            return Ok(()); // whatever it says to being asked, names are durable there
        }
        match File::open(folder).and_then(|f| f.sync_all()) {
            Err(e) if is_failing_disk(&e) => Err(e),
            Err(error) => {
                tracing::debug!(folder = %folder.display(), %error, "folder not synced");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Makes the folder that `path` lies in, so that it survives a power loss.
    fn make_parent(&self, path: &Path) -> io::Result<()> {
        let Some(folder) = path.parent().filter(|f| *f != self.root) else {
            return Ok(());
        };
        self.make_parent(folder)?;
        self.step(Step::MakeDir(folder))?;
        match fs::create_dir(folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let durable = || self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever made it may not have come to this yet.
        if let Some(up) = folder.parent()
            && !durable().contains(folder)
        {
            self.sync_dir(up)?;
            durable().insert(folder.to_owned());
        }
        Ok(())
    }

    fn sync_parent(&self, path: &Path) -> io::Result<()> {
        path.parent().map_or(Ok(()), |folder| self.sync_dir(folder))
    }

    fn create_io(&self, object: &str, content: &mut dyn Read) -> io::Result<Created> {
        let tmp = self.write_tmp(content)?;
        let created = self.link(&tmp.path, object)?;
        drop(tmp);
        self.seal(object, created);
        Ok(created)
    }

    fn create_from_staged(&self, object: &str, staged: &Path) -> io::Result<Created> {
        self.step(Step::Sync(staged))?;
        File::open(staged)?.sync_all()?;
        let created = self.link(staged, object)?;
        if self.three_fs && created == Created::New {
            // Before the seal, which would forbid it: both names are one file.
            fs::remove_file(staged)?;
            self.seal(object, created);
        }
        Ok(created)
    }

    fn seal(&self, object: &str, created: Created) {
        let immutable = IMMUTABLE.iter().any(|folder| object.starts_with(folder));
        if self.three_fs
            && immutable
            && created == Created::New
            && let Err(error) = mount::seal(&self.path(object))
        {
            tracing::debug!(object, %error, "not made immutable");
        }
    }

    fn unseal(&self, path: &Path) -> io::Result<()> {
        if self.three_fs {
            mount::unseal(path)?;
        }
        Ok(())
    }

    /// Gives a finished file its name. Nothing asks beforehand whether the name is taken: this host would remember the answer.
    fn link(&self, tmp: &Path, object: &str) -> io::Result<Created> {
        let path = self.path(object);
        self.make_parent(&path)?;
        self.step(Step::Link(tmp, &path))?;
        let created = match fs::hard_link(tmp, &path) {
            Ok(()) => Created::New,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Created::Existed,
            Err(e) => return Err(e),
        };
        // Also where another writer was faster: it may not have come to this yet, and ours says now that it is there.
        self.sync_parent(&path)?;
        Ok(created)
    }

    fn replace_io(&self, object: &str, content: &mut dyn Read) -> io::Result<()> {
        let tmp = self.write_tmp(content)?;
        let path = self.path(object);
        self.make_parent(&path)?;
        self.unseal(&path)?;
        self.step(Step::Rename(&tmp.path, &path))?;
        fs::rename(&tmp.path, &path)?;
        self.sync_parent(&path)?;
        self.seal(object, Created::New);
        Ok(())
    }

    fn remove_io(&self, object: &str) -> io::Result<()> {
        let path = self.path(object);
        self.step(Step::Remove(&path))?;
        self.unseal(&path)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // A tag must not come back when what it named has been collected. Nothing else is relied on to be gone.
        if object.starts_with(names::TAGS) {
            self.sync_parent(&path)?;
        }
        Ok(())
    }

    fn short(&self, object: &str, range: ByteRange, found: String) -> OriginError {
        OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected: format!("{} bytes at offset {}", range.len, range.start),
            found,
        }
    }

    fn too_long(&self, object: &str, max_len: u64) -> OriginError {
        OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected: format!("at most {max_len} bytes"),
            found: "a longer object".to_owned(),
        }
    }

    /// A range, read as 3FS stores it.
    fn fetch_in_chunks(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        let failed = |e: io::Error| self.error(object, &e);
        let file = mount::open(&self.path(object)).map_err(failed)?;
        let mut out = Vec::with_capacity(to_usize(range.len));
        let mut buffer = mount::PieceBuffer::new();
        for piece in chunks::pieces(range) {
            match buffer.read(&file, piece).map_err(failed)? {
                Ok(bytes) => out.extend_from_slice(bytes),
                Err(got) => {
                    let found = format!(
                        "a read of {got} bytes in place of {} at offset {}: the object ends there, or a chunk of it is lost",
                        piece.len, piece.start
                    );
                    return Err(self.short(object, range, found));
                }
            }
        }
        Ok(out)
    }

    fn list_io(&self, prefix: &str) -> io::Result<Vec<String>> {
        let mut out = Vec::new();
        let mut folders = vec![prefix.trim_end_matches('/').to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = match fs::read_dir(self.path(&folder)) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(e),
            };
            for entry in entries {
                let entry = entry?;
                // Names that are not UTF-8 are none of ours.
                let Ok(name) = entry.file_name().into_string() else {
                    continue;
                };
                let full = if folder.is_empty() {
                    name
                } else {
                    format!("{folder}/{name}")
                };
                if entry.file_type()?.is_dir() {
                    folders.push(full)
                } else {
                    out.push(full)
                }
            }
        }
        out.sort();
        Ok(out)
    }
}

/// What no caller may take for "this file system cannot sync a folder".
fn is_failing_disk(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let failing = [Errno::IO, Errno::NOSPC, Errno::DQUOT];
    Errno::from_io_error(error).is_some_and(|e| failing.contains(&e))
}

impl Origin for DirOrigin {
    fn address(&self) -> String {
        format!("dir:{}", self.root.display())
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        if self.three_fs {
            return self.fetch_in_chunks(object, range);
        }
        let file = File::open(self.path(object)).map_err(|e| self.error(object, &e))?;
        let mut out = vec![0; to_usize(range.len)];
        match file.read_exact_at(&mut out, range.start) {
            Ok(()) => Ok(out),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                let len = file.metadata().map(|m| m.len());
                let found =
                    len.map_or_else(|e| e.to_string(), |n| format!("an object of {n} bytes"));
                Err(self.short(object, range, found))
            }
            Err(e) => Err(self.error(object, &e)),
        }
    }

    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        if !self.three_fs {
            return Ok(());
        }
        let found = mount::size_expecting(&self.path(object), size);
        let found = found.map_err(|e| self.error(object, &e))?;
        if found == size {
            return Ok(());
        }
        Err(OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected: format!("an object of {size} bytes"),
            found: format!("one of {found}"),
        })
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        if self.three_fs {
            let len = self.size(object)?;
            if len > max_len {
                return Err(self.too_long(object, max_len));
            }
            return self.fetch_in_chunks(object, ByteRange { start: 0, len });
        }
        let file = File::open(self.path(object)).map_err(|e| self.error(object, &e))?;
        let mut out = Vec::new();
        file.take(max_len.saturating_add(1))
            .read_to_end(&mut out)
            .map_err(|e| self.error(object, &e))?;
        if to_u64(out.len()) > max_len {
            return Err(self.too_long(object, max_len));
        }
        Ok(out)
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.create_io(object, content)
            .map_err(|e| self.unavailable(object, &e))
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.replace_io(object, &mut &*content)
            .map_err(|e| self.unavailable(object, &e))
    }

    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        File::open(path)
            .and_then(|mut file| self.replace_io(object, &mut file))
            .map_err(|e| self.unavailable(object, &e))
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.list_io(prefix)
            .map_err(|e| self.unavailable(prefix, &e))
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let mut out = Vec::new();
        for name in self.list(prefix)? {
            let meta = match fs::symlink_metadata(self.path(&name)) {
                Ok(meta) => meta,
                // Removed since it was listed.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(self.unavailable(&name, &e)),
            };
            let modified = meta.modified().map_err(|e| self.unavailable(&name, &e))?;
            out.push(ObjectInfo {
                name,
                size: meta.len(),
                modified,
            });
        }
        Ok(out)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.remove_io(object)
            .map_err(|e| self.unavailable(object, &e))
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        let path = self.path(object);
        let size = if self.three_fs {
            mount::size_of(&path)
        } else {
            fs::metadata(path).map(|m| m.len())
        };
        size.map_err(|e| self.error(object, &e))
    }

    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        if path.parent() != Some(&self.root.join(names::TMP)) {
            let mut file = File::open(path).map_err(|e| self.unavailable(object, &e))?;
            return self.create(object, &mut file);
        }
        self.create_from_staged(object, path)
            .map_err(|e| self.unavailable(object, &e))
    }

    fn lag(&self) -> Duration {
        if self.three_fs {
            three_fs::LAG
        } else {
            Duration::ZERO
        }
    }

    fn chunk_bytes(&self) -> Option<u64> {
        self.three_fs.then_some(three_fs::CHUNK_BYTES)
    }

    fn staging(&self) -> Option<PathBuf> {
        Some(self.root.join(names::TMP))
    }
}
