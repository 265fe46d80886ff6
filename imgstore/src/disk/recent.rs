//! Writes that were answered and not flushed yet, kept where a killed process loses nothing of them.
//!
//! A record may reach a pair's index only after its data was synced, so between flushes the index knows nothing of it. A device
//! that outlives its server (ublk) must not lose what was answered all the same: what uses it wrote it once, and its next flush
//! promises that it is there. So each record goes to a side file too before the write is answered, and is replayed by whoever
//! opens the pair next: if the system still runs, for then the data is in its page cache. After a loss of power the
//! data may be missing, and the files of an earlier boot are worth nothing.
//! ```text
//! PAIR.recent0, PAIR.recent1    "DSECRCNT" | boot id (36) | 0 (4) | generation (8) | 0 (8) | records (16 each)
//! ```
//! Of the two, one grows; a flush begins the other, and empties the first when the index holds what it had. A record that is in both
//! the index and here does no harm: records are replayed in order up to the last one.

use std::io;
use std::sync::Arc;

use crate::format::overlaybd::record::{RECORD_BYTES, Record};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

const MAGIC: [u8; 8] = *b"DSECRCNT";
/// Bytes of a boot id as text.
const BOOT_BYTES: usize = 36;
const HEAD_BYTES: usize = 64;
/// Most bytes of a file: a flush begins long before.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Names the time since the system was started, as in `/proc/sys/kernel/random/boot_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootId([u8; BOOT_BYTES]);

impl BootId {
    /// From text of 36 bytes; `None` for any other.
    pub fn parse(text: &[u8]) -> Option<Self> {
        text.trim_ascii().try_into().ok().map(Self)
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct Recent {
    files: [Arc<dyn Media>; 2],
    boot: BootId,
    generation: u64,
    /// Where the next record goes in the file that grows.
    end: u64,
}

/// A file of this boot: its generation and records.
fn read(file: &dyn Media, boot: BootId) -> io::Result<Option<(u64, Vec<Record>)>> {
    let len = file.size()?;
    if len < to_u64(HEAD_BYTES) || len > FILE_BYTES_MAX {
        return Ok(None);
    }
    let mut bytes = vec![0; to_usize(len)];
    file.read_at(&mut bytes, 0)?;
    let Some((head, records)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        return Ok(None);
    };
    let ours = head.starts_with(&MAGIC) && head.get(8..8 + BOOT_BYTES) == Some(&boot.0[..]);
    let generation = head
        .get(48..)
        .and_then(|b| b.first_chunk())
        .map(|b| u64::from_le_bytes(*b));
    // A record that was cut off was never answered.
    let records = records.as_chunks::<RECORD_BYTES>().0;
    let records = records.iter().map(Record::from_bytes).collect();
    Ok(generation
        .filter(|_| ours)
        .map(|generation| (generation, records)))
}

impl Recent {
    /// The two side files of a pair, and what they hold of this boot, in order of writing. They go on to hold it until
    /// [`Recent::forget`].
    ///
    /// # Errors
    /// What the media said.
    pub fn open(files: [Arc<dyn Media>; 2], boot: BootId) -> io::Result<(Self, Vec<Record>)> {
        let mut found = Vec::new();
        for file in &files {
            found.extend(read(&**file, boot)?);
        }
        found.sort_by_key(|(generation, _)| *generation);
        let generation = found.last().map_or(0, |(generation, _)| *generation);
        let records = found.into_iter().flat_map(|(_, records)| records).collect();
        let recent = Self {
            files,
            boot,
            generation,
            end: 0,
        };
        Ok((recent, records))
    }

    fn file(&self) -> &dyn Media {
        let [even, odd] = &self.files;
        if self.generation.is_multiple_of(2) {
            &**even
        } else {
            &**odd
        }
    }

    fn other(&self) -> &dyn Media {
        let [even, odd] = &self.files;
        if self.generation.is_multiple_of(2) {
            &**odd
        } else {
            &**even
        }
    }

    /// Keeps records; to be called before they are answered.
    ///
    /// # Errors
    /// What the medium said: the records do not count then.
    pub(super) fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let bytes: Vec<u8> = records.iter().flat_map(|r| r.to_bytes()).collect();
        let end = self.end + to_u64(bytes.len());
        if end > FILE_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.file().write_at(&bytes, self.end)?;
        self.end = end;
        Ok(())
    }

    /// Begins the other file, which is empty: what comes from now on is not part of the flush that begins.
    ///
    /// # Errors
    /// What the medium said.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        let mut head = [0; HEAD_BYTES];
        let generation = self.generation + 1;
        let fields = MAGIC
            .into_iter()
            .chain(self.boot.0)
            .chain([0; 4])
            .chain(generation.to_le_bytes());
        for (to, from) in head.iter_mut().zip(fields) {
            *to = from;
        }
        self.generation = generation;
        self.end = to_u64(HEAD_BYTES);
        self.file().write_at(&head, 0)
    }

    /// The index holds what the file before the last [`Recent::begin`] had.
    ///
    /// # Errors
    /// What the medium said.
    pub(super) fn forget(&self) -> io::Result<()> {
        self.other().set_len(0)
    }

    /// Nothing that is here may count any more.
    ///
    /// # Errors
    /// What the media said.
    pub(super) fn forget_all(&self) -> io::Result<()> {
        self.other().set_len(0)?;
        self.file().set_len(0)
    }
}
