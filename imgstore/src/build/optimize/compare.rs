//! The new layer is read with the independent reader and compared with the old one before it is published.

use super::*;

/// The new layer before it is published, beside the old one.
pub(super) struct Subject<'a> {
    pub(super) old: &'a Old<'a>,
    pub(super) tree: &'a LayerTree,
    pub(super) meta: &'a [u8],
    pub(super) manifest: &'a Manifest,
    pub(super) staged: &'a Staged,
    pub(super) kept: &'a Kept,
}

impl Subject<'_> {
    /// A segment of the new layer, verified.
    fn segment(&self, index: usize) -> Result<Vec<u8>, String> {
        let Some(own) = self.staged.own.get(index) else {
            let at = index - self.staged.own.len();
            let old = self.kept.segments.get(at).ok_or("no such segment")?;
            let plain = self.old.segment(*old).map_err(|e| e.to_string())?;
            return Ok(plain.to_vec());
        };
        let stored = match own.stored {
            Stored::Known(pack, range) => {
                let fetched = self.old.origin.fetch(&names::pack(&pack.digest), range);
                fetched.map_err(|e| e.to_string())?
            }
            Stored::New(pack, range) => {
                let pack = self
                    .staged
                    .packs
                    .get(pack)
                    .ok_or("no such pack in staging")?;
                let mut bytes = vec![0; to_usize(range.len)];
                let read = pack.file.read_exact_at(&mut bytes, range.start);
                read.map(|()| bytes).map_err(|e| e.to_string())?
            }
        };
        let plain = frame::decode(&stored, own.segment.len()).map_err(|e| e.to_string())?;
        if Digest::of(&plain) == own.segment.digest() {
            Ok(plain)
        } else {
            Err(format!(
                "its bytes are not those of {}",
                own.segment.digest()
            ))
        }
    }

    /// Reads old and new layer with the independent reader and compares everything.
    pub(super) fn compare(&self, options: &OptimizeOptions) -> Result<(), OptimizeError> {
        let failed = |e: ReaderError| BuildError::ReadBack {
            what: "image".into(),
            found: e.to_string(),
        };
        let read_new = |index: usize| self.segment(index);
        let reader = LayerReader::open(self.meta, self.manifest, &read_new).map_err(failed)?;
        let new = reader.tree().map_err(failed)?;
        let mut seen = std::collections::HashSet::new();
        let mut files: Vec<(Vec<u8>, InodeId, InodeId, u64)> = Vec::new();
        for (path, a, b) in compare_trees(&self.tree.tree, &new.tree)? {
            if let Kind::File(content) = &self.tree.tree.inode(a).kind
                && seen.insert(a)
            {
                files.push((path, a, b, content.len));
            }
        }
        // Neighbours in the image are read one after another.
        let first = |id: &InodeId| {
            let index = self
                .tree
                .nid(*id)
                .and_then(|nid| chunk_index(&self.old.meta, nid).ok());
            index.and_then(|index| index.blocks.into_iter().flatten().next())
        };
        files.sort_by_cached_key(|(_, a, ..)| first(a));
        self.compare_files(&new, &files, options)
    }

    /// Where a file has data, in both layers.
    fn same_ranges(
        &self,
        new: &LayerTree,
        a: InodeId,
        b: InodeId,
    ) -> Result<Vec<(u64, u64)>, String> {
        let old = data_ranges(&self.old.meta, self.tree.nid(a)).map_err(|e| e.to_string())?;
        let new = data_ranges(self.meta, new.nid(b)).map_err(|e| e.to_string())?;
        if old == new {
            Ok(old)
        } else {
            Err("its holes differ".to_owned())
        }
    }

    fn compare_files(
        &self,
        new: &LayerTree,
        files: &[(Vec<u8>, InodeId, InodeId, u64)],
        options: &OptimizeOptions,
    ) -> Result<(), OptimizeError> {
        let total = files.iter().map(|f| f.3).fold(0, u64::saturating_add);
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let (stop, failure) = (AtomicBool::new(false), Mutex::new(None));
        let fail = |what: &[u8], found: String| {
            stop.store(true, Ordering::Relaxed);
            let what = format!("`{}`", String::from_utf8_lossy(what));
            let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(BuildError::ReadBack { what, found });
        };
        let read_old = |index: usize| {
            let plain = self.old.segment(index).map_err(|e| e.to_string())?;
            Ok(plain.to_vec())
        };
        let read_new = |index: usize| self.segment(index);
        let work = || {
            let readers = (
                LayerReader::open(&self.old.meta, &self.old.layer.manifest, &read_old),
                LayerReader::open(self.meta, self.manifest, &read_new),
            );
            let (left, right) = match readers {
                (Ok(left), Ok(right)) => (left, right),
                (Err(e), _) | (_, Err(e)) => return fail(b"image", e.to_string()),
            };
            while !stop.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some((path, a, b, len)) = files.get(number) else {
                    return;
                };
                let ranges = match self.same_ranges(new, *a, *b) {
                    Ok(ranges) => ranges,
                    Err(found) => return fail(path, found),
                };
                let right = |buf: &mut [u8], at| right.read_exact_at(new, *b, buf, at);
                let left = |buf: &mut [u8], at| left.read_exact_at(self.tree, *a, buf, at);
                match first_difference(*len, &ranges, &left, &right) {
                    Ok(None) => {}
                    Ok(Some(at)) => return fail(path, format!("other bytes at offset {at}")),
                    Err(e) => return fail(path, e.to_string()),
                }
                let bytes = done.fetch_add(*len, Ordering::Relaxed) + len;
                options.report(Phase::ReadBack, (bytes, total), (number + 1, files.len()));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..options.threads {
                scope.spawn(work);
            }
            work();
        });
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        failure.map_or(Ok(()), |e| Err(e.into()))
    }
}

type ReadAt<'a> = dyn Fn(&mut [u8], u64) -> Result<(), ReaderError> + 'a;

/// Where a file has data, as ranges that do not touch.
fn data_ranges(image: &[u8], nid: Option<u64>) -> Result<Vec<(u64, u64)>, FormatError> {
    let missing = || FormatError::new("inode of a file", "a number", "none");
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for run in data_runs(image, nid.ok_or_else(missing)?)? {
        match ranges.last_mut() {
            Some((_, end)) if *end == run.file_offset => *end += run.len,
            _ => ranges.push((run.file_offset, run.file_offset + run.len)),
        }
    }
    Ok(ranges)
}

/// The first piece in which two files of `len` bytes with the same data ranges differ. Of a hole, both ends are read: it may
/// be longer than anything that could be read.
fn first_difference(
    len: u64,
    ranges: &[(u64, u64)],
    left: &ReadAt<'_>,
    right: &ReadAt<'_>,
) -> Result<Option<u64>, ReaderError> {
    let mut bufs = (Vec::new(), Vec::new());
    let mut differs = |at: u64, end: u64| -> Result<bool, ReaderError> {
        let here = to_usize(end - at);
        bufs.0.resize(here, 0);
        bufs.1.resize(here, 0);
        left(&mut bufs.0, at)?;
        right(&mut bufs.1, at)?;
        Ok(bufs.0 != bufs.1)
    };
    let mut hole = 0;
    for (start, end) in ranges.iter().copied().chain([(len, len)]) {
        let ends = [
            (hole, start.min(hole + COMPARED_BYTES)),
            (start.saturating_sub(COMPARED_BYTES).max(hole), start),
        ];
        for (from, to) in ends {
            if from < to && differs(from, to)? {
                return Ok(Some(from));
            }
        }
        let mut at = start;
        while at < end {
            let to = end.min(at + COMPARED_BYTES);
            if differs(at, to)? {
                return Ok(Some(at));
            }
            at = to;
        }
        hole = end;
    }
    Ok(None)
}
