//! Keeps the kernel from holding file data twice.
//!
//! A file-backed EROFS mount reads the FUSE file through that file's page cache, then copies into its own. The first copy is
//! useful for a moment (the kernel reads ahead over the borders of small files, which saves most requests) and a waste from then
//! on. So segments that were handed out are remembered in order, and when there are more than a few MiB of them, the
//! pages of the oldest are dropped from the FUSE file. What is dropped and needed again is simply read again.

use std::collections::{HashSet, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

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

#[derive(Debug, Default)]
struct Inside {
    order: VecDeque<Extent>,
    known: HashSet<(Digest, usize)>,
    bytes: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PageWindow {
    inside: Mutex<Inside>,
    /// Takes what is to be dropped, on another thread: dropping waits for reads.
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

    /// Notes that bytes of a segment go to the kernel.
    pub(crate) fn note(&self, layer: &LayerState, index: usize) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        if !inside.known.insert((layer.digest, index)) {
            return;
        }
        let start = layer.layout.segment_start(index);
        let (Some(start), Some(segment)) = (start, layer.segments.get(index)) else {
            return;
        };
        let len = segment.len();
        inside.bytes += len;
        inside.order.push_back(Extent {
            layer: layer.digest,
            index,
            start,
            len,
        });
        while inside.bytes > WINDOW_BYTES {
            let Some(oldest) = inside.order.pop_front() else {
                break;
            };
            inside.bytes -= oldest.len;
            inside.known.remove(&(oldest.layer, oldest.index));
            if self.out.send(oldest).is_err() {
                tracing::error!("nobody drops pages any more");
            }
        }
    }
}
