//! One mapping of an LSMT index: 16 bytes on disk, and the same 16 bytes in memory.
//!
//! ```text
//! first u64    bits 0-49 LBA (sectors), 50-63 length (sectors, 1 to 16,383)
//! second u64   bits 0-54 place of the data in the layer's file (sectors), 55 zeroed, 56-63 tag
//! ```
//! On disk the tag means nothing to a reader; in memory it is the number of the layer that a merged map takes the data from.
//! A zeroed record reads as zeros and hides what lies below; its place is not read.

use crate::format::FormatError;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 16;
/// Longest mapping, in sectors.
pub const SECTORS_MAX: u64 = (1 << 14) - 1;
/// The LBA of records that only fill up a write.
pub const LBA_PADDING: u64 = (1 << 50) - 1;
/// First place that can hold data: behind the header.
pub const PLACE_MIN: u64 = 8;
/// Largest place that fits.
pub const PLACE_MAX: u64 = (1 << 55) - 1;
const ZEROED: u64 = 1 << 55;

/// See the head of this file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Record {
    first: u64,
    second: u64,
}

impl Record {
    /// A mapping of sectors to data at `place` in layer `layer`. The parts must fit their bits.
    pub const fn data(lba: u64, sectors: u64, place: u64, layer: u8) -> Self {
        debug_assert!(lba < LBA_PADDING && sectors > 0 && sectors <= SECTORS_MAX);
        debug_assert!(place <= PLACE_MAX);
        Self {
            first: lba | sectors << 50,
            second: place | (layer as u64) << 56,
        }
    }

    /// A mapping of sectors to zeros; `place` is where data written then would lie.
    pub const fn zeroed(lba: u64, sectors: u64, place: u64, layer: u8) -> Self {
        let mut record = Self::data(lba, sectors, place, layer);
        record.second |= ZEROED;
        record
    }

    /// A record that maps nothing.
    pub const fn padding() -> Self {
        Self {
            first: LBA_PADDING,
            second: 0,
        }
    }

    /// First sector.
    pub const fn lba(self) -> u64 {
        self.first & LBA_PADDING
    }

    /// Sectors.
    pub const fn sectors(self) -> u64 {
        self.first >> 50
    }

    /// First sector behind it.
    pub const fn end(self) -> u64 {
        self.lba() + self.sectors()
    }

    /// Where the data is, in sectors from the start of the layer.
    pub const fn place(self) -> u64 {
        self.second & PLACE_MAX
    }

    /// Whether it reads as zeros.
    pub const fn is_zeroed(self) -> bool {
        self.second & ZEROED != 0
    }

    /// The tag: in a merged map, the layer.
    pub const fn layer(self) -> u8 {
        self.second.to_le_bytes()[7]
    }

    /// The same mapping of another layer.
    pub const fn with_layer(self, layer: u8) -> Self {
        Self {
            first: self.first,
            second: self.second & !(0xFF << 56) | (layer as u64) << 56,
        }
    }

    /// Whether it only fills up a write.
    pub const fn is_padding(self) -> bool {
        self.lba() == LBA_PADDING
    }

    /// The part of it in `from..to`, which overlaps it. The place of data moves along with a cut at the front.
    pub fn cut(self, from: u64, to: u64) -> Self {
        let start = self.lba().max(from);
        let end = self.end().min(to);
        debug_assert!(start < end, "the range overlaps the record");
        let moved = if self.is_zeroed() {
            0
        } else {
            start - self.lba()
        };
        Self {
            first: start | (end - start) << 50,
            second: self.second + moved,
        }
    }

    /// Whether `next` goes on where this one ends, in every respect, so that both can be one.
    pub fn continues(self, next: Self) -> bool {
        let place = if self.is_zeroed() {
            next.place()
        } else {
            self.place() + self.sectors()
        };
        self.end() == next.lba()
            && self.is_zeroed() == next.is_zeroed()
            && self.layer() == next.layer()
            && place == next.place()
            && self.sectors() + next.sectors() <= SECTORS_MAX
    }

    /// Both as one; only if it [`Record::continues`].
    pub fn join(self, next: Self) -> Self {
        debug_assert!(self.continues(next));
        Self {
            first: self.lba() | (self.sectors() + next.sectors()) << 50,
            second: self.second,
        }
    }

    /// As on disk.
    pub fn to_bytes(self) -> [u8; RECORD_BYTES] {
        (u128::from(self.first) | u128::from(self.second) << 64).to_le_bytes()
    }

    /// From disk, unchecked: see [`check`].
    pub fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Self {
        let both = u128::from_le_bytes(*bytes);
        let half = |value: u128| u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0);
        Self {
            first: half(both),
            second: half(both >> 64),
        }
    }
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_padding() {
            return f.write_str("padding");
        }
        let kind = if self.is_zeroed() { "zero" } else { "data" };
        write!(
            f,
            "{}+{} {kind}@{} of {}",
            self.lba(),
            self.sectors(),
            self.place(),
            self.layer()
        )
    }
}

/// Checks one record of an index whose data part ends at `data_end` (sectors from the start of the file).
///
/// # Errors
/// Names the field and the record.
pub fn check(record: Record, number: usize, data_end: u64) -> Result<(), FormatError> {
    let wrong = |what: &str, expected: String, found: u64| {
        FormatError::new(format!("{what} of index record {number}"), expected, found)
    };
    if record.sectors() == 0 {
        return Err(wrong("length", format!("1 to {SECTORS_MAX}"), 0));
    }
    if record.end() > LBA_PADDING {
        return Err(wrong("end", format!("at most {LBA_PADDING}"), record.end()));
    }
    let used = if record.is_zeroed() {
        0
    } else {
        record.sectors()
    };
    if record.place() < PLACE_MIN || record.place() + used > data_end {
        let expected = format!("data within sectors {PLACE_MIN} to {data_end}");
        return Err(wrong("place", expected, record.place()));
    }
    Ok(())
}

/// Parses a sealed index: in order, without overlaps, every record inside the data part. Padding is left out.
///
/// # Errors
/// Names the record that is out of place.
pub fn parse_sealed(bytes: &[u8], data_end: u64) -> Result<Vec<Record>, FormatError> {
    let (records, rest) = bytes.as_chunks::<RECORD_BYTES>();
    if !rest.is_empty() {
        return Err(FormatError::new(
            "index",
            "whole records of 16 bytes",
            format!("{} bytes", bytes.len()),
        ));
    }
    let mut out = Vec::with_capacity(records.len());
    let mut end = 0;
    for (number, bytes) in records.iter().enumerate() {
        let record = Record::from_bytes(bytes);
        if record.is_padding() {
            continue;
        }
        check(record, number, data_end)?;
        if record.lba() < end {
            return Err(FormatError::new(
                format!("sector of index record {number}"),
                format!("at least {end}, the end of the record before"),
                record.lba(),
            ));
        }
        end = record.end();
        out.push(record.with_layer(0));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(records: &[Record]) -> Vec<u8> {
        records.iter().flat_map(|r| r.to_bytes()).collect()
    }

    #[test]
    fn the_worked_example_of_the_format() {
        let raw = [
            0x00, 0, 0, 0, 0, 0, 0x04, 0, 0x13, 0, 0, 0, 0, 0, 0x80, 0, //
            0x8C, 0, 0, 0, 0, 0, 0x14, 0, 0x09, 0, 0, 0, 0, 0, 0, 0,
        ];
        let records = parse_sealed(&raw, 19).unwrap();
        assert_eq!(
            records,
            [Record::zeroed(0, 1, 19, 0), Record::data(140, 5, 9, 0)]
        );
        assert_eq!(bytes(&records), raw);
        assert_eq!(
            format!("{records:?}"),
            "[0+1 zero@19 of 0, 140+5 data@9 of 0]"
        );
    }

    #[test]
    fn every_field_keeps_its_bits() {
        let record = Record::data(LBA_PADDING - SECTORS_MAX, SECTORS_MAX, PLACE_MAX, 255);
        assert_eq!(record.lba(), LBA_PADDING - SECTORS_MAX);
        assert_eq!(record.end(), LBA_PADDING);
        assert_eq!((record.place(), record.layer()), (PLACE_MAX, 255));
        assert!(!record.is_zeroed());
        assert_eq!(Record::from_bytes(&record.to_bytes()), record);
        assert_eq!(record.with_layer(3).layer(), 3);
        assert_eq!(record.with_layer(3).place(), PLACE_MAX);
    }

    #[test]
    fn a_cut_moves_the_place_of_data_only() {
        let data = Record::data(10, 10, 100, 2);
        assert_eq!(data.cut(0, 15), Record::data(10, 5, 100, 2));
        assert_eq!(data.cut(13, 99), Record::data(13, 7, 103, 2));
        let zeroed = Record::zeroed(10, 10, 100, 2);
        assert_eq!(zeroed.cut(13, 18), Record::zeroed(13, 5, 100, 2));
    }

    #[test]
    fn only_what_continues_in_every_respect_is_joined() {
        let a = Record::data(10, 10, 100, 2);
        assert!(a.continues(Record::data(20, 1, 110, 2)));
        assert_eq!(
            a.join(Record::data(20, 1, 110, 2)),
            Record::data(10, 11, 100, 2)
        );
        for other in [
            Record::data(21, 1, 110, 2),
            Record::data(20, 1, 111, 2),
            Record::data(20, 1, 110, 3),
            Record::zeroed(20, 1, 110, 2),
            Record::data(20, SECTORS_MAX - 9, 110, 2),
        ] {
            assert!(!a.continues(other), "{other:?}");
        }
        assert!(a.continues(Record::data(20, SECTORS_MAX - 10, 110, 2)));
        assert!(Record::zeroed(0, 1, 9, 0).continues(Record::zeroed(1, 1, 9, 0)));
    }

    #[test]
    fn what_is_out_of_place_is_named() {
        let good = [Record::data(4, 4, 8, 0), Record::data(8, 1, 12, 0)];
        assert_eq!(parse_sealed(&bytes(&good), 13).unwrap(), good);
        let padded = [good[0], Record::padding(), good[1], Record::padding()];
        assert_eq!(parse_sealed(&bytes(&padded), 13).unwrap(), good);
        for (records, data_end, what) in [
            (vec![good[1], good[0]], 13, "sector of index record 1"),
            (vec![good[0], Record::data(7, 1, 12, 0)], 13, "sector of"),
            (vec![good[0]], 11, "place of index record 0"),
            (vec![Record::data(0, 1, 7, 0)], 13, "place"),
            (vec![Record::zeroed(0, 1, 0, 0)], 13, "place"),
            (vec![Record::zeroed(0, 1, 14, 0)], 13, "place"),
        ] {
            let error = parse_sealed(&bytes(&records), data_end).unwrap_err();
            assert!(error.what.starts_with(what), "{error}");
        }
        assert!(parse_sealed(&bytes(&good)[..31], 13).is_err());
        let mut none = Record::data(0, 1, 8, 0).to_bytes();
        none[6] = 0;
        assert!(parse_sealed(&none, 13).is_err());
        let mut far = Record::data(LBA_PADDING - 1, 1, 8, 0).to_bytes();
        assert!(parse_sealed(&far, 13).is_ok());
        far[6] = 0x0B;
        assert!(
            parse_sealed(&far, 13).is_err(),
            "two sectors from the last one"
        );
    }
}
