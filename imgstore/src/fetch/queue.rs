//! Ranges waiting to be fetched, and the threads that fetch them.
//!
//! Three queues, all bounded: what a reader waits for, what read-ahead hopes for, and what a trace foresees. A thread takes
//! demand first, and some threads never take prefetch, so that prefetch cannot occupy them all. A trace's ranges come one
//! after the other, with a bound of bytes on their way, and none is begun while a reader's range waits or is on its way: what is
//! fetched for nobody must not take bandwidth from somebody. A segment is in the queues or on its way at most once; asking
//! again for one that only waits as prefetch moves its range to the demand queue, and of a trace's range a piece that begins
//! there; one who does not follow the trace takes single segments out, and has them fetched as without it. Threads are started when needed, up to a bound, and stay. A range has its deadline from the moment somebody wants
//! it, one of a trace from its beginning. An origin that keeps a thread far beyond that (a dead network file system) has it;
//! another one is started in its place, up to a bound.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ahead::Ahead;
use super::origins::{Fetched, OriginSet, Spent};
use super::pace::Pace;
use super::plan::{RANGE_BYTES_MAX, RangePlan, plan};
use crate::format::manifest::Segment;
use crate::format::names;
use crate::ids::Digest;
use crate::origin::OriginError;
use crate::store::layer::Layer;
use traced::TRACED_JOBS_MAX;

/// Most requests at a time.
const THREADS_MAX: usize = 16;
/// Of those, threads that may carry prefetch.
const PREFETCH_THREADS_MAX: usize = 8;
/// Most threads that may be lost to origins that never answer.
const LOST_MAX: usize = 64;
/// A thread is lost when its request is over its deadline by this much.
const LOST_AFTER: Duration = Duration::from_secs(2);
/// Most ranges waiting for a thread, by kind.
const DEMAND_MAX: usize = 8192;
const PREFETCH_MAX: usize = 64;
const TRACED_MAX: usize = 8192;
/// Bytes of traces' ranges on their way, unless told otherwise.
pub const TRACED_BYTES_MAX: u64 = 4 << 20;
/// A fetch thread needs little stack: a request, no recursion.
const STACK_BYTES: usize = 512 << 10;

/// Why a segment is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A reader waits.
    Demand,
    /// Read-ahead.
    Prefetch,
    /// A trace says that it will be read.
    Trace,
    /// What came before was damaged: fetch it once more, from another origin if there is one.
    Again,
}

/// Why there are no bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The origins failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// Too many ranges are waiting.
    #[error("more than {DEMAND_MAX} ranges wait to be fetched")]
    Busy,
}

/// What came of one range.
#[derive(Debug)]
pub struct Delivery {
    /// The layer it was fetched for.
    pub layer: Arc<Layer>,
    /// Which bytes hold what.
    pub plan: RangePlan,
    /// Why it was asked for.
    pub priority: Priority,
    /// The bytes of the whole range.
    pub outcome: Result<Fetched, FetchError>,
    /// What it cost.
    pub spent: Spent,
    /// Segments for which a reader came when they were on their way already.
    pub joined: Vec<usize>,
    /// Which fetch it is, for [`FetchQueue::settle`].
    pub run: u64,
}

/// Takes deliveries, on the thread that fetched. It may block: that thread does nothing else. What it does not
/// [settle](FetchQueue::settle) and somebody asks for meanwhile is fetched again when it returns.
pub type Sink = Arc<dyn Fn(Delivery) + Send + Sync>;

#[derive(Debug)]
struct Job {
    layer: Arc<Layer>,
    plan: RangePlan,
    priority: Priority,
    /// When somebody began to want it.
    asked: Instant,
}

impl Job {
    /// The size of the pack that the range is in.
    fn pack_size(&self) -> u64 {
        let mut packs = self.layer.placement.packs.iter();
        let pack = packs.find(|pack| pack.digest == self.plan.pack);
        pack.map_or(0, |pack| pack.size)
    }

    fn digests(&self) -> impl Iterator<Item = Digest> {
        let segments = &self.layer.manifest.segments;
        let parts = self.plan.parts.iter();
        parts.filter_map(|part| segments.get(part.index).map(Segment::digest))
    }
}

#[derive(Debug, Default)]
struct State {
    demand: VecDeque<Job>,
    prefetch: VecDeque<Job>,
    traced: VecDeque<Job>,
    /// Segments in a queue or being fetched.
    wanted: HashSet<Digest>,
    /// Of those, the ones that somebody asked for again, for a reader.
    joined: HashSet<Digest>,
    /// Segments that have come and that the sink has not settled: by which fetch, and whether somebody has asked since.
    arrived: HashMap<Digest, (u64, bool)>,
    /// The deadlines of what is being fetched.
    running: BTreeMap<u64, Instant>,
    next_run: u64,
    threads: usize,
    idle: usize,
    prefetching: usize,
    demanding: usize,
    tracing: usize,
    tracing_bytes: u64,
    ahead: Ahead,
    /// Bound of the next range of a trace, as the link is known so far; 0 before.
    traced_range_bytes: u64,
    /// Ranges that are being fetched or delivered.
    busy: usize,
}

/// What a queue has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueDepth {
    /// Ranges that readers wait for and that no thread has taken.
    pub demand: usize,
    /// Ranges of read-ahead that no thread has taken.
    pub prefetch: usize,
    /// Ranges of traces that wait.
    pub traced: usize,
    /// Ranges that are being fetched or delivered.
    pub running: usize,
}

struct Shared {
    origins: OriginSet,
    sink: Sink,
    patience: Duration,
    traced_bytes_max: u64,
    state: Mutex<State>,
    work: Condvar,
    pace: Pace,
}

/// See the head of this file.
#[derive(Clone)]
pub struct FetchQueue {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for FetchQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FetchQueue")
            .field("origins", &self.shared.origins)
            .field("state", &*self.shared.lock())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job, waiting for one.
    fn next(&self) -> Job {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.demand.pop_front() {
                state.busy += 1;
                state.demanding += 1;
                return job;
            }
            if let Some(job) = state.next_traced(self.traced_bytes_max) {
                state.busy += 1;
                return job;
            }
            if state.prefetching < PREFETCH_THREADS_MAX
                && let Some(job) = state.prefetch.pop_front()
            {
                state.prefetching += 1;
                state.busy += 1;
                return job;
            }
            state.idle += 1;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

impl FetchQueue {
    /// A queue over `origins` that gives up a range after `patience`.
    pub fn new(origins: OriginSet, patience: Duration, sink: Sink) -> Self {
        Self::with_budget(origins, patience, TRACED_BYTES_MAX, sink)
    }

    /// As [`FetchQueue::new`], with another bound of the bytes of traces that are on their way. One range may always be.
    pub fn with_budget(
        origins: OriginSet,
        patience: Duration,
        traced_bytes_max: u64,
        sink: Sink,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                origins,
                sink,
                patience,
                traced_bytes_max,
                state: Mutex::new(State::default()),
                work: Condvar::new(),
                pace: Pace::default(),
            }),
        }
    }

    /// The origins that are asked.
    pub fn origins(&self) -> &OriginSet {
        &self.shared.origins
    }

    /// Whether so many more bytes in a request are cheaper than another request, as far as the origins have shown.
    pub fn worth(&self, bytes: u64) -> bool {
        self.shared.pace.worth(bytes)
    }

    /// Whether a reader of this segment goes along a trace of the layer that waits: what it takes of that is decided there.
    pub fn follows(&self, layer: &Digest, index: usize) -> bool {
        let state = self.shared.lock();
        let mut waiting = state.traced.iter();
        state.ahead.is_in_order(layer, index) && waiting.any(|job| job.layer.digest == *layer)
    }

    /// What there is to do now.
    pub fn depth(&self) -> QueueDepth {
        let state = self.shared.lock();
        QueueDepth {
            demand: state.demand.len(),
            prefetch: state.prefetch.len(),
            traced: state.traced.len(),
            running: state.busy,
        }
    }

    /// A reader now waits for segments that were asked for as prefetch: their ranges come next, if they still wait.
    pub fn promote(&self, digests: &[Digest]) {
        let mut state = self.shared.lock();
        for digest in digests {
            state.promote(digest, &self.shared.pace);
        }
        drop(state);
        self.shared.work.notify_all();
    }

    /// Whether a segment has come and is not settled yet.
    pub fn has_arrived(&self, digest: &Digest) -> bool {
        self.shared.lock().arrived.contains_key(digest)
    }

    /// The sink has put a segment of its delivery `run` where readers find it: from now on asking means fetching. Whether somebody
    /// asked since it came, and must be given it.
    pub fn settle(&self, digest: &Digest, run: u64) -> bool {
        self.shared.lock().settle(digest, run)
    }

    /// What is known of the link before anything came through the queue: the first ranges of traces are as long as that allows.
    pub fn hint_pace(&self, bytes_per_ms: u64) {
        let mut state = self.shared.lock();
        if state.traced_range_bytes == 0 {
            state.set_pace(bytes_per_ms);
        }
    }

    /// Whether those who read do not say what they read of what a trace brought: it is followed to its end then.
    pub fn set_blind(&self, blind: bool) {
        self.shared.lock().ahead.set_blind(blind);
        self.shared.work.notify_all();
    }

    /// Of what a trace brought of this layer, so many stored bytes were read: it may be followed further.
    pub fn traced_read(&self, layer: &Digest, bytes: u64) {
        let mut state = self.shared.lock();
        state.ahead.read(layer, bytes);
        let more = !state.traced.is_empty();
        drop(state);
        if more {
            self.shared.work.notify_one();
        }
    }

    /// Forgets the ranges of traces that wait, of the layers that `layer` says yes to; their segments.
    pub fn cancel_traced(&self, layer: impl Fn(&Digest) -> bool) -> Vec<Digest> {
        let mut state = self.shared.lock();
        state.ahead.forget(&layer);
        let (gone, kept) = std::mem::take(&mut state.traced)
            .into_iter()
            .partition(|job| layer(&job.layer.digest));
        state.traced = kept;
        let digests: Vec<Digest> = VecDeque::iter(&gone).flat_map(Job::digests).collect();
        for digest in &digests {
            state.wanted.remove(digest);
        }
        digests
    }

    /// Asks for segments of a layer. Those that are asked for already are left out (and moved forward if a reader now
    /// waits for them); the others are delivered, range by range, in any order.
    pub fn push(&self, layer: &Arc<Layer>, indexes: &[usize], priority: Priority) {
        let mut refused = Vec::new();
        let asked = Instant::now();
        let mut state = self.shared.lock();
        let fresh = state.want_all(layer, indexes, priority, &self.shared.pace);
        if priority == Priority::Trace {
            state.ahead.start(layer.digest);
        }
        let bytes_max = match priority {
            // Cut when they begin, as the link then is.
            Priority::Trace => u64::MAX,
            _ => RANGE_BYTES_MAX,
        };
        for plan in plan(&layer.placement, fresh, bytes_max) {
            let job = Job {
                layer: Arc::clone(layer),
                plan,
                priority,
                asked,
            };
            let (queue, max) = match priority {
                Priority::Prefetch => (&mut state.prefetch, PREFETCH_MAX),
                Priority::Trace => (&mut state.traced, TRACED_MAX),
                Priority::Demand | Priority::Again => (&mut state.demand, DEMAND_MAX),
            };
            if queue.len() < max {
                queue.push_back(job);
            } else {
                for digest in job.digests() {
                    state.wanted.remove(&digest);
                }
                refused.push(job);
            }
        }
        let traced = state.traced.len().min(TRACED_JOBS_MAX);
        let waiting = state.demand.len() + state.prefetch.len() + traced;
        let start = waiting
            .saturating_sub(state.idle)
            .min((THREADS_MAX + state.lost(asked)).saturating_sub(state.threads));
        state.threads += start;
        drop(state);
        self.shared.work.notify_all();
        for _ in 0..start {
            self.start_thread();
        }
        for job in refused {
            (self.shared.sink)(Delivery {
                layer: job.layer,
                plan: job.plan,
                priority,
                outcome: Err(FetchError::Busy),
                spent: Spent::default(),
                joined: Vec::new(),
                run: u64::MAX,
            });
        }
    }

    fn run(&self) -> ! {
        loop {
            let shared = &self.shared;
            let job = shared.next();
            let first = usize::from(job.priority == Priority::Again);
            let object = names::pack(&job.plan.pack);
            tracing::trace!(priority = ?job.priority, first = job.plan.parts.first().map(|p| p.index), segments = job.plan.parts.len(), bytes = job.plan.range.len, "fetching");
            let start = Instant::now();
            let from = match job.priority {
                Priority::Trace => start,
                _ => job.asked,
            };
            let deadline = from + shared.patience;
            let run = shared.lock().begin(deadline);
            let (outcome, spent) =
                shared
                    .origins
                    .fetch(&object, job.pack_size(), job.plan.range, first, deadline);
            let took = start.elapsed();
            if outcome.is_ok() && spent.requests == 1 {
                shared.pace.record(job.plan.range.len, took);
            }
            let mut state = shared.lock();
            state.running.remove(&run);
            let joined = state.finish(&job);
            if outcome.is_ok() {
                state.arrive(&job, run);
            }
            if job.priority == Priority::Trace && outcome.is_ok() {
                let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
                state.set_pace(job.plan.range.len.saturating_mul(1000) / us);
            }
            let more = !state.traced.is_empty();
            drop(state);
            if more {
                // The end of this one may be what a trace's next range waited for.
                shared.work.notify_all();
            }
            (shared.sink)(Delivery {
                layer: Arc::clone(&job.layer),
                plan: job.plan.clone(),
                priority: job.priority,
                outcome: outcome.map_err(FetchError::from),
                spent,
                joined,
                run,
            });
            let unsettled = shared.lock().leave(&job, run);
            self.push(&job.layer, &unsettled, Priority::Demand);
            shared.lock().busy -= 1;
        }
    }

    fn start_thread(&self) {
        let queue = self.clone();
        let spawned = std::thread::Builder::new()
            .name("fetch".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || queue.run());
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start a fetch thread");
            self.shared.lock().threads -= 1;
        }
    }
}

impl State {
    /// A fetch begins; its number, for `running`.
    fn begin(&mut self, deadline: Instant) -> u64 {
        let run = self.next_run;
        self.next_run += 1;
        self.running.insert(run, deadline);
        run
    }

    /// Threads that an origin keeps beyond all deadlines.
    fn lost(&self, now: Instant) -> usize {
        let lost = self.running.values().filter(|deadline| {
            deadline
                .checked_add(LOST_AFTER)
                .is_some_and(|end| end < now)
        });
        lost.count().min(LOST_MAX)
    }

    /// Those of these segments that must be queued now.
    fn want_all(
        &mut self,
        layer: &Layer,
        indexes: &[usize],
        priority: Priority,
        pace: &Pace,
    ) -> Vec<usize> {
        let Some(first) = indexes.first() else {
            return Vec::new();
        };
        let jumps = match priority {
            Priority::Demand | Priority::Again => !self.ahead.is_in_order(&layer.digest, *first),
            // Read-ahead of one who follows comes with the trace.
            Priority::Prefetch => self.ahead.has_jumped(&layer.digest),
            Priority::Trace => false,
        };
        let mut fresh = Vec::new();
        for index in indexes {
            let Some(segment) = layer.manifest.segments.get(*index) else {
                continue;
            };
            let digest = segment.digest();
            if jumps && self.take_out(&digest) {
                if priority != Priority::Prefetch {
                    self.ahead.jump(&layer.digest, *index);
                }
                fresh.push(*index);
            } else if self.want(&digest, priority, pace) {
                fresh.push(*index);
            }
        }
        fresh
    }

    /// Whether the segment must be queued now: it was not wanted yet. Moves a waiting one forward for a reader otherwise.
    fn want(&mut self, digest: &Digest, priority: Priority, pace: &Pace) -> bool {
        if priority == Priority::Again {
            // What has come is what was damaged.
            self.arrived.remove(digest);
        } else if let Some((_, asked)) = self.arrived.get_mut(digest) {
            *asked |= priority != Priority::Trace;
            return false;
        }
        if self.wanted.insert(*digest) {
            return true;
        }
        if matches!(priority, Priority::Demand | Priority::Again) {
            self.promote(digest, pace);
        }
        false
    }

    fn promote(&mut self, digest: &Digest, pace: &Pace) {
        let holds = |job: &Job| job.digests().any(|d| d == *digest);
        if let Some(at) = self.prefetch.iter().position(holds) {
            if let Some(mut job) = self.prefetch.remove(at) {
                job.priority = Priority::Demand;
                job.asked = Instant::now();
                self.demand.push_back(job);
            }
        } else if let Some(at) = self.traced.iter().position(holds) {
            self.promote_traced(at, digest, pace);
        } else if self.wanted.contains(digest) {
            self.joined.insert(*digest);
        }
    }

    /// The bytes of a job are here, and its sink will settle them.
    fn arrive(&mut self, job: &Job, run: u64) {
        self.arrived
            .extend(job.digests().map(|d| (d, (run, false))));
    }

    fn settle(&mut self, digest: &Digest, run: u64) -> bool {
        match self.arrived.entry(*digest) {
            Entry::Occupied(entry) if entry.get().0 == run => entry.remove().1,
            _ => false,
        }
    }

    /// The sink is through with a job; what it left out although somebody asked for it.
    fn leave(&mut self, job: &Job, run: u64) -> Vec<usize> {
        let parts = job.plan.parts.iter().zip(job.digests());
        let unsettled =
            parts.filter_map(|(part, digest)| self.settle(&digest, run).then_some(part.index));
        unsettled.collect()
    }

    /// A job has ended; the segments for which a reader came meanwhile.
    fn finish(&mut self, job: &Job) -> Vec<usize> {
        match job.priority {
            Priority::Demand | Priority::Again => self.demanding -= 1,
            Priority::Prefetch => self.prefetching -= 1,
            Priority::Trace => {
                self.tracing -= 1;
                self.tracing_bytes -= job.plan.range.len;
            }
        }
        let mut joined = Vec::new();
        for (part, digest) in job.plan.parts.iter().zip(job.digests()) {
            self.wanted.remove(&digest);
            if self.joined.remove(&digest) {
                if job.priority == Priority::Trace {
                    self.ahead.read(&job.layer.digest, part.len);
                }
                joined.push(part.index);
            }
        }
        joined
    }
}

mod traced;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traced_tests;
