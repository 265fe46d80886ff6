//! Bearer tokens, one per (registry, repository, actions), each renewed by one thread before it expires.
//!
//! Whoever finds a token due for renewal renews it; the others go on with the old one while it is good, else they wait for
//! the outcome, and a failure is theirs as well. So 64 readers of one origin cost one request to the token server per life
//! of a token. When a token is due is random within bounds, so that hosts which started together do not come together.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::RegistryError;
use crate::credentials::secret::Secret;

/// Longest wait for another thread's renewal: longer than any request to a token server takes.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a token is used when the server does not say.
pub(super) const LIFE_UNSAID: Duration = Duration::from_secs(60);
/// A token that lives longer is renewed all the same.
const LIFE_MAX: Duration = Duration::from_secs(24 * 3600);

/// What a token is for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) registry: String,
    pub(super) repository: String,
    pub(super) actions: &'static str,
}

/// A token in use; the number tells it from its successors.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub(super) value: Secret,
    pub(super) number: u64,
}

#[derive(Debug)]
struct Held {
    token: Token,
    due: Instant,
    expires: Instant,
}

#[derive(Debug, Default)]
struct State {
    held: Option<Held>,
    renewing: bool,
    /// Renewals so far, and how the last one failed.
    renewals: u64,
    failure: Option<RegistryError>,
}

#[derive(Debug, Default)]
struct Slot {
    state: Mutex<State>,
    renewed: Condvar,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    slots: Mutex<HashMap<Key, Arc<Slot>>>,
}

/// Seven to nine tenths of a life.
fn due_after(life: Duration) -> Duration {
    let random = u32::try_from(RandomState::new().hash_one(life) % 200).unwrap_or(0);
    life * (700 + random) / 1000
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(
        &self,
        until: Option<Instant>,
        renew: impl FnOnce() -> Result<(Secret, Duration), RegistryError>,
    ) -> Result<Token, RegistryError> {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            if let Some(held) = &state.held {
                let good = now < held.due || (state.renewing && now < held.expires);
                if good {
                    return Ok(held.token.clone());
                }
            }
            if !state.renewing {
                break;
            }
            let seen = state.renewals;
            let left = until.map(|at| at.saturating_duration_since(now));
            let wait = left.map_or(WAIT_MAX, |left| left.min(WAIT_MAX));
            let (next, timeout) = self
                .renewed
                .wait_timeout_while(state, wait, |s| s.renewals == seen)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            if timeout.timed_out() {
                let text = "another request for a token does not end";
                return Err(RegistryError::Unavailable(text.to_owned()));
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
        state.renewing = true;
        drop(state);
        let renewed = renew();
        let mut state = self.lock();
        state.renewing = false;
        state.renewals += 1;
        let outcome = state.take_in(renewed);
        self.renewed.notify_all();
        outcome
    }
}

impl State {
    fn take_in(
        &mut self,
        renewed: Result<(Secret, Duration), RegistryError>,
    ) -> Result<Token, RegistryError> {
        let now = Instant::now();
        match (renewed, &mut self.held) {
            (Ok((value, life)), held) => {
                let life = life.min(LIFE_MAX);
                let number = self.renewals;
                let token = Token { value, number };
                *held = Some(Held {
                    token: token.clone(),
                    due: now + due_after(life),
                    expires: now + life,
                });
                self.failure = None;
                Ok(token)
            }
            (Err(error), Some(held)) if now < held.expires => {
                tracing::warn!(%error, "a registry's token could not be renewed yet");
                held.due = now + due_after(held.expires - now);
                self.failure = None;
                Ok(held.token.clone())
            }
            (Err(error), held) => {
                *held = None;
                self.failure = Some(error.clone());
                Err(error)
            }
        }
    }
}

impl Tokens {
    fn slot(&self, key: &Key) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(slots.entry(key.clone()).or_default())
    }

    /// A good token; `renew` gives a new one and how long it lives. Waits for another's renewal at most `until` then.
    pub(super) fn current(
        &self,
        key: &Key,
        until: Option<Instant>,
        renew: impl FnOnce() -> Result<(Secret, Duration), RegistryError>,
    ) -> Result<Token, RegistryError> {
        self.slot(key).current(until, renew)
    }

    /// The registry refused this token: it is not used again.
    pub(super) fn reject(&self, key: &Key, token: &Token) {
        let slot = self.slot(key);
        let mut state = slot.lock();
        if state
            .held
            .as_ref()
            .is_some_and(|held| held.token.number == token.number)
        {
            state.held = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn key() -> Key {
        Key {
            registry: "r".to_owned(),
            repository: "a".to_owned(),
            actions: "pull",
        }
    }

    /// Turned red by: `renewing` not set (64 renewals); waiters that renew again after a failure.
    #[test]
    fn one_thread_renews_for_all_and_a_failure_is_shared() {
        let tokens = Tokens::default();
        let calls = AtomicU64::new(0);
        let ask_all = |fail: bool| {
            let start = Barrier::new(64);
            let entered = Barrier::new(2);
            std::thread::scope(|scope| {
                for n in 0..64 {
                    let (start, tokens, calls, entered) = (&start, &tokens, &calls, &entered);
                    scope.spawn(move || {
                        start.wait();
                        let got = tokens.current(&key(), None, || {
                            if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                                entered.wait();
                            }
                            if fail {
                                Err(RegistryError::Denied("no".to_owned()))
                            } else {
                                Ok((Secret::new("t"), Duration::from_secs(1000)))
                            }
                        });
                        assert_eq!(got.is_err(), fail, "{n}");
                    });
                }
                // The renewal ends when all threads have asked.
                let slot = tokens.slot(&key());
                let begun = Instant::now();
                while Arc::strong_count(&slot) < 66 && begun.elapsed() < Duration::from_secs(20) {
                    std::thread::yield_now();
                }
                entered.wait();
            });
        };
        ask_all(true);
        // Who asks only after the failure tries for itself; the many that waited do not.
        let failed = calls.swap(0, Ordering::Relaxed);
        assert!((1..32).contains(&failed), "{failed}");
        ask_all(false);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        let token = tokens
            .current(&key(), None, || unreachable!("it is good"))
            .unwrap();
        tokens.reject(
            &key(),
            &Token {
                number: 77,
                ..token.clone()
            },
        );
        tokens
            .current(&key(), None, || unreachable!("another one was refused"))
            .unwrap();
        tokens.reject(&key(), &token);
        let next = tokens
            .current(&key(), None, || Ok((Secret::new("n"), LIFE_UNSAID)))
            .unwrap();
        assert_eq!(next.value.reveal(), "n");
    }

    #[test]
    fn tokens_are_due_before_they_expire() {
        for seconds in [1, 60, 3600] {
            let life = Duration::from_secs(seconds);
            let due = due_after(life);
            assert!(due >= life * 7 / 10 && due < life * 9 / 10, "{due:?}");
        }
        // An old token serves while it is good and no new one can be had.
        let tokens = Tokens::default();
        let life = Duration::from_millis(400);
        let first = tokens
            .current(&key(), None, || Ok((Secret::new("a"), life)))
            .unwrap();
        let mut refused = 0;
        let begun = Instant::now();
        while begun.elapsed() < life {
            let fail = || {
                refused += 1;
                Err(RegistryError::Unavailable("down".to_owned()))
            };
            match tokens.current(&key(), None, fail) {
                Ok(token) => assert_eq!(token.number, first.number),
                Err(_) => break,
            }
        }
        assert!((1..50).contains(&refused), "{refused}");
        let error = tokens.current(&key(), None, || Err(RegistryError::NotFound));
        assert!(matches!(error, Err(RegistryError::NotFound)));
    }
}
