//! Before anything is published, the image is read with an independent reader and compared with the source.
//!
//! Metadata: every inode's attributes, xattrs, targets, device numbers, links. Data: every unit of every file, through the
//! metadata image, the packs' frames and the segments' digests, down to the hash from the first read. Segments that the
//! origin had already are fetched from it, so that a layer is never published on top of a damaged pack.

use std::collections::HashMap;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::error::BuildError;
use super::options::{BuildOptions, Phase, Step};
use super::scan::Scanned;
use super::segments::{Staged, Stored};
use crate::format::manifest::Manifest;
use crate::format::placement::Placement;
use crate::format::{frame, names};
use crate::ids::{Digest, to_u64, to_usize};
use crate::origin::Origin;
use crate::store::reader::{LayerReader, LayerTree};
use crate::tree::{InodeId, Kind, Tree};

/// Runs of zero units longer than this are checked at both ends only: a sparse file may claim more zeros than could be read.
const ZERO_UNITS_READ_MAX: usize = 64;

/// What a build compares.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The source.
    pub tree: &'a Tree,
    /// Its hashes.
    pub scanned: &'a HashMap<InodeId, Scanned>,
    /// The metadata image that was written.
    pub meta: &'a [u8],
    /// The manifest that was written.
    pub manifest: &'a Manifest,
    /// The packs in staging.
    pub staged: &'a Staged,
    /// The placement that was written.
    pub placement: &'a Placement,
    /// The origin, for segments that were not stored anew.
    pub origin: &'a dyn Origin,
}

fn differs(path: &[u8], found: impl Into<String>) -> BuildError {
    BuildError::ReadBack {
        what: format!("`{}`", String::from_utf8_lossy(path)),
        found: found.into(),
    }
}

impl Subject<'_> {
    fn stored_frame(&self, index: usize) -> Result<Vec<u8>, String> {
        if let Some(Stored::New(pack, range)) = self.staged.own.get(index).map(|s| s.stored) {
            let staged = self
                .staged
                .packs
                .get(pack)
                .ok_or("no such pack in staging")?;
            let mut bytes = vec![0; to_usize(range.len)];
            staged
                .file
                .read_exact_at(&mut bytes, range.start)
                .map_err(|e| e.to_string())?;
            return Ok(bytes);
        }
        let (pack, range) = self
            .placement
            .find(index)
            .ok_or("no such segment in the placement")?;
        self.origin
            .fetch_of(&names::pack(&pack.digest), pack.size, range)
            .map_err(|e| e.to_string())
    }

    fn segment(&self, index: usize) -> Result<Vec<u8>, String> {
        let segment = self
            .manifest
            .segments
            .get(index)
            .ok_or("no such segment in the manifest")?;
        let plain =
            frame::decode(&self.stored_frame(index)?, segment.len()).map_err(|e| e.to_string())?;
        if Digest::of(&plain) != segment.digest() {
            return Err(format!(
                "its bytes are not those of segment {}",
                segment.digest()
            ));
        }
        Ok(plain)
    }
}

/// Compares the image with its source.
///
/// # Errors
/// [`BuildError::ReadBack`] names the first difference found.
pub fn compare(subject: &Subject<'_>, options: &BuildOptions) -> Result<(), BuildError> {
    let read_segment = |index: usize| subject.segment(index);
    let failed = |e: crate::store::reader::ReaderError| BuildError::ReadBack {
        what: "image".into(),
        found: e.to_string(),
    };
    let reader =
        LayerReader::open(subject.meta, subject.manifest, &read_segment).map_err(failed)?;
    let found = reader.tree().map_err(failed)?;
    let pairs = compare_trees(subject.tree, &found.tree)?;
    let mut files: Vec<(&[u8], InodeId, InodeId, &Scanned)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (path, source, read) in &pairs {
        if let Some(scanned) = subject.scanned.get(source)
            && seen.insert(*source)
        {
            files.push((path, *source, *read, scanned));
        }
    }
    // Neighbours in the image are read by the same thread one after another.
    files.sort_by_key(|(path, ..)| (path.rsplit(|b| *b == b'.').next(), *path));
    compare_files(subject, &found, &files, options)
}

fn compare_files(
    subject: &Subject<'_>,
    found: &LayerTree,
    files: &[(&[u8], InodeId, InodeId, &Scanned)],
    options: &BuildOptions,
) -> Result<(), BuildError> {
    let read_segment = |index: usize| subject.segment(index);
    let total = files
        .iter()
        .map(|(.., f)| f.len)
        .fold(0, u64::saturating_add);
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let error: Mutex<Option<BuildError>> = Mutex::new(None);
    let fail = |e: BuildError| {
        *error
            .lock()
            .expect("no reader panics while it holds the lock") = Some(e)
    };
    let work = || {
        // A reader of its own for each thread: its kept segments are then those of its own files.
        let reader = match LayerReader::open(subject.meta, subject.manifest, &read_segment) {
            Ok(reader) => reader,
            Err(e) => {
                return fail(BuildError::ReadBack {
                    what: "image".into(),
                    found: e.to_string(),
                });
            }
        };
        loop {
            let from = next.fetch_add(FILES_AT_ONCE, Ordering::Relaxed);
            let part = files.get(from..).unwrap_or_default();
            if part.is_empty() || error.lock().expect("as above").is_some() {
                return;
            }
            let mut read = 0;
            for (path, _, id, scanned) in part.iter().take(FILES_AT_ONCE) {
                if let Err(e) = compare_file(&reader, found, path, *id, scanned) {
                    return fail(e);
                }
                read += scanned.len;
            }
            options.report(Step {
                phase: Phase::ReadBack,
                bytes: (done.fetch_add(read, Ordering::Relaxed) + read, total),
                items: (
                    to_u64((from + FILES_AT_ONCE).min(files.len())),
                    to_u64(files.len()),
                ),
            });
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads {
            scope.spawn(work);
        }
        work();
    });
    error
        .into_inner()
        .expect("all threads have ended")
        .map_or(Ok(()), Err)
}

/// Files that a thread takes at a time.
const FILES_AT_ONCE: usize = 32;

fn compare_file(
    reader: &LayerReader<'_>,
    found: &LayerTree,
    path: &[u8],
    id: InodeId,
    scanned: &Scanned,
) -> Result<(), BuildError> {
    let mut zeros = 0;
    let mut buf = Vec::new();
    for (index, unit) in scanned.units.iter().enumerate() {
        let next_is_zero = scanned.units.get(index + 1).is_some_and(Option::is_none);
        zeros = if unit.is_none() { zeros + 1 } else { 0 };
        if zeros > ZERO_UNITS_READ_MAX && next_is_zero {
            continue;
        }
        let (offset, padded) = scanned.span(index);
        let len = padded.min(scanned.len - offset);
        buf.clear();
        buf.resize(to_usize(padded), 0);
        let room = buf.get_mut(..to_usize(len)).unwrap_or_default();
        reader
            .read_exact_at(found, id, room, offset)
            .map_err(|e| differs(path, e.to_string()))?;
        let right = match unit {
            Some(unit) => Digest::of(&buf) == unit.digest,
            None => buf.iter().all(|b| *b == 0),
        };
        if !right {
            return Err(differs(path, format!("other bytes at offset {offset}")));
        }
    }
    Ok(())
}

/// Compares two trees but for file contents; returns the pairs of ids by path.
///
/// # Errors
/// [`BuildError::ReadBack`] names the first path that differs.
pub fn compare_trees(
    source: &Tree,
    read: &Tree,
) -> Result<Vec<(Vec<u8>, InodeId, InodeId)>, BuildError> {
    let (left, right) = (source.walk(), read.walk());
    let mut to_read: HashMap<InodeId, InodeId> = HashMap::new();
    let mut to_source: HashMap<InodeId, InodeId> = HashMap::new();
    let mut pairs = Vec::with_capacity(left.len());
    for (i, (path, a)) in left.into_iter().enumerate() {
        let Some((other, b)) = right.get(i).filter(|(other, _)| *other == path) else {
            return Err(differs(&path, "it is missing"));
        };
        compare_inodes(other, source, a, read, *b)?;
        // Hard links: the same names share an inode on both sides.
        if *to_read.entry(a).or_insert(*b) != *b || *to_source.entry(*b).or_insert(a) != a {
            return Err(differs(&path, "its hard links differ"));
        }
        pairs.push((path, a, *b));
    }
    if let Some((path, _)) = right.get(pairs.len()) {
        return Err(differs(path, "it is not in the source"));
    }
    Ok(pairs)
}

fn compare_inodes(
    path: &[u8],
    source: &Tree,
    a: InodeId,
    read: &Tree,
    b: InodeId,
) -> Result<(), BuildError> {
    let (a, b) = (source.inode(a), read.inode(b));
    if a.meta.perm & 0o7777 != b.meta.perm || a.mode() != b.mode() {
        return Err(differs(
            path,
            format!("mode {:o} in place of {:o}", b.mode(), a.mode()),
        ));
    }
    if (a.meta.uid, a.meta.gid, a.meta.mtime, &a.meta.xattrs)
        != (b.meta.uid, b.meta.gid, b.meta.mtime, &b.meta.xattrs)
    {
        return Err(differs(
            path,
            format!("{:?} in place of {:?}", b.meta, a.meta),
        ));
    }
    let same = match (&a.kind, &b.kind) {
        (Kind::File(x), Kind::File(y)) => x.len == y.len,
        (Kind::Symlink(x), Kind::Symlink(y)) => x == y,
        (Kind::Char(x, y), Kind::Char(u, v)) | (Kind::Block(x, y), Kind::Block(u, v)) => {
            (x, y) == (u, v)
        }
        _ => true, // the mode told the types, and directories are compared by their names
    };
    if same {
        Ok(())
    } else {
        Err(differs(path, "its size, target or device number differs"))
    }
}
