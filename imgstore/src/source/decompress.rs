//! Tells the compression of an archive by its first bytes, and undoes it.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;

use super::SourceError;

/// How many first bytes [`Compression::of`] needs.
pub(super) const MAGIC_LEN: usize = 6;

/// The compression of an archive or layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// By magic; whatever is no known compression is taken as plain, and then has to be a tar.
    pub(super) fn of(first: &[u8], archive: &str) -> Result<Self, SourceError> {
        let refuse = |found| {
            Err(SourceError::Compression {
                archive: archive.to_owned(),
                found,
            })
        };
        match first {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Ok(Self::Zstd),
            // A skippable frame in front, as some zstd writers put it.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', 0] => refuse("xz"),
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => refuse("bzip2"),
            [0x04, 0x22, 0x4d, 0x18, ..] => refuse("lz4"),
            [0x1f, 0x9d, ..] => refuse("compress (.Z)"),
            [b'P', b'K', 3, 4, ..] => refuse("zip"),
            _ => Ok(Self::None),
        }
    }

    /// The plain bytes of `stream`.
    pub(super) fn reader<'r>(self, stream: Box<dyn Read + 'r>) -> io::Result<Box<dyn Read + 'r>> {
        Ok(match self {
            Self::None => stream,
            Self::Gzip => Box::new(MultiGzDecoder::new(stream)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::new(stream)?),
        })
    }
}

/// Reads the first [`MAGIC_LEN`] bytes (fewer at the end) and gives them back with a stream that still has them.
pub(super) fn peek<'r>(
    mut stream: Box<dyn Read + 'r>,
) -> io::Result<(Vec<u8>, Box<dyn Read + 'r>)> {
    let mut first = Vec::with_capacity(MAGIC_LEN);
    let limit = crate::ids::to_u64(MAGIC_LEN);
    stream.by_ref().take(limit).read_to_end(&mut first)?;
    let whole = io::Cursor::new(first.clone()).chain(stream);
    Ok((first, Box::new(whole)))
}
