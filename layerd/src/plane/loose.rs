//! Frames that came without being asked for: the other half of a demanded pair.
//!
//! They are on their way to the cache on disk, but may not be there yet when a reader wants one. A few are kept as they
//! came, unverified; whoever takes one decodes and verifies it like any other frame.

use std::collections::VecDeque;

use imgstore::ids::Digest;

use crate::protocol::Provenance;

/// Bytes of frames kept.
const LOOSE_BYTES_MAX: usize = 1 << 20;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Loose {
    frames: VecDeque<(Digest, Vec<u8>, Provenance)>,
    bytes: usize,
}

impl Loose {
    /// Keeps a frame; the oldest ones go when there are too many bytes.
    pub(super) fn keep(&mut self, digest: Digest, frame: Vec<u8>, from: Provenance) {
        self.bytes += frame.len();
        self.frames.push_back((digest, frame, from));
        while self.bytes > LOOSE_BYTES_MAX
            && let Some((_, old, _)) = self.frames.pop_front()
        {
            self.bytes -= old.len();
        }
    }

    /// Takes the frame of a segment, if it is here.
    pub(super) fn take(&mut self, wanted: &Digest) -> Option<(Vec<u8>, Provenance)> {
        let at = self
            .frames
            .iter()
            .position(|(digest, ..)| digest == wanted)?;
        let (_, frame, from) = self.frames.remove(at)?;
        self.bytes -= frame.len();
        Some((frame, from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_frames_go_first_and_a_frame_is_given_once() {
        let digest = |n: u8| Digest::of(&[n]);
        let from = || Provenance {
            origin: String::new(),
            pack: digest(0),
            offset: 0,
        };
        let mut loose = Loose::default();
        for n in 0..5 {
            loose.keep(digest(n), vec![n; 300_000], from());
        }
        assert!(loose.take(&digest(0)).is_none() && loose.take(&digest(1)).is_none());
        assert_eq!(loose.take(&digest(3)).unwrap().0[0], 3);
        assert!(loose.take(&digest(3)).is_none());
        assert_eq!(loose.bytes, 600_000);
    }
}
