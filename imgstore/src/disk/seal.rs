//! Ending layers: sealing a pair where it lies, and committing any map of live data into a new, compact file.
//!
//! Both write the index behind the data and the trailer last, after a sync: a file with a trailer is whole.

use std::io;

use super::DiskError;
use super::map::Map;
use super::pair::Pair;
use crate::format::overlaybd::header::{DATA, HEADER, Header, RECORDS_MAX, SEALED};
use crate::format::overlaybd::record::{PLACE_MIN, RECORD_BYTES, Record};
use crate::format::overlaybd::{HEADER_BYTES, SECTOR};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

/// Bytes copied at a time.
const COPY_BYTES: usize = 1 << 20;
/// Committed indexes are filled up to whole blocks of so many records.
const RECORDS_A_BLOCK: usize = HEADER_BYTES / RECORD_BYTES;

fn write_end(
    out: &dyn Media,
    records: &[Record],
    data_end: u64,
    header: &Header,
) -> io::Result<()> {
    let bytes: Vec<u8> = records.iter().flat_map(|r| r.to_bytes()).collect();
    let index_offset = data_end * SECTOR;
    let index_end = (index_offset + to_u64(bytes.len())).next_multiple_of(to_u64(HEADER_BYTES));
    // What the data file had beyond its records must not stay between index and trailer, or behind it.
    out.set_len(index_offset)?;
    out.set_len(index_end)?;
    out.write_at(&bytes, index_offset)?;
    out.sync()?;
    let trailer = Header {
        flags: DATA | SEALED,
        index_offset,
        index_records: to_u64(records.len()),
        ..header.clone()
    };
    out.write_at(&trailer.to_bytes(), index_end)?;
    out.sync()
}

fn few_enough(records: usize, name: &str) -> Result<(), DiskError> {
    if to_u64(records) <= RECORDS_MAX {
        return Ok(());
    }
    Err(DiskError::TooManyExtents {
        name: name.to_owned(),
        found: to_u64(records),
        max: RECORDS_MAX,
    })
}

/// Seals a pair in its data file, which is a layer afterwards. Nobody may write to it any more; its index file has no
/// use afterwards. Interrupted at any point, the pair is still one, or the layer is whole.
///
/// # Errors
/// What the media said, or more than a million mappings.
pub fn seal(pair: &Pair) -> Result<(), DiskError> {
    let failed = |source| DiskError::io("seal", pair.name())(source);
    pair.flush().map_err(failed)?;
    let map = Map::new(pair.records());
    few_enough(map.records().len(), pair.name())?;
    let data = pair.data();
    let end = pair.data_sectors() + to_u64(HEADER_BYTES) / SECTOR;
    write_end(&*data, map.records(), end, pair.header()).map_err(failed)
}

/// Writes the live data of a map into a new layer file: data in order of sectors, nothing else. `read` fills a buffer with
/// a record's data. The header's index fields and flags do not matter.
///
/// # Errors
/// What either side said, or more than a million mappings.
pub fn commit(
    map: &Map,
    header: &Header,
    read: &mut dyn FnMut(Record, &mut [u8]) -> io::Result<()>,
    out: &dyn Media,
    name: &str,
) -> Result<(), DiskError> {
    let failed = |source| DiskError::io("write", name)(source);
    let begin = Header {
        flags: HEADER | DATA | SEALED,
        index_offset: 0,
        index_records: 0,
        ..header.clone()
    };
    out.write_at(&begin.to_bytes(), 0).map_err(failed)?;
    let mut place = PLACE_MIN;
    let mut moved = Vec::with_capacity(map.records().len());
    let mut buffer = vec![0; COPY_BYTES];
    for record in map.records() {
        if record.is_zeroed() {
            moved.push(Record::zeroed(record.lba(), record.sectors(), place, 0));
            continue;
        }
        moved.push(Record::data(record.lba(), record.sectors(), place, 0));
        let step = to_u64(COPY_BYTES) / SECTOR;
        let mut at = record.lba();
        while at < record.end() {
            let part = record.cut(at, at + step);
            let bytes = buffer
                .get_mut(..to_usize(part.sectors() * SECTOR))
                .unwrap_or_default();
            read(part, bytes).map_err(failed)?;
            out.write_at(bytes, place * SECTOR).map_err(failed)?;
            place += part.sectors();
            at = part.end();
        }
    }
    // Data that lay apart lies together now.
    let joined = Map::new(moved);
    let mut records = joined.records().to_vec();
    few_enough(records.len(), name)?;
    while !records.len().is_multiple_of(RECORDS_A_BLOCK) {
        records.push(Record::padding());
    }
    write_end(out, &records, place, header).map_err(failed)
}
