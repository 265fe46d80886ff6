//! A layer in the data plane: what it is made of, and what was done with it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::format::FormatError;
use imgstore::format::flat::FlatLayout;
use imgstore::format::manifest::{Manifest, Segment};
use imgstore::ids::Digest;
use layerd_client::api::Counters;

use super::hotahead::HotAhead;
use super::meta::{MetaError, VerifiedMeta};
use super::readahead::ReadAhead;
use super::touched::Touched;
use crate::paths;
use crate::protocol::{Touches, Traced};

/// Why a layer cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("cannot read `{path}`: {source}")]
    Io {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("`{path}` is damaged: {source}")]
    Damaged {
        path: std::path::PathBuf,
        #[source]
        source: FormatError,
    },
    #[error(transparent)]
    Meta(#[from] MetaError),
}

impl OpenError {
    /// Whether fetching the files again can help.
    pub(crate) const fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Damaged { .. } | Self::Meta(MetaError::Damaged { .. })
        )
    }
}

/// Most segments remembered for layers that are not served (yet).
const EARLY_MAX: usize = 4096;

#[derive(Debug)]
struct Activity {
    counters: Counters,
    touched: Touched,
    readahead: ReadAhead,
    hotahead: HotAhead,
}

/// What follows from a read.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// Segments `first..end` to load in advance.
    pub(crate) ahead: Option<(usize, usize)>,
    /// Stored bytes that a trace brought and that nobody had read before.
    pub(crate) foreseen: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct LayerState {
    pub(crate) digest: Digest,
    pub(crate) segments: Vec<Segment>,
    pub(crate) layout: FlatLayout,
    pub(crate) meta: VerifiedMeta,
    /// Whether what is done with it counts in any total.
    pub(crate) counted: bool,
    /// So many of the first segments are read one after the other, as a trace foresaw; 0 where nothing may be loaded ahead.
    hot: usize,
    activity: Mutex<Activity>,
}

impl LayerState {
    /// Opens what `folder` holds of `layer`, and verifies it. `ahead`: whether hot segments may be loaded before they are read.
    ///
    /// # Errors
    /// Names the file that is missing or damaged.
    pub(crate) fn open(folder: &Path, layer: Digest, ahead: bool) -> Result<Self, OpenError> {
        let path = folder.join(paths::MANIFEST);
        let bytes = std::fs::read(&path).map_err(|source| OpenError::Io {
            path: path.clone(),
            source,
        })?;
        let manifest = Manifest::parse(&bytes, &layer)
            .map_err(|source| OpenError::Damaged { path, source })?;
        let meta = VerifiedMeta::open(&folder.join(paths::META), &manifest.meta)?;
        let activity = Activity {
            counters: Counters::default(),
            touched: Touched::new(manifest.segment_bytes()),
            readahead: ReadAhead::default(),
            hotahead: HotAhead::default(),
        };
        Ok(Self {
            digest: layer,
            layout: FlatLayout::new(&manifest),
            hot: if ahead { manifest.hot_segments() } else { 0 },
            segments: manifest.segments,
            meta,
            counted: true,
            activity: Mutex::new(activity),
        })
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the counters.
    pub(crate) fn count(&self, change: impl FnOnce(&mut Counters)) {
        change(&mut self.activity().counters);
    }

    /// Notes a read of `[offset, offset + len)`.
    pub(crate) fn note_read(&self, offset: u64, len: u64) -> Noted {
        let mut noted = Noted::default();
        noted.ahead = self.note(offset, len, &mut noted.foreseen);
        noted
    }

    fn note(&self, offset: u64, len: u64, foreseen: &mut u64) -> Option<(usize, usize)> {
        let end = offset.saturating_add(len).min(self.layout.len());
        let data = self.meta.len();
        let mut activity = self.activity();
        activity.counters.fuse_reads += 1;
        if offset < data || offset >= end {
            return None;
        }
        activity.touched.mark(offset - data, end - offset);
        let here = self.segment_at(offset)?;
        let last = self.segment_at(end - 1).unwrap_or(here);
        *foreseen = activity.touched.read_traced(here..=last);
        if here < self.hot {
            return activity.hotahead.on_read(here, self.hot);
        }
        let start = self.layout.segment_start(here)?;
        let window = activity.readahead.on_read(offset, end - offset, start)?;
        drop(activity);
        let first = self.segment_at(window.start)?;
        let last = self
            .segment_at(window.end - 1)
            .unwrap_or(self.segments.len().saturating_sub(1));
        Some((first, last + 1))
    }

    /// The segment that holds byte `offset` of the flat image.
    fn segment_at(&self, offset: u64) -> Option<usize> {
        match self.layout.pieces(offset, 1).first()? {
            imgstore::format::flat::Piece::Segment { index, .. } => Some(*index),
            imgstore::format::flat::Piece::Meta { .. } => None,
        }
    }

    /// A copy of the counters.
    pub(crate) fn counters(&self) -> Counters {
        let activity = self.activity();
        Counters {
            needed_bytes: activity.touched.bytes(),
            traced_unused_segments: activity.touched.unused(),
            ..activity.counters
        }
    }

    /// The first touches since the layer is served.
    pub(crate) fn touches(&self) -> Touches {
        self.activity().touched.touches()
    }

    /// Segment `index`, of `stored` bytes, came because of a trace.
    pub(crate) fn note_traced(&self, index: usize, stored: u64) {
        let data = self.meta.len();
        let start = self.layout.segment_start(index).map(|start| start - data);
        let (Some(start), Some(segment)) = (start, self.segments.get(index)) else {
            return;
        };
        let mut activity = self.activity();
        let place = start..start + segment.len();
        if activity.touched.note_traced(index, stored, place) {
            activity.counters.traced_segments += 1;
            activity.counters.traced_bytes += stored;
        }
    }
}

/// The layers that are served, and the counters of those that were.
#[derive(Debug, Default)]
pub(crate) struct Layers {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    served: BTreeMap<Digest, Arc<LayerState>>,
    retired: Counters,
    /// Segments (with stored bytes) that a trace brought for layers that are about to be served.
    early: Vec<(Traced, u64)>,
}

impl Layers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, layer: &Digest) -> Option<Arc<LayerState>> {
        self.lock().served.get(layer).cloned()
    }

    pub(crate) fn insert(&self, layer: Arc<LayerState>) {
        let mut inner = self.lock();
        inner.early.retain(|(traced, stored)| {
            let its = traced.layer == layer.digest;
            if its {
                layer.note_traced(traced.index, *stored);
            }
            !its
        });
        inner.served.insert(layer.digest, layer);
    }

    /// A segment came because of a trace, perhaps before its layer is served.
    pub(crate) fn note_traced(&self, traced: Traced, stored: u64) {
        let mut inner = self.lock();
        match inner.served.get(&traced.layer) {
            Some(layer) => layer.note_traced(traced.index, stored),
            None if inner.early.len() < EARLY_MAX => inner.early.push((traced, stored)),
            // Of no importance but for the counters.
            None => {}
        }
    }

    /// Takes a layer out; its counters stay in the total.
    pub(crate) fn remove(&self, layer: &Digest) -> Option<Arc<LayerState>> {
        let mut inner = self.lock();
        let state = inner.served.remove(layer)?;
        if state.counted {
            inner.retired.add(&state.counters());
        }
        Some(state)
    }

    pub(crate) fn digests(&self) -> Vec<Digest> {
        self.lock().served.keys().copied().collect()
    }

    /// Counts for a layer, or only in the total where there is none (any more).
    pub(crate) fn count(&self, layer: Option<&Digest>, counters: &Counters) {
        let mut inner = self.lock();
        match layer.and_then(|layer| inner.served.get(layer)) {
            Some(state) => state.count(|c| c.add(counters)),
            None => inner.retired.add(counters),
        }
    }

    /// Counters per layer, and all together.
    pub(crate) fn stats(&self) -> (BTreeMap<String, Counters>, Counters) {
        let inner = self.lock();
        let mut total = inner.retired;
        let mut layers = BTreeMap::new();
        for (digest, state) in inner.served.iter().filter(|(_, s)| s.counted) {
            let counters = state.counters();
            total.add(&counters);
            layers.insert(digest.to_hex(), counters);
        }
        (layers, total)
    }
}
