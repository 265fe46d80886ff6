//! Writes that were answered and not flushed yet, kept where a killed process loses nothing of them.
//!
//! A record may reach a pair's index only after its data was synced, so between flushes the index knows nothing of it. A device
//! that outlives its server (ublk) must not lose what was answered all the same: what uses it wrote it once, and its next flush
//! promises that it is there. So each record goes to a side file too before the write is answered, with the place in the index that it
//! will have:
//! ```text
//! PAIR.recent0, PAIR.recent1    entries: record (16) | offset in the index file (8) | crc32c (4) | 0 (4)
//! ```
//! The checksum covers record, offset, and the data that the record points to. Of the two files one grows; a flush begins the other, and
//! empties the first when the index holds what it had.
//!
//! Whoever opens the pair next replays the entries that go on where the index ends, as far as they are whole and their data is what was
//! written. A killed process leaves all of them so; after a loss of power they may end anywhere, and what is replayed is what
//! was written in that order. Older entries are behind the index's end and do not count, so nothing here is synced but
//! the removal of entries that were found and could not be replayed: their offsets are used again.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::record::{RECORD_BYTES, Record, check};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

const ENTRY_BYTES: usize = 32;
/// Most bytes of a file: a flush begins long before.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Recent {
    /// The first one grows.
    files: [Arc<dyn Media>; 2],
    /// Where the next entry goes in the file that grows.
    end: u64,
    /// Where the next record goes in the index file.
    offset: u64,
}

fn checksum(record: Record, offset: u64, data: &[u8]) -> u32 {
    let own = crc32c::crc32c(&record.to_bytes());
    let own = crc32c::crc32c_append(own, &offset.to_le_bytes());
    crc32c::crc32c_append(own, data)
}

/// The entries of a file that belong behind `index_end`, by their offsets.
fn read(
    file: &dyn Media,
    index_end: u64,
    found: &mut HashMap<u64, (Record, u32)>,
) -> io::Result<bool> {
    let len = file.size()?;
    let mut bytes = vec![0; to_usize(len.min(FILE_BYTES_MAX))];
    file.read_at(&mut bytes, 0)?;
    // One that was cut off was never answered.
    for entry in bytes.as_chunks::<ENTRY_BYTES>().0 {
        let Some((record, rest)) = entry.split_first_chunk::<RECORD_BYTES>() else {
            continue;
        };
        let offset = rest.first_chunk().map(|b| u64::from_le_bytes(*b));
        let sum = rest.get(8..).and_then(|b| b.first_chunk());
        if let (Some(offset), Some(sum)) = (offset, sum)
            && offset >= index_end
        {
            found.insert(
                offset,
                (Record::from_bytes(record), u32::from_le_bytes(*sum)),
            );
        }
    }
    Ok(len > 0)
}

impl Recent {
    /// Opens the side files of a pair whose index ends at `index_end`. What goes on there is given to `replay`, in order, which makes it
    /// durable; then it is taken out of the files.
    ///
    /// # Errors
    /// What the media said.
    pub(super) fn open(
        files: [Arc<dyn Media>; 2],
        data: &dyn Media,
        index_end: u64,
        replay: impl FnOnce(Vec<Record>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let mut found = HashMap::new();
        let mut used = false;
        for file in &files {
            used |= read(&**file, index_end, &mut found)?;
        }
        let sectors = data.size()? / SECTOR;
        let mut offset = index_end;
        let mut records = Vec::new();
        let mut buffer = Vec::new();
        while let Some((record, sum)) = found.remove(&offset) {
            if check(record, records.len(), sectors).is_err() {
                break;
            }
            let len = if record.is_zeroed() {
                0
            } else {
                record.sectors() * SECTOR
            };
            buffer.resize(to_usize(len), 0);
            data.read_at(&mut buffer, record.place() * SECTOR)?;
            if checksum(record, offset, &buffer) != sum {
                break;
            }
            records.push(record);
            offset += to_u64(RECORD_BYTES);
        }
        replay(records)?;
        let recent = Self {
            files,
            end: 0,
            offset,
        };
        if used {
            recent.forget_all()?;
        }
        Ok(recent)
    }

    fn growing(&self) -> &dyn Media {
        let [growing, _] = &self.files;
        &**growing
    }

    fn full(&self) -> &dyn Media {
        let [_, full] = &self.files;
        &**full
    }

    /// Keeps records; to be called before they are answered. `data` is what the record points to, where it is one.
    ///
    /// # Errors
    /// What the medium said: the records do not count then.
    pub(super) fn append(&mut self, records: &[Record], data: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(records.len() * ENTRY_BYTES);
        let mut offset = self.offset;
        for record in records {
            bytes.extend(record.to_bytes());
            bytes.extend(offset.to_le_bytes());
            bytes.extend(checksum(*record, offset, data).to_le_bytes());
            bytes.extend([0; 4]);
            offset += to_u64(RECORD_BYTES);
        }
        let end = self.end + to_u64(bytes.len());
        if end > FILE_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.growing().write_at(&bytes, self.end)?;
        (self.end, self.offset) = (end, offset);
        Ok(())
    }

    /// A flush begins with what was kept so far; what comes from now on goes to the other file, which is empty.
    pub(super) fn begin(&mut self) {
        self.files.reverse();
        self.end = 0;
    }

    /// The index holds what was kept before the last [`Recent::begin`].
    ///
    /// # Errors
    /// What the medium said.
    pub(super) fn forget(&self) -> io::Result<()> {
        self.full().set_len(0)
    }

    /// Nothing that is here may ever count again.
    ///
    /// # Errors
    /// What the media said.
    pub(super) fn forget_all(&self) -> io::Result<()> {
        for file in &self.files {
            file.set_len(0)?;
            file.sync()?;
        }
        Ok(())
    }
}
