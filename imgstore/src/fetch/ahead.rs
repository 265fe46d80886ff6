//! How far a trace is followed ahead of the readers.
//!
//! A trace of another workload foresees what nobody will read, and its ranges share the link and the processor with the readers.
//! So the first ranges are a guess, as long as a few tens of milliseconds of the link, and each stored byte that is read pays for
//! [`PER_READ`] more. A trace that fits is followed with growing strides, one that does not costs the guess.

use std::collections::HashMap;

use crate::ids::Digest;

/// Stored bytes that may be fetched for each one that was read.
const PER_READ: u64 = 3;

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

    /// Whether a range of this layer's trace may begin. `guess`: bytes that need no reader.
    pub(super) fn may_begin(&self, layer: &Digest, guess: u64) -> bool {
        let Some(progress) = self.layers.get(layer).filter(|_| !self.blind) else {
            return true;
        };
        progress.begun < guess.saturating_add(progress.read.saturating_mul(PER_READ))
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

    /// Mutation: `may_begin` is always true.
    #[test]
    fn a_trace_that_nobody_reads_costs_the_guess_and_each_byte_read_pays_for_more() {
        let layer = Digest::of(b"layer");
        let mut ahead = Ahead::default();
        ahead.start(layer);
        let mut begun = 0;
        let mut follow = |ahead: &mut Ahead| {
            while ahead.may_begin(&layer, 100) && begun < 10_000 {
                ahead.begin(&layer, 50);
                begun += 50;
            }
            begun
        };
        assert_eq!(follow(&mut ahead), 100);
        ahead.read(&layer, 60);
        assert_eq!((follow(&mut ahead), ahead.read_bytes(&layer)), (300, 60));
        ahead.set_blind(true);
        assert_eq!(follow(&mut ahead), 10_000);
        ahead.set_blind(false);
        ahead.forget(|digest| *digest == layer);
        // Of a layer that is not followed nothing is held back.
        assert!(ahead.may_begin(&layer, 0));
        assert_eq!(ahead.read_bytes(&layer), 0);
    }
}
