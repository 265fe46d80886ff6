//! Readers whose deadline has passed.

use std::sync::PoisonError;
use std::time::Instant;

use super::Shared;

impl Shared {
    /// Sends readers away whose deadline has passed. All deadlines are equally far away, so the next one is known and
    /// nothing has to be polled.
    pub(super) fn watch_deadlines(&self) {
        let mut state = self.lock();
        loop {
            let Some(next) = state.pending.next_deadline() else {
                state = self
                    .waiting
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let now = Instant::now();
            if next > now {
                let waited = self.waiting.wait_timeout(state, next - now);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let expired = state.pending.expire(now);
            drop(state);
            for waiter in expired {
                tracing::error!(layer = %waiter.place.layer.digest, segment = waiter.place.index,
                    waited_seconds = self.patience.as_secs_f64(),
                    "no answer for a segment in time; the reader gets EIO");
                waiter.place.layer.count(|c| c.cache_misses += 1);
                self.latency
                    .failed
                    .observe(self.latency.since(waiter.deadline));
                (waiter.done)(Err("no answer in time"));
            }
            state = self.lock();
        }
    }
}
