//! Where a sandbox is, if it lives, and what it uses there.

use super::{Sandbox, Service};
use crate::api::State;
use crate::backend::Place;
use crate::container::cgroup::Usage;
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

impl Service {
    /// What a sandbox uses.
    ///
    /// # Errors
    /// `SandboxGone`.
    pub(crate) fn usage(&self, sandbox: &Sandbox) -> Result<Usage, ApiError> {
        let place = living(&sandbox.record())?;
        Ok(self.backends.of(&place)?.usage(&place)?)
    }

    /// Whether a sandbox lives, and if not, why: for those whose connection to it broke.
    pub(crate) fn reason(&self, sandbox: &Sandbox) -> Option<String> {
        if let Some(reason) = sandbox.ending.get() {
            return Some(reason.clone());
        }
        let record = sandbox.record();
        match &record.place {
            Some(place) if record.info.state != State::Gone => {
                (!self.lives(place)).then(|| "its first process ended".to_owned())
            }
            _ => Some(record.info.reason.unwrap_or_default()),
        }
    }
}
