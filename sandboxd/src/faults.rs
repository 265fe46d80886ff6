//! A seam for tests: steps of making a sandbox that can be made to fail.
//!
//! Off unless the program is started for it (`--fail-every`, hidden) or a test says so. Then every so many-th step that is
//! passed fails, whichever it is: a number that has no divisor in common with the number of steps meets each of them in turn.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

static EVERY: AtomicU64 = AtomicU64::new(0);
static PASSED: AtomicU64 = AtomicU64::new(0);

/// Has every `every`-th step fail; 0: none.
pub fn fail_every(every: u64) {
    EVERY.store(every, Ordering::Release);
}

/// A step that may be made to fail.
///
/// # Errors
/// When it is its turn.
pub(crate) fn step(name: &'static str) -> io::Result<()> {
    let every = EVERY.load(Ordering::Acquire);
    if every == 0 || !(PASSED.fetch_add(1, Ordering::AcqRel) + 1).is_multiple_of(every) {
        return Ok(());
    }
    Err(io::Error::other(format!("a fault was put at `{name}`")))
}
