//! What is kept of an output stream: its beginning and its end, a bounded part each, whatever it grows to.

use std::collections::VecDeque;

/// Bytes kept from the beginning of a stream.
pub const HEAD_BYTES_MAX: usize = 256 << 10;
/// Bytes kept from its end. Head and tail of both streams together: 1 MiB an exec.
pub const TAIL_BYTES_MAX: usize = 256 << 10;

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Spool {
    /// Bytes that the stream was so far.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Adds bytes at the end.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = HEAD_BYTES_MAX - self.head.len();
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(first);
        let keep = rest.len().min(TAIL_BYTES_MAX);
        let rest = rest.split_at(rest.len() - keep).1;
        let over = (self.tail.len() + keep).saturating_sub(TAIL_BYTES_MAX);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// What is kept from offset `from` on, as runs of bytes with their offsets, in order.
    pub(crate) fn kept(&mut self, from: u64) -> Vec<(u64, &[u8])> {
        let tail_at = self.total - self.tail.len() as u64;
        let runs = [(0, &*self.head), (tail_at, &*self.tail.make_contiguous())];
        let mut kept = Vec::new();
        for (at, bytes) in runs {
            let skip = usize::try_from(from.saturating_sub(at)).unwrap_or(usize::MAX);
            let rest = bytes.get(skip..).unwrap_or_default();
            if !rest.is_empty() {
                kept.push((at.max(from), rest));
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: a tail that drains one byte too few keeps the second assertion from holding.
    #[test]
    fn the_beginning_and_the_end_are_kept_and_know_their_offsets() {
        let all: Vec<u8> = (0..1_000_003_u32)
            .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
            .collect();
        for piece in [1000, 65_536, 700_000, 1_000_003] {
            let mut spool = Spool::default();
            for bytes in all.chunks(piece) {
                spool.push(bytes);
            }
            assert_eq!(spool.total(), 1_000_003);
            let tail_at = all.len() - TAIL_BYTES_MAX;
            let kept = spool.kept(0);
            assert_eq!(kept.len(), 2);
            assert_eq!(kept[0], (0, &all[..HEAD_BYTES_MAX]));
            assert_eq!(kept[1], (tail_at as u64, &all[tail_at..]));
            assert_eq!(spool.kept(1_000_000), [(1_000_000, &all[1_000_000..])]);
            assert_eq!(spool.kept(1_000_003), []);
        }
        let mut small = Spool::default();
        small.push(b"abc");
        assert_eq!(small.kept(1), [(1, &b"bc"[..])]);
    }
}
