//! Whether a disk is worth asking. Pure: the caller says what time it is.
//!
//! A disk that is full or failing is left alone for a while and then tried again with one request. While it is left
//! alone nothing waits for it, so a fault costs the cache and not the reads.

use std::time::{Duration, Instant};

/// So many errors in a row make a disk a failing one.
pub const ERRORS_MAX: u32 = 8;
/// A failing disk is left alone for this long. What it was asked may have taken long to fail.
pub const FAILING_PAUSE: Duration = Duration::from_secs(30);
/// A full disk is left alone for this long: nothing is evicted for others in vain more often than this.
pub const FULL_PAUSE: Duration = Duration::from_secs(2);

/// An alarm is raised at most this often.
pub const ALARM_EVERY: Duration = Duration::from_secs(60);

/// Why a disk is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskState {
    /// It is not.
    Fine,
    /// What others may have is gone, and there is nothing to evict.
    Full,
    /// It answered with errors.
    Failing,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Health {
    errors: u32,
    state: DiskState,
    until: Option<Instant>,
    alarmed: Option<Instant>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            errors: 0,
            state: DiskState::Fine,
            until: None,
            alarmed: None,
        }
    }
}

impl Health {
    pub(super) const fn state(&self) -> DiskState {
        self.state
    }

    /// Whether the disk may be asked. When a pause is over one caller may, and the others after its answer.
    pub(super) fn may_ask(&mut self, now: Instant) -> bool {
        match self.until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.until = Some(now + self.pause());
                true
            }
        }
    }

    const fn pause(&self) -> Duration {
        match self.state {
            DiskState::Failing => FAILING_PAUSE,
            DiskState::Full | DiskState::Fine => FULL_PAUSE,
        }
    }

    /// It did what it was asked; whether it was left alone until now.
    pub(super) fn worked(&mut self) -> bool {
        let was = self.state != DiskState::Fine;
        *self = Self {
            alarmed: self.alarmed,
            ..Self::default()
        };
        was
    }

    /// Whether an alarm is due; then it counts as raised.
    pub(super) fn alarm(&mut self, now: Instant) -> bool {
        let due = self
            .alarmed
            .is_none_or(|at| now.saturating_duration_since(at) >= ALARM_EVERY);
        if due {
            self.alarmed = Some(now);
        }
        due
    }

    /// It is full; whether that is new.
    pub(super) fn full(&mut self, now: Instant) -> bool {
        let new = self.state == DiskState::Fine;
        self.state = DiskState::Full;
        self.until = Some(now + FULL_PAUSE);
        new
    }

    /// It answered with an error; whether it is given up for a while just now.
    pub(super) fn failed(&mut self, now: Instant) -> bool {
        self.errors = self.errors.saturating_add(1);
        if self.errors < ERRORS_MAX {
            return false;
        }
        let new = self.state != DiskState::Failing;
        self.state = DiskState::Failing;
        self.until = Some(now + FAILING_PAUSE);
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_disk_is_given_up_and_tried_again_by_one() {
        let mut health = Health::default();
        let start = Instant::now();
        for _ in 1..ERRORS_MAX {
            assert!(!health.failed(start) && health.may_ask(start));
        }
        assert!(health.failed(start), "now it is given up");
        assert!(!health.failed(start), "and that is said once");
        assert!(!health.may_ask(start + FAILING_PAUSE / 2));
        let later = start + FAILING_PAUSE;
        assert!(health.may_ask(later), "one tries");
        assert!(!health.may_ask(later), "the others wait for the answer");
        assert!(health.worked() && health.may_ask(later));
        assert_eq!(health.state(), DiskState::Fine);
        assert!(!health.failed(later), "the count starts again");
    }

    #[test]
    fn single_errors_between_successes_are_no_failing_disk() {
        let mut health = Health::default();
        let now = Instant::now();
        for _ in 0..100 {
            assert!(!health.failed(now));
            assert!(!health.worked());
        }
    }

    #[test]
    fn a_full_disk_is_left_alone_for_a_moment() {
        let mut health = Health::default();
        let now = Instant::now();
        assert!(health.full(now) && health.alarm(now));
        assert!(!health.full(now) && !health.alarm(now));
        assert!(!health.alarm(now + ALARM_EVERY / 2) && health.alarm(now + ALARM_EVERY));
        assert!(!health.may_ask(now));
        assert!(health.may_ask(now + FULL_PAUSE));
    }
}
