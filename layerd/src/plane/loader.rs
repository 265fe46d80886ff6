//! Gives readers verified segments: from memory, from the cache on disk, or from the control process.
//!
//! A read takes the lock once. What is in memory is answered at once; everything else becomes a pending entry
//! (`pending`) and a task for a few worker threads: look on disk, decode, verify, answer. Demand goes before read-ahead, and one worker
//! at least is never busy with read-ahead. No thread ever waits for the control process: it is asked, and its answer
//! is another task. **Verification here is the only way out of the store**: no byte reaches the kernel before the whole segment has
//! been decoded and its BLAKE3 compared, whether it came from disk or from an origin.

use std::collections::VecDeque;
use std::collections::hash_map::Entry as Slot;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use imgstore::format::frame;
use imgstore::ids::{Digest, to_u64};
use imgstore::store::cache::SegmentFiles;

use super::latency::Latency;
use super::layer::LayerState;
use super::link::Link;
use super::loose::Loose;
use super::lru::{Plain, PlainLru};
use super::pending::{Entry, OnSegment, Pending, Place, Stage, Waiter};
use crate::kill::step;
use crate::memory::resident_bytes;
use crate::protocol::{PlaneNow, Provenance, ToControl};

/// Threads that look, decode and verify.
const WORKERS: usize = 3;
/// Of those, how many may work on read-ahead at a time.
const PREFETCH_WORKERS_MAX: usize = WORKERS - 1;
/// A worker decodes with zstd's state on the heap; its own stack stays small.
const STACK_BYTES: usize = 512 << 10;
/// Read segments are reported for the order of eviction in batches of this many.
const USED_BATCH: usize = 64;

enum Task {
    /// Find out which of these segments are cached; load those, ask for the others.
    Look {
        layer: Arc<LayerState>,
        indexes: Vec<usize>,
    },
    /// Load a cached segment.
    Load(Digest),
    /// Decode what the control process sent.
    Decode {
        digest: Digest,
        frame: Vec<u8>,
        from: Provenance,
    },
}

impl Task {
    fn is_about(&self, wanted: &Digest) -> bool {
        match self {
            Self::Look { .. } => false,
            Self::Load(digest) | Self::Decode { digest, .. } => digest == wanted,
        }
    }
}

struct State {
    lru: PlainLru,
    loose: Loose,
    pending: Pending,
    demand: VecDeque<Task>,
    prefetch: VecDeque<Task>,
    prefetching: usize,
    used: Vec<Digest>,
}

struct Shared {
    files: SegmentFiles,
    link: Arc<Link>,
    patience: Duration,
    latency: Latency,
    state: Mutex<State>,
    /// There is a task.
    work: Condvar,
    /// There is a reader with a deadline.
    waiting: Condvar,
}

/// See the head of this file.
#[derive(Clone)]
pub(crate) struct Loader {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").finish_non_exhaustive()
    }
}

/// What a loader needs.
#[derive(Debug)]
pub(crate) struct LoaderSettings {
    /// Bytes of plain segments kept in memory.
    pub(crate) memory_bytes_max: u64,
    /// How long a reader waits for an origin.
    pub(crate) patience: Duration,
}

impl Loader {
    /// Starts the workers on a cache.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn start(
        files: SegmentFiles,
        link: Arc<Link>,
        settings: &LoaderSettings,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            files,
            link,
            patience: settings.patience,
            latency: Latency::new(settings.patience),
            state: Mutex::new(State {
                lru: PlainLru::new(settings.memory_bytes_max),
                loose: Loose::default(),
                pending: Pending::default(),
                demand: VecDeque::new(),
                prefetch: VecDeque::new(),
                prefetching: 0,
                used: Vec::new(),
            }),
            work: Condvar::new(),
            waiting: Condvar::new(),
        });
        for n in 0..WORKERS {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("load-{n}"))
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work())?;
        }
        let timer = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("deadlines".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || timer.watch_deadlines())?;
        Ok(Self { shared })
    }

    /// Gives each of these segments of a layer to its callback: now, from this thread, if all are in memory or as soon as
    /// each is there, from another thread.
    pub(crate) fn read(&self, layer: &Arc<LayerState>, wanted: Vec<(usize, OnSegment)>) {
        let deadline = Instant::now() + self.shared.patience;
        let mut now = Vec::new();
        let mut fresh = Vec::new();
        let mut promoted = Vec::new();
        let mut waits = false;
        let mut hits = 0;
        let mut state = self.shared.lock();
        for (index, done) in wanted {
            let place = Place {
                layer: Arc::clone(layer),
                index,
            };
            let Some((digest, _)) = place.segment() else {
                now.push((done, None));
                continue;
            };
            if let Some(plain) = state.lru.get(&digest) {
                hits += 1;
                now.push((done, Some(plain)));
                continue;
            }
            let waiter = Waiter {
                place,
                deadline,
                done,
            };
            waits = true;
            match state.join(digest, waiter) {
                Joined::Fresh => fresh.push(index),
                Joined::Promoted => promoted.push(digest),
                Joined::Waiting => {}
            }
        }
        drop(state);
        if waits {
            // Also a reader of what was on its way has a deadline.
            self.shared.waiting.notify_one();
        }
        if !fresh.is_empty() {
            // Looking whether a file is there takes microseconds and saves the way through a worker.
            self.shared.look(layer, fresh);
        }
        for digest in promoted {
            self.shared.link.send(&ToControl::Promote { digest });
        }
        if hits > 0 {
            layer.count(|c| c.cache_hits += hits);
        }
        for (done, plain) in now {
            done(plain.as_ref().ok_or("no such segment"));
        }
        if hits > 0 && layer.counted {
            let latency = &self.shared.latency;
            let took = latency.since(deadline);
            (0..hits).for_each(|_| latency.hit.observe(took));
        }
    }

    /// What is going on, and how long it takes.
    pub(crate) fn now(&self) -> PlaneNow {
        let state = self.shared.lock();
        let entries = state.pending.entries.values();
        let waiting: usize = entries.map(|entry| entry.waiters.len()).sum();
        let latency = &self.shared.latency;
        PlaneNow {
            hit: latency.hit.observed(),
            miss: latency.miss.observed(),
            failed: latency.failed.observed(),
            pending_segments: to_u64(state.pending.entries.len()),
            waiting_reads: to_u64(waiting),
            queued_tasks: to_u64(state.demand.len() + state.prefetch.len()),
            memory_bytes: state.lru.bytes(),
            resident_bytes: resident_bytes(),
        }
    }

    /// Loads segments that will probably be read soon, if they are not here or on their way.
    pub(crate) fn prefetch(&self, layer: &Arc<LayerState>, first: usize, end: usize) {
        let mut indexes = Vec::new();
        let mut state = self.shared.lock();
        for index in first..end {
            let place = Place {
                layer: Arc::clone(layer),
                index,
            };
            let Some((digest, _)) = place.segment() else {
                break;
            };
            if state.lru.contains(&digest) {
                continue;
            }
            if let Slot::Vacant(slot) = state.pending.entries.entry(digest) {
                slot.insert(Entry::looking(place, None));
                indexes.push(index);
            }
        }
        if indexes.is_empty() {
            return;
        }
        // Looking is cheap and starts the requests: it does not queue behind other read-ahead.
        state.demand.push_back(Task::Look {
            layer: Arc::clone(layer),
            indexes,
        });
        drop(state);
        self.shared.work.notify_one();
    }

    /// A frame from the control process. One that is `cached` is kept only for those who wait for it.
    pub(crate) fn frame(&self, digest: Digest, frame: Vec<u8>, from: Provenance, cached: bool) {
        let mut state = self.shared.lock();
        let Some(entry) = state.pending.entries.get_mut(&digest) else {
            if !cached {
                state.loose.keep(digest, frame, from);
            }
            return;
        };
        tracing::trace!(?digest, "frame came");
        entry.stage = Stage::Decoding;
        let prefetch = entry.prefetch;
        if !prefetch && state.pending.entries.len() == 1 {
            // Nothing else can arrive: decode here instead of waking a worker.
            drop(state);
            return self.shared.decode(digest, &frame, Source::Origin(from));
        }
        let task = Task::Decode {
            digest,
            frame,
            from,
        };
        if prefetch {
            state.prefetch.push_back(task);
        } else {
            state.demand.push_back(task);
        }
        drop(state);
        self.shared.work.notify_one();
    }

    /// The control process has no frame for these.
    pub(crate) fn no_frame(&self, digests: &[Digest], reason: &str, foreseen: bool) {
        for digest in digests {
            if foreseen && self.shared.lock().pending.is_awaited(digest) {
                // The reader came when the trace's request was over. Asking twice fetches once.
                self.shared.ask(digest);
            } else if !self.shared.asks_for_reader(digest, reason) {
                self.shared.fail(digest, reason);
            }
        }
    }

    /// Says everything that is needed again: the control process is new.
    pub(crate) fn ask_again(&self) {
        let asked = self.shared.lock().pending.asked();
        for (layer, first, count, prefetch) in asked {
            self.shared.link.send(&ToControl::Need {
                layer,
                first,
                count,
                prefetch,
            });
        }
    }

    /// Says something to the control process.
    pub(crate) fn say(&self, message: &ToControl) {
        self.shared.link.send(message);
    }

    /// Reports the segments read from the cache since the last time.
    pub(crate) fn report_used(&self) {
        let digests = std::mem::take(&mut self.shared.lock().used);
        if !digests.is_empty() {
            self.shared.link.send(&ToControl::Used { digests });
        }
    }
}

enum Joined {
    /// Nobody had asked for it.
    Fresh,
    /// Read-ahead waits for the control process: tell it that somebody waits now.
    Promoted,
    /// It is on its way.
    Waiting,
}

impl State {
    /// Makes a task of the frame of a pending segment, if it came by itself.
    fn decode_loose(&mut self, digest: &Digest) -> bool {
        let Some(entry) = self.pending.entries.get_mut(digest) else {
            return false;
        };
        let Some((frame, from)) = self.loose.take(digest) else {
            return false;
        };
        entry.stage = Stage::Decoding;
        let queue = if entry.prefetch {
            &mut self.prefetch
        } else {
            &mut self.demand
        };
        queue.push_back(Task::Decode {
            digest: *digest,
            frame,
            from,
        });
        true
    }

    /// Adds a reader to a segment that is not in memory.
    fn join(&mut self, digest: Digest, waiter: Waiter) -> Joined {
        let entry = match self.pending.entries.entry(digest) {
            Slot::Occupied(entry) => entry.into_mut(),
            Slot::Vacant(slot) => {
                slot.insert(Entry::looking(waiter.place.clone(), Some(waiter)));
                return Joined::Fresh;
            }
        };
        entry.waiters.push(waiter);
        if !std::mem::take(&mut entry.prefetch) {
            return Joined::Waiting;
        }
        if entry.stage == Stage::Asked {
            return Joined::Promoted;
        }
        let at = self.prefetch.iter().position(|t| t.is_about(&digest));
        if let Some(task) = at.and_then(|at| self.prefetch.remove(at)) {
            self.demand.push_back(task);
        }
        Joined::Waiting
    }
}

/// Where a frame was found.
enum Source {
    Cache,
    Origin(Provenance),
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.demand.pop_front() {
                drop(state);
                self.run(task);
                state = self.lock();
            } else if state.prefetching < PREFETCH_WORKERS_MAX
                && let Some(task) = state.prefetch.pop_front()
            {
                state.prefetching += 1;
                drop(state);
                self.run(task);
                state = self.lock();
                state.prefetching -= 1;
            } else {
                state = self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn run(&self, task: Task) {
        match task {
            Task::Look { layer, indexes } => self.look(&layer, indexes),
            Task::Load(digest) => self.load(digest),
            Task::Decode {
                digest,
                frame,
                from,
            } => self.decode(digest, &frame, Source::Origin(from)),
        }
    }

    /// Sorts segments into cached ones, which become tasks, and missing ones, which are asked for run by run.
    fn look(&self, layer: &Arc<LayerState>, indexes: Vec<usize>) {
        let mut cached = Vec::new();
        // (first index, count, whether nobody waits): a reader may have come since the task was queued.
        let mut runs: Vec<(usize, usize, bool)> = Vec::new();
        for index in indexes {
            let Some(segment) = layer.segments.get(index) else {
                continue;
            };
            let digest = segment.digest();
            // A disk that fails is treated like a cache without the segment.
            let there = self.files.contains(&digest).unwrap_or(false);
            let mut state = self.lock();
            if state.decode_loose(&digest) {
                self.work.notify_one();
                continue;
            }
            // Its frame may have come since the look: it is answered already, or about to be.
            let entry = state.pending.entries.get_mut(&digest);
            let Some(entry) = entry.filter(|entry| entry.stage != Stage::Decoding) else {
                continue;
            };
            if there {
                entry.stage = Stage::Decoding;
                cached.push(digest);
                continue;
            }
            entry.ask();
            let idle = entry.prefetch;
            drop(state);
            match runs.last_mut() {
                Some((first, count, i)) if *first + *count == index && *i == idle => *count += 1,
                _ => runs.push((index, 1, idle)),
            }
        }
        for (first, count, prefetch) in runs {
            tracing::trace!(first, count, prefetch, "need");
            self.link.send(&ToControl::Need {
                layer: layer.digest,
                first,
                count,
                prefetch,
            });
        }
        self.queue_loads(cached);
    }

    fn queue_loads(&self, cached: Vec<Digest>) {
        if cached.is_empty() {
            return;
        }
        let mut state = self.lock();
        for digest in cached {
            let entry = state.pending.entries.get(&digest);
            if entry.is_some_and(|entry| !entry.prefetch) {
                state.demand.push_back(Task::Load(digest));
            } else {
                state.prefetch.push_back(Task::Load(digest));
            }
        }
        drop(state);
        self.work.notify_all();
    }

    fn plain_len(&self, digest: &Digest) -> Option<u64> {
        let state = self.lock();
        let place = &state.pending.entries.get(digest)?.place;
        place.segment().map(|(_, len)| len)
    }

    fn load(&self, digest: Digest) {
        let Some(len) = self.plain_len(&digest) else {
            return;
        };
        match self.files.read(&digest, frame::frame_len_max(len)) {
            Ok(Some(frame)) => self.decode(digest, &frame, Source::Cache),
            Ok(None) => self.ask(&digest),
            Err(error) => {
                tracing::warn!(path = %self.files.path(&digest).display(), %error, "cannot read a cached segment");
                self.ask(&digest);
            }
        }
    }

    /// Asks the control process for one segment.
    fn ask(&self, digest: &Digest) {
        let mut state = self.lock();
        let Some(entry) = state.pending.entries.get_mut(digest) else {
            return;
        };
        entry.ask();
        let need = ToControl::Need {
            layer: entry.place.layer.digest,
            first: entry.place.index,
            count: 1,
            prefetch: entry.prefetch,
        };
        drop(state);
        self.link.send(&need);
    }

    /// A request that came to nothing must not fail a reader who only joined it, read-ahead's or another reader's: asks
    /// once more, now for this reader. Whether it did.
    fn asks_for_reader(&self, digest: &Digest, reason: &str) -> bool {
        let mut state = self.lock();
        let entry = state.pending.entries.get_mut(digest);
        let patience = self.patience;
        let entry = entry.filter(|entry| entry.has_new_reader(patience));
        let joined = entry.map(Entry::turn_to_another_layer).is_some();
        drop(state);
        if joined {
            tracing::debug!(%digest, reason, "asking again for a reader who came later");
            self.ask(digest);
        }
        joined
    }

    /// The length of a pending segment, and a buffer of that length (with old bytes in it).
    fn buffer(&self, digest: &Digest) -> Option<Box<[u8]>> {
        let mut state = self.lock();
        let (_, len) = state.pending.entries.get(digest)?.place.segment()?;
        let spare = state.lru.take_spare(len);
        drop(state);
        Some(spare.unwrap_or_else(|| vec![0; imgstore::ids::to_usize(len)].into_boxed_slice()))
    }

    fn decode(&self, digest: Digest, stored: &[u8], source: Source) {
        step("decoding");
        let Some(mut plain) = self.buffer(&digest) else {
            return;
        };
        let verified = frame::verified_into(stored, &digest, &mut plain);
        tracing::trace!(?digest, "decoded");
        step("decoded");
        match verified {
            Ok(()) => self.finish(digest, &Arc::new(plain), &source),
            Err(error) => self.damaged(digest, &error.to_string(), source),
        }
    }

    /// Keeps a verified segment and answers everybody who waits for it.
    fn finish(&self, digest: Digest, plain: &Plain, source: &Source) {
        let mut state = self.lock();
        let Some(entry) = state.pending.entries.remove(&digest) else {
            return;
        };
        state.lru.insert(digest, plain);
        let mut report = false;
        if matches!(source, Source::Cache) {
            state.used.push(digest);
            report = state.used.len() >= USED_BATCH;
        }
        let used = if report {
            std::mem::take(&mut state.used)
        } else {
            Vec::new()
        };
        drop(state);
        let from_origin = matches!(source, Source::Origin(_));
        entry.place.layer.count(|c| {
            c.prefetched_segments += u64::from(entry.prefetch);
        });
        for waiter in entry.waiters {
            waiter.place.layer.count(|c| {
                if from_origin {
                    c.cache_misses += 1;
                } else {
                    c.cache_hits += 1;
                }
            });
            if waiter.place.layer.counted {
                let latency = &self.latency;
                let histogram = if from_origin {
                    &latency.miss
                } else {
                    &latency.hit
                };
                histogram.observe(latency.since(waiter.deadline));
            }
            (waiter.done)(Ok(plain));
        }
        tracing::trace!(?digest, "answered");
        if report {
            self.link.send(&ToControl::Used { digests: used });
        }
    }

    /// A segment whose bytes are not what they should be: counted, logged, and fetched once more.
    fn damaged(&self, digest: Digest, found: &str, source: Source) {
        let mut state = self.lock();
        let Some(entry) = state.pending.entries.get_mut(&digest) else {
            return;
        };
        let place = entry.place.clone();
        let last = match &source {
            Source::Cache => false,
            Source::Origin(_) => std::mem::replace(&mut entry.second_try, true),
        };
        if !last {
            entry.ask();
            entry.asked_idle = false;
        }
        drop(state);
        place.layer.count(|c| c.verify_failures += 1);
        let (layer, index) = (place.layer.digest, place.index);
        match source {
            Source::Cache => {
                let path = self.files.path(&digest);
                tracing::warn!(%layer, segment = index, expected = %digest, found, path = %path.display(),
                    "a cached segment is damaged; fetching it again");
                if let Err(error) = self.files.remove(&digest) {
                    tracing::warn!(path = %path.display(), %error, "cannot remove a damaged segment");
                }
                self.ask(&digest);
            }
            Source::Origin(from) => {
                tracing::error!(%layer, segment = index, expected = %digest, found, pack = %from.pack,
                    offset = from.offset, origin = from.origin,
                    "{}", if last { "a segment from the origin is damaged again; its readers get EIO" } else { "a segment from the origin is damaged; fetching it again" });
                if last {
                    self.fail(&digest, "damaged on the origin");
                } else {
                    self.link.send(&ToControl::Again { layer, index });
                }
            }
        }
    }

    /// The layer that was asked cannot give this segment: another layer of a reader is asked, which may have it in another
    /// pack. Without one, everybody who waits gets EIO.
    fn fail(&self, digest: &Digest, reason: &str) {
        let mut state = self.lock();
        let Some(entry) = state.pending.entries.get_mut(digest) else {
            return;
        };
        let from = entry.place.layer.digest;
        if entry.turn_to_another_layer() {
            let to = entry.place.layer.digest;
            drop(state);
            tracing::warn!(%digest, layer = %from, other = %to, reason, "a segment cannot be had from one layer's packs; trying another layer's");
            return self.ask(digest);
        }
        let Some(entry) = state.pending.entries.remove(digest) else {
            return;
        };
        drop(state);
        let (layer, index) = (entry.place.layer.digest, entry.place.index);
        if entry.waiters.is_empty() {
            tracing::debug!(%layer, segment = index, %digest, reason, "read-ahead came to nothing");
        } else {
            tracing::error!(%layer, segment = index, %digest, readers = entry.waiters.len(), reason,
                "a segment cannot be had; its readers get EIO");
        }
        for waiter in entry.waiters {
            waiter.place.layer.count(|c| c.cache_misses += 1);
            self.latency
                .failed
                .observe(self.latency.since(waiter.deadline));
            (waiter.done)(Err(reason));
        }
    }
}

mod deadlines;
#[cfg(test)]
mod failing_disk_tests;
#[cfg(test)]
mod tests;
