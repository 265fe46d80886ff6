//! What is in the cache, how much room it takes, and what goes next. Pure: nothing here touches the disk.
//!
//! Room is counted *before* a file is written and given back only *after* it is unlinked, so that the sum is never less than
//! what is on disk, whatever happens in between:
//! ```text
//! reserve ─► (file is written and renamed) ─► settle        choose ─► (file is unlinked) ─► freed
//! ```
//! Memory is bounded: 48 bytes a segment in sorted lists, one for each first byte of the digests, and at most
//! [`FILES_MAX`] segments; what is above goes like what is above the limit in bytes.
//!
//! Three things are never chosen: pinned segments and layers, layers that somebody holds (they are mounted), and whatever is being
//! written now.

use std::collections::{HashMap, HashSet};

use crate::ids::Digest;

/// Most segments that are counted; at 48 bytes each and an eighth of slack that is 113 MB.
pub(super) const FILES_MAX: usize = 2 << 20;
/// Sizes are counted in these.
const UNIT_BYTES: u64 = 512;

/// One cached frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) digest: Digest,
    /// Position in the order of use, larger is later: microseconds since 1970, made unique for this run.
    pub(super) used: u64,
    /// In units of 512 bytes, as `st_blocks` is.
    units: u32,
}

impl Entry {
    pub(super) fn new(digest: Digest, bytes: u64, used: u64) -> Self {
        Self {
            digest,
            used,
            units: u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX),
        }
    }

    fn bytes(self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }
}

/// What is kept of a layer.
#[derive(Debug, Clone, Copy, Default)]
struct LayerEntry {
    bytes: u64,
    used: u64,
    holds: u32,
    pinned: bool,
}

/// A segment of pinned layers.
#[derive(Debug, Clone, Copy, Default)]
struct PinnedSegment {
    pins: u32,
    bytes: u64,
}

/// What must be unlinked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Victim {
    Segment(Digest, u64),
    Layer(Digest, u64),
}

/// How much room there is to be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) bytes: u64,
    pub(super) files: usize,
}

impl Wanted {
    pub(super) const fn is_nothing(self) -> bool {
        self.bytes == 0 && self.files == 0
    }
}

/// Sums for people.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Everything in the folder that is the cache's, with folders and what is being written.
    pub bytes: u64,
    /// Of those, segments.
    pub segment_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Of the bytes, descriptions of layers.
    pub layer_bytes: u64,
    /// Layers that are described.
    pub layers: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Ledger {
    /// By the first byte of the digest; each sorted by digest.
    shards: Vec<Vec<Entry>>,
    files: usize,
    segment_bytes: u64,
    layers: HashMap<Digest, LayerEntry>,
    layer_bytes: u64,
    /// Being written.
    writing_bytes: u64,
    /// Chosen and not unlinked yet.
    leaving_bytes: u64,
    /// Folders and our own small files.
    fixed_bytes: u64,
    writing: HashMap<Digest, u32>,
    leaving: HashSet<Digest>,
    pinned: HashMap<Digest, PinnedSegment>,
    pinned_bytes: u64,
    clock: u64,
    files_max: usize,
}

fn shard_of(digest: &Digest) -> usize {
    usize::from(digest.as_bytes().first().copied().unwrap_or_default())
}

impl Ledger {
    /// An empty one whose order of use starts at `now`.
    pub(super) fn new(now: u64, files_max: usize) -> Self {
        Self {
            shards: vec![Vec::new(); 256],
            files: 0,
            segment_bytes: 0,
            layers: HashMap::new(),
            layer_bytes: 0,
            writing_bytes: 0,
            leaving_bytes: 0,
            fixed_bytes: 0,
            writing: HashMap::new(),
            leaving: HashSet::new(),
            pinned: HashMap::new(),
            pinned_bytes: 0,
            clock: now,
            files_max,
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            bytes: self.bytes(),
            segment_bytes: self.segment_bytes,
            segments: crate::ids::to_u64(self.files),
            layer_bytes: self.layer_bytes,
            layers: crate::ids::to_u64(self.layers.len()),
        }
    }

    /// Everything that is counted.
    pub(super) fn bytes(&self) -> u64 {
        self.segment_bytes
            + self.layer_bytes
            + self.writing_bytes
            + self.leaving_bytes
            + self.fixed_bytes
    }

    /// What is being written now.
    pub(super) const fn writing_bytes(&self) -> u64 {
        self.writing_bytes
    }

    /// Notes what folders and our own small files take.
    pub(super) fn set_fixed(&mut self, bytes: u64) {
        self.fixed_bytes = bytes;
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn find(&self, digest: &Digest) -> Option<&Entry> {
        let shard = self.shards.get(shard_of(digest))?;
        let at = shard.binary_search_by(|e| e.digest.cmp(digest)).ok()?;
        shard.get(at)
    }

    /// Counted bytes of a segment, if it is there.
    pub(super) fn segment(&self, digest: &Digest) -> Option<u64> {
        self.find(digest).map(|entry| entry.bytes())
    }

    /// Adds or replaces.
    fn insert(&mut self, entry: Entry) {
        let Some(shard) = self.shards.get_mut(shard_of(&entry.digest)) else {
            return;
        };
        match shard.binary_search_by(|e| e.digest.cmp(&entry.digest)) {
            Ok(at) => {
                if let Some(old) = shard.get_mut(at) {
                    self.segment_bytes -= old.bytes();
                    *old = entry;
                }
            }
            Err(at) => {
                if shard.len() == shard.capacity() {
                    shard.reserve_exact((shard.len() / 8).max(16));
                }
                shard.insert(at, entry);
                self.files += 1;
            }
        }
        self.segment_bytes += entry.bytes();
    }

    /// Adds what was found on disk, unless it is known: then it is newer.
    pub(super) fn found(&mut self, entries: impl Iterator<Item = Entry>) {
        let now = self.clock;
        for mut entry in entries {
            if self.find(&entry.digest).is_none() {
                // A file from the future would never go.
                entry.used = entry.used.min(now);
                self.insert(entry);
            }
        }
    }

    /// Adds a layer found on disk, unless it is known.
    pub(super) fn found_layer(&mut self, layer: Digest, bytes: u64, used: u64) {
        let used = used.min(self.clock);
        let entry = self.layers.entry(layer).or_default();
        if entry.bytes == 0 {
            entry.bytes = bytes;
            entry.used = entry.used.max(used);
            self.layer_bytes += bytes;
        }
    }

    pub(super) fn touch(&mut self, digest: &Digest) {
        let now = self.tick();
        let shard = self.shards.get_mut(shard_of(digest));
        let found = shard.and_then(|shard| {
            let at = shard.binary_search_by(|e| e.digest.cmp(digest)).ok()?;
            shard.get_mut(at)
        });
        if let Some(entry) = found {
            entry.used = now;
        }
    }

    /// Whether files of this name are being unlinked right now.
    pub(super) fn is_leaving(&self, digest: &Digest) -> bool {
        self.leaving.contains(digest)
    }

    /// Makes room in the books for a file that will be written; it is in use from now on.
    pub(super) fn reserve(&mut self, digest: Digest, bytes: u64) {
        *self.writing.entry(digest).or_insert(0) += 1;
        self.writing_bytes += bytes;
    }

    /// The end of a reservation; with `kept`, the segment is there now.
    pub(super) fn settle(&mut self, digest: &Digest, reserved: u64, kept: Option<u64>) {
        self.unreserve(digest, reserved);
        if let Some(bytes) = kept {
            let used = self.tick();
            self.insert(Entry::new(*digest, bytes, used));
        }
    }

    /// The end of a reservation for a file of a layer; what is kept of the layer takes `total` bytes now.
    pub(super) fn settle_layer(&mut self, layer: &Digest, reserved: u64, total: Option<u64>) {
        self.unreserve(layer, reserved);
        if let Some(total) = total {
            let used = self.tick();
            let entry = self.layers.entry(*layer).or_default();
            self.layer_bytes = self.layer_bytes - entry.bytes + total;
            entry.bytes = total;
            entry.used = used;
        }
    }

    fn unreserve(&mut self, digest: &Digest, reserved: u64) {
        self.writing_bytes -= reserved;
        if let Some(count) = self.writing.get_mut(digest) {
            *count -= 1;
            if *count == 0 {
                self.writing.remove(digest);
            }
        }
    }

    /// Somebody needs this layer's files.
    pub(super) fn hold(&mut self, layer: Digest) {
        let used = self.tick();
        let entry = self.layers.entry(layer).or_default();
        entry.holds += 1;
        entry.used = used;
    }

    /// Somebody needs them no more.
    pub(super) fn release(&mut self, layer: &Digest) {
        let used = self.tick();
        if let Some(entry) = self.layers.get_mut(layer) {
            entry.holds = entry.holds.saturating_sub(1);
            entry.used = used;
        }
    }

    /// Forgets a layer whose files were removed on purpose.
    pub(super) fn forget_layer(&mut self, layer: &Digest) {
        if let Some(entry) = self.layers.get_mut(layer) {
            self.layer_bytes -= entry.bytes;
            entry.bytes = 0;
        }
        self.drop_empty(layer);
    }

    fn drop_empty(&mut self, layer: &Digest) {
        let empty = |e: &LayerEntry| e.bytes == 0 && e.holds == 0 && !e.pinned;
        if self.layers.get(layer).is_some_and(empty) {
            self.layers.remove(layer);
        }
    }

    /// All layers that are described: bytes, and whether somebody holds it.
    pub(super) fn described(&self) -> Vec<(Digest, u64, bool)> {
        let layers = self.layers.iter().filter(|(_, e)| e.bytes > 0);
        layers.map(|(d, e)| (*d, e.bytes, e.holds > 0)).collect()
    }

    /// Bytes that nothing may evict, however many of them are there by now: pinned segments, descriptions of held and pinned
    /// layers, folders.
    pub(super) fn sure_bytes(&self) -> u64 {
        let layers = self.layers.values().filter(|e| e.holds > 0 || e.pinned);
        layers.map(|e| e.bytes).sum::<u64>() + self.pinned_bytes + self.fixed_bytes
    }

    /// Bytes that pinning these segments would add to [`Ledger::sure_bytes`].
    pub(super) fn pin_cost(&self, segments: &[(Digest, u64)]) -> u64 {
        let mut seen = HashSet::new();
        let new = segments
            .iter()
            .filter(|(digest, _)| !self.pinned.contains_key(digest) && seen.insert(*digest));
        new.map(|(_, bytes)| *bytes).sum()
    }

    /// Pins a layer and its segments with the bytes each can take.
    pub(super) fn pin(&mut self, layer: Digest, segments: &[(Digest, u64)]) {
        self.layers.entry(layer).or_default().pinned = true;
        for (digest, bytes) in segments {
            let entry = self.pinned.entry(*digest).or_default();
            entry.pins += 1;
            if entry.pins == 1 {
                entry.bytes = *bytes;
                self.pinned_bytes += *bytes;
            }
        }
    }

    /// Takes a pin away.
    pub(super) fn unpin(&mut self, layer: &Digest, segments: &[(Digest, u64)]) {
        if let Some(entry) = self.layers.get_mut(layer) {
            entry.pinned = false;
        }
        self.drop_empty(layer);
        for (digest, _) in segments {
            if let Some(entry) = self.pinned.get_mut(digest) {
                entry.pins -= 1;
                if entry.pins == 0 {
                    self.pinned_bytes -= entry.bytes;
                    self.pinned.remove(digest);
                }
            }
        }
    }

    fn may_go(&self, digest: &Digest) -> bool {
        (self.pinned.is_empty() || !self.pinned.contains_key(digest))
            && (self.writing.is_empty() || !self.writing.contains_key(digest))
    }

    fn layer_may_go(&self, layer: &Digest, entry: &LayerEntry) -> bool {
        entry.bytes > 0 && entry.holds == 0 && !entry.pinned && !self.writing.contains_key(layer)
    }

    /// How many segments there are too many.
    pub(super) fn files_over(&self) -> usize {
        self.files.saturating_sub(self.files_max)
    }

    /// Takes out what was used longest ago until `wanted` is met or nothing may go. It stays counted until [`Ledger::freed`].
    pub(super) fn choose(&mut self, wanted: Wanted) -> Vec<Victim> {
        // (used, bytes, is a segment) of all that may go: 24 bytes each, for as long as this takes.
        let segments = self.shards.iter().flatten();
        let mut order: Vec<(u64, u64, bool)> = segments
            .filter(|e| self.may_go(&e.digest))
            .map(|e| (e.used, e.bytes(), true))
            .collect();
        let layers = self.layers.iter();
        order.extend(
            layers
                .filter(|(layer, e)| self.layer_may_go(layer, e))
                .map(|(_, e)| (e.used, e.bytes, false)),
        );
        order.sort_unstable_by_key(|(used, ..)| *used);
        let (mut bytes, mut files) = (0, 0);
        let mut last = None;
        // How many of those used at `last` go.
        let mut of_last = 0;
        for (used, size, is_segment) in order {
            if bytes >= wanted.bytes && files >= wanted.files {
                break;
            }
            bytes += size;
            files += usize::from(is_segment);
            of_last = if last == Some(used) { of_last + 1 } else { 1 };
            last = Some(used);
        }
        last.map_or_else(Vec::new, |last| self.take(last, of_last))
    }

    /// Takes out everything that may go and was used before `last`, and `of_last` of what was used then.
    fn take(&mut self, last: u64, mut of_last: usize) -> Vec<Victim> {
        let mut goes = |used: u64| match used.cmp(&last) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Greater => false,
            std::cmp::Ordering::Equal => {
                let goes = of_last > 0;
                of_last = of_last.saturating_sub(1);
                goes
            }
        };
        // Layers first: a mount may wait for one of them to be gone.
        let mut victims = Vec::new();
        for (layer, entry) in &self.layers {
            if self.layer_may_go(layer, entry) && goes(entry.used) {
                victims.push(Victim::Layer(*layer, entry.bytes));
            }
        }
        let mut shards = std::mem::take(&mut self.shards);
        for shard in &mut shards {
            shard.retain(|entry| {
                let leaves = self.may_go(&entry.digest) && goes(entry.used);
                if leaves {
                    victims.push(Victim::Segment(entry.digest, entry.bytes()));
                }
                !leaves
            });
        }
        self.shards = shards;
        for victim in &victims {
            let (digest, bytes) = match *victim {
                Victim::Segment(digest, bytes) => {
                    self.files -= 1;
                    self.segment_bytes -= bytes;
                    (digest, bytes)
                }
                Victim::Layer(layer, bytes) => {
                    self.layers.remove(&layer);
                    self.layer_bytes -= bytes;
                    (layer, bytes)
                }
            };
            self.leaving_bytes += bytes;
            self.leaving.insert(digest);
        }
        victims
    }

    /// A victim's files are gone, or (`stays`) could not be removed: then it is the youngest again.
    pub(super) fn freed(&mut self, victim: Victim, stays: bool) {
        let (Victim::Segment(digest, bytes) | Victim::Layer(digest, bytes)) = victim;
        self.leaving_bytes -= bytes;
        self.leaving.remove(&digest);
        if !stays {
            return;
        }
        let used = self.tick();
        match victim {
            Victim::Segment(..) => self.insert(Entry::new(digest, bytes, used)),
            Victim::Layer(..) => self.found_layer(digest, bytes, used),
        }
    }
}

#[cfg(test)]
mod tests;
