//! Which hot segments to load before they are read. Pure: indexes in, indexes out.
//!
//! Hot segments lie in the order in which a start read them, so a reader that goes from one to the next (or near it) will want
//! those behind it soon. They are loaded a few at a time, since what is loaded and not read is lost work: another workload that
//! jumps about among them gets none.

/// Segments loaded ahead: enough to hide the time of decoding one, few enough for a small memory.
const AHEAD: usize = 4;
/// A step of at most so many segments is one to the next: readers of several files overtake each other.
const STEP_MAX: usize = 4;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct HotAhead {
    /// The segment read last.
    last: usize,
    /// First segment that was not loaded ahead.
    next: usize,
}

impl HotAhead {
    /// A read of segment `here` of `hot`; the segments to load now.
    pub(super) fn on_read(&mut self, here: usize, hot: usize) -> Option<(usize, usize)> {
        if here == self.last {
            return None;
        }
        let step = here > self.last && here - self.last <= STEP_MAX;
        if here < self.last && self.last - here <= STEP_MAX {
            // Somebody comes later: nothing new.
            return None;
        }
        self.last = here;
        if !step {
            self.next = here;
            return None;
        }
        let first = self.next.max(here + 1);
        let end = (here + 1 + AHEAD).min(hot);
        self.next = self.next.max(end);
        (first < end).then_some((first, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_in_order_has_each_segment_loaded_ahead_once() {
        let mut ahead = HotAhead::default();
        let windows: Vec<_> = (0..10).filter_map(|n| ahead.on_read(n, 10)).collect();
        assert_eq!(windows, [(2, 6), (6, 7), (7, 8), (8, 9), (9, 10)]);
    }

    /// Mutation: no `STEP_MAX`.
    #[test]
    fn one_that_jumps_has_none() {
        let mut ahead = HotAhead::default();
        for n in [30, 7, 50, 12, 90, 40] {
            assert_eq!(ahead.on_read(n, 100), None);
        }
        assert_eq!(ahead.on_read(41, 100), Some((42, 46)));
        assert_eq!(ahead.on_read(39, 100), None);
        assert_eq!(ahead.on_read(43, 100), Some((46, 48)));
    }
}
