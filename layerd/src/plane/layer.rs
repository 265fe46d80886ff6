//! A layer in the data plane: what it is made of, and what was done with it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::format::FormatError;
use imgstore::format::flat::FlatLayout;
use imgstore::format::manifest::{Manifest, Segment};
use imgstore::ids::{BLOCK_SIZE, Digest, to_usize};
use layerd_client::api::Counters;

use super::meta::{MetaError, VerifiedMeta};
use super::readahead::ReadAhead;
use crate::paths;

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

/// Distinct 4 KiB blocks of file data that were asked for.
#[derive(Debug)]
struct Needed {
    words: Vec<u64>,
    blocks: u64,
}

impl Needed {
    fn new(bytes: u64) -> Self {
        let words = to_usize(bytes.div_ceil(BLOCK_SIZE * 64));
        Self {
            words: vec![0; words],
            blocks: 0,
        }
    }

    fn mark(&mut self, offset: u64, len: u64) {
        for block in offset / BLOCK_SIZE..(offset + len).div_ceil(BLOCK_SIZE) {
            let bit = 1_u64 << (block % 64);
            if let Some(word) = self.words.get_mut(to_usize(block / 64))
                && *word & bit == 0
            {
                *word |= bit;
                self.blocks += 1;
            }
        }
    }
}

#[derive(Debug)]
struct Activity {
    counters: Counters,
    needed: Needed,
    readahead: ReadAhead,
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
    activity: Mutex<Activity>,
}

impl LayerState {
    /// Opens what `folder` holds of `layer`, and verifies it.
    ///
    /// # Errors
    /// Names the file that is missing or damaged.
    pub(crate) fn open(folder: &Path, layer: Digest) -> Result<Self, OpenError> {
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
            needed: Needed::new(manifest.segment_bytes()),
            readahead: ReadAhead::default(),
        };
        Ok(Self {
            digest: layer,
            layout: FlatLayout::new(&manifest),
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

    /// Notes a read of `[offset, offset + len)`; the segments `first..end` to load in advance.
    pub(crate) fn note_read(&self, offset: u64, len: u64) -> Option<(usize, usize)> {
        let end = offset.saturating_add(len).min(self.layout.len());
        let data = self.meta.len();
        let mut activity = self.activity();
        activity.counters.fuse_reads += 1;
        if offset < data || offset >= end {
            return None;
        }
        activity.needed.mark(offset - data, end - offset);
        let here = self.segment_at(offset)?;
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
            needed_bytes: activity.needed.blocks * BLOCK_SIZE,
            ..activity.counters
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
}

impl Layers {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, layer: &Digest) -> Option<Arc<LayerState>> {
        self.lock().served.get(layer).cloned()
    }

    pub(crate) fn insert(&self, layer: Arc<LayerState>) {
        self.lock().served.insert(layer.digest, layer);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_is_needed_twice_counts_once() {
        let mut needed = Needed::new(1 << 20);
        needed.mark(0, 4096);
        needed.mark(4000, 200);
        assert_eq!(needed.blocks, 2);
        needed.mark(0, 1 << 20);
        assert_eq!(needed.blocks, 256);
        needed.mark(1 << 20, 4096);
        assert_eq!(needed.blocks, 256);
    }
}
