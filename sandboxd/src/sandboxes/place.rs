//! Where a sandbox is, if it lives.

use crate::api::State;
use crate::backend::Place;
use crate::error::{ApiError, ErrorKind};
use crate::store::Record;

/// The place of a living sandbox; else the error that says why it has none.
pub(super) fn living(record: &Record) -> Result<Place, ApiError> {
    match &record.place {
        Some(place) if record.info.state != State::Gone => Ok(place.clone()),
        _ => {
            let reason = record.info.reason.as_deref().unwrap_or("it is being made");
            let message = format!("sandbox `{}` is gone: {reason}", record.info.id);
            Err(ApiError::new(ErrorKind::SandboxGone, message))
        }
    }
}
