//! When to make shells ahead: while nobody waits for something.
//!
//! Moving a process into a control group holds up every `clone` of the host for a grace period of the kernel, ten milliseconds and
//! more. A shell made right after another was taken would delay the very command that it was taken for. So makers wait
//! until nothing has been asked for a moment, unless few shells are left.
//!
//! Shells that are made right after each other share one grace period. So nothing is made until half of them are used, and then all
//! that are missing: one that is replaced at once costs a period each time, and sooner or later a command meets it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Without a request for so long, it is quiet.
const QUIET: Duration = Duration::from_millis(15);
/// Shells that are made however busy it is.
const LEAST: usize = 2;
/// With fewer shells than this each one that is used is replaced.
const FEW: usize = 4;

#[derive(Debug)]
struct State {
    ready: usize,
    /// Whether all that are missing are being made.
    filling: bool,
    asked: Instant,
    closed: bool,
}

impl State {
    /// Whether shells are being made, of which there should be `full`.
    fn fills(&mut self, full: usize) -> bool {
        if full < FEW || self.ready <= full / 2 {
            self.filling = true;
        } else if self.ready >= full {
            self.filling = false;
        }
        self.filling
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Quiet {
    /// Shells that are kept ready.
    full: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Quiet {
    pub(super) fn new(full: usize) -> Self {
        let state = State {
            ready: 0,
            filling: true,
            asked: Instant::now(),
            closed: false,
        };
        Self {
            full,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something is asked for now.
    pub(super) fn asked(&self) {
        self.lock().asked = Instant::now();
    }

    /// A shell is ready.
    pub(super) fn made(&self) {
        self.lock().ready += 1;
    }

    /// A shell was taken.
    pub(super) fn taken(&self) {
        let mut state = self.lock();
        state.ready = state.ready.saturating_sub(1);
        state.asked = Instant::now();
        drop(state);
        self.changed.notify_all();
    }

    /// Nobody waits from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until a shell should be made.
    pub(super) fn wait(&self) {
        let mut state = self.lock();
        while !state.closed && state.ready >= LEAST {
            if !state.fills(self.full) {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let left = QUIET.saturating_sub(state.asked.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutations: `LEAST` is 0 (the first wait never ends while requests come); `wait` returns at once.
    #[test]
    fn few_shells_are_made_at_once_and_the_others_when_it_is_quiet() {
        let quiet = Quiet::new(8);
        let far = Instant::now() + Duration::from_secs(3600);
        quiet.lock().asked = far;
        quiet.wait();
        quiet.made();
        quiet.wait();
        quiet.made();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| quiet.wait());
            // Enough are ready, and it is not quiet: only a taken one lets it go on.
            assert!(!waiter.is_finished());
            quiet.lock().ready = 1;
            quiet.changed.notify_all();
            waiter.join().unwrap();
        });
        quiet.made();
        let begun = Instant::now();
        quiet.asked();
        quiet.wait();
        assert!(begun.elapsed() >= QUIET);
        quiet.lock().asked = far;
        quiet.close();
        quiet.wait();
    }

    /// Mutations: `filling` is never reset; half is not looked at; few are treated as many.
    #[test]
    fn none_is_made_until_half_are_used_and_then_all() {
        let quiet = Quiet::new(8);
        let mut state = quiet.lock();
        let mut fills = |ready, full| {
            state.ready = ready;
            state.fills(full)
        };
        let filling: Vec<bool> = (0..=8).map(|ready| fills(ready, 8)).collect();
        assert_eq!(
            filling,
            [true, true, true, true, true, true, true, true, false]
        );
        let using: Vec<bool> = (0..8).rev().map(|ready| fills(ready, 8)).collect();
        assert_eq!(using, [false, false, false, true, true, true, true, true]);
        assert!(fills(3, 3));
    }
}
