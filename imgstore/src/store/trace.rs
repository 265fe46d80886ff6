//! Traces on an origin: an object named by its digest, and a label of the tag that names the object.
//!
//! The label is read with the tag, which a mount reads anyway: a layer without a trace costs no request.

use super::layer::{self, LayerError};
use super::lease::hold::{PATIENCE, publishing};
use crate::build::BuildError;
use crate::build::publish::Publisher;
use crate::format::tag::Tag;
use crate::format::trace::{TRACE_BYTES_MAX, TRACE_LABEL, Trace};
use crate::format::{FormatError, names};
use crate::ids::{Digest, TagName};
use crate::origin::Origin;
use crate::store::tags;

/// The trace that a tag names.
pub fn of_tag(tag: &Tag) -> Option<Digest> {
    tag.labels.get(TRACE_LABEL)?.parse().ok()
}

/// The trace published under this digest.
///
/// # Errors
/// [`LayerError::Damaged`] when the bytes are not those that the name stands for, else what the origin said.
pub fn read(origin: &dyn Origin, digest: &Digest) -> Result<Trace, LayerError> {
    let object = names::trace(digest);
    let bytes = origin.fetch_all(&object, TRACE_BYTES_MAX)?;
    let damaged = |source| LayerError::Damaged {
        object: object.clone(),
        origin: origin.address(),
        source,
    };
    let found = Digest::of(&bytes);
    if found != *digest {
        return Err(damaged(FormatError::new(
            "digest of a trace",
            digest.to_hex(),
            found,
        )));
    }
    Trace::parse(&bytes).map_err(damaged)
}

/// Publishes `trace` and has the tag `name` refer to it; the layer stays what it is.
///
/// # Errors
/// When there is no such tag or the origin cannot be written.
pub fn publish(origin: &dyn Origin, name: &TagName, trace: &Trace) -> Result<Digest, BuildError> {
    let mut tag = layer::read_tag(origin, name)?;
    let digest = trace.digest();
    publishing(origin, |hold| {
        let publisher = Publisher {
            origin,
            hold,
            patience: PATIENCE,
        };
        write(&publisher, trace)?;
        tag.labels.insert(TRACE_LABEL.to_owned(), digest.to_hex());
        tags::write(origin, name, &tag)?;
        Ok(digest)
    })
}

/// Writes a trace that a tag is about to name. Also one that is there: it is young then, and nobody collects it.
///
/// # Errors
/// When the origin cannot be written.
pub(crate) fn write(publisher: &Publisher<'_>, trace: &Trace) -> Result<(), BuildError> {
    let object = names::trace(&trace.digest());
    publisher.claim_objects([object.clone()])?;
    Ok(publisher.origin.replace(&object, &trace.to_bytes())?)
}
