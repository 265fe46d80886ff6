//! Several origins as one: asked in order, and again after a pause, until a deadline.
//!
//! The first origin that has an object gives it. One that fails is passed over, for this request only. When all have
//! failed and at least one of them might do better later, the round is repeated after a random pause between nothing and
//! a bound that doubles ("full jitter"), so that many hosts do not come back at the same moment.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::origin::{ByteRange, Origin, OriginError};
use crate::store::layer::LayerError;

/// Bound of the first pause.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Bound of every later pause.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What an answer cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Requests sent, failed ones included.
    pub requests: u64,
    /// Of those, requests that came after a failed one.
    pub retries: u64,
    /// Body bytes of the answers that were accepted.
    pub bytes: u64,
}

/// Origins in the order in which they are asked.
#[derive(Debug, Clone)]
pub struct OriginSet {
    origins: Vec<Arc<dyn Origin>>,
}

/// The bytes, and who gave them.
#[derive(Debug)]
pub struct Fetched {
    /// Exactly the range.
    pub bytes: Vec<u8>,
    /// The origin's address.
    pub origin: String,
}

/// A random pause of at most `PAUSE_FIRST * 2^round`, cut at `PAUSE_MAX`.
fn pause(round: u32) -> Duration {
    let bound = PAUSE_FIRST
        .saturating_mul(1_u32.checked_shl(round).unwrap_or(u32::MAX))
        .min(PAUSE_MAX);
    // A fresh `RandomState` has fresh random keys: enough randomness to spread hosts, without another dependency.
    let random = RandomState::new().hash_one(round);
    let micros = u64::try_from(bound.as_micros()).unwrap_or(u64::MAX).max(1);
    Duration::from_micros(random % micros)
}

impl OriginSet {
    /// Origins in order. At least one.
    pub fn new(origins: Vec<Arc<dyn Origin>>) -> Self {
        assert!(!origins.is_empty(), "at least one origin");
        Self { origins }
    }

    /// Fetches a range. `first` says which origin to begin with (modulo their number): a second fetch of something that was
    /// damaged begins with another one, where there is another one.
    ///
    /// # Errors
    /// The last failure, when no origin has the object or the deadline has passed.
    pub fn fetch(
        &self,
        object: &str,
        range: ByteRange,
        first: usize,
        deadline: Instant,
    ) -> (Result<Fetched, OriginError>, Spent) {
        let mut spent = Spent::default();
        let mut round = 0;
        loop {
            let mut last = None;
            let mut again = false;
            for n in 0..self.origins.len() {
                let Some(origin) = self.origins.get((first + n) % self.origins.len()) else {
                    continue;
                };
                spent.requests += 1;
                spent.retries += u64::from(spent.requests > 1);
                match origin.fetch(object, range) {
                    Ok(bytes) => {
                        spent.bytes += range.len;
                        let origin = origin.address();
                        return (Ok(Fetched { bytes, origin }), spent);
                    }
                    Err(error) => {
                        again |= error.is_transient();
                        tracing::debug!(object, start = range.start, len = range.len, %error, "fetch failed");
                        last = Some(error);
                    }
                }
            }
            let wait = pause(round);
            round += 1;
            let now = Instant::now();
            if let Some(error) = last
                && (!again || now + wait >= deadline)
            {
                return (Err(error), spent);
            }
            std::thread::sleep(wait);
        }
    }

    /// Runs `load` on each origin until one answers: for tags, manifests and other small objects.
    ///
    /// # Errors
    /// The first origin's failure: it is the one the user put first.
    pub fn first<T>(
        &self,
        mut load: impl FnMut(&dyn Origin) -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        let mut failure = None;
        for origin in &self.origins {
            match load(&**origin) {
                Ok(found) => return Ok(found),
                Err(error) => {
                    tracing::debug!(origin = origin.address(), %error, "origin passed over");
                    failure.get_or_insert(error);
                }
            }
        }
        Err(failure.expect("at least one origin, checked by `new`"))
    }

    /// Their addresses, in order.
    pub fn addresses(&self) -> Vec<String> {
        self.origins.iter().map(|o| o.address()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::origin::Created;
    use crate::origin::mem::MemOrigin;

    /// Fails the first `failures` fetches.
    #[derive(Debug)]
    struct Flaky {
        inner: MemOrigin,
        failures: AtomicU32,
    }

    impl Origin for Flaky {
        fn address(&self) -> String {
            "flaky:".to_owned()
        }
        fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
            let left = self
                .failures
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            if left.is_ok() {
                return Err(OriginError::Unavailable {
                    origin: self.address(),
                    object: object.to_owned(),
                    reason: "told to".to_owned(),
                });
            }
            self.inner.fetch(object, range)
        }
        fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
            self.inner.fetch_all(object, max_len)
        }
        fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
            self.inner.create(object, content)
        }
        fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
            self.inner.replace(object, content)
        }
        fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
            self.inner.list(prefix)
        }
        fn size(&self, object: &str) -> Result<u64, OriginError> {
            self.inner.size(object)
        }
    }

    fn flaky(failures: u32) -> Arc<dyn Origin> {
        let inner = MemOrigin::default();
        inner.replace("a", b"0123456789").unwrap();
        let failures = AtomicU32::new(failures);
        Arc::new(Flaky { inner, failures })
    }

    const RANGE: ByteRange = ByteRange { start: 2, len: 3 };

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn a_transient_failure_is_retried_and_counted() {
        let set = OriginSet::new(vec![flaky(2)]);
        let (fetched, spent) = set.fetch("a", RANGE, 0, soon());
        assert_eq!(fetched.unwrap().bytes, b"234");
        let expected = Spent {
            requests: 3,
            retries: 2,
            bytes: 3,
        };
        assert_eq!(spent, expected);
    }

    #[test]
    fn a_missing_object_is_not_retried_and_a_deadline_ends_retries() {
        let set = OriginSet::new(vec![flaky(0), flaky(0)]);
        let (fetched, spent) = set.fetch("b", RANGE, 0, soon());
        assert!(matches!(fetched, Err(OriginError::NotFound { .. })));
        assert_eq!(spent.requests, 2);
        let set = OriginSet::new(vec![flaky(u32::MAX)]);
        let (fetched, spent) = set.fetch("a", RANGE, 0, Instant::now());
        assert!(matches!(fetched, Err(OriginError::Unavailable { .. })));
        assert_eq!(spent.requests, 1);
    }

    #[test]
    fn the_next_origin_serves_when_the_first_cannot() {
        let set = OriginSet::new(vec![flaky(u32::MAX), flaky(0)]);
        let (fetched, spent) = set.fetch("a", RANGE, 0, soon());
        assert_eq!(fetched.unwrap().bytes, b"234");
        assert_eq!(spent.requests, 2);
        let (fetched, spent) = set.fetch("a", RANGE, 1, soon());
        assert_eq!(fetched.unwrap().bytes, b"234");
        assert_eq!(spent.requests, 1);
    }

    #[test]
    fn pauses_grow_and_stay_below_their_bounds() {
        for round in 0..40 {
            assert!(pause(round) < PAUSE_MAX);
        }
        assert!(pause(0) < PAUSE_FIRST);
    }
}
