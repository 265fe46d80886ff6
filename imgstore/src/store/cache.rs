//! The segment cache on disk: stored frames as they came from the origin, one file a segment.
//!
//! ```text
//! ROOT/segments/ab/ab12…   the zstd frame of the segment with this digest (64 hex digits, first two as folder)
//! ROOT/tmp/…               files being written; emptied at start
//! ```
//! **The digest is the state.** Nothing here is trusted: whoever loads a frame decodes the whole segment and compares its
//! BLAKE3 before one byte is used. So a file may be torn, stale, cut off or foreign after a crash: it is a mismatch, and the
//! segment is fetched again. That is why nothing is synced, why there is no index on disk, and why a file may be unlinked
//! while somebody reads it.
//!
//! Two processes share the folder: the data plane only reads ([`SegmentFiles`]), the control process writes, counts and
//! evicts ([`SegmentCache`]).

pub mod fsck;
pub mod kept;
pub mod lock;
pub mod names;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, IoSlice, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};

use crate::ids::{Digest, to_u64};

/// Folder of cached frames below the cache's root.
const SEGMENTS: &str = "segments";
/// Folder of files being written.
const TMP: &str = "tmp";
/// Free space that is left to others: at most this many bytes ...
const RESERVE_BYTES_MAX: u64 = 512 << 20;
/// ... and at most this part of the file system.
const RESERVE_PART: u64 = 20;
/// Eviction makes room for this part of the limit at once, so that it is rare.
const EVICT_PART: u64 = 20;

/// The reading half: finds frames by digest.
#[derive(Debug, Clone)]
pub struct SegmentFiles {
    segments: PathBuf,
}

impl SegmentFiles {
    /// The cache below `root`; nothing is created.
    pub fn new(root: &Path) -> Self {
        Self {
            segments: root.join(SEGMENTS),
        }
    }

    /// Where the frame of `digest` is, if it is there.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        let hex = digest.to_hex();
        let (folder, _) = hex.split_at(2);
        self.segments.join(folder).join(&hex)
    }

    /// Reads a frame of at most `len_max` bytes; `None` when it is not cached. A longer file is cut off: it cannot be the
    /// frame, and decoding it fails. The file's pages leave the page cache again, for the plain bytes go there.
    ///
    /// # Errors
    /// What the disk said.
    pub fn read(&self, digest: &Digest, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path(digest)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let len = file.metadata()?.len().min(len_max);
        let mut frame = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
        (&file).take(len).read_to_end(&mut frame)?;
        if let Err(error) = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed) {
            // Advice only: where it is refused, the page cache holds a second, compressed copy.
            tracing::trace!(%error, "cached frames stay in the page cache");
        }
        Ok(Some(frame))
    }

    /// Whether a frame is there.
    ///
    /// # Errors
    /// What the disk said.
    pub fn contains(&self, digest: &Digest) -> io::Result<bool> {
        self.path(digest).try_exists()
    }
}

/// Why a frame was not kept. The segment is served all the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The cache's folders cannot be used.
    #[error("cannot use `{path}` as cache: {source}")]
    Open {
        /// The folder.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// A frame could not be written.
    #[error("cannot cache segment {digest} in `{path}`: {source}")]
    Write {
        /// The segment.
        digest: Digest,
        /// Its file.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// The disk holds too much that is not ours.
    #[error(
        "cannot cache segment {digest}: `{path}` has {free} bytes free, {reserve} are left to others and the cache is empty"
    )]
    NoRoom {
        /// The segment.
        digest: Digest,
        /// The cache.
        path: PathBuf,
        /// Free bytes of its file system.
        free: u64,
        /// Bytes the cache does not touch.
        reserve: u64,
    },
}

/// One cached frame.
#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    /// Position in the order of use; larger is later.
    used: u64,
}

#[derive(Debug, Default)]
struct Entries {
    by_digest: HashMap<Digest, Entry>,
    bytes: u64,
    clock: u64,
}

impl Entries {
    fn insert(&mut self, digest: Digest, bytes: u64, used: u64) {
        let entry = Entry { bytes, used };
        if let Some(old) = self.by_digest.insert(digest, entry) {
            self.bytes = self.bytes.saturating_sub(old.bytes);
        }
        self.bytes = self.bytes.saturating_add(bytes);
    }

    fn remove(&mut self, digest: &Digest) {
        if let Some(old) = self.by_digest.remove(digest) {
            self.bytes = self.bytes.saturating_sub(old.bytes);
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Takes out the entries used longest ago until `bytes` are freed or nothing is left.
    fn take_oldest(&mut self, bytes: u64) -> Vec<Digest> {
        let mut all: Vec<(u64, Digest, u64)> = self
            .by_digest
            .iter()
            .map(|(digest, entry)| (entry.used, *digest, entry.bytes))
            .collect();
        all.sort_unstable_by_key(|(used, ..)| *used);
        let mut freed = 0;
        let mut taken = Vec::new();
        for (_, digest, len) in all {
            if freed >= bytes {
                break;
            }
            freed += len;
            self.by_digest.remove(&digest);
            taken.push(digest);
        }
        self.bytes = self.bytes.saturating_sub(freed);
        taken
    }
}

/// The writing half: bounded in bytes, and never the cause of a full disk.
#[derive(Debug)]
pub struct SegmentCache {
    files: SegmentFiles,
    root: PathBuf,
    bytes_max: u64,
    entries: Mutex<Entries>,
    next_tmp: AtomicU64,
    evicted: AtomicU64,
}

impl SegmentCache {
    /// Opens (and creates) the cache below `root`, at most `bytes_max` bytes of frames. Left-over temporary files go;
    /// frames of an earlier run are found by [`SegmentCache::scan`].
    ///
    /// # Errors
    /// [`CacheError::Open`] names the folder.
    pub fn open(root: &Path, bytes_max: u64) -> Result<Self, CacheError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CacheError::Open { path, source }
        };
        let tmp = root.join(TMP);
        for folder in [root.join(SEGMENTS), tmp.clone()] {
            fs::create_dir_all(&folder).map_err(failed(&folder))?;
        }
        for entry in fs::read_dir(&tmp).map_err(failed(&tmp))? {
            let path = entry.map_err(failed(&tmp))?.path();
            fs::remove_file(&path).map_err(failed(&path))?;
        }
        Ok(Self {
            files: SegmentFiles::new(root),
            root: root.to_owned(),
            bytes_max,
            entries: Mutex::new(Entries::default()),
            next_tmp: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        })
    }

    /// The reading half.
    pub const fn files(&self) -> &SegmentFiles {
        &self.files
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the frames of earlier runs, in the order in which they were written or read, and evicts what is too much.
    /// Files with other names are not ours and stay. Run it in the background: the cache works meanwhile.
    ///
    /// # Errors
    /// What the disk said about a folder; files that vanish meanwhile are no error.
    pub fn scan(&self) -> io::Result<()> {
        let mut found: Vec<(SystemTime, Digest, u64)> = Vec::new();
        for folder in fs::read_dir(&self.files.segments)? {
            let folder = folder?;
            let name = folder.file_name();
            let two_hex = |n: &str| n.len() == 2 && n.bytes().all(|b| b.is_ascii_hexdigit());
            if !name.to_str().is_some_and(two_hex) || !folder.file_type()?.is_dir() {
                continue;
            }
            for file in fs::read_dir(folder.path())? {
                let file = file?;
                let digest = file.file_name().to_str().and_then(|n| n.parse().ok());
                let Some(digest) = digest else { continue };
                let Ok(meta) = file.metadata() else { continue };
                if meta.is_file() && self.files.path(&digest) == file.path() {
                    let written = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    let read = meta.accessed().unwrap_or(written);
                    found.push((written.max(read), digest, meta.len()));
                }
            }
        }
        found.sort_unstable_by_key(|(used, ..)| *used);
        let mut entries = self.entries();
        for (_, digest, bytes) in found {
            if !entries.by_digest.contains_key(&digest) {
                // 0: before everything that this run has used; ties are broken by nothing, which is fine.
                entries.insert(digest, bytes, 0);
            }
        }
        self.evict(entries, 0);
        Ok(())
    }

    /// Notes that these segments were read just now.
    pub fn touch(&self, digests: &[Digest]) {
        let mut entries = self.entries();
        for digest in digests {
            let now = entries.tick();
            if let Some(entry) = entries.by_digest.get_mut(digest) {
                entry.used = now;
            }
        }
    }

    /// Bytes of frames that are counted now.
    pub fn bytes_used(&self) -> u64 {
        self.entries().bytes
    }

    /// Frames evicted since the cache was opened.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Free bytes of the file system, and how many of them are left to others.
    fn room(&self) -> Option<(u64, u64)> {
        let stat = rustix::fs::statvfs(&self.root).ok()?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let all = stat.f_blocks.saturating_mul(stat.f_frsize);
        Some((free, RESERVE_BYTES_MAX.min(all / RESERVE_PART)))
    }

    /// Evicts until the limit holds and `missing` bytes of disk are freed, or the cache is empty.
    fn evict(&self, mut entries: MutexGuard<'_, Entries>, missing: u64) {
        let over = entries.bytes.saturating_sub(self.bytes_max);
        let wanted = over.max(missing);
        if wanted == 0 {
            return;
        }
        let taken = entries.take_oldest(wanted.saturating_add(self.bytes_max / EVICT_PART));
        drop(entries);
        for digest in taken {
            self.unlink(&digest);
        }
    }

    fn unlink(&self, digest: &Digest) {
        let path = self.files.path(digest);
        match fs::remove_file(&path) {
            Ok(()) => {
                self.evicted.fetch_add(1, Ordering::Relaxed);
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot evict a cached segment");
            }
        }
    }

    /// Keeps the frame of `digest` (replacing whatever file has its name), evicting others if the limit asks for it.
    ///
    /// Room is counted before the file is written, so that many writers together do not pass the limit.
    ///
    /// # Errors
    /// [`CacheError::Write`] or [`CacheError::NoRoom`]; nothing is left behind then.
    pub fn put(&self, digest: &Digest, frame: &[u8]) -> Result<(), CacheError> {
        let bytes = to_u64(frame.len());
        if bytes > self.bytes_max {
            return Ok(());
        }
        let missing = match self.room() {
            Some((free, reserve)) => reserve.saturating_add(bytes).saturating_sub(free),
            None => 0,
        };
        if missing > 0 {
            self.evict(self.entries(), missing);
            self.check_room(digest, bytes)?;
        }
        let mut entries = self.entries();
        let now = entries.tick();
        entries.insert(*digest, bytes, now);
        self.evict(entries, 0);
        let path = self.files.path(digest);
        if let Err(source) = self.write(&path, frame) {
            self.entries().remove(digest);
            return Err(CacheError::Write {
                digest: *digest,
                path,
                source,
            });
        }
        if !self.entries().by_digest.contains_key(digest) {
            // Evicted before it was there: the cache is smaller than what is being written at a time.
            self.unlink(digest);
        }
        Ok(())
    }

    fn check_room(&self, digest: &Digest, bytes: u64) -> Result<(), CacheError> {
        match self.room() {
            Some((free, reserve)) if free < reserve.saturating_add(bytes) => {
                Err(CacheError::NoRoom {
                    digest: *digest,
                    path: self.root.clone(),
                    free,
                    reserve,
                })
            }
            _ => Ok(()),
        }
    }

    fn write(&self, path: &Path, frame: &[u8]) -> io::Result<()> {
        let number = self.next_tmp.fetch_add(1, Ordering::Relaxed);
        let tmp = self
            .root
            .join(TMP)
            .join(format!("{}-{number}", std::process::id()));
        let written = write_and_rename(&tmp, path, frame);
        if written.is_err() {
            match fs::remove_file(&tmp) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %tmp.display(), error = %e, "cannot remove a temporary file");
                }
                _ => {}
            }
        }
        written
    }
}

fn write_and_rename(tmp: &Path, path: &Path, frame: &[u8]) -> io::Result<()> {
    let file = File::create(tmp)?;
    write_past_page_cache(&file, frame)?;
    match fs::rename(tmp, path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::rename(tmp, path)
        }
        renamed => renamed,
    }
}

/// `RWF_DONTCACHE` (Linux 6.14): the pages leave the page cache as soon as they are on disk.
const DONT_CACHE: u32 = 0x80;

/// Writes the whole of `bytes`. The frame is in the data plane's memory by now; a copy in the page cache would only take
/// the place of file data. Where the kernel or the file system cannot do that, the copy stays until memory is short.
fn write_past_page_cache(mut file: &File, bytes: &[u8]) -> io::Result<()> {
    let flags = ReadWriteFlags::from_bits_retain(DONT_CACHE);
    let written = match rustix::io::pwritev2(file, &[IoSlice::new(bytes)], 0, flags) {
        Ok(written) => written,
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => 0,
        Err(e) => return Err(e.into()),
    };
    let rest = bytes.get(written..).unwrap_or_default();
    if rest.is_empty() {
        return Ok(());
    }
    file.seek(SeekFrom::Start(to_u64(written)))?;
    file.write_all(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(n: u8, len: usize) -> (Digest, Vec<u8>) {
        let bytes = vec![n; len];
        (Digest::of(&bytes), bytes)
    }

    #[test]
    fn what_was_put_is_read_and_a_missing_frame_is_none() {
        let root = tempfile::tempdir().unwrap();
        let cache = SegmentCache::open(root.path(), 1 << 20).unwrap();
        let (digest, bytes) = frame(1, 5000);
        assert_eq!(cache.files().read(&digest, 1 << 20).unwrap(), None);
        cache.put(&digest, &bytes).unwrap();
        assert_eq!(cache.files().read(&digest, 1 << 20).unwrap(), Some(bytes));
        assert_eq!(cache.files().read(&digest, 10).unwrap().unwrap().len(), 10);
        assert_eq!(cache.bytes_used(), 5000);
    }

    #[test]
    fn the_limit_holds_and_the_least_recently_used_goes_first() {
        let root = tempfile::tempdir().unwrap();
        let cache = SegmentCache::open(root.path(), 10_000).unwrap();
        let frames: Vec<_> = (0..4).map(|n| frame(n, 3000)).collect();
        for (digest, bytes) in frames.iter().take(3) {
            cache.put(digest, bytes).unwrap();
        }
        cache.touch(&[frames[0].0]);
        cache.put(&frames[3].0, &frames[3].1).unwrap();
        let there: Vec<bool> = frames
            .iter()
            .map(|(digest, _)| cache.files().contains(digest).unwrap())
            .collect();
        assert_eq!(there, [true, false, true, true]);
        assert_eq!(cache.bytes_used(), 9000);
        assert_eq!(cache.evicted(), 1);
    }

    #[test]
    fn a_new_run_finds_the_frames_and_leaves_foreign_files_alone() {
        let root = tempfile::tempdir().unwrap();
        let (digest, bytes) = frame(1, 3000);
        SegmentCache::open(root.path(), 10_000)
            .unwrap()
            .put(&digest, &bytes)
            .unwrap();
        let foreign = root.path().join("segments/ab/notes.txt");
        fs::create_dir_all(foreign.parent().unwrap()).unwrap();
        fs::write(&foreign, vec![0; 50_000]).unwrap();
        let misplaced = root.path().join("segments/zz").join(digest.to_hex());
        fs::create_dir_all(misplaced.parent().unwrap()).unwrap();
        fs::write(&misplaced, b"x").unwrap();
        let left_over = root.path().join("tmp/1-1");
        fs::write(&left_over, b"half").unwrap();
        let cache = SegmentCache::open(root.path(), 100).unwrap();
        assert!(!left_over.try_exists().unwrap());
        cache.scan().unwrap();
        assert_eq!(cache.bytes_used(), 0);
        assert!(!cache.files().contains(&digest).unwrap());
        assert!(foreign.try_exists().unwrap() && misplaced.try_exists().unwrap());
    }

    #[test]
    fn putting_a_frame_twice_counts_it_once() {
        let root = tempfile::tempdir().unwrap();
        let cache = SegmentCache::open(root.path(), 10_000).unwrap();
        let (digest, bytes) = frame(9, 2000);
        cache.put(&digest, &bytes).unwrap();
        cache.put(&digest, &bytes).unwrap();
        assert_eq!(cache.bytes_used(), 2000);
    }
}
