//! One link that all answers share, and exact waiting.
//!
//! The link is a time line: a piece of data reserves the next free stretch of it, and is written when that
//! stretch is over, which is when its last byte would have arrived. An idle link gives no credit, so that the
//! first piece of an answer takes its full time; only within an answer a late wake-up is made good.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, Timespec, clock_gettime};

const NS_PER_S: u64 = 1_000_000_000;

/// How late a wake-up may be and still be made good: the time between two pieces of one answer.
const LATE_NS_MAX: u64 = 5_000_000;

/// A link with a bandwidth in bytes per second; 0 means unlimited.
#[derive(Debug)]
pub(crate) struct Link {
    bandwidth: AtomicU64,
    free_at_ns: AtomicU64,
}

impl Link {
    pub(crate) const fn new(bandwidth: u64) -> Self {
        Self {
            bandwidth: AtomicU64::new(bandwidth),
            free_at_ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn bandwidth(&self) -> u64 {
        self.bandwidth.load(Ordering::Relaxed)
    }

    pub(crate) fn set_bandwidth(&self, bandwidth: u64) {
        self.bandwidth.store(bandwidth, Ordering::Relaxed);
    }

    /// How many bytes to send at a time: about half a millisecond's worth, so that connections share the link
    /// evenly and the pace is smooth; everything at once on an unlimited link.
    pub(crate) fn piece_len(&self) -> u64 {
        match self.bandwidth() {
            0 => 1 << 20,
            bandwidth => (bandwidth / 2_000).clamp(4 << 10, 128 << 10),
        }
    }

    /// Waits until `len` bytes have passed the link; `goes_on` says that they follow others of the same answer.
    pub(crate) fn pass(&self, len: u64, goes_on: bool) {
        let bandwidth = self.bandwidth();
        if bandwidth == 0 {
            return;
        }
        let duration_ns = len.saturating_mul(NS_PER_S) / bandwidth;
        let now = now_ns();
        let earliest = if goes_on {
            now.saturating_sub(LATE_NS_MAX)
        } else {
            now
        };
        let reserve = |free_at: u64| Some(free_at.max(earliest) + duration_ns);
        let began = self
            .free_at_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .unwrap_or(now)
            .max(earliest);
        sleep_until_ns(began + duration_ns);
    }
}

/// Nanoseconds of the monotonic clock.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * NS_PER_S + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Sleeps to a moment of the monotonic clock.
pub(crate) fn sleep_until_ns(moment: u64) {
    let request = Timespec {
        tv_sec: i64::try_from(moment / NS_PER_S).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(moment % NS_PER_S).unwrap_or(0),
    };
    while rustix::thread::clock_nanosleep_absolute(ClockId::Monotonic, &request).is_err() {}
}

/// Asks the kernel to wake this thread without slack (the default is 50 us late).
pub(crate) fn use_exact_timers() {
    // It cannot fail with a valid value; if it did, the waits were some 50 us longer and nothing else.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1)).unwrap_or_default();
}
