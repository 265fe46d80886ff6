//! Checks a cache folder that nobody writes to: every file of ours against its name.
//!
//! A frame must decode to bytes with the digest that it is named by; a manifest must be its layer's; a placement must have its
//! seal and fit the manifest; a metadata image must have the manifest's digest. The running system checks all of that at
//! each use and fetches what is damaged again, so damage costs time and never correctness; this finds it before a reader
//! does, and mends by removing: what is gone is fetched again. Foreign files are counted and left alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde::Serialize;

use super::lock::{CacheLock, LockError};
use super::{kept, names};
use crate::format::frame;
use crate::format::manifest::{MANIFEST_BYTES_MAX, META_BYTES_MAX, Manifest, SEGMENT_BYTES_MAX};
use crate::format::placement::{PLACEMENT_BYTES_MAX, Placement};
use crate::ids::{Digest, to_u64, to_usize};

/// Threads that decode and hash.
const THREADS_MAX: usize = 8;

/// One damaged file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheDamage {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub what: String,
    /// Whether it was removed.
    pub mended: bool,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct CacheReport {
    /// Segments that are what they should be.
    pub segments_right: u64,
    /// Stored bytes of those.
    pub bytes_right: u64,
    /// Kept descriptions of layers (manifest, placement, metadata image, pin) that are right.
    pub descriptions_right: u64,
    /// Temporary files of runs that ended; no damage, they go at the next start.
    pub leftovers: u64,
    /// Files that are not ours.
    pub foreign: u64,
    /// Everything that is wrong, by path.
    pub damage: Vec<CacheDamage>,
}

/// Why a folder cannot be checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Somebody writes to it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// It is no cache.
    #[error("`{0}` is no cache: expected a folder with `segments` in it")]
    NoCache(PathBuf),
    /// A folder cannot be listed, or a file not be removed.
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckError {
    let path = path.to_owned();
    move |source| CheckError::Io { what, path, source }
}

/// Called now and then with (folders done, folders in all).
pub type OnProgress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Checks the cache at `root`; with `repair`, removes what is damaged or left over.
///
/// # Errors
/// [`CheckError::Lock`] while a layerd uses it; damage is no error.
pub fn check(
    root: &Path,
    repair: bool,
    progress: OnProgress<'_>,
) -> Result<CacheReport, CheckError> {
    if !root.join(names::SEGMENTS).is_dir() {
        return Err(CheckError::NoCache(root.to_owned()));
    }
    let lock = CacheLock::take(root, "dsec fsck")?;
    let checker = Checker {
        root,
        repair,
        report: Mutex::new(CacheReport::default()),
    };
    let jobs = checker.jobs()?;
    let next = AtomicUsize::new(0);
    let done = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let run = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            checker.run(job)?;
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, to_u64(jobs.len()));
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.min(THREADS_MAX))
            .map(|_| scope.spawn(run))
            .collect();
        let joined = threads
            .into_iter()
            .map(|t| t.join().expect("checking does not panic"));
        joined.collect::<Result<(), CheckError>>()
    })?;
    drop(lock);
    let mut report = checker.report.into_inner().unwrap_or_default();
    report.damage.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

enum Job {
    Shard(u8, PathBuf),
    Layer(Digest, PathBuf),
    Pins(PathBuf),
    Tmp(PathBuf),
}

struct Checker<'a> {
    root: &'a Path,
    repair: bool,
    report: Mutex<CacheReport>,
}

/// Names in a folder, and whether each is a plain file; a missing folder is empty.
fn list(folder: &Path) -> Result<Vec<(String, PathBuf, fs::FileType)>, CheckError> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed("list", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed("list", folder))?;
        let kind = entry
            .file_type()
            .map_err(failed("look at", &entry.path()))?;
        // A name that is not UTF-8 is none of ours, and its lossy form is not either.
        let name = entry.file_name().to_string_lossy().into_owned();
        found.push((name, entry.path(), kind));
    }
    Ok(found)
}

/// Removes a file; a data plane that outlived its control process may have done so already.
fn remove(path: &Path) -> Result<(), CheckError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(failed("remove", path)),
    }
}

/// Reads a file of at most `len_max` bytes.
fn read(path: &Path, len_max: u64) -> Result<Vec<u8>, String> {
    let len = fs::metadata(path).map_err(|e| e.to_string())?.len();
    if len > len_max {
        return Err(format!("length: expected at most {len_max}, found {len}"));
    }
    fs::read(path).map_err(|e| e.to_string())
}

impl Checker<'_> {
    fn note(&self, change: impl FnOnce(&mut CacheReport)) {
        change(
            &mut self
                .report
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
    }

    fn foreign(&self) {
        self.note(|report| report.foreign += 1);
    }

    /// Folders of segments, layers, pins and temporary files.
    fn jobs(&self) -> Result<Vec<Job>, CheckError> {
        let mut jobs = Vec::new();
        for (name, path, kind) in list(&self.root.join(names::SEGMENTS))? {
            match names::shard(&name).filter(|_| kind.is_dir()) {
                Some(shard) => jobs.push(Job::Shard(shard, path)),
                None => self.foreign(),
            }
        }
        for (name, path, kind) in list(&self.root.join(names::LAYERS))? {
            match names::digest(&name).filter(|_| kind.is_dir()) {
                Some(layer) => jobs.push(Job::Layer(layer, path)),
                None => self.foreign(),
            }
        }
        jobs.push(Job::Pins(self.root.join(names::PINS)));
        jobs.push(Job::Tmp(self.root.join(names::TMP)));
        Ok(jobs)
    }

    fn run(&self, job: &Job) -> Result<(), CheckError> {
        match job {
            Job::Shard(shard, folder) => self.shard(*shard, folder),
            Job::Layer(layer, folder) => self.layer(layer, folder),
            Job::Pins(folder) => self.pins(folder),
            Job::Tmp(folder) => self.tmp(folder),
        }
    }

    fn damaged(&self, path: PathBuf, mut what: String) {
        let mut mended = self.repair;
        if self.repair
            && let Err(error) = remove(&path)
        {
            // One that stays is no reason to leave the others.
            mended = false;
            what = format!("{what}; {error}");
        }
        self.note(|report| report.damage.push(CacheDamage { path, what, mended }));
    }

    fn shard(&self, shard: u8, folder: &Path) -> Result<(), CheckError> {
        let mut plain = vec![0; to_usize(SEGMENT_BYTES_MAX)];
        for (name, path, kind) in list(folder)? {
            let Some(digest) = names::segment(shard, &name).filter(|_| kind.is_file()) else {
                self.foreign();
                continue;
            };
            match check_frame(&path, &digest, &mut plain) {
                Ok(len) => self.note(|report| {
                    report.segments_right += 1;
                    report.bytes_right += len;
                }),
                Err(what) => self.damaged(path, what),
            }
        }
        Ok(())
    }

    fn layer(&self, layer: &Digest, folder: &Path) -> Result<(), CheckError> {
        let path = |name| folder.join(name);
        let there = list(folder)?;
        let has = |wanted: &str| {
            there
                .iter()
                .any(|(name, _, kind)| name == wanted && kind.is_file())
        };
        for (name, _, kind) in &there {
            if !(kind.is_file() && names::LAYER_FILES.contains(&&**name)) {
                self.foreign();
            }
        }
        let right = || self.note(|report| report.descriptions_right += 1);
        let manifest = if has(names::MANIFEST) {
            match check_manifest(&path(names::MANIFEST), layer) {
                Ok(manifest) => {
                    right();
                    Some(manifest)
                }
                Err(what) => {
                    self.damaged(path(names::MANIFEST), what);
                    None
                }
            }
        } else {
            None
        };
        for (name, check) in [
            (names::PLACEMENT, check_placement as CheckAgainst),
            (names::META, check_meta as CheckAgainst),
        ] {
            if !has(name) {
                continue;
            }
            let checked = match &manifest {
                Some(manifest) => check(&path(name), layer, manifest),
                None => {
                    Err("cannot be checked: its layer's manifest is damaged or missing".to_owned())
                }
            };
            match checked {
                Ok(()) => right(),
                Err(what) => self.damaged(path(name), what),
            }
        }
        Ok(())
    }

    fn pins(&self, folder: &Path) -> Result<(), CheckError> {
        for (name, path, kind) in list(folder)? {
            if names::pin(&name).filter(|_| kind.is_file()).is_none() {
                self.foreign();
                continue;
            }
            let sealed = read(&path, PLACEMENT_BYTES_MAX);
            match sealed.and_then(|sealed| {
                kept::unseal(&sealed, "digest of a pin")
                    .map(drop)
                    .map_err(|e| e.to_string())
            }) {
                Ok(()) => self.note(|report| report.descriptions_right += 1),
                Err(what) => self.damaged(path, what),
            }
        }
        Ok(())
    }

    fn tmp(&self, folder: &Path) -> Result<(), CheckError> {
        for (name, path, kind) in list(folder)? {
            let ours = names::tmp_run(&name).is_some() || names::is_old_tmp(&name);
            if !(ours && kind.is_file()) {
                self.foreign();
                continue;
            }
            if self.repair {
                remove(&path)?;
            }
            self.note(|report| report.leftovers += 1);
        }
        Ok(())
    }
}

type CheckAgainst = fn(&Path, &Digest, &Manifest) -> Result<(), String>;

/// Stored bytes of a frame that is right.
fn check_frame(path: &Path, digest: &Digest, plain: &mut [u8]) -> Result<u64, String> {
    let stored = read(path, frame::frame_len_max(SEGMENT_BYTES_MAX))?;
    let len = frame::decode_some(&stored, plain).map_err(|e| e.to_string())?;
    let found = Digest::of(plain.get(..len).unwrap_or_default());
    if found == *digest {
        Ok(to_u64(stored.len()))
    } else {
        Err(format!("digest of the plain bytes: found {found}"))
    }
}

fn check_manifest(path: &Path, layer: &Digest) -> Result<Manifest, String> {
    let bytes = read(path, MANIFEST_BYTES_MAX)?;
    Manifest::parse(&bytes, layer).map_err(|e| e.to_string())
}

fn check_placement(path: &Path, layer: &Digest, manifest: &Manifest) -> Result<(), String> {
    let sealed = read(path, PLACEMENT_BYTES_MAX)?;
    let bytes = kept::unseal(&sealed, "digest of a kept placement").map_err(|e| e.to_string())?;
    Placement::parse(bytes, layer, manifest)
        .map(drop)
        .map_err(|e| e.to_string())
}

fn check_meta(path: &Path, _: &Digest, manifest: &Manifest) -> Result<(), String> {
    let len = fs::metadata(path).map_err(|e| e.to_string())?.len();
    if len != manifest.meta.size || len > META_BYTES_MAX {
        return Err(format!(
            "length: expected {}, found {len}",
            manifest.meta.size
        ));
    }
    let file = fs::File::open(path).map_err(|e| e.to_string())?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).map_err(|e| e.to_string())?;
    let found = Digest::from(hasher.finalize());
    if found == manifest.meta.digest {
        return Ok(());
    }
    Err(format!(
        "digest: expected {}, found {found}",
        manifest.meta.digest
    ))
}
