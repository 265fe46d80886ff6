//! The 512-byte header block of a tar entry: ustar, GNU, star and the old format without magic.
//!
//! ```text
//! 0 name[100] 100 mode[8] 108 uid[8] 116 gid[8] 124 size[12] 136 mtime[12] 148 checksum[8] 156 type 157 link[100]
//! 257 magic[8] 265 uname[32] 297 gname[32] 329 major[8] 337 minor[8]
//! ustar: 345 prefix[155]      star: 345 prefix[131], "tar\0" at 508
//! GNU:   386 sparse map, 4 x (offset[12] length[12])   482 more map blocks follow   483 real size[12]
//! ```
//! Numbers are octal text, or (first bit set) big-endian two's complement.

use super::error::{TarFault, shown};

/// Bytes of a block.
pub(super) const BLOCK: usize = 512;

/// A header block whose checksum is right.
#[derive(Debug, Clone)]
pub(super) struct Header {
    block: [u8; BLOCK],
}

/// A numeric field: its name and place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field(&'static str, usize, usize);

pub(super) const MODE: Field = Field("mode", 100, 8);
pub(super) const UID: Field = Field("uid", 108, 8);
pub(super) const GID: Field = Field("gid", 116, 8);
pub(super) const SIZE: Field = Field("size", 124, 12);
pub(super) const MTIME: Field = Field("mtime", 136, 12);
pub(super) const MAJOR: Field = Field("major", 329, 8);
pub(super) const MINOR: Field = Field("minor", 337, 8);
pub(super) const GNU_REAL_SIZE: Field = Field("real size", 483, 12);

/// What a block is.
#[derive(Debug)]
pub(super) enum Block {
    Zeros,
    Header(Box<Header>),
}

impl Block {
    pub(super) fn parse(block: [u8; BLOCK]) -> Result<Self, TarFault> {
        if block.iter().all(|b| *b == 0) {
            return Ok(Self::Zeros);
        }
        let header = Header { block };
        header.check()?;
        Ok(Self::Header(Box::new(header)))
    }
}

impl Header {
    /// The sum of all bytes with the field itself as spaces; old writers summed signed bytes.
    fn check(&self) -> Result<(), TarFault> {
        let (mut unsigned, mut signed) = (0_u64, 0_i64);
        for (at, byte) in self.block.iter().enumerate() {
            let byte = if (148..156).contains(&at) {
                b' '
            } else {
                *byte
            };
            unsigned += u64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        let stored = number(self.bytes(148, 8));
        let right = stored.is_some_and(|n| n == i128::from(unsigned) || n == i128::from(signed));
        if right {
            return Ok(());
        }
        Err(TarFault::Checksum {
            expected: shown(self.bytes(148, 8)),
            found: unsigned,
        })
    }

    pub(super) fn bytes(&self, at: usize, len: usize) -> &[u8] {
        self.block.get(at..at + len).unwrap_or_default()
    }

    /// The entry type: `0` for a file, `5` for a directory …
    pub(super) fn entry_type(&self) -> u8 {
        self.block.get(156).copied().unwrap_or_default()
    }

    fn is_gnu(&self) -> bool {
        self.bytes(257, 8) == b"ustar  \0"
    }

    /// The path in the header, prefix included.
    pub(super) fn path(&self) -> Vec<u8> {
        let name = until_nul(self.bytes(0, 100));
        let prefix = if self.bytes(257, 6) != b"ustar\0" {
            &[]
        } else if self.bytes(508, 4) == b"tar\0" {
            until_nul(self.bytes(345, 131))
        } else {
            until_nul(self.bytes(345, 155))
        };
        if prefix.is_empty() {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    /// The link target in the header.
    pub(super) fn link(&self) -> Vec<u8> {
        until_nul(self.bytes(157, 100)).to_vec()
    }

    /// A numeric field; an empty one is 0.
    pub(super) fn number(&self, field: Field) -> Result<i128, TarFault> {
        let bytes = self.bytes(field.1, field.2);
        number(bytes).ok_or_else(|| TarFault::Number {
            field: field.0,
            found: shown(bytes),
        })
    }

    /// A numeric field that cannot be negative.
    pub(super) fn unsigned(&self, field: Field) -> Result<u64, TarFault> {
        let n = self.number(field)?;
        u64::try_from(n).map_err(|_out_of_range| TarFault::Range {
            field: field.0,
            expected: "0 to 2^64-1",
            found: n.to_string(),
        })
    }

    /// The four map entries of a GNU sparse header, and whether further map blocks follow.
    pub(super) fn gnu_sparse(&self) -> Result<(Vec<(u64, u64)>, bool), TarFault> {
        if !self.is_gnu() {
            return Err(TarFault::Sparse(
                "expected a GNU header before a GNU sparse map",
            ));
        }
        let more = self.block.get(482).is_some_and(|b| *b != 0);
        Ok((sparse_entries(self.bytes(386, 96))?, more))
    }
}

/// A further block of a GNU sparse map: 21 entries, and whether another one follows.
pub(super) fn gnu_sparse_block(block: &[u8; BLOCK]) -> Result<(Vec<(u64, u64)>, bool), TarFault> {
    let entries = sparse_entries(block.get(..504).unwrap_or_default())?;
    Ok((entries, block.get(504).is_some_and(|b| *b != 0)))
}

fn sparse_entries(bytes: &[u8]) -> Result<Vec<(u64, u64)>, TarFault> {
    let mut entries = Vec::new();
    for entry in bytes.chunks_exact(24) {
        let (offset, len) = entry.split_at(12);
        if offset.first() == Some(&0) {
            break;
        }
        let read = |field: &[u8]| number(field).and_then(|n| u64::try_from(n).ok());
        let bad = TarFault::Sparse("expected offsets and lengths as numbers");
        entries.push((
            read(offset).ok_or_else(|| bad.clone())?,
            read(len).ok_or(bad)?,
        ));
    }
    Ok(entries)
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or_default()
}

fn number(field: &[u8]) -> Option<i128> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // Two's complement of everything behind the first bit.
        let top = i128::from(first & 0x7f);
        let start = if first & 0x40 != 0 { top - 0x80 } else { top };
        return Some(
            rest.iter()
                .fold(start, |n, byte| (n << 8) | i128::from(*byte)),
        );
    }
    let text = field.trim_ascii_start();
    let digits = text
        .split(|b| *b == 0 || *b == b' ')
        .next()
        .unwrap_or_default();
    digits.iter().try_fold(0_i128, |n, digit| {
        matches!(digit, b'0'..=b'7').then(|| n * 8 + i128::from(digit - b'0'))
    })
}
