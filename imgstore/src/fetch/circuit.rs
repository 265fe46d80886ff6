//! Whether an origin is worth asking first: a circuit breaker, pure, with the time as an argument.
//!
//! ```text
//!         3 failures in a row, or a slow one                     pause is over
//! closed ────────────────────────────────────► open (asked last) ─────────────► one request probes
//!   ▲                                                ▲                            │        │
//!   └──────────────────── an answer ─────────────────│────────────────────────────┘        │
//!                                                    └── a failure: the pause doubles ─────┘
//! ```
//! An open circuit forbids nothing: where no other origin answers, this one is asked all the same. What an origin itself
//! asks for (Retry-After) is different: until then it is not asked at all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::failure::FailureKind;
use super::pause;

/// Failures in a row that open the circuit.
const FAILURES_MAX: u32 = 3;
/// A failure that took this long opens it alone: the next reader should not wait as long.
const SLOW_FAILURE: Duration = Duration::from_secs(1);
/// Bounds of the pause before an origin is probed; each is cut by up to a half at random.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Longest time that a probe keeps others from probing too.
const PROBE_MAX: Duration = Duration::from_secs(10);
/// Longest time an origin is left alone because it asks for that.
pub(super) const RETRY_AFTER_MAX: Duration = Duration::from_mins(1);
/// How long an origin is left alone that wants it and does not say how long.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_millis(250);
/// An origin with a request this old has stopped answering.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// A request that was given less time than this proves nothing by not being answered.
const FAIR: Duration = Duration::from_millis(100);

/// How an origin is to be treated now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// As the user ordered.
    Good,
    /// It failed, and the pause is over: one request may find out whether it is back.
    Probe,
    /// It fails: after the others.
    Failing,
    /// It wants not to be asked before this moment.
    Resting(Instant),
}

/// A failed request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failed {
    pub(super) kind: FailureKind,
    pub(super) took: Duration,
    /// How much time it had; `None` where the origin knows no limit.
    pub(super) allowed: Duration,
    /// What the origin asks for.
    pub(super) retry_after: Option<Duration>,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Circuit {
    /// Failures since the last answer.
    failures: u32,
    /// How often it was opened since the last answer.
    opened: u32,
    /// Until when it is open.
    open_until: Option<Instant>,
    resting_until: Option<Instant>,
    /// When the requests for ranges started that are not answered yet.
    started: BTreeMap<u64, Instant>,
    next_request: u64,
}

impl Circuit {
    pub(super) fn standing(&self, now: Instant) -> Standing {
        if let Some(until) = self.resting_until.filter(|until| now < *until) {
            return Standing::Resting(until);
        }
        match self.open_until {
            Some(until) if now >= until => Standing::Probe,
            Some(_) => Standing::Failing,
            None if self.is_stuck(now) => Standing::Failing,
            None => Standing::Good,
        }
    }

    /// Numbers only grow, so the first one is the oldest.
    fn is_stuck(&self, now: Instant) -> bool {
        let oldest = self.started.values().next();
        oldest.is_some_and(|start| now.saturating_duration_since(*start) >= STUCK_AFTER)
    }

    /// The caller asks now, as a probe: nobody else needs to.
    pub(super) fn probe(&mut self, now: Instant) {
        self.open_until = Some(now + PROBE_MAX);
    }

    /// A request for a range begins.
    pub(super) fn begin(&mut self, now: Instant) -> u64 {
        let number = self.next_request;
        self.next_request += 1;
        self.started.insert(number, now);
        number
    }

    /// It ended.
    pub(super) fn end(&mut self, request: u64) {
        self.started.remove(&request);
    }

    /// The origin answered: with the bytes, or that there are none.
    pub(super) fn answered(&mut self) {
        self.failures = 0;
        self.opened = 0;
        self.open_until = None;
    }

    pub(super) fn failed(&mut self, failed: Failed, now: Instant) {
        if failed.kind == FailureKind::Busy {
            let wanted = failed.retry_after.unwrap_or(RETRY_AFTER_DEFAULT);
            let until = now + wanted.min(RETRY_AFTER_MAX);
            self.resting_until = self.resting_until.max(Some(until));
            // It is there and knows what it does: no sign of a failing origin.
            return;
        }
        if failed.allowed < FAIR && failed.took >= failed.allowed {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        let probed = self.open_until.is_some();
        if probed || self.failures >= FAILURES_MAX || failed.took >= SLOW_FAILURE {
            let bound = pause::doubled(PAUSE_FIRST, self.opened, PAUSE_MAX);
            self.opened = self.opened.saturating_add(1);
            self.open_until = Some(now + bound / 2 + pause::below(bound / 2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn failed(kind: FailureKind, took: Duration) -> Failed {
        Failed {
            kind,
            took,
            allowed: SECOND * 15,
            retry_after: None,
        }
    }

    fn fast() -> Failed {
        failed(FailureKind::Unavailable, Duration::from_millis(1))
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_an_answer_closes_it() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        for _ in 0..2 {
            circuit.failed(fast(), now);
        }
        circuit.answered();
        for _ in 0..2 {
            circuit.failed(fast(), now);
            assert_eq!(circuit.standing(now), Standing::Good);
        }
        circuit.failed(fast(), now);
        assert_eq!(circuit.standing(now), Standing::Failing);
        circuit.answered();
        assert_eq!(circuit.standing(now), Standing::Good);
    }

    #[test]
    fn one_slow_failure_opens_it_unless_it_had_hardly_any_time() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        let hurried = Failed {
            allowed: Duration::from_millis(20),
            ..failed(FailureKind::Unavailable, Duration::from_millis(21))
        };
        for _ in 0..10 {
            circuit.failed(hurried, now);
        }
        assert_eq!(circuit.standing(now), Standing::Good);
        circuit.failed(failed(FailureKind::Unavailable, SECOND), now);
        assert_eq!(circuit.standing(now), Standing::Failing);
    }

    #[test]
    fn it_is_probed_once_a_pause_and_the_pause_doubles_up_to_a_bound() {
        let (mut circuit, mut now) = (Circuit::default(), Instant::now());
        circuit.failed(failed(FailureKind::Unavailable, SECOND), now);
        for bound in [1, 2, 4, 8, 16, 30, 30, 30] {
            let bound = SECOND * bound;
            let early = now + bound / 2 - Duration::from_micros(1);
            assert_eq!(circuit.standing(early), Standing::Failing);
            now += bound;
            assert_eq!(circuit.standing(now), Standing::Probe);
            circuit.probe(now);
            assert_eq!(circuit.standing(now), Standing::Failing, "one probe");
            // A probe that never comes back does not end all probing.
            assert_eq!(circuit.standing(now + PROBE_MAX), Standing::Probe);
            circuit.failed(fast(), now);
        }
        circuit.answered();
        circuit.failed(failed(FailureKind::Unavailable, SECOND), now);
        assert_eq!(circuit.standing(now + SECOND), Standing::Probe);
    }

    #[test]
    fn what_the_origin_asks_for_is_kept_within_a_bound() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        let busy = |retry_after| Failed {
            retry_after,
            ..failed(FailureKind::Busy, Duration::ZERO)
        };
        circuit.failed(busy(Some(SECOND * 7)), now);
        circuit.failed(busy(None), now);
        let until = now + SECOND * 7;
        assert_eq!(circuit.standing(now), Standing::Resting(until));
        assert_eq!(circuit.standing(until), Standing::Good);
        circuit.failed(busy(Some(SECOND * 86_400)), now);
        let until = now + RETRY_AFTER_MAX;
        assert_eq!(circuit.standing(now), Standing::Resting(until));
    }

    #[test]
    fn a_request_that_never_ends_makes_the_origin_one_that_fails() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        let request = circuit.begin(now);
        let other = circuit.begin(now + STUCK_AFTER);
        assert_eq!(circuit.standing(now + STUCK_AFTER), Standing::Failing);
        circuit.end(request);
        assert_eq!(circuit.standing(now + STUCK_AFTER), Standing::Good);
        circuit.end(other);
    }
}
