//! Ranges cut into reads that each cost 3FS one operation. Pure.
//!
//! A file is stored in chunks of equal size; a read inside one of them is one storage operation. The disks are read
//! from 4-KiB borders anyway, so a read begins on one: the bytes before the wanted ones are dropped.

use crate::ids::to_usize;
use crate::origin::ByteRange;

use super::CHUNK_BYTES;

/// Disk reads begin at multiples of this.
const SECTOR_BYTES: u64 = 4096;

/// One read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First byte that is read.
    pub(crate) start: u64,
    /// Bytes that are read.
    pub(crate) len: usize,
    /// Of those, how many at the start nobody asked for.
    pub(crate) skip: usize,
}

/// The reads that make up a range, in order. None crosses a multiple of [`CHUNK_BYTES`].
pub(crate) fn pieces(range: ByteRange) -> Vec<Piece> {
    let mut out = Vec::new();
    let end = range.start.saturating_add(range.len);
    let mut at = range.start;
    while at < end {
        let border = (at / CHUNK_BYTES + 1).saturating_mul(CHUNK_BYTES);
        let start = at - at % SECTOR_BYTES;
        let until = border.min(end);
        out.push(Piece {
            start,
            len: to_usize(until - start),
            skip: to_usize(at - start),
        });
        at = until;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(start: u64, len: u64) -> Vec<(u64, usize, usize)> {
        let pieces = pieces(ByteRange { start, len });
        pieces.iter().map(|p| (p.start, p.len, p.skip)).collect()
    }

    #[test]
    fn reads_begin_on_sectors_and_end_at_chunks() {
        const MIB: u64 = CHUNK_BYTES;
        assert_eq!(cut(0, 10), [(0, 10, 0)]);
        assert_eq!(cut(5000, 10), [(4096, 914, 904)]);
        assert_eq!(cut(0, MIB), [(0, 1 << 20, 0)]);
        assert_eq!(cut(MIB - 1, 1), [(MIB - 4096, 4096, 4095)]);
        assert_eq!(cut(MIB - 1, 2), [(MIB - 4096, 4096, 4095), (MIB, 1, 0)]);
        assert_eq!(
            cut(100, 2 * MIB),
            [(0, 1 << 20, 100), (MIB, 1 << 20, 0), (2 * MIB, 100, 0)]
        );
    }

    /// Every byte once, no border crossed, for many ranges around borders.
    #[test]
    fn pieces_make_up_the_range() {
        for start in [
            0,
            1,
            4095,
            4096,
            CHUNK_BYTES - 1,
            CHUNK_BYTES,
            u64::MAX - 9 * CHUNK_BYTES,
        ] {
            for len in [
                1,
                4096,
                CHUNK_BYTES - 1,
                CHUNK_BYTES,
                CHUNK_BYTES + 1,
                5 << 20,
            ] {
                let mut at = start;
                for piece in pieces(ByteRange { start, len }) {
                    assert_eq!(piece.start + u64::try_from(piece.skip).unwrap(), at);
                    let end = piece.start + u64::try_from(piece.len).unwrap();
                    assert_eq!(piece.start / CHUNK_BYTES, (end - 1) / CHUNK_BYTES);
                    at = end;
                }
                assert_eq!(at, start + len);
            }
        }
    }
}
