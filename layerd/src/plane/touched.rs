//! Which blocks of a layer's data were asked for: how many, which first, and of which segments none.
//!
//! One bit a block, and a list of first touches in their order, as long as it is short: what a trace is made of.

use std::collections::{HashMap, HashSet};
use std::ops::{Range, RangeInclusive};
use std::sync::LazyLock;
use std::time::Instant;

use imgstore::ids::{BLOCK_SIZE, to_u64, to_usize};

use crate::protocol::{Touch, Touches};

/// Most touches kept of a layer (16 bytes each): a start has a few hundred to some thousand.
const TOUCHES_MAX: usize = 1 << 15;

/// When this process began to count time.
static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Touched {
    words: Vec<u64>,
    blocks: u64,
    first: Vec<Touch>,
    full: bool,
    /// Segments that came because of a trace.
    traced: HashSet<usize>,
    /// Of those, the ones that nobody has read, with their stored bytes.
    unread: HashMap<usize, u64>,
}

impl Touched {
    /// For `bytes` of data.
    pub(super) fn new(bytes: u64) -> Self {
        Self {
            words: vec![0; to_usize(bytes.div_ceil(BLOCK_SIZE * 64))],
            blocks: 0,
            first: Vec::new(),
            full: false,
            traced: HashSet::new(),
            unread: HashMap::new(),
        }
    }

    /// `len` bytes of the data from `offset` are asked for.
    pub(super) fn mark(&mut self, offset: u64, len: u64) {
        let mut now = None;
        for block in offset / BLOCK_SIZE..(offset + len).div_ceil(BLOCK_SIZE) {
            let bit = 1_u64 << (block % 64);
            if let Some(word) = self.words.get_mut(to_usize(block / 64))
                && *word & bit == 0
            {
                *word |= bit;
                self.blocks += 1;
                let now = *now.get_or_insert_with(|| EPOCH.elapsed().as_micros());
                self.note(block, u64::try_from(now).unwrap_or(u64::MAX));
            }
        }
    }

    fn note(&mut self, block: u64, at_us: u64) {
        let Ok(first) = u32::try_from(block) else {
            return;
        };
        let room = self.first.len() < TOUCHES_MAX;
        match self.first.last_mut() {
            Some(last) if u64::from(last.first) + u64::from(last.count) == block => last.count += 1,
            _ if room => {
                let count = 1;
                self.first.push(Touch {
                    at_us,
                    first,
                    count,
                });
            }
            _ => self.full = true,
        }
    }

    /// Bytes of all distinct blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks * BLOCK_SIZE
    }

    /// The first touches.
    pub(super) fn touches(&self) -> Touches {
        Touches {
            touches: self.first.clone(),
            full: self.full,
        }
    }

    /// Segment `index`, whose data lies at `place`, came because of a trace as `stored` bytes; whether it is the first time.
    pub(super) fn note_traced(&mut self, index: usize, stored: u64, place: Range<u64>) -> bool {
        let mut blocks = place.start / BLOCK_SIZE..place.end / BLOCK_SIZE;
        let fresh = self.traced.insert(index);
        if fresh && !blocks.any(|block| self.has(block)) {
            self.unread.insert(index, stored);
        }
        fresh
    }

    /// Segments `indexes` are read; the stored bytes of those that came because of a trace and that nobody had read.
    pub(super) fn read_traced(&mut self, indexes: RangeInclusive<usize>) -> u64 {
        if self.unread.is_empty() {
            return 0;
        }
        indexes.filter_map(|index| self.unread.remove(&index)).sum()
    }

    /// Segments that came because of a trace and that nobody has read.
    pub(super) fn unused(&self) -> u64 {
        to_u64(self.unread.len())
    }

    fn has(&self, block: u64) -> bool {
        let word = self.words.get(to_usize(block / 64)).copied();
        word.unwrap_or(0) & (1 << (block % 64)) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(touched: &Touched) -> Vec<(u32, u32)> {
        let touches = touched.touches().touches;
        touches.iter().map(|t| (t.first, t.count)).collect()
    }

    #[test]
    fn a_block_that_is_needed_twice_counts_once_and_is_touched_first_once() {
        let mut touched = Touched::new(1 << 20);
        touched.mark(0, 4096);
        touched.mark(4000, 200);
        assert_eq!((touched.bytes(), runs(&touched)), (2 * 4096, vec![(0, 2)]));
        touched.mark(40 << 10, 8192);
        touched.mark(0, 1 << 20);
        assert_eq!(touched.bytes(), 1 << 20);
        assert_eq!(runs(&touched), [(0, 2), (10, 2), (2, 8), (12, 244)]);
        touched.mark(1 << 20, 4096);
        assert_eq!(touched.bytes(), 1 << 20);
        assert!(!touched.touches().full);
    }

    /// Mutation: no bound in `note`.
    #[test]
    fn the_list_of_touches_is_bounded_and_says_so() {
        let mut touched = Touched::new(1 << 30);
        for n in 0..to_u64(TOUCHES_MAX) + 1 {
            touched.mark(n * 8192, 4096);
        }
        let touches = touched.touches();
        assert_eq!((touches.touches.len(), touches.full), (TOUCHES_MAX, true));
    }

    /// Mutations: `read_traced` leaves them in; `note_traced` takes what was read before for unread.
    #[test]
    fn traced_segments_that_nobody_read_are_counted_and_pay_once() {
        let mut touched = Touched::new(1 << 20);
        let place = |n: u64| n << 18..(n + 1) << 18;
        touched.mark(300 << 10, 1);
        assert!(touched.note_traced(0, 10, place(0)) && touched.note_traced(2, 12, place(2)));
        assert!(touched.note_traced(1, 11, place(1)) && !touched.note_traced(2, 12, place(2)));
        assert_eq!(touched.unused(), 2);
        assert_eq!(
            [touched.read_traced(1..=3), touched.read_traced(0..=3)],
            [12, 10]
        );
        assert_eq!((touched.read_traced(0..=3), touched.unused()), (0, 0));
    }
}
