//! Keeps the kernel from holding file data twice.
//!
//! A file-backed EROFS mount reads the FUSE file through that file's page cache, then copies into its own. The first copy is
//! useful for a moment (the kernel reads ahead over the borders of small files, which saves most requests) and a waste from then
//! on. So segments that were handed out are remembered in order, and when there are more than a few MiB of them, the
//! pages of the oldest are dropped from the FUSE file. What is dropped and needed again is simply read again.

//!
//! The control process does the dropping. Done here, it would be a call of this process that may wait for reads that wait for
//! this process: killed in that moment it could not die, and its readers would hang instead of getting EIO (that was
//! seen). Without a control process pages stay until memory is short.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::ids::Digest;

use super::layer::LayerState;
use super::link::Link;
use crate::protocol::ToControl;

/// File data that may be in the kernel twice.
const WINDOW_BYTES: u64 = 20 << 20;
/// So much more may be, until it is worth a message.
const BATCH_BYTES: u64 = 4 << 20;

/// A segment of a layer: its place in the flat image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) layer: Digest,
    pub(crate) index: usize,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

/// A segment that was handed out or is asked for.
#[derive(Debug, Default)]
struct Known {
    reads: u32,
    queued: bool,
}

#[derive(Debug, Default)]
struct Inside {
    order: VecDeque<Extent>,
    known: HashMap<(Digest, usize), Known>,
    bytes: u64,
}

impl Inside {
    fn begin(&mut self, key: (Digest, usize)) {
        self.known.entry(key).or_default().reads += 1;
    }

    fn end(&mut self, extent: Extent) {
        let known = self.known.entry((extent.layer, extent.index)).or_default();
        known.reads = known.reads.saturating_sub(1);
        if !known.queued {
            known.queued = true;
            self.bytes += extent.len;
            self.order.push_back(extent);
        }
    }

    /// The oldest segments beyond `bytes_max`, but those that a read waits for.
    fn overflow(&mut self, bytes_max: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        for _ in 0..self.order.len() {
            if self.bytes <= bytes_max {
                break;
            }
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            let key = (oldest.layer, oldest.index);
            if self.known.get(&key).is_some_and(|known| known.reads > 0) {
                self.order.push_back(oldest);
                continue;
            }
            self.bytes -= oldest.len;
            self.known.remove(&key);
            out.push(oldest);
        }
        out
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PageWindow {
    inside: Mutex<Inside>,
    link: Arc<Link>,
}

impl PageWindow {
    /// A window that asks for dropping over `link`.
    pub(crate) fn new(link: Arc<Link>) -> Self {
        Self {
            inside: Mutex::default(),
            link,
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read of these segments begins.
    pub(crate) fn begin(&self, layer: &LayerState, segments: Range<usize>) {
        let mut inside = self.inside();
        for index in segments {
            inside.begin((layer.digest, index));
        }
    }

    /// It was answered: the pages are in the kernel.
    pub(crate) fn end(&self, layer: &LayerState, segments: Range<usize>) {
        let extent = |index| {
            let start = layer.layout.segment_start(index)?;
            let len = layer.segments.get(index)?.len();
            Some(Extent {
                layer: layer.digest,
                index,
                start,
                len,
            })
        };
        let mut inside = self.inside();
        for extent in segments.filter_map(extent) {
            inside.end(extent);
        }
        if inside.bytes <= WINDOW_BYTES + BATCH_BYTES {
            return;
        }
        let dropped = inside.overflow(WINDOW_BYTES);
        drop(inside);
        for (layer, start, end) in runs(dropped) {
            self.link.send(&ToControl::Drop { layer, start, end });
        }
    }
}

/// Joins extents that touch.
fn runs(mut extents: Vec<Extent>) -> Vec<(Digest, u64, u64)> {
    extents.sort_unstable_by_key(|extent| (extent.layer, extent.start));
    let mut runs: Vec<(Digest, u64, u64)> = Vec::new();
    for extent in extents {
        match runs.last_mut() {
            Some((layer, _, end)) if *layer == extent.layer && *end == extent.start => {
                *end += extent.len;
            }
            _ => runs.push((extent.layer, extent.start, extent.start + extent.len)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(index: usize) -> Extent {
        Extent {
            layer: Digest::of(b"layer"),
            index,
            start: u64::try_from(index).unwrap() * 10,
            len: 10,
        }
    }

    #[test]
    fn neighbours_are_dropped_together() {
        let layer = Digest::of(b"layer");
        let found = runs([3, 1, 7, 2].map(extent).to_vec());
        assert_eq!(found, [(layer, 10, 40), (layer, 70, 80)]);
    }

    fn read(inside: &mut Inside, index: usize) {
        inside.begin((extent(index).layer, index));
        inside.end(extent(index));
    }

    fn indexes(extents: &[Extent]) -> Vec<usize> {
        extents.iter().map(|e| e.index).collect()
    }

    #[test]
    fn the_oldest_go_when_the_window_is_full_and_may_come_again() {
        let mut inside = Inside::default();
        for index in [0, 1, 0, 2, 3] {
            read(&mut inside, index);
        }
        assert_eq!(indexes(&inside.overflow(25)), [0, 1]);
        assert_eq!(inside.bytes, 20);
        read(&mut inside, 0);
        assert_eq!(inside.overflow(30), []);
        assert_eq!(indexes(&inside.overflow(0)), [2, 3, 0]);
        assert!(inside.known.is_empty());
    }

    #[test]
    fn what_a_read_waits_for_stays() {
        let mut inside = Inside::default();
        read(&mut inside, 0);
        inside.begin((extent(0).layer, 0));
        read(&mut inside, 1);
        assert_eq!(indexes(&inside.overflow(0)), [1]);
        inside.end(extent(0));
        assert_eq!(indexes(&inside.overflow(0)), [0]);
    }
}
