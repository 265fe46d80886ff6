//! The second read: make every planned segment, compress what the origin lacks, write it into packs in staging.
//!
//! Workers make segments in batches; the packs are written in layout order, so they do not depend on the number of threads.
//! Memory is bounded by a batch.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::{NamedTempFile, TempPath};

use super::error::BuildError;
use super::known::{self, Known};
use super::layout::{Layout, Planned};
use super::options::{BuildOptions, Phase, Step};
use crate::format::frame;
use crate::format::manifest::Segment;
use crate::format::placement::Pack;
use crate::ids::{BLOCK_SIZE, Digest, to_u64, to_usize};
use crate::origin::{ByteRange, Origin};
use crate::process::Process;
use crate::source::content::ContentReader;
use crate::tree::{InodeId, Kind, Tree};

/// Segments made at a time.
const BATCH: usize = 64;
/// A pack is closed when it has this many stored bytes (3FS guidance: packs of 1 to 4 GiB).
const PACK_BYTES: u64 = 1 << 30;

/// Where a segment's frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// In a staged pack: index, and range in it.
    New(usize, ByteRange),
    /// On the origin already.
    Known(Pack, ByteRange),
}

/// A segment that was made.
#[derive(Debug, Clone, Copy)]
pub struct StagedSegment {
    /// Its name and length.
    pub segment: Segment,
    /// Where it is.
    pub stored: Stored,
}

impl StagedSegment {
    /// Whether this build stores it.
    pub const fn is_new(&self) -> bool {
        matches!(self.stored, Stored::New(..))
    }
}

/// A pack in staging; the file goes away with this value.
#[derive(Debug)]
pub struct StagedPack {
    /// Where it is.
    pub path: TempPath,
    /// For reading.
    pub file: File,
    /// Name and size.
    pub pack: Pack,
}

impl StagedPack {
    /// A written file as a pack: synced, and closed by who wrote it, for on 3FS a file's length is certain only then.
    pub(crate) fn seal(file: NamedTempFile, pack: Pack) -> std::io::Result<Self> {
        let (file, path) = file.into_parts();
        file.sync_all()?;
        drop(file);
        let file = File::open(&path)?;
        Ok(Self { path, file, pack })
    }
}

/// Everything that was made.
#[derive(Debug)]
pub struct Staged {
    /// In the layout's order.
    pub own: Vec<StagedSegment>,
    /// Packs with the new segments.
    pub packs: Vec<StagedPack>,
}

struct Made {
    segment: Segment,
    source: Source,
}

enum Source {
    /// The origin has it, here.
    Known(Pack, ByteRange),
    /// To be stored.
    Frame(Vec<u8>),
}

struct Maker<'a> {
    tree: &'a Tree,
    known: &'a Known,
    origin: &'a dyn Origin,
    level: i32,
    /// The file read last, kept open because its parts come in a row.
    open: Option<(InodeId, ContentReader)>,
    compressor: Option<frame::Encoder>,
}

impl Maker<'_> {
    fn plain(&mut self, planned: &Planned) -> Result<Vec<u8>, BuildError> {
        let mut plain = vec![0; to_usize(u64::from(planned.blocks) * BLOCK_SIZE)];
        let mut at = 0;
        for part in &planned.parts {
            let Kind::File(content) = &self.tree.inode(part.file).kind else {
                continue;
            };
            if self.open.as_ref().is_none_or(|(id, _)| *id != part.file) {
                self.open = Some((part.file, ContentReader::open(content)?));
            }
            let (_, reader) = self.open.as_ref().expect("opened above");
            let padded = to_usize(u64::from(part.blocks) * BLOCK_SIZE);
            let len = padded.min(to_usize(content.len - part.offset));
            let buf = plain
                .get_mut(at..at + len)
                .expect("the parts make up the segment");
            reader.read_exact_at(buf, part.offset)?;
            reader.check_unchanged()?;
            at += padded;
        }
        Ok(plain)
    }

    fn make(&mut self, planned: &Planned) -> Result<Made, BuildError> {
        let plain = self.plain(planned)?;
        let segment = Segment(Digest::of(&plain), to_u64(plain.len()));
        if let Some((pack, range)) = known::find(self.origin, self.known, segment) {
            return Ok(Made {
                segment,
                source: Source::Known(pack, range),
            });
        }
        let level = self.level;
        let encoder = self
            .compressor
            .get_or_insert_with(|| frame::Encoder::new(level));
        Ok(Made {
            segment,
            source: Source::Frame(encoder.encode(&plain)),
        })
    }
}

fn make_batch(batch: &[Planned], makers: &mut [Maker<'_>]) -> Result<Vec<Made>, BuildError> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, Result<Made, BuildError>)>> =
        Mutex::new(Vec::with_capacity(batch.len()));
    let work = |maker: &mut Maker<'_>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(planned) = batch.get(index) else {
                break;
            };
            let made = maker.make(planned);
            results
                .lock()
                .expect("no maker panics while it holds the lock")
                .push((index, made));
        }
    };
    std::thread::scope(|scope| {
        let mut makers = makers.iter_mut();
        let mine = makers.next();
        for maker in makers {
            scope.spawn(|| work(maker));
        }
        if let Some(maker) = mine {
            work(maker);
        }
    });
    let mut results = results.into_inner().expect("all threads have ended");
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, made)| made).collect()
}

/// Writes packs of whole frames into staging, one after the other.
pub(crate) struct PackWriter {
    folder: PathBuf,
    /// The origin's chunks, which frames should not cross.
    chunk_bytes: Option<u64>,
    done: Vec<StagedPack>,
    current: Option<OpenPack>,
}

struct OpenPack {
    file: NamedTempFile,
    hasher: blake3::Hasher,
    len: u64,
    frames: Vec<(u32, u32)>,
}

impl OpenPack {
    /// Writes a frame of so many plain bytes.
    fn write(&mut self, frame: &[u8], plain_len: u64) -> std::io::Result<()> {
        self.file.write_all(frame)?;
        self.hasher.update(frame);
        let len = to_u64(frame.len());
        self.len += len;
        let small = |n: u64| u32::try_from(n).expect("a frame has at most 5 MiB");
        self.frames.push((small(len), small(plain_len)));
        Ok(())
    }
}

impl PackWriter {
    /// A writer of packs in `folder`, for an origin with such chunks.
    pub(crate) const fn new(folder: PathBuf, chunk_bytes: Option<u64>) -> Self {
        Self {
            folder,
            chunk_bytes,
            done: Vec::new(),
            current: None,
        }
    }

    /// The packs that are finished; what is appended later counts from 0 again.
    pub(crate) fn take_done(&mut self) -> Vec<StagedPack> {
        std::mem::take(&mut self.done)
    }

    /// Adds a frame; where it is, as long as nothing is taken.
    pub(super) fn store(&mut self, frame: &[u8], plain_len: u64) -> Result<Stored, BuildError> {
        let pack = self.done.len();
        Ok(Stored::New(pack, self.append(frame, plain_len)?))
    }

    /// The packs, all finished.
    pub(super) fn into_packs(mut self) -> Result<Vec<StagedPack>, BuildError> {
        self.finish()?;
        Ok(self.done)
    }

    fn error(&self, source: std::io::Error) -> BuildError {
        BuildError::Staging {
            path: self.folder.display().to_string(),
            source,
        }
    }

    /// Adds a frame; a pack that is large enough is finished.
    ///
    /// # Errors
    /// [`BuildError::Staging`].
    pub(crate) fn append(&mut self, frame: &[u8], plain_len: u64) -> Result<ByteRange, BuildError> {
        let mut open = match self.current.take() {
            Some(open) => open,
            None => {
                let file = tempfile::Builder::new()
                    .prefix(&format!("{}pack-", Process::file_prefix()))
                    // It becomes an object as it is: as readable as every other, for a web server of another user.
                    .permissions(Permissions::from_mode(0o666))
                    .tempfile_in(&self.folder)
                    .map_err(|e| self.error(e))?;
                OpenPack {
                    file,
                    hasher: blake3::Hasher::new(),
                    len: 0,
                    frames: Vec::new(),
                }
            }
        };
        let pad = self.chunk_bytes.map_or(0, |chunk| {
            frame::padding_len(open.len, to_u64(frame.len()), chunk)
        });
        if pad > 0 {
            open.write(&frame::padding(pad), 0)
                .map_err(|e| self.error(e))?;
        }
        let range = ByteRange {
            start: open.len,
            len: to_u64(frame.len()),
        };
        open.write(frame, plain_len).map_err(|e| self.error(e))?;
        let full = open.len >= PACK_BYTES;
        self.current = Some(open);
        if full {
            self.finish()?;
        }
        Ok(range)
    }

    /// Finishes the pack that is being written, if one is.
    ///
    /// # Errors
    /// [`BuildError::Staging`].
    pub(crate) fn finish(&mut self) -> Result<(), BuildError> {
        let Some(mut open) = self.current.take() else {
            return Ok(());
        };
        let table = frame::seek_table(&open.frames);
        open.file.write_all(&table).map_err(|e| self.error(e))?;
        open.hasher.update(&table);
        let pack = Pack {
            digest: open.hasher.finalize().into(),
            size: open.len + to_u64(table.len()),
        };
        let staged = StagedPack::seal(open.file, pack).map_err(|e| self.error(e))?;
        self.done.push(staged);
        Ok(())
    }
}

/// Makes all planned segments.
///
/// # Errors
/// When a file changed or cannot be read, or staging cannot be written.
pub fn stage(
    tree: &Tree,
    layout: &Layout,
    known: &Known,
    origin: &dyn Origin,
    options: &BuildOptions,
) -> Result<Staged, BuildError> {
    let folder = origin.staging().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&folder).map_err(|source| BuildError::Staging {
        path: folder.display().to_string(),
        source,
    })?;
    let mut writer = PackWriter::new(folder, origin.chunk_bytes());
    let maker = |_| Maker {
        tree,
        known,
        origin,
        level: options.level,
        open: None,
        compressor: None,
    };
    let mut makers: Vec<Maker<'_>> = (0..options.threads).map(maker).collect();
    let total: u64 = layout
        .own
        .iter()
        .map(|p| u64::from(p.blocks) * BLOCK_SIZE)
        .sum();
    let mut done = 0;
    let mut own = Vec::with_capacity(layout.own.len());
    let mut new: HashMap<Digest, Stored> = HashMap::new();
    for batch in layout.own.chunks(BATCH) {
        for made in make_batch(batch, &mut makers)? {
            let digest = made.segment.digest();
            let stored = match (made.source, new.get(&digest)) {
                (_, Some(stored)) => *stored,
                (Source::Known(pack, range), None) => Stored::Known(pack, range),
                (Source::Frame(frame), None) => {
                    let pack = writer.done.len();
                    Stored::New(pack, writer.append(&frame, made.segment.len())?)
                }
            };
            new.insert(digest, stored);
            done += made.segment.len();
            own.push(StagedSegment {
                segment: made.segment,
                stored,
            });
        }
        options.report(Step {
            phase: Phase::Store,
            bytes: (done, total),
            items: (to_u64(own.len()), to_u64(layout.own.len())),
        });
    }
    let packs = writer.into_packs()?;
    assert!(
        own.len() == layout.own.len(),
        "every planned segment was made"
    );
    Ok(Staged { own, packs })
}
