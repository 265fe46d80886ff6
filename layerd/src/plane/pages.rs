//! Keeps the kernel from holding file data twice.
//!
//! A file-backed EROFS mount reads the FUSE file through that file's page cache, then copies into its own. The first copy is
//! useful for a moment (the kernel reads ahead over the borders of small files, which saves most requests) and a waste from then
//! on. So segments that were handed out are remembered in order, and when there are more than a few MiB of them, the
//! pages of the oldest are dropped from the FUSE file. What is dropped and needed again is simply read again.

//!
//! Dropping waits for pages that are being read, and would wait for ever if the read needed this very process to go
//! on, which the kernel does not let die meanwhile. So it is done on a thread of its own, and only for segments that no read is
//! waiting for. (If a process is killed in the instant between that check and the call, the control process aborts the
//! FUSE connection, which frees everybody.)

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use imgstore::ids::Digest;

use super::layer::LayerState;

/// File data that may be in the kernel twice.
const WINDOW_BYTES: u64 = 24 << 20;

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
    out: Sender<Extent>,
}

impl PageWindow {
    /// A window that says what is to be dropped to `out`.
    pub(crate) fn new(out: Sender<Extent>) -> Self {
        Self {
            inside: Mutex::default(),
            out,
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
        let dropped = inside.overflow(WINDOW_BYTES);
        drop(inside);
        for extent in dropped {
            if self.out.send(extent).is_err() {
                tracing::error!("nobody drops pages any more");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(index: usize) -> Extent {
        Extent {
            layer: Digest::of(b"layer"),
            index,
            start: 0,
            len: 10,
        }
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
