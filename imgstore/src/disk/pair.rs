//! The writable layer: a data file that only grows, and an index file of records in the order of the writes.
//!
//! ```text
//! DATA    header (4,096) | sectors as they were written
//! INDEX   header (4,096) | records, later ones win
//! ```
//! **Crash consistency.** A record reaches the index file only after the data it points to was synced. So whatever a power
//! failure leaves, a record that is there points to its data, and a flush that was answered is all there. Recovery cuts the index at the
//! first record that is torn or cannot be right, and appends behind whatever the data file holds. Between flushes records wait in memory; their
//! number is bounded. `recent` keeps them where a killed process does not lose them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::DiskError;
use super::live_map::LiveMap;
use super::map::Piece;
use super::recent::Recent;
use crate::format::FormatError;
use crate::format::overlaybd::header::{DATA, HEADER, Header, SEALED, SPARSE};
use crate::format::overlaybd::record::{
    PLACE_MAX, PLACE_MIN, RECORD_BYTES, Record, SECTORS_MAX, check,
};
use crate::format::overlaybd::{HEADER_BYTES, SECTOR};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

/// Most sectors of one record of data: 4 MiB, as the other writers split.
const WRITE_SECTORS_MAX: u64 = 8192;
/// Records that may wait for a flush; with one more, the next writer flushes all of them.
const PENDING_MAX: usize = 16_384;
/// Most bytes of records in an index file: 128,000,000 records, as in containerd/overlaybd.
const INDEX_BYTES_MAX: u64 = 128_000_000 * 16;

/// What two files of a pair hold, without changing them.
#[derive(Debug)]
pub struct Recovered {
    /// The data file's header.
    pub header: Header,
    /// What is mapped.
    pub map: LiveMap,
    /// Records that count, in order of writing.
    pub records: Vec<Record>,
    /// Bytes of the index file that count.
    pub index_bytes: u64,
    /// Where data is appended next, in sectors.
    pub data_end: u64,
    /// Bytes of the index file behind those that count.
    pub dropped_bytes: u64,
}

impl Recovered {
    /// Reads a pair, whoever wrote it; `name` is for messages.
    ///
    /// # Errors
    /// [`DiskError::Damaged`] when a header is not that of a pair.
    pub fn read(data: &dyn Media, index: &dyn Media, name: &str) -> Result<Self, DiskError> {
        let head = |media: &dyn Media| -> Result<(Header, u64), DiskError> {
            let len = media.size().map_err(DiskError::io("read", name))?;
            let mut bytes = vec![0; to_usize(len.min(to_u64(HEADER_BYTES)))];
            media
                .read_at(&mut bytes, 0)
                .map_err(DiskError::io("read", name))?;
            Ok((
                Header::parse(&bytes).map_err(DiskError::damaged(name))?,
                len,
            ))
        };
        let (header, data_bytes) = head(data)?;
        let (index_header, index_len) = head(index)?;
        header
            .must_begin_data()
            .and_then(|()| index_header.must_begin_index())
            .and_then(|()| pair_flags(&header))
            .map_err(DiskError::damaged(name))?;
        if header.uuid != index_header.uuid {
            let text = |header: &Header| format!("{:?}", header.uuid);
            let error = FormatError::new("uuid of the index", text(&header), text(&index_header));
            return Err(DiskError::damaged(name)(error));
        }
        let start = to_u64(HEADER_BYTES);
        if index_len - start > INDEX_BYTES_MAX {
            let expected = format!("at most {INDEX_BYTES_MAX}");
            let error = FormatError::new("bytes of records in the index file", expected, index_len);
            return Err(DiskError::damaged(name)(error));
        }
        let mut raw = vec![0; to_usize(index_len - start)];
        index
            .read_at(&mut raw, start)
            .map_err(DiskError::io("read", name))?;
        let whole_sectors = data_bytes / SECTOR;
        let mut map = LiveMap::default();
        let mut records = Vec::new();
        let mut counted = 0;
        for (number, bytes) in raw.as_chunks::<RECORD_BYTES>().0.iter().enumerate() {
            let record = Record::from_bytes(bytes);
            if !record.is_padding() {
                if let Err(error) = check(record, number, whole_sectors) {
                    tracing::warn!(pair = name, %error, "the index is cut here");
                    break;
                }
                let record = record.with_layer(0);
                map.insert(record);
                records.push(record);
            }
            counted += to_u64(RECORD_BYTES);
        }
        Ok(Self {
            header,
            map,
            records,
            index_bytes: start + counted,
            data_end: data_bytes.div_ceil(SECTOR),
            dropped_bytes: index_len - start - counted,
        })
    }
}

fn pair_flags(header: &Header) -> Result<(), FormatError> {
    if header.flags & (SEALED | SPARSE) == 0 {
        return Ok(());
    }
    Err(FormatError::new(
        "flags of the data file",
        "a writable append layer (bits 2 and 4 clear)",
        format!("{:#x}", header.flags),
    ))
}

#[derive(Debug)]
struct State {
    map: LiveMap,
    /// Where data is appended next, in sectors.
    data_end: u64,
    /// Records that are not in the index file yet.
    pending: Vec<Record>,
    /// Data was written since the last sync.
    dirty: bool,
    /// Where the pending records are kept too.
    recent: Option<Recent>,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Pair {
    name: String,
    header: Header,
    data: Arc<dyn Media>,
    index: Arc<dyn Media>,
    state: RwLock<State>,
    /// Where the next record goes in the index file; held while flushing. `None` after a failed flush: nothing is known
    /// of the files then, until they are opened again.
    index_end: Mutex<Option<u64>>,
}

impl Pair {
    /// Makes an empty pair in two empty media.
    ///
    /// # Errors
    /// What they said.
    pub fn create(
        data: Arc<dyn Media>,
        index: Arc<dyn Media>,
        header: Header,
        name: &str,
    ) -> Result<Self, DiskError> {
        let data_header = Header {
            flags: HEADER | DATA,
            index_offset: 0,
            index_records: 0,
            ..header
        };
        let index_header = Header {
            flags: HEADER,
            index_offset: to_u64(HEADER_BYTES),
            ..data_header.clone()
        };
        data.write_at(&data_header.to_bytes(), 0)
            .and_then(|()| data.sync())
            .and_then(|()| index.write_at(&index_header.to_bytes(), 0))
            .and_then(|()| index.sync())
            .map_err(DiskError::io("create", name))?;
        Self::open(data, index, name)
    }

    /// Opens a pair for writing, after whatever happened to it.
    ///
    /// # Errors
    /// As for [`Recovered::read`].
    pub fn open(
        data: Arc<dyn Media>,
        index: Arc<dyn Media>,
        name: &str,
    ) -> Result<Self, DiskError> {
        let found = Recovered::read(&*data, &*index, name)?;
        if found.dropped_bytes > 0 {
            index
                .set_len(found.index_bytes)
                .and_then(|()| index.sync())
                .map_err(DiskError::io("recover", name))?;
        }
        Ok(Self {
            name: name.to_owned(),
            header: found.header,
            data,
            index,
            state: RwLock::new(State {
                map: found.map,
                data_end: found.data_end,
                pending: Vec::new(),
                dirty: false,
                recent: None,
            }),
            index_end: Mutex::new(Some(found.index_bytes)),
        })
    }

    /// The same pair with two side files, where what is answered is kept from now on. What a killed process had kept there and not
    /// flushed is flushed first.
    ///
    /// # Errors
    /// What the media said.
    pub fn with_recent(self, files: [Arc<dyn Media>; 2]) -> Result<Self, DiskError> {
        let failed = |source| DiskError::io("recover", &self.name)(source);
        let index_end = self.lock_index().unwrap_or_default();
        let replay = |records: Vec<Record>| {
            for record in records {
                self.map(&[record], &[])?;
            }
            self.flush()
        };
        let recent = Recent::open(files, &*self.data, index_end, replay).map_err(failed)?;
        self.write_state().recent = Some(recent);
        Ok(self)
    }

    /// The data file's header.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The data file.
    pub fn data(&self) -> Arc<dyn Media> {
        Arc::clone(&self.data)
    }

    fn write_state(&self) -> std::sync::RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_state(&self) -> std::sync::RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_index(&self) -> MutexGuard<'_, Option<u64>> {
        self.index_end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What this layer maps in these sectors.
    pub fn pieces(&self, sectors: std::ops::Range<u64>) -> Vec<Piece> {
        self.read_state().map.pieces(sectors).collect()
    }

    /// How many mappings it has.
    pub fn extents(&self) -> usize {
        self.read_state().map.len()
    }

    /// All that it maps, in order.
    pub fn records(&self) -> Vec<Record> {
        self.read_state().map.records().collect()
    }

    /// Sectors of data written so far, those that were written over included.
    pub fn data_sectors(&self) -> u64 {
        self.read_state().data_end - to_u64(HEADER_BYTES) / SECTOR
    }

    /// Takes room at the end of the data file.
    fn append(&self, sectors: u64) -> io::Result<u64> {
        let mut state = self.write_state();
        let place = state.data_end;
        let end = place.checked_add(sectors).filter(|end| *end <= PLACE_MAX);
        state.data_end = end.ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(place)
    }

    /// `data` is what the record points to, where it is one.
    fn map(&self, records: &[Record], data: &[u8]) -> io::Result<()> {
        let mut state = self.write_state();
        // In the order of the map, and before anybody can see it.
        if let Some(recent) = &mut state.recent {
            recent.append(records, data)?;
        }
        for record in records {
            state.map.insert(*record);
            state.pending.push(*record);
            // Only now that its data is written: a flush that runs between reserving and writing must not take this away.
            state.dirty |= !record.is_zeroed();
        }
        Ok(())
    }

    /// Flushes where many records wait for it. Whoever writes calls this after the write.
    ///
    /// # Errors
    /// As for [`Pair::flush`].
    pub fn flush_if_full(&self) -> io::Result<()> {
        let full = self.read_state().pending.len() > PENDING_MAX;
        if full { self.flush() } else { Ok(()) }
    }

    /// Writes whole sectors.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a part of a sector; else what the medium said: every sector then has its old or
    /// its new content.
    pub fn write(&self, lba: u64, bytes: &[u8]) -> io::Result<()> {
        let sector = to_usize(SECTOR);
        if bytes.is_empty() || !bytes.len().is_multiple_of(sector) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut at = lba;
        for part in bytes.chunks(to_usize(WRITE_SECTORS_MAX) * sector) {
            let sectors = to_u64(part.len() / sector);
            let place = self.append(sectors)?;
            self.data.write_at(part, place * SECTOR)?;
            self.map(&[Record::data(at, sectors, place, 0)], part)?;
            at += sectors;
        }
        Ok(())
    }

    /// Makes sectors read as zeros, whatever lies below.
    ///
    /// # Errors
    /// What the medium said: nothing has changed then.
    pub fn discard(&self, lba: u64, sectors: u64) -> io::Result<()> {
        // Any place inside the data part will do, and the first is there whatever else is lost.
        let place = PLACE_MIN;
        let mut records = Vec::new();
        let mut at = lba;
        while at < lba + sectors {
            let step = (lba + sectors - at).min(SECTORS_MAX);
            records.push(Record::zeroed(at, step, place, 0));
            at += step;
        }
        self.map(&records, &[])
    }

    /// Makes everything written before this call survive a loss of power.
    ///
    /// # Errors
    /// What the media said. After a failure nothing can be flushed until the pair is opened again: what the disk kept of
    /// the failed sync is unknown.
    pub fn flush(&self) -> io::Result<()> {
        let mut end = self.lock_index();
        let Some(start) = *end else {
            let text = format!(
                "`{}`: an earlier flush failed; open the disk again",
                self.name
            );
            return Err(io::Error::other(text));
        };
        let mut state = self.write_state();
        let pending = std::mem::take(&mut state.pending);
        let dirty = std::mem::take(&mut state.dirty);
        if pending.is_empty() && !dirty {
            return Ok(());
        }
        // Lost on failure, with the pair: see above.
        *end = None;
        if let Some(recent) = &mut state.recent {
            recent.begin();
        }
        drop(state);
        match self.write_out(&pending, dirty, start) {
            Ok(next) => {
                *end = Some(next);
                Ok(())
            }
            Err(error) => {
                // What was not synced must not come back as if it were: nobody knows whether its data is on disk.
                if let Some(recent) = self.write_state().recent.take()
                    && let Err(error) = recent.forget_all()
                {
                    tracing::error!(pair = self.name, %error, "writes of a failed flush may come back");
                }
                Err(error)
            }
        }
    }

    /// Syncs data, then writes and syncs its records behind `start` of the index; where they end.
    fn write_out(&self, pending: &[Record], dirty: bool, start: u64) -> io::Result<u64> {
        let bytes: Vec<u8> = pending.iter().flat_map(|r| r.to_bytes()).collect();
        let next = start + to_u64(bytes.len());
        if next > to_u64(HEADER_BYTES) + INDEX_BYTES_MAX {
            let text = format!(
                "`{}`: too many writes since the last snapshot; open the disk again and take one",
                self.name
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        if dirty {
            self.data.sync()?;
        }
        if !bytes.is_empty() {
            self.index.write_at(&bytes, start)?;
            self.index.sync()?;
        }
        self.read_state()
            .recent
            .as_ref()
            .map_or(Ok(()), Recent::forget)?;
        Ok(next)
    }
}
