//! Ranges waiting to be fetched, and the threads that fetch them.
//!
//! Two queues, both bounded: what a reader waits for, and what read-ahead hopes for. A thread takes demand first, and some
//! threads never take prefetch, so that prefetch cannot occupy them all. A segment is in the queues or on its way at most
//! once; asking again for one that only waits as prefetch moves its range to the demand queue. Threads are started when
//! needed, up to a bound, and stay. A range has its deadline from the moment somebody wants it. An origin that keeps a thread
//! far beyond that (a dead network file system) has it; another one is started in its place, up to a bound.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::origins::{Fetched, OriginSet, Spent};
use super::pace::Pace;
use super::plan::{RANGE_BYTES_MAX, RangePlan, plan};
use crate::format::manifest::Segment;
use crate::format::names;
use crate::ids::Digest;
use crate::origin::OriginError;
use crate::store::layer::Layer;

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
/// A fetch thread needs little stack: a request, no recursion.
const STACK_BYTES: usize = 512 << 10;

/// Why a segment is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A reader waits.
    Demand,
    /// Read-ahead.
    Prefetch,
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
}

/// Takes deliveries, on the thread that fetched. It may block: that thread does nothing else.
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
    /// Segments in a queue or being fetched.
    wanted: HashSet<Digest>,
    /// The deadlines of what is being fetched.
    running: BTreeMap<u64, Instant>,
    next_run: u64,
    threads: usize,
    idle: usize,
    prefetching: usize,
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
    /// Ranges that are being fetched or delivered.
    pub running: usize,
}

struct Shared {
    origins: OriginSet,
    sink: Sink,
    patience: Duration,
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

    fn run(&self) {
        loop {
            let job = self.next();
            let prefetch = job.priority == Priority::Prefetch;
            let first = usize::from(job.priority == Priority::Again);
            let object = names::pack(&job.plan.pack);
            tracing::trace!(segments = job.plan.parts.len(), "fetching");
            let start = Instant::now();
            let deadline = job.asked + self.patience;
            let run = self.lock().begin(deadline);
            let (outcome, spent) =
                self.origins
                    .fetch(&object, job.pack_size(), job.plan.range, first, deadline);
            if outcome.is_ok() && spent.requests == 1 {
                self.pace.record(job.plan.range.len, start.elapsed());
            }
            // Forgotten before it is delivered: whoever gets the segment and loses it again may ask at once.
            let mut state = self.lock();
            state.prefetching -= usize::from(prefetch);
            state.running.remove(&run);
            for digest in job.digests() {
                state.wanted.remove(&digest);
            }
            drop(state);
            (self.sink)(Delivery {
                layer: job.layer,
                plan: job.plan,
                priority: job.priority,
                outcome: outcome.map_err(FetchError::from),
                spent,
            });
            self.lock().busy -= 1;
        }
    }
}

impl FetchQueue {
    /// A queue over `origins` that gives up a range after `patience`.
    pub fn new(origins: OriginSet, patience: Duration, sink: Sink) -> Self {
        Self {
            shared: Arc::new(Shared {
                origins,
                sink,
                patience,
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

    /// What there is to do now.
    pub fn depth(&self) -> QueueDepth {
        let state = self.shared.lock();
        QueueDepth {
            demand: state.demand.len(),
            prefetch: state.prefetch.len(),
            running: state.busy,
        }
    }

    /// A reader now waits for segments that were asked for as prefetch: their ranges come next, if they still wait.
    pub fn promote(&self, digests: &[Digest]) {
        let mut state = self.shared.lock();
        for digest in digests {
            state.promote(digest);
        }
        drop(state);
        self.shared.work.notify_all();
    }

    /// Asks for segments of a layer. Those that are asked for already are left out (and moved forward if a reader now
    /// waits for them); the others are delivered, range by range, in any order.
    pub fn push(&self, layer: &Arc<Layer>, indexes: &[usize], priority: Priority) {
        let mut refused = Vec::new();
        let asked = Instant::now();
        let mut state = self.shared.lock();
        let fresh: Vec<usize> = indexes
            .iter()
            .copied()
            .filter(|index| {
                let segment = layer.manifest.segments.get(*index);
                segment.is_some_and(|s| state.want(&s.digest(), priority))
            })
            .collect();
        for plan in plan(&layer.placement, fresh, RANGE_BYTES_MAX) {
            let job = Job {
                layer: Arc::clone(layer),
                plan,
                priority,
                asked,
            };
            let (queue, max) = match priority {
                Priority::Prefetch => (&mut state.prefetch, PREFETCH_MAX),
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
        let waiting = state.demand.len() + state.prefetch.len();
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
            });
        }
    }

    fn start_thread(&self) {
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new()
            .name("fetch".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || shared.run());
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

    /// Whether the segment must be queued now: it was not wanted yet. Moves a waiting prefetch forward otherwise.
    fn want(&mut self, digest: &Digest, priority: Priority) -> bool {
        if self.wanted.insert(*digest) {
            return true;
        }
        if priority != Priority::Prefetch {
            self.promote(digest);
        }
        false
    }

    fn promote(&mut self, digest: &Digest) {
        let holds = |job: &Job| job.digests().any(|d| d == *digest);
        let at = self.prefetch.iter().position(holds);
        if let Some(mut job) = at.and_then(|at| self.prefetch.remove(at)) {
            job.priority = Priority::Demand;
            job.asked = Instant::now();
            self.demand.push_back(job);
        }
    }
}

#[cfg(test)]
mod tests;
