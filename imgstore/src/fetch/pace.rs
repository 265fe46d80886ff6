//! What a request costs and what a byte costs, as measured: whether a few more bytes are cheaper than another round trip.
//!
//! Every answer is a point (bytes, time). A straight line through the recent ones, older ones fading, has the price of a
//! request as its height at zero and the price of a byte as its slope. Requests that share a narrow link make
//! the slope steeper, which is right: there a spare byte costs the others.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How much an older point counts after each new one: the last hundred or so decide.
const FADING: f64 = 0.99;
/// Points that a line needs before it is believed.
const POINTS_MIN: f64 = 8.0;
/// A spare segment is used in about three of five cases (`docs/decisions/0006-pairs.md`). If it is used, its bytes cost nothing
/// extra and it saves a request; so it may cost one and a half requests.
const WORTH: f64 = 1.5;

/// Sums of a weighted linear regression of milliseconds on kilobytes.
#[derive(Debug, Default)]
struct Sums {
    n: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Pace {
    sums: Mutex<Sums>,
}

fn kilobytes(bytes: u64) -> f64 {
    // Ranges are bounded by a few MiB; what is cut off here is far beyond them.
    f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)) / 1000.0
}

impl Pace {
    /// Takes a request that was answered at the first try.
    pub fn record(&self, bytes: u64, took: Duration) {
        let (x, y) = (kilobytes(bytes), took.as_secs_f64() * 1000.0);
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        *sums = Sums {
            n: sums.n.mul_add(FADING, 1.0),
            x: sums.x.mul_add(FADING, x),
            y: sums.y.mul_add(FADING, y),
            xx: sums.xx.mul_add(FADING, x * x),
            xy: sums.xy.mul_add(FADING, x * y),
        };
    }

    /// Whether `bytes` more in a request are cheaper than the request that they may save. Yes, until the line is known.
    pub fn worth(&self, bytes: u64) -> bool {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let spread = sums.n * sums.xx - sums.x * sums.x;
        // All of one size: there is no line.
        if sums.n < POINTS_MIN || spread < sums.x * sums.x * 1e-3 {
            return true;
        }
        let per_kilobyte = ((sums.n * sums.xy - sums.x * sums.y) / spread).max(0.0);
        let per_request = ((sums.y - per_kilobyte * sums.x) / sums.n).max(0.0);
        per_kilobyte * kilobytes(bytes) <= per_request * WORTH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link of `delay_us` and `per_kb_us`, seen through `count` requests of several sizes.
    fn pace(delay_us: u64, per_kb_us: u64, count: u64) -> Pace {
        let pace = Pace::default();
        for n in 0..count {
            let kb = 20 + n * 37 % 160;
            let took = Duration::from_micros(delay_us + per_kb_us * kb);
            pace.record(kb * 1000, took);
        }
        pace
    }

    #[test]
    fn a_wide_link_carries_spare_bytes_and_a_narrow_one_does_not() {
        // 1 ms and 1 GB/s; 1 ms and 25 MB/s; 20 ms and 25 MB/s.
        assert!(pace(1000, 1, 50).worth(100_000));
        assert!(!pace(1000, 40, 50).worth(100_000));
        assert!(pace(20_000, 40, 50).worth(100_000));
        // The border: 1.5 ms at 40 µs a kilobyte.
        assert!(pace(1000, 40, 50).worth(37_000));
        assert!(!pace(1000, 40, 50).worth(38_000));
    }

    #[test]
    fn without_a_line_spare_bytes_are_worth_it() {
        assert!(pace(1000, 40, 7).worth(100_000));
        let same = Pace::default();
        for _ in 0..50 {
            same.record(64_000, Duration::from_millis(30));
        }
        assert!(same.worth(100_000));
    }

    #[test]
    fn a_link_that_changes_is_learned_anew() {
        let pace = pace(1000, 1, 400);
        for n in 0..700_u64 {
            let kb = 20 + n * 37 % 160;
            pace.record(kb * 1000, Duration::from_micros(1000 + 40 * kb));
        }
        assert!(!pace.worth(100_000));
    }
}
