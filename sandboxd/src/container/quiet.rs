//! When to make shells ahead: while nobody waits for something.
//!
//! Moving a process into a control group holds up every `clone` of the host for a grace period of the kernel, ten milliseconds and
//! more. A shell made right after another was taken would delay the very command that it was taken for. So makers wait
//! until nothing has been asked for a moment, unless few shells are left.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Without a request for so long, it is quiet.
const QUIET: Duration = Duration::from_millis(15);
/// Shells that are made however busy it is.
const LEAST: usize = 2;

#[derive(Debug)]
struct State {
    ready: usize,
    asked: Instant,
    closed: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Quiet {
    state: Mutex<State>,
    changed: Condvar,
}

impl Quiet {
    pub(super) fn new() -> Self {
        let state = State {
            ready: 0,
            asked: Instant::now(),
            closed: false,
        };
        Self {
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
        let quiet = Quiet::new();
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
}
