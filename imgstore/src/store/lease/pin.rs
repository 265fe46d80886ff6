//! Leases that people hold: layers that stay though no tag points to them.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Hold, Wanted};
use crate::format::lease::{LEASE_BYTES_MAX, Lease, Purpose};
use crate::format::{FormatError, names};
use crate::ids::{Digest, LayerRef};
use crate::origin::{Origin, OriginError};
use crate::store::layer::{self, LayerError};
use crate::store::tags::{self, TagError};

/// The object of a lease that was given as it is listed, or without folder and ending.
pub fn object_name(text: &str) -> String {
    let inner = text.strip_prefix(names::LEASES).unwrap_or(text);
    let inner = inner.strip_suffix(".json").unwrap_or(inner);
    format!("{}{inner}.json", names::LEASES)
}

/// Keeps layers for `ttl`; the lease's name.
///
/// # Errors
/// When a layer is not there, or not all of it.
pub fn create(
    origin: &dyn Origin,
    references: &[LayerRef],
    ttl: Duration,
    patience: Duration,
) -> Result<String, TagError> {
    let layers = references
        .iter()
        .map(|r| layer::resolve(origin, r))
        .collect::<Result<BTreeSet<Digest>, _>>()?;
    let hold = Hold::new(Purpose::Pin, ttl);
    write(origin, &hold, layers, patience)?;
    Ok(hold.name().to_owned())
}

/// Lets a lease run again from now, for `ttl` or as long as before.
///
/// # Errors
/// When there is no such lease, it is a publisher's, or a layer it names is gone.
pub fn renew(
    origin: &dyn Origin,
    name: &str,
    ttl: Option<Duration>,
    patience: Duration,
) -> Result<(), TagError> {
    let object = object_name(name);
    let damaged = |source| LayerError::Damaged {
        object: object.clone(),
        origin: origin.address(),
        source,
    };
    let bytes = origin.fetch_all(&object, LEASE_BYTES_MAX)?;
    let lease = Lease::parse(&bytes).map_err(damaged)?;
    if lease.purpose != Purpose::Pin {
        let found = lease.purpose.as_str();
        let wrong = FormatError::new("purpose of the lease to renew", "pin", found);
        return Err(damaged(wrong).into());
    }
    let ttl = ttl.unwrap_or(Duration::from_secs(lease.seconds));
    let hold = Hold::named(object, Purpose::Pin, ttl);
    write(origin, &hold, lease.layers.into_iter().collect(), patience)
}

/// Ends a lease, whoever holds it.
///
/// # Errors
/// When there is none of that name or the origin fails.
pub fn release(origin: &dyn Origin, name: &str) -> Result<(), OriginError> {
    let object = object_name(name);
    origin.size(&object)?;
    origin.remove(&object)
}

fn write(
    origin: &dyn Origin,
    hold: &Hold,
    layers: BTreeSet<Digest>,
    patience: Duration,
) -> Result<(), TagError> {
    let mut relied_on = BTreeSet::new();
    for digest in &layers {
        relied_on.extend(layer::objects(&layer::open(origin, digest)?));
    }
    let wanted = Wanted {
        layers: layers.clone(),
        objects: BTreeSet::new(),
    };
    let complete = || -> Result<(), TagError> {
        hold.claim(origin, &wanted, &relied_on, patience)?;
        // Only now do they stay as they are.
        for digest in &layers {
            let objects = tags::missing(origin, &layer::open(origin, digest)?)?;
            if !objects.is_empty() {
                return Err(TagError::Incomplete {
                    layer: *digest,
                    origin: origin.address(),
                    objects,
                });
            }
        }
        Ok(())
    };
    complete().inspect_err(|_| hold.release(origin))
}
