//! Asking again for what must exist: some origins say for a while that an object does not exist although it was published
//! (a host of 3FS remembers for 5 s that a name did not exist).
//!
//! Only objects that another object of the same origin names are asked for again: those were published before it.

use std::time::{Duration, Instant};

use super::{Origin, OriginError};

/// Pause between two askings.
const PAUSE: Duration = Duration::from_millis(250);

/// Runs `ask`, and again while the origin says that the object does not exist and may still be wrong about it
/// ([`Origin::lag`]). Blocks its thread meanwhile.
///
/// # Errors
/// What `ask` said last.
pub fn named<T>(
    origin: &dyn Origin,
    ask: impl Fn() -> Result<T, OriginError>,
) -> Result<T, OriginError> {
    let deadline = Instant::now() + origin.lag();
    loop {
        match ask() {
            Err(OriginError::NotFound { object, .. }) if Instant::now() < deadline => {
                tracing::debug!(object, "named but not there: asking again");
                std::thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}
