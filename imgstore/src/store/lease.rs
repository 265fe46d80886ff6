//! Leases on an origin: written, read, and judged by the origin's own clock.
//!
//! A lease is an object that says what must not be collected. It runs out by itself some time after it was written, and
//! "after" is measured with the origin's times only, so that the clocks of hosts do not matter. [`hold`] is the side of
//! those who need something; the collector reads all leases with [`read_all`].

pub mod clock;
pub mod hold;
pub mod pin;

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime};

use crate::format::lease::{LEASE_BYTES_MAX, LEASE_SECONDS_MAX, Lease, Purpose};
use crate::format::manifest::FORMAT;
use crate::format::{FormatError, names};
use crate::ids::Digest;
use crate::origin::{ObjectInfo, Origin, OriginError};
use crate::process::Process;

pub use hold::{Hold, HoldError, Wanted};

/// A lease that was found on an origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The lease's object.
    pub info: ObjectInfo,
    /// What it says; the error if it cannot be read.
    pub lease: Result<Lease, FormatError>,
}

impl Found {
    /// How long it runs after it was written. What cannot be read counts as the longest.
    pub fn runs_for(&self) -> Duration {
        let seconds = self.lease.as_ref().map_or(LEASE_SECONDS_MAX, |l| l.seconds);
        Duration::from_secs(seconds)
    }

    /// Whether it has run out at `now`, or its holder has certainly ended. Never for [`Purpose::Untagged`]: how long such
    /// a lease is respected is the collector's choice.
    pub fn is_over(&self, now: SystemTime) -> bool {
        let age = now.duration_since(self.info.modified).unwrap_or_default();
        let over = age > self.runs_for();
        match &self.lease {
            Ok(lease) => lease.purpose != Purpose::Untagged && (over || is_abandoned(lease)),
            Err(_) => over,
        }
    }
}

fn is_abandoned(lease: &Lease) -> bool {
    lease.process.parse().is_ok_and(|p: Process| p.is_gone())
}

/// A new name for a lease: no two are the same.
pub fn fresh_name(purpose: Purpose) -> String {
    format!("{}{}-{}.json", names::LEASES, purpose.as_str(), random())
}

/// 64 random bits in hex: a fresh `RandomState` has fresh random keys.
pub(crate) fn random() -> String {
    format!("{:016x}", RandomState::new().hash_one(0_u8))
}

/// This host and process, for people.
pub fn holder() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{} pid {}", host.trim(), std::process::id())
}

/// All leases of an origin, those that are over included. One that goes away meanwhile is left out: whoever releases a
/// lease has finished what it was for.
///
/// # Errors
/// When the origin cannot list or fails.
pub fn read_all(origin: &dyn Origin) -> Result<Vec<Found>, OriginError> {
    let mut out = Vec::new();
    for info in origin.list_info(names::LEASES)? {
        let lease = match origin.fetch_all(&info.name, LEASE_BYTES_MAX) {
            Ok(bytes) => Lease::parse(&bytes),
            Err(OriginError::NotFound { .. }) => continue,
            Err(OriginError::WrongAnswer {
                expected, found, ..
            }) => Err(FormatError::new("lease", expected, found)),
            Err(e) => return Err(e),
        };
        out.push(Found { info, lease });
    }
    Ok(out)
}

/// Says that `layer` is about to lose a tag. Must be done before the tag goes.
///
/// # Errors
/// When the origin fails. One that cannot hold leases cannot be collected either: that is no error.
pub fn write_untagged(origin: &dyn Origin, layer: Digest) -> Result<(), OriginError> {
    let lease = Lease {
        format: FORMAT,
        holder: holder(),
        layers: vec![layer],
        objects: Vec::new(),
        process: String::new(),
        purpose: Purpose::Untagged,
        seconds: 0,
    };
    match origin.replace(&fresh_name(Purpose::Untagged), &lease.to_bytes()) {
        Err(OriginError::Unsupported { .. }) => Ok(()),
        written => written,
    }
}
