//! How far a trace is followed ahead of the readers.
//!
//! A trace of another workload foresees what nobody will read, and its ranges share the link and the processor with the readers.
//! So what is fetched first is a guess, of some ten milliseconds of the link, and each stored byte that is read pays for itself and
//! half as much again. A trace that fits is followed with growing strides, one that does not costs the guess and half of what
//! the two have in common.

use std::collections::HashMap;

use crate::ids::Digest;

/// Stored bytes of one layer.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    begun: u64,
    read: u64,
}

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

    /// Bytes of the layer's trace that were read.
    pub(super) fn read_bytes(&self, layer: &Digest) -> u64 {
        self.layers.get(layer).map_or(0, |progress| progress.read)
    }

    /// A range of the layer's trace begins.
    pub(super) fn begin(&mut self, layer: &Digest, bytes: u64) {
        if let Some(progress) = self.layers.get_mut(layer) {
            progress.begun = progress.begun.saturating_add(bytes);
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
        assert_eq!(
            (ahead.left(&layer, 100), ahead.read_bytes(&layer)),
            (50, 60)
        );
        ahead.set_blind(true);
        assert_eq!(ahead.left(&layer, 100), u64::MAX);
        ahead.set_blind(false);
        ahead.forget(|digest| *digest == layer);
        // Of a layer that is not followed nothing is held back.
        assert_eq!(ahead.left(&layer, 0), u64::MAX);
        assert_eq!(ahead.read_bytes(&layer), 0);
    }
}
