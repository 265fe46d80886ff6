//! A layer as one flat image: what the FUSE driver reads.

use std::sync::{Arc, Mutex, PoisonError};

use imgstore::format::flat::Piece;
use imgstore::ids::{to_u64, to_usize};
use imgstore::image::{BlockImage, ReadDone, ReadError};

use super::layer::LayerState;
use super::loader::Loader;
use super::lru::Plain;
use super::pages::PageWindow;
use super::pending::OnSegment;
use crate::protocol::ToControl;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct LayerImage {
    pub(crate) layer: Arc<LayerState>,
    pub(crate) loader: Loader,
    /// Where the kernel goes through the page cache of the FUSE file.
    pub(crate) pages: Option<Arc<PageWindow>>,
}

/// A read of several pieces, answered when the last one is there.
struct Gather {
    bytes: Vec<u8>,
    left: usize,
    failure: Option<ReadError>,
    done: Option<ReadDone>,
}

/// `len` bytes of a segment from `offset`.
fn part(plain: &Plain, offset: u64, len: u64) -> Result<&[u8], ReadError> {
    let from = to_usize(offset);
    let to = from.saturating_add(to_usize(len));
    plain
        .get(from..to)
        .ok_or_else(|| ReadError("a segment is shorter than its layout".to_owned()))
}

impl LayerImage {
    fn answer(layer: &LayerState, done: ReadDone, result: Result<&[u8], ReadError>) {
        layer.count(|c| match &result {
            Ok(bytes) => c.served_bytes += to_u64(bytes.len()),
            Err(_) => c.failed_reads += 1,
        });
        done(result);
    }

    /// Tells the page window what is read, and when it is answered.
    fn watch_pages(&self, pieces: &[Piece], done: ReadDone) -> ReadDone {
        let index = |piece: &Piece| match piece {
            Piece::Meta { .. } => None,
            Piece::Segment { index, .. } => Some(*index),
        };
        let mut indexes = pieces.iter().filter_map(index);
        let (Some(pages), Some(first)) = (&self.pages, indexes.next()) else {
            return done;
        };
        let segments = first..indexes.next_back().unwrap_or(first) + 1;
        let (pages, layer) = (Arc::clone(pages), Arc::clone(&self.layer));
        pages.begin(&layer, segments.clone());
        Box::new(move |answer| {
            done(answer);
            pages.end(&layer, segments);
        })
    }

    fn read_one(&self, index: usize, offset: u64, len: u64, done: ReadDone) {
        let layer = Arc::clone(&self.layer);
        let on_segment: OnSegment = Box::new(move |segment| {
            let result = segment
                .map_err(|e| ReadError(e.to_owned()))
                .and_then(|plain| part(plain, offset, len));
            Self::answer(&layer, done, result);
        });
        self.loader.read(&self.layer, vec![(index, on_segment)]);
    }

    /// Reads metadata now and everything else when it comes, into one buffer.
    fn read_pieces(&self, pieces: &[Piece], done: ReadDone) {
        let total: u64 = pieces
            .iter()
            .map(|p| match p {
                Piece::Meta { len, .. } | Piece::Segment { len, .. } => *len,
            })
            .sum();
        let mut bytes = Vec::with_capacity(to_usize(total));
        let mut meta_bytes = 0;
        for piece in pieces {
            match piece {
                Piece::Meta { offset, len } => {
                    meta_bytes += *len;
                    if let Err(error) = self.layer.meta.read(*offset, *len, &mut bytes) {
                        tracing::error!(layer = %self.layer.digest, %error, "metadata cannot be read; the reader gets EIO");
                        let failure = ReadError(error.to_string());
                        return Self::answer(&self.layer, done, Err(failure));
                    }
                }
                Piece::Segment { len, .. } => bytes.resize(bytes.len() + to_usize(*len), 0),
            }
        }
        if meta_bytes > 0 {
            self.layer.count(|c| c.meta_bytes += meta_bytes);
        }
        let mut wanted: Vec<(usize, OnSegment)> = Vec::new();
        let left = pieces
            .iter()
            .filter(|p| matches!(p, Piece::Segment { .. }))
            .count();
        if left == 0 {
            return done(Ok(&bytes));
        }
        let gather = Arc::new(Mutex::new(Gather {
            bytes,
            left,
            failure: None,
            done: Some(done),
        }));
        let mut at = 0;
        for piece in pieces {
            match *piece {
                Piece::Meta { len, .. } => at += to_usize(len),
                Piece::Segment { index, offset, len } => {
                    wanted.push((index, self.gather_one(&gather, at, offset, len)));
                    at += to_usize(len);
                }
            }
        }
        self.loader.read(&self.layer, wanted);
    }

    fn gather_one(
        &self,
        gather: &Arc<Mutex<Gather>>,
        at: usize,
        offset: u64,
        len: u64,
    ) -> OnSegment {
        let gather = Arc::clone(gather);
        let layer = Arc::clone(&self.layer);
        Box::new(move |segment| {
            let mut gather = gather.lock().unwrap_or_else(PoisonError::into_inner);
            let result = segment
                .map_err(|e| ReadError(e.to_owned()))
                .and_then(|plain| part(plain, offset, len));
            match result {
                Ok(piece) => {
                    let target = gather.bytes.get_mut(at..at.saturating_add(piece.len()));
                    if let Some(target) = target {
                        target.copy_from_slice(piece);
                    }
                }
                Err(failure) => gather.failure = Some(failure),
            }
            gather.left -= 1;
            if gather.left > 0 {
                return;
            }
            let bytes = std::mem::take(&mut gather.bytes);
            let failure = gather.failure.take();
            let done = gather.done.take();
            drop(gather);
            if let Some(done) = done {
                Self::answer(&layer, done, failure.map_or(Ok(&*bytes), Err));
            }
        })
    }
}

impl BlockImage for LayerImage {
    fn len(&self) -> u64 {
        self.layer.layout.len()
    }

    fn read_at(&self, offset: u64, len: u32, done: ReadDone) {
        let noted = self.layer.note_read(offset, u64::from(len));
        let pieces = self.layer.layout.pieces(offset, u64::from(len));
        let done = self.watch_pages(&pieces, done);
        match *pieces {
            [Piece::Segment { index, offset, len }] => self.read_one(index, offset, len, done),
            _ => self.read_pieces(&pieces, done),
        }
        if let Some((first, end)) = noted.ahead {
            self.loader.prefetch(&self.layer, first, end);
        }
        if noted.foreseen > 0 {
            self.loader.say(&ToControl::Foreseen {
                layer: self.layer.digest,
                bytes: noted.foreseen,
            });
        }
    }
}
