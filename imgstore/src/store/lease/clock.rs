//! Two clocks: the origin's, which all hosts share, and one of this host that neither jumps nor stands still.

use std::time::{Duration, SystemTime};

use crate::format::names;
use crate::origin::{Origin, OriginError};

/// The time on the origin's clock: an object is written there, looked at and removed.
///
/// # Errors
/// When the origin cannot be written or cannot tell the age of objects.
pub fn origin_now(origin: &dyn Origin) -> Result<SystemTime, OriginError> {
    let name = format!("{}{}.json", names::GC_CLOCK, super::random());
    origin.replace(&name, b"{}")?;
    let listed = origin.list_info(names::GC);
    origin.remove(&name)?;
    let found = listed?.into_iter().find(|info| info.name == name);
    found
        .map(|info| info.modified)
        .ok_or_else(|| OriginError::Unavailable {
            origin: origin.address(),
            object: name,
            reason: "it was written and is not listed".to_owned(),
        })
}

/// Time since the host was started, with the time in which it was suspended: a lease runs on then too.
pub fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanos)
}
