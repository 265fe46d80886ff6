//! Random pauses, so that many hosts that failed together do not come back together.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Bound of the first pause between two rounds of retries.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Bound of every later one.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Anything from nothing to just below `bound`.
pub(super) fn below(bound: Duration) -> Duration {
    // A fresh `RandomState` has fresh random keys: enough randomness to spread hosts, without another dependency.
    let random = RandomState::new().hash_one(bound);
    let micros = u64::try_from(bound.as_micros()).unwrap_or(u64::MAX).max(1);
    Duration::from_micros(random % micros)
}

/// A random pause ("full jitter") whose bound doubles with every round.
pub(super) fn between_rounds(round: u32) -> Duration {
    below(doubled(PAUSE_FIRST, round, PAUSE_MAX))
}

/// `first` doubled `times` times, at most `max`.
pub(super) fn doubled(first: Duration, times: u32, max: Duration) -> Duration {
    let factor = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_below_their_bounds() {
        for round in 0..40 {
            assert!(between_rounds(round) < PAUSE_MAX);
        }
        assert!(between_rounds(0) < PAUSE_FIRST);
        let longest = (0..200).map(|_| between_rounds(10)).max().unwrap();
        assert!(
            longest > PAUSE_FIRST * 2,
            "{longest:?}: the bound does not grow"
        );
        assert_eq!(below(Duration::ZERO), Duration::ZERO);
    }
}
