//! How far a trace is followed ahead of the readers.
//!
//! A trace of another workload foresees what nobody will read, and its ranges share the link and the processor with the readers.
//! So what is fetched first is a guess, of some twenty milliseconds of the link, and each stored byte that is read pays for itself and
//! half as much again. A trace that fits is followed with growing strides. One that does not fit costs the guess and half of what was
//! foreseen rightly: a reader who jumps about in it pays for nothing ahead, and reads as without a trace.

use std::collections::HashMap;

use crate::ids::Digest;

/// Stored bytes of one layer.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    begun: u64,
    read: u64,
    /// The segment behind the last one that was begun.
    next: usize,
    /// What a reader who comes for that one takes along; 0 after a jump.
    stride: u64,
    /// The last reader who came for something jumped.
    jumped: bool,
}

/// A reader who comes for one of so many segments behind the last one begun is in the trace's order: readers of several files
/// overtake each other.
const STEP_MAX: usize = 4;
/// The least that such a reader takes along.
const STRIDE_MIN: u64 = 128 << 10;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    layers: HashMap<Digest, Progress>,
    /// Nobody says what is read: traces are followed to their ends.
    blind: bool,
}

impl Ahead {
    /// Whether readers say what they read.
    pub(super) fn set_blind(&mut self, blind: bool) {
        self.blind = blind;
    }

    /// Begins anew for a layer.
    pub(super) fn start(&mut self, layer: Digest) {
        self.layers.insert(layer, Progress::default());
    }

    /// Forgets layers.
    pub(super) fn forget(&mut self, which: impl Fn(&Digest) -> bool) {
        self.layers.retain(|layer, _| !which(layer));
    }

    /// Bytes of this layer's trace that may be begun now. `guess`: those that need no reader.
    pub(super) fn left(&self, layer: &Digest, guess: u64) -> u64 {
        let Some(progress) = self.layers.get(layer).filter(|_| !self.blind) else {
            return u64::MAX;
        };
        let read = progress.read;
        let allowed = guess.saturating_add(read).saturating_add(read / 2);
        allowed.saturating_sub(progress.begun)
    }

    /// Whether a reader who comes for segment `index` is in the order of the layer's trace.
    pub(super) fn is_in_order(&self, layer: &Digest, index: usize) -> bool {
        let progress = self.layers.get(layer);
        let step = progress.and_then(|progress| index.checked_sub(progress.next));
        step.is_some_and(|step| step < STEP_MAX)
    }

    /// Whether the last reader who came for something of this layer jumped.
    pub(super) fn has_jumped(&self, layer: &Digest) -> bool {
        self.layers
            .get(layer)
            .is_some_and(|progress| progress.jumped)
    }

    /// A reader jumps to segment `index`.
    pub(super) fn jump(&mut self, layer: &Digest, index: usize) {
        if let Some(progress) = self.layers.get_mut(layer) {
            (progress.stride, progress.jumped) = (0, true);
            progress.next = index + 1;
        }
    }

    /// A reader takes segment `index` out of what waits of the layer's trace; the bytes to take in all, `max` at most. One who
    /// is in the trace's order takes twice as much each time, one who jumps about in it only what it wants.
    pub(super) fn stride(&mut self, layer: &Digest, index: usize, max: u64) -> u64 {
        let in_order = self.is_in_order(layer, index);
        let Some(progress) = self.layers.get_mut(layer) else {
            return 0;
        };
        progress.jumped = !in_order;
        progress.stride = match in_order {
            true => (progress.stride * 2).clamp(STRIDE_MIN, max.max(STRIDE_MIN)),
            false => 0,
        };
        progress.stride
    }

    /// So many bytes of the layer's trace begin.
    pub(super) fn begin(&mut self, layer: &Digest, bytes: u64) {
        if let Some(progress) = self.layers.get_mut(layer) {
            progress.begun = progress.begun.saturating_add(bytes);
        }
    }

    /// Segment `last` is the last one of those that begin.
    pub(super) fn pass(&mut self, layer: &Digest, last: Option<usize>) {
        if let (Some(progress), Some(last)) = (self.layers.get_mut(layer), last) {
            progress.next = last + 1;
        }
    }

    /// Some of what the layer's trace brought was read.
    pub(super) fn read(&mut self, layer: &Digest, bytes: u64) {
        if let Some(progress) = self.layers.get_mut(layer) {
            progress.read = progress.read.saturating_add(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: `left` has no bound.
    #[test]
    fn a_trace_that_nobody_reads_costs_the_guess_and_each_byte_read_pays_for_more() {
        let layer = Digest::of(b"layer");
        let mut ahead = Ahead::default();
        ahead.start(layer);
        ahead.begin(&layer, 70);
        assert_eq!(ahead.left(&layer, 100), 30);
        ahead.begin(&layer, 70);
        assert_eq!(ahead.left(&layer, 100), 0);
        ahead.read(&layer, 60);
        assert_eq!(ahead.left(&layer, 100), 50);
        ahead.set_blind(true);
        assert_eq!(ahead.left(&layer, 100), u64::MAX);
        ahead.set_blind(false);
        ahead.forget(|digest| *digest == layer);
        // Of a layer that is not followed nothing is held back.
        assert_eq!(ahead.left(&layer, 0), u64::MAX);
    }

    /// Mutation: no `STEP_MAX`.
    #[test]
    fn a_reader_in_order_takes_more_each_time_and_one_that_jumps_what_it_wants() {
        let layer = Digest::of(b"layer");
        let mut ahead = Ahead::default();
        ahead.start(layer);
        ahead.pass(&layer, Some(9));
        let mut take = |index| {
            let stride = ahead.stride(&layer, index, 400 << 10);
            ahead.pass(&layer, Some(index));
            stride >> 10
        };
        assert_eq!([10, 12, 16, 17].map(&mut take), [128, 256, 400, 400]);
        assert_eq!([30, 7, 50, 51].map(&mut take), [0, 0, 0, 128]);
    }
}
