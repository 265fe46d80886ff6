//! Collectors' records on an origin: what is about to be removed, readable by those who might need it.
//!
//! Every collector has a record under a name of its own, so none has to overwrite or trust another's. A record holds
//! until it is removed, until its time is over, or until its process is known to have ended.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use crate::format::condemned::{CONDEMNED_BYTES_MAX, CONDEMNED_SECONDS_MAX, Condemned};
use crate::format::{FormatError, names};
use crate::origin::{ObjectInfo, Origin, OriginError};
use crate::process::Process;

/// A record that was found.
#[derive(Debug, Clone)]
pub struct Record {
    /// Its object.
    pub info: ObjectInfo,
    /// What it says; one that cannot be read counts as naming everything.
    pub content: Result<Condemned, FormatError>,
}

impl Record {
    /// Whether its collector may still remove something at `now`.
    pub fn is_live(&self, now: SystemTime) -> bool {
        let seconds = self
            .content
            .as_ref()
            .map_or(CONDEMNED_SECONDS_MAX, |c| c.seconds);
        let age = now.duration_since(self.info.modified).unwrap_or_default();
        let gone = self
            .content
            .as_ref()
            .is_ok_and(|c| c.process.parse().is_ok_and(|p: Process| p.is_gone()));
        age <= Duration::from_secs(seconds) && !gone
    }

    /// The first of `objects`, or `lease`, that it condemns.
    pub fn names(&self, objects: &BTreeSet<String>, lease: &str) -> Option<String> {
        match &self.content {
            Ok(content) => content
                .objects
                .iter()
                .find(|o| *o == lease || objects.contains(*o))
                .cloned(),
            Err(_) => Some(lease.to_owned()),
        }
    }

    /// Who collects.
    pub fn holder(&self) -> String {
        match &self.content {
            Ok(content) => content.holder.clone(),
            Err(error) => format!("unknown; `{}`: {error}", self.info.name),
        }
    }
}

/// All records of an origin, those that are over included.
///
/// # Errors
/// When the origin cannot list or fails.
pub fn read_all(origin: &dyn Origin) -> Result<Vec<Record>, OriginError> {
    let mut out = Vec::new();
    for info in origin.list_info(names::GC)? {
        if !info.name.starts_with(names::GC_RECORD) {
            continue;
        }
        let content = match origin.fetch_all(&info.name, CONDEMNED_BYTES_MAX) {
            Ok(bytes) => Condemned::parse(&bytes),
            Err(OriginError::NotFound { .. }) => continue,
            Err(OriginError::WrongAnswer {
                expected, found, ..
            }) => Err(FormatError::new("gc record", expected, found)),
            Err(e) => return Err(e),
        };
        out.push(Record { info, content });
    }
    Ok(out)
}
