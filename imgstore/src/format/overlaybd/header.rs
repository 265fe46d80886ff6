//! Header and trailer of an LSMT layer: one form of 4,096 bytes, four roles.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 + 16 | magic |
//! | 24 | 4 | 390 |
//! | 28 | 4 | flags: 0 header (else trailer), 1 data file (else index file), 2 sealed, 4 sparse |
//! | 32, 40 | 8, 8 | offset of the index (bytes), number of its records |
//! | 48 | 8 | virtual size (bytes) |
//! | 56, 93 | 37, 37 | uuid and parent's uuid as text, NUL behind |
//! | 132, 133 | 1, 1 | version 1.1 |
//! | 134 | 256 | user tag, padded with NUL |
//!
//! A header says "sealed" from the first write on: only the trailer proves a file complete, and its fields count.

use super::{HEADER_BYTES, SECTOR, u32_at, u64_at};
use crate::format::FormatError;
use crate::ids::to_u64;

const MAGIC: [u8; 24] = [
    0x4C, 0x53, 0x4D, 0x54, 0x00, 0x01, 0x02, 0x00, // "LSMT", 0, 1, 2, 0
    0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C, 0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A,
];
const SIZE: u32 = 390;
const UUID_BYTES: usize = 36;
const TAG_BYTES: usize = 256;
/// Most records of a sealed layer's index, as in containerd/overlaybd.
pub const RECORDS_MAX: u64 = 1_000_000;

/// This is a header, not a trailer.
pub const HEADER: u32 = 1 << 0;
/// It belongs to a file with data, not to an index file.
pub const DATA: u32 = 1 << 1;
/// The file is complete.
pub const SEALED: u32 = 1 << 2;
/// The file is written in place, not by appending.
pub const SPARSE: u32 = 1 << 4;

/// A layer's name: text of 36 characters, compared without case.
#[derive(Clone, Copy)]
pub struct Uuid([u8; UUID_BYTES]);

impl Uuid {
    /// A version 4 uuid of these random bytes, in small letters.
    pub fn random(bytes: [u8; 16]) -> Self {
        let mut value = bytes
            .iter()
            .fold(0_u128, |sum, byte| sum << 8 | u128::from(*byte));
        value &= !(0xF << 76) & !(0x3 << 62);
        value |= 4 << 76 | 2 << 62;
        let hex = format!("{value:032x}");
        let mut text = [b'-'; UUID_BYTES];
        let mut digits = hex.bytes();
        for (at, place) in text.iter_mut().enumerate() {
            if !matches!(at, 8 | 13 | 18 | 23)
                && let Some(digit) = digits.next()
            {
                *place = digit;
            }
        }
        Self(text)
    }

    /// From text of 36 printable characters; `None` for anything else, and for the uuid of zeros that stands for none.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text: [u8; UUID_BYTES] = text.try_into().ok()?;
        let none = text.iter().all(|b| matches!(b, b'0' | b'-'));
        let printable = text.iter().all(u8::is_ascii_graphic);
        (printable && !none).then_some(Self(text))
    }
}

impl PartialEq for Uuid {
    fn eq(&self, other: &Self) -> bool {
        self.0.eq_ignore_ascii_case(&other.0)
    }
}

impl Eq for Uuid {}

impl std::fmt::Display for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(std::str::from_utf8(&self.0).unwrap_or("?"))
    }
}

impl std::fmt::Debug for Uuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl serde::Serialize for Uuid {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The fields of a header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// [`HEADER`], [`DATA`], [`SEALED`], [`SPARSE`]; others mean nothing to us.
    pub flags: u32,
    /// Where the index starts, in bytes.
    pub index_offset: u64,
    /// Records of the index, padding included.
    pub index_records: u64,
    /// Bytes of the disk; 0 where it is that of the layers below.
    pub virtual_size: u64,
    /// The layer's name.
    pub uuid: Option<Uuid>,
    /// The layer below.
    pub parent: Option<Uuid>,
    /// Up to 256 bytes for the user, without the NULs behind.
    pub user_tag: Vec<u8>,
}

fn uuid_at(bytes: &[u8], offset: usize) -> Option<Uuid> {
    bytes.get(offset..offset + UUID_BYTES).and_then(Uuid::parse)
}

impl Header {
    /// Reads a header or trailer.
    ///
    /// # Errors
    /// When it is too short or the magic is another.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let magic = bytes.get(..MAGIC.len()).unwrap_or(bytes);
        let whole = bytes.get(..HEADER_BYTES);
        let (Some(bytes), true) = (whole, magic == MAGIC) else {
            return Err(FormatError::new(
                "LSMT magic",
                "4,096 bytes that begin with `LSMT\\0\\1\\2\\0`",
                format!(
                    "{} bytes that begin with {:02x?}",
                    bytes.len(),
                    magic.get(..8)
                ),
            ));
        };
        let tag = bytes.get(134..134 + TAG_BYTES).unwrap_or_default();
        let used = tag.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
        let field = |offset| u64_at(bytes, offset).unwrap_or(0);
        Ok(Self {
            flags: u32_at(bytes, 28).unwrap_or(0),
            index_offset: field(32),
            index_records: field(40),
            virtual_size: field(48),
            uuid: uuid_at(bytes, 56),
            parent: uuid_at(bytes, 93),
            user_tag: tag.get(..used).unwrap_or_default().to_vec(),
        })
    }

    /// The bytes of it. A user tag of more than 256 bytes is cut.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| {
            if let Some(place) = out.get_mut(offset..offset + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, &MAGIC);
        put(24, &SIZE.to_le_bytes());
        put(28, &self.flags.to_le_bytes());
        put(32, &self.index_offset.to_le_bytes());
        put(40, &self.index_records.to_le_bytes());
        put(48, &self.virtual_size.to_le_bytes());
        for (offset, uuid) in [(56, self.uuid), (93, self.parent)] {
            // Both other implementations read the uuid of zeros as none.
            let none = Uuid(*b"00000000-0000-0000-0000-000000000000");
            put(offset, &uuid.unwrap_or(none).0);
        }
        put(132, &[1, 1]);
        let tag = self.user_tag.get(..TAG_BYTES).unwrap_or(&self.user_tag);
        put(134, tag);
        out
    }

    fn flags_must_be(&self, set: u32, clear: u32, role: &str) -> Result<(), FormatError> {
        if self.flags & set == set && self.flags & clear == 0 {
            return Ok(());
        }
        Err(FormatError::new(
            format!("flags of the {role}"),
            format!("bits {set:#x} set and {clear:#x} clear"),
            format!("{:#x}", self.flags),
        ))
    }

    /// Checks that this begins a layer or a writable data file.
    ///
    /// # Errors
    /// Names the flags.
    pub fn must_begin_data(&self) -> Result<(), FormatError> {
        self.flags_must_be(HEADER, 0, "header")
    }

    /// Checks that this begins the index file of a writable pair.
    ///
    /// # Errors
    /// Names the flags, or the place of the index.
    pub fn must_begin_index(&self) -> Result<(), FormatError> {
        self.flags_must_be(HEADER, DATA | SEALED, "index file's header")?;
        if self.index_offset != to_u64(HEADER_BYTES) {
            return Err(FormatError::new(
                "index offset of the index file",
                HEADER_BYTES.to_string(),
                self.index_offset,
            ));
        }
        Ok(())
    }

    /// Checks that this ends a sealed layer of `file_bytes` bytes; where its index lies: start and length in bytes.
    ///
    /// # Errors
    /// Names the field.
    pub fn sealed_index(&self, file_bytes: u64) -> Result<(u64, u64), FormatError> {
        self.flags_must_be(DATA | SEALED, HEADER, "trailer")?;
        if self.index_records > RECORDS_MAX {
            return Err(FormatError::new(
                "records of the index",
                format!("at most {RECORDS_MAX}"),
                self.index_records,
            ));
        }
        let header = to_u64(HEADER_BYTES);
        let trailer = file_bytes.saturating_sub(header);
        let len = self.index_records * to_u64(super::record::RECORD_BYTES);
        let end = self.index_offset.checked_add(len);
        let fits = self.index_offset >= header && end.is_some_and(|end| end <= trailer);
        if !fits || !self.index_offset.is_multiple_of(SECTOR) {
            return Err(FormatError::new(
                "offset of the index",
                format!(
                    "a multiple of {SECTOR} from {header} on, with {len} bytes before the trailer at {trailer}"
                ),
                self.index_offset,
            ));
        }
        Ok((self.index_offset, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            flags: DATA | SEALED,
            index_offset: 8192,
            index_records: 256,
            virtual_size: 1 << 40,
            uuid: Uuid::parse(b"00000001-0000-4000-8000-00000000000A"),
            parent: None,
            user_tag: b"made here".to_vec(),
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        let header = header();
        let bytes = header.to_bytes();
        assert_eq!(Header::parse(&bytes).unwrap(), header);
        assert_eq!(bytes[24..28], [0x86, 1, 0, 0]);
        assert_eq!(bytes[132..134], [1, 1]);
        let full = Header {
            user_tag: vec![7; 300],
            ..header
        };
        assert_eq!(Header::parse(&full.to_bytes()).unwrap().user_tag, [7; 256]);
    }

    #[test]
    fn uuids_compare_without_case_and_zeros_are_none() {
        let small = Uuid::parse(b"00000001-0000-4000-8000-00000000000a");
        assert_eq!(header().uuid, small);
        assert_eq!(Uuid::parse(b"00000000-0000-0000-0000-000000000000"), None);
        assert_eq!(Uuid::parse(&[0; 36]), None);
        assert_eq!(Uuid::parse(b"short"), None);
        let text = Uuid::random([0xFF; 16]).to_string();
        assert_eq!(text, "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn a_sealed_index_lies_between_header_and_trailer() {
        let file = 8192 + 4096 + 4096;
        assert_eq!(header().sealed_index(file).unwrap(), (8192, 4096));
        let wrong = |change: fn(&mut Header)| {
            let mut header = header();
            change(&mut header);
            header.sealed_index(file).unwrap_err().what
        };
        assert_eq!(wrong(|h| h.flags |= HEADER), "flags of the trailer");
        assert_eq!(wrong(|h| h.flags &= !SEALED), "flags of the trailer");
        assert_eq!(wrong(|h| h.flags &= !DATA), "flags of the trailer");
        assert_eq!(wrong(|h| h.index_records = 257), "offset of the index");
        assert_eq!(
            wrong(|h| h.index_records = 1_000_001),
            "records of the index"
        );
        assert_eq!(wrong(|h| h.index_offset = 8193), "offset of the index");
        assert_eq!(wrong(|h| h.index_offset = 0), "offset of the index");
        assert_eq!(wrong(|h| h.index_offset = !511), "offset of the index");
    }

    #[test]
    fn roles_are_told_apart() {
        let with = |flags| Header { flags, ..header() };
        with(HEADER | DATA).must_begin_data().unwrap();
        with(DATA).must_begin_data().unwrap_err();
        let index = Header {
            index_offset: 4096,
            ..with(HEADER)
        };
        index.must_begin_index().unwrap();
        with(HEADER).must_begin_index().unwrap_err();
        for flags in [HEADER | SEALED, HEADER | DATA, 0] {
            let header = Header {
                flags,
                ..index.clone()
            };
            header.must_begin_index().unwrap_err();
        }
    }

    #[test]
    fn another_magic_is_refused() {
        let mut bytes = header().to_bytes();
        bytes[9] ^= 1;
        assert_eq!(Header::parse(&bytes).unwrap_err().what, "LSMT magic");
        assert!(Header::parse(&header().to_bytes()[..4095]).is_err());
        assert!(Header::parse(b"").is_err());
    }
}
