//! Leases: expiring objects that say what must not be collected. See `docs/format.md`.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::manifest::FORMAT;
use crate::ids::Digest;

/// Largest lease a reader accepts, in bytes (some 80,000 names).
pub const LEASE_BYTES_MAX: u64 = 8 << 20;
/// Longest time a lease can run without being renewed: a year. One that cannot be read counts as that long.
pub const LEASE_SECONDS_MAX: u64 = 366 * 24 * 3600;

/// What a lease is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Somebody publishes: names the objects that are being created or reused.
    Publish,
    /// A host has layers mounted.
    Mount,
    /// A person wants layers to be kept.
    Pin,
    /// Layers that lost a tag: kept until the collector's grace period has passed, for hosts that cannot write leases.
    Untagged,
}

impl Purpose {
    /// The word in names and listings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Mount => "mount",
            Self::Pin => "pin",
            Self::Untagged => "untagged",
        }
    }
}

/// A lease. It runs for `seconds` from when the object was written, by the origin's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// [`FORMAT`].
    pub format: u32,
    /// Who holds it, for people.
    pub holder: String,
    /// Layers that are needed with everything they refer to.
    pub layers: Vec<Digest>,
    /// Single objects that are needed.
    pub objects: Vec<String>,
    /// The process that holds it; empty if the lease outlives its process.
    pub process: String,
    /// What it is for.
    pub purpose: Purpose,
    /// How long it runs after it was written.
    pub seconds: u64,
}

impl Lease {
    /// The bytes to store.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a lease has only strings and integers")
    }

    /// Parses a lease.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let lease: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("lease", "JSON of format version 1", e))?;
        if lease.format != FORMAT {
            return Err(FormatError::new("lease field `format`", "1", lease.format));
        }
        if lease.seconds > LEASE_SECONDS_MAX {
            return Err(FormatError::new(
                "lease field `seconds`",
                format!("at most {LEASE_SECONDS_MAX}"),
                lease.seconds,
            ));
        }
        Ok(lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_in_canonical_order_and_is_bounded() {
        let lease = Lease {
            format: 1,
            holder: "host".into(),
            layers: vec![Digest::of(b"x")],
            objects: vec!["packs/a".into()],
            process: String::new(),
            purpose: Purpose::Mount,
            seconds: 3600,
        };
        let bytes = lease.to_bytes();
        assert_eq!(Lease::parse(&bytes), Ok(lease.clone()));
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(serde_json::to_vec(&value).unwrap(), bytes);
        let long = Lease {
            seconds: LEASE_SECONDS_MAX + 1,
            ..lease
        };
        assert!(Lease::parse(&long.to_bytes()).is_err());
        assert!(Lease::parse(b"{}").is_err());
    }
}
