//! How long answers took: counts in fixed buckets, so that many hosts' numbers can be added up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in microseconds; what took longer is in one more.
pub const BOUNDS_US: [u64; 15] = [
    500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000, 30_000_000,
];
const BUCKETS: usize = BOUNDS_US.len() + 1;

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Latency {
    counts: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencySnapshot {
    /// By bucket, each without the ones below it; the last one is what took longer than every bound.
    pub counts: [u64; BUCKETS],
    /// Microseconds of all together.
    pub sum_us: u64,
}

impl LatencySnapshot {
    /// Answers in all.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Latency {
    /// Takes one answer.
    pub fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// What was recorded so far.
    pub fn snapshot(&self) -> LatencySnapshot {
        LatencySnapshot {
            counts: std::array::from_fn(|n| {
                let count = self.counts.get(n);
                count.map_or(0, |count| count.load(Ordering::Relaxed))
            }),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_in_the_bucket_whose_bound_they_do_not_exceed() {
        let latency = Latency::default();
        for us in [0, 500, 501, 1_000, 30_000_000, 30_000_001] {
            latency.record(Duration::from_micros(us));
        }
        let seen = latency.snapshot();
        let mut expected = [0; BUCKETS];
        expected[..2].copy_from_slice(&[2, 2]);
        expected[14..].copy_from_slice(&[1, 1]);
        assert_eq!(seen.counts, expected);
        assert_eq!((seen.count(), seen.sum_us), (6, 60_002_002));
    }
}
