//! Tells the compression of an archive by its first bytes, and undoes it.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use super::SourceError;
use crate::ids::to_u64;

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

    /// The plain bytes of `stream`; too many of them are an error (see [`Bomb`]).
    pub(super) fn reader<'r>(
        self,
        stream: Box<dyn Read + 'r>,
        expansion: &Expansion,
    ) -> io::Result<Box<dyn Read + 'r>> {
        let counted = Compressed {
            inner: stream,
            expansion: expansion.clone(),
        };
        let plain: Box<dyn Read + 'r> = match self {
            Self::None => return Ok(Box::new(counted.inner)),
            Self::Gzip => Box::new(MultiGzDecoder::new(counted)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::new(counted)?),
        };
        Ok(Box::new(Plain {
            inner: plain,
            expansion: expansion.clone(),
        }))
    }
}

/// Plain bytes that a source may have without a question.
const FREE_BYTES: u64 = 1 << 30;
/// Beyond, the most plain bytes for each compressed one. Real archives have up to some 20, a large file of zeros in gzip 1,030.
pub(super) const RATIO_MAX: u64 = 250;

/// How much all compressed parts of one source had, and what came out of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Expansion(Rc<Cell<Counts>>);

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    compressed: u64,
    plain: u64,
    /// What is compressed from now on came out of a compressed archive itself, and counts as nothing.
    inside: bool,
    /// In place of [`FREE_BYTES`], for tests.
    free: Option<u64>,
}

impl Expansion {
    /// Called between an archive and the archives in it.
    pub(super) fn go_inside(&self) {
        self.update(|counts| counts.inside = counts.plain > 0);
    }

    fn update(&self, change: impl FnOnce(&mut Counts)) -> Counts {
        let mut counts = self.0.get();
        change(&mut counts);
        self.0.set(counts);
        counts
    }
}

/// An archive that expands to far more than honest ones do: a small file must not fill a disk.
#[derive(Debug, thiserror::Error)]
#[error("{plain} bytes came out of {compressed}")]
pub(super) struct Bomb {
    pub(super) plain: u64,
    pub(super) compressed: u64,
}

impl Bomb {
    /// The bomb behind a failed read, if it was one.
    pub(super) fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

struct Compressed<'r> {
    inner: Box<dyn Read + 'r>,
    expansion: Expansion,
}

impl Read for Compressed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.expansion.update(|counts| {
            let more = if counts.inside { 0 } else { to_u64(n) };
            counts.compressed = counts.compressed.saturating_add(more);
        });
        Ok(n)
    }
}

struct Plain<'r> {
    inner: Box<dyn Read + 'r>,
    expansion: Expansion,
}

impl Read for Plain<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        let counts = self
            .expansion
            .update(|counts| counts.plain = counts.plain.saturating_add(to_u64(n)));
        let Counts {
            compressed, plain, ..
        } = counts;
        let max = counts
            .free
            .unwrap_or(FREE_BYTES)
            .max(compressed.saturating_mul(RATIO_MAX));
        if plain > max {
            return Err(io::Error::other(Bomb { plain, compressed }));
        }
        Ok(n)
    }
}

/// Reads the first [`MAGIC_LEN`] bytes (fewer at the end) and gives them back with a stream that still has them.
pub(super) fn peek<'r>(
    mut stream: Box<dyn Read + 'r>,
) -> io::Result<(Vec<u8>, Box<dyn Read + 'r>)> {
    let mut first = Vec::with_capacity(MAGIC_LEN);
    let limit = to_u64(MAGIC_LEN);
    stream.by_ref().take(limit).read_to_end(&mut first)?;
    let whole = io::Cursor::new(first.clone()).chain(stream);
    Ok((first, Box::new(whole)))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Both compressions, one in the other too. Red without the check in `Plain::read`.
    #[test]
    fn what_expands_too_much_is_an_error() {
        let zeros = vec![0; 8 << 20];
        let gzip = |bytes: &[u8]| {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            out.write_all(bytes).unwrap();
            out.finish().unwrap()
        };
        let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
        let read = |compressed: &[u8], free: u64, rounds: usize| {
            let expansion = Expansion::default();
            expansion.update(|counts| counts.free = Some(free));
            let mut stream: Box<dyn Read> = Box::new(io::Cursor::new(compressed.to_vec()));
            for _ in 0..rounds {
                let (first, rest) = peek(stream).unwrap();
                let compression = Compression::of(&first, "x").unwrap();
                stream = compression.reader(rest, &expansion).unwrap();
            }
            io::copy(&mut stream, &mut io::sink())
        };
        for bomb in [gzip(&zeros), zstd(&zeros)] {
            let error = read(&bomb, 1 << 20, 1).unwrap_err();
            let bomb_found = Bomb::of(&error).unwrap();
            assert!(bomb_found.plain < 2 << 20, "{bomb_found:?}");
            // What is small stays free, and honest ratios are never asked.
            assert_eq!(read(&bomb, 16 << 20, 1).unwrap(), 8 << 20);
        }
        assert!(Bomb::of(&read(&gzip(&zstd(&zeros)), 1 << 20, 2).unwrap_err()).is_some());
        // What came out of an archive may not count as if it had been given: 8 MiB from 9,000 bytes twice.
        let expansion = Expansion::default();
        expansion.update(|counts| counts.free = Some(1000));
        for (round, right) in [true, false].into_iter().enumerate() {
            let mut noise = vec![0; 9000];
            blake3::Hasher::new().finalize_xof().fill(&mut noise);
            let parts = [gzip(&noise), gzip(&zeros[..1 << 20])].concat();
            let inner: Box<dyn Read> = Box::new(io::Cursor::new(parts));
            // Before the reader is made: it looks at the header at once.
            for _ in 0..round {
                expansion.go_inside();
            }
            let mut plain = Compression::Gzip.reader(inner, &expansion).unwrap();
            let copied = io::copy(&mut plain, &mut io::sink());
            assert_eq!(copied.is_ok(), right, "round {round}: {copied:?}");
            expansion.update(|counts| counts.plain = counts.compressed * RATIO_MAX);
        }
        let text: Vec<u8> = (0..200_000_u32)
            .flat_map(|n| n.to_string().into_bytes())
            .collect();
        assert!(read(&gzip(&text), 1000, 1).is_ok());
    }
}
