//! Segments that somebody waits for: one entry a segment, however many readers.
//!
//! ```text
//!            no cached file              frame arrives             digest is right
//! Looking ───────────────────► Asked ───────────────────► Decoding ───────────────► gone (in memory)
//!    └────── cached file ──────────────────────────────────► │ ▲
//!                                                            │ └── wrong once: asked again
//!                                                            └──── wrong twice, or no frame: gone (EIO)
//! ```
//! A reader that waits longer than its deadline gets EIO and leaves; the entry goes with its last reader unless it
//! is read-ahead.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use imgstore::ids::Digest;

use super::layer::LayerState;
use super::lru::Plain;

/// Told once how it ended.
pub(crate) type OnSegment = Box<dyn FnOnce(Result<&Plain, &str>) + Send>;

/// A segment of a layer.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) layer: Arc<LayerState>,
    pub(crate) index: usize,
}

impl Place {
    /// Digest and plain length; `None` outside the layer.
    pub(crate) fn segment(&self) -> Option<(Digest, u64)> {
        let segment = self.layer.segments.get(self.index)?;
        Some((segment.digest(), segment.len()))
    }
}

/// One reader.
pub(crate) struct Waiter {
    pub(crate) place: Place,
    pub(crate) deadline: Instant,
    pub(crate) done: OnSegment,
}

/// How far a segment has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Queued to be looked for on disk.
    Looking,
    /// The control process was asked.
    Asked,
    /// Being loaded, decoded and verified, or queued for it.
    Decoding,
}

/// See the head of this file.
pub(crate) struct Entry {
    /// Whom to ask for it.
    pub(crate) place: Place,
    pub(crate) stage: Stage,
    pub(crate) waiters: Vec<Waiter>,
    /// Read-ahead asked first, and nobody waits.
    pub(crate) prefetch: bool,
    /// The control process was last asked when nobody waited: its refusal says nothing about a request that has a reader.
    pub(crate) asked_idle: bool,
    /// When the control process was last asked.
    pub(crate) asked: Instant,
    /// A damaged frame from an origin was seen; the next one is the last.
    pub(crate) second_try: bool,
    /// Layers whose packs do not have it: their placements are not asked again.
    pub(crate) in_vain: Vec<Digest>,
}

impl Entry {
    /// A segment that somebody begins to look for.
    pub(crate) fn looking(place: Place, waiter: Option<Waiter>) -> Self {
        Self {
            place,
            stage: Stage::Looking,
            prefetch: waiter.is_none(),
            waiters: waiter.into_iter().collect(),
            asked_idle: false,
            asked: Instant::now(),
            second_try: false,
            in_vain: Vec::new(),
        }
    }

    /// The control process is asked now.
    pub(crate) fn ask(&mut self) {
        self.stage = Stage::Asked;
        self.asked_idle = self.prefetch;
        self.asked = Instant::now();
    }

    /// The layer that was asked cannot give the segment. Turns to the layer of another reader, which may have it in
    /// another pack; whether there is one.
    pub(crate) fn turn_to_another_layer(&mut self) -> bool {
        self.in_vain.push(self.place.layer.digest);
        let untried = |waiter: &&Waiter| !self.in_vain.contains(&waiter.place.layer.digest);
        let Some(place) = self.waiters.iter().find(untried).map(|w| w.place.clone()) else {
            return false;
        };
        self.place = place;
        self.second_try = false;
        true
    }

    /// Whether a reader came after the control process was asked: the refusal of that request is not an answer to it, and it
    /// has not waited as long as it is ready to.
    pub(crate) fn has_new_reader(&self, patience: Duration) -> bool {
        let came_later = |waiter: &Waiter| waiter.deadline > self.asked + patience;
        let new = self.asked_idle || self.waiters.iter().any(came_later);
        self.stage == Stage::Asked && !self.waiters.is_empty() && new
    }
}

/// All of them.
#[derive(Default)]
pub(crate) struct Pending {
    pub(crate) entries: HashMap<Digest, Entry>,
}

impl Pending {
    /// Whether a reader waits for an answer of the control process about this segment.
    pub(super) fn is_awaited(&self, digest: &Digest) -> bool {
        let entry = self.entries.get(digest);
        entry.is_some_and(|entry| !entry.prefetch && entry.stage == Stage::Asked)
    }

    /// The readers whose deadline has passed, taken out; entries without readers go.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Waiter> {
        let mut expired = Vec::new();
        self.entries.retain(|_, entry| {
            let before = entry.waiters.len();
            let (late, rest) = std::mem::take(&mut entry.waiters)
                .into_iter()
                .partition(|waiter| waiter.deadline <= now);
            entry.waiters = rest;
            expired.extend::<Vec<Waiter>>(late);
            let lost_all = before > 0 && entry.waiters.is_empty();
            !lost_all || entry.prefetch || entry.stage == Stage::Decoding
        });
        expired
    }

    /// When the next reader loses patience.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let waiters = self.entries.values().flat_map(|entry| &entry.waiters);
        waiters.map(|waiter| waiter.deadline).min()
    }

    /// Everything that was asked for, to be asked again, as runs: (layer, first index, count, whether nobody waits).
    pub(crate) fn asked(&mut self) -> Vec<(Digest, usize, usize, bool)> {
        let mut all: Vec<(Digest, usize, bool)> = self
            .entries
            .values_mut()
            .filter(|entry| entry.stage == Stage::Asked)
            .map(|entry| {
                entry.ask();
                (entry.place.layer.digest, entry.place.index, entry.prefetch)
            })
            .collect();
        all.sort_unstable();
        let mut runs: Vec<(Digest, usize, usize, bool)> = Vec::new();
        for (layer, index, prefetch) in all {
            match runs.last_mut() {
                Some((l, first, count, p))
                    if *l == layer && *first + *count == index && *p == prefetch =>
                {
                    *count += 1;
                }
                _ => runs.push((layer, index, 1, prefetch)),
            }
        }
        runs
    }
}
