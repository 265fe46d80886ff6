//! Of a trace's ranges: which begins next, how long it is, and what readers take out.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::{Job, Priority, State};
use crate::fetch::pace::Pace;
use crate::fetch::plan::RangePlan;
use crate::ids::Digest;
use crate::store::layer::Layer;

/// Most ranges of traces on their way.
pub(super) const TRACED_JOBS_MAX: usize = 4;
/// Longest range of a trace: long enough that requests cost little, short enough that what comes first is there soon.
const TRACED_RANGE_BYTES_MAX: u64 = 2 << 20;
/// And shortest bound of it, however slow the link or small the budget is.
const TRACED_RANGE_BYTES_MIN: u64 = 128 << 10;
/// The bound before anything is known of the link.
pub(super) const TRACED_RANGE_BYTES_FIRST: u64 = 512 << 10;
/// A range of a trace should take about so long: a reader who comes meanwhile shares the link with it.
const TRACED_RANGE_MS: u64 = 20;

impl State {
    /// Takes one segment out of a trace's range that waits; whether it was in one.
    pub(super) fn take_out(&mut self, digest: &Digest) -> bool {
        let holds = |job: &Job| job.digests().any(|d| d == *digest);
        let Some(at) = self.traced.iter().position(holds) else {
            return false;
        };
        let Some(Job { layer, plan, .. }) = self.traced.remove(at) else {
            return false;
        };
        let index = index_in(&layer, &plan, digest);
        let (before, _, behind) = plan.take(index, 0);
        for plan in [behind, before].into_iter().flatten() {
            self.traced.insert(at, traced_job(&layer, plan));
        }
        true
    }

    /// Takes what begins with this segment out of the trace's range `at`.
    pub(super) fn promote_traced(&mut self, at: usize, digest: &Digest, pace: &Pace) {
        let Some(Job { layer, plan, .. }) = self.traced.remove(at) else {
            return;
        };
        let index = index_in(&layer, &plan, digest);
        let max = self.traced_range_bytes / 2;
        let (before, taken, behind) = match self.ahead.stride(&layer.digest, index, max) {
            // One who jumps about reads as without a trace.
            0 => plan.take_pair(index, |bytes| pace.worth(bytes)),
            stride => {
                let (before, taken, behind) = plan.take(index, stride);
                // Its own segment is one that was foreseen and read; of the others the data plane will not say.
                let parts = taken.iter().flat_map(|plan| &plan.parts);
                let bytes = parts.clone().next().map_or(0, |part| part.len);
                self.ahead.begin(&layer.digest, bytes);
                self.ahead.read(&layer.digest, bytes);
                (before, taken, behind)
            }
        };
        let last = taken.iter().flat_map(|plan| &plan.parts).next_back();
        self.ahead.pass(&layer.digest, last.map(|part| part.index));
        for plan in [behind, before].into_iter().flatten() {
            self.traced.insert(at, traced_job(&layer, plan));
        }
        self.demand.extend(taken.map(|plan| Job {
            priority: Priority::Demand,
            ..traced_job(&layer, plan)
        }));
    }

    /// A trace's ranges are as long as takes about [`TRACED_RANGE_MS`].
    pub(super) fn set_pace(&mut self, bytes_per_ms: u64) {
        let bytes = bytes_per_ms.saturating_mul(TRACED_RANGE_MS);
        self.traced_range_bytes = bytes.clamp(TRACED_RANGE_BYTES_MIN, TRACED_RANGE_BYTES_MAX);
    }

    /// Longest range of a trace that the link and the budget bear.
    pub(super) fn range_bytes_max(&self, budget: u64) -> u64 {
        let known = match self.traced_range_bytes {
            0 => TRACED_RANGE_BYTES_FIRST,
            bytes => bytes,
        };
        known.min((budget / 2).max(TRACED_RANGE_BYTES_MIN))
    }

    /// Cuts the next range of a trace to this.
    pub(super) fn shorten_front(&mut self, max: u64) {
        let long = |job: &&Job| job.plan.range.len > max;
        if self.traced.front().filter(long).is_none() {
            return;
        }
        let Some(Job { layer, plan, .. }) = self.traced.pop_front() else {
            return;
        };
        let first = plan.parts.first().map_or(usize::MAX, |part| part.index);
        let (before, taken, behind) = plan.take(first, max);
        for plan in [behind, taken, before].into_iter().flatten() {
            self.traced.push_front(traced_job(&layer, plan));
        }
    }

    /// The next range of a trace, if one may begin.
    pub(super) fn next_traced(&mut self, bytes_max: u64) -> Option<Job> {
        if self.demanding > 0 {
            return None;
        }
        let max = self.range_bytes_max(bytes_max);
        // One range is the guess.
        let left = |job: &Job| self.ahead.left(&job.layer.digest, max);
        // Not in dribs and drabs: a reader who is faster takes what it needs.
        let may = |job: &Job| left(job) >= job.plan.range.len.min(max / 2);
        let mut seen = HashSet::new();
        let mut jobs = self.traced.iter();
        // A layer's ranges come in their order: a short one further back is no reason to ask for it alone.
        let at = jobs.position(|job| seen.insert(job.layer.digest) && may(job))?;
        let max = self.traced.get(at).map_or(0, left).min(max);
        // The layers that must wait keep their order behind it.
        if let Some(job) = self.traced.remove(at) {
            self.traced.push_front(job);
        }
        self.shorten_front(max);
        let len = self.traced.front()?.plan.range.len;
        let fits = self.tracing == 0
            || (self.tracing < TRACED_JOBS_MAX && self.tracing_bytes + len <= bytes_max);
        if !fits {
            return None;
        }
        self.tracing += 1;
        self.tracing_bytes += len;
        let job = self.traced.pop_front()?;
        let last = job.plan.parts.last().map(|part| part.index);
        self.ahead.begin(&job.layer.digest, len);
        self.ahead.pass(&job.layer.digest, last);
        Some(job)
    }
}

/// The index of the segment of a plan that has this digest.
fn index_in(layer: &Layer, plan: &RangePlan, digest: &Digest) -> usize {
    let segments = &layer.manifest.segments;
    let is_it = |index: &usize| segments.get(*index).is_some_and(|s| s.digest() == *digest);
    let index = plan.parts.iter().map(|p| p.index).find(is_it);
    index.unwrap_or(usize::MAX)
}

pub(super) fn traced_job(layer: &Arc<Layer>, plan: RangePlan) -> Job {
    Job {
        layer: Arc::clone(layer),
        plan,
        priority: Priority::Trace,
        asked: Instant::now(),
    }
}
