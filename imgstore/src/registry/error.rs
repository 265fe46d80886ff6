//! Why a registry did not do what it was asked, without saying which origin or import asked.

use std::time::{Duration, SystemTime};

use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde::Deserialize;

use super::credentials::PLACES;
use crate::origin::http::retry_after::retry_after;

/// Longest text of a server that is repeated in a message.
const SAID_CHARS_MAX: usize = 200;

/// See the head of this file.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// No such repository, tag, manifest or blob.
    #[error("it is not there")]
    NotFound,
    /// Who asks is not known or not allowed. Asking again does not help.
    #[error("{0}")]
    Denied(String),
    /// The registry asks to be left alone for a while.
    #[error("{reason}")]
    Busy {
        /// What it said.
        reason: String,
        /// For how long, where it said so.
        retry_after: Option<Duration>,
    },
    /// It could not be reached or failed; a retry may help.
    #[error("{0}")]
    Unavailable(String),
    /// An answer that cannot be right.
    #[error("expected {expected}, found {found}")]
    Wrong {
        /// A right one.
        expected: String,
        /// What came.
        found: String,
    },
    /// The registry does not do this.
    #[error("the registry does not {0}")]
    Unsupported(&'static str),
}

#[derive(Deserialize)]
struct Document {
    errors: Vec<Said>,
}

#[derive(Deserialize)]
struct Said {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl RegistryError {
    /// An answer that is not what it should be.
    pub(crate) fn wrong(expected: impl ToString, found: impl ToString) -> Self {
        Self::Wrong {
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// A failure of the transport; addresses are left out, since their queries may hold signatures.
    pub(crate) fn transport(error: reqwest::Error) -> Self {
        let error = error.without_url();
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Self::Unavailable(text)
    }

    /// What a status that is no success means. `body` is the beginning of the reply's.
    pub(crate) fn refused(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let document: Option<Document> = serde_json::from_slice(body).ok();
        let said = document.and_then(|d| d.errors.into_iter().next());
        let code = said.as_ref().map_or("", |said| said.code.as_str());
        let mut reason = format!("HTTP status {status}");
        if let Some(said) = &said {
            let text = format!(" ({}: {})", said.code, said.message);
            let shown = text.chars().filter(|c| !c.is_control());
            reason.extend(shown.take(SAID_CHARS_MAX));
        }
        match (status, code) {
            (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE, _)
            | (_, "TOOMANYREQUESTS") => Self::Busy {
                reason,
                retry_after: retry_after(headers, SystemTime::now()),
            },
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _)
            | (_, "DENIED" | "UNAUTHORIZED") => Self::Denied(format!("{reason}; {PLACES}")),
            (StatusCode::NOT_FOUND | StatusCode::GONE, _) => Self::NotFound,
            (StatusCode::RANGE_NOT_SATISFIABLE, _) => {
                Self::wrong("an object that has the range", reason)
            }
            (StatusCode::METHOD_NOT_ALLOWED, _) | (_, "UNSUPPORTED") => {
                Self::Unsupported("allow it (docker-registry: `storage.delete.enabled`)")
            }
            _ => Self::Unavailable(reason),
        }
    }

    /// Whether asking again can help.
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Busy { .. } | Self::Unavailable(_) | Self::Wrong { .. }
        )
    }
}
