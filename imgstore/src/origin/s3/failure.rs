//! What an S3 server said when it did not do what it was asked, and what that means to the caller.

use std::error::Error;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use reqwest::StatusCode;
use reqwest::header::{DATE, HeaderMap, LOCATION};

use super::credentials::{NoCredentials, PLACES};
use crate::origin::OriginError;
use crate::origin::http::retry_after::retry_after;

/// Clocks that differ by more are named as the likely cause of a refusal; servers allow 15 minutes.
const CLOCK_SKEW_NAMED: Duration = Duration::from_secs(300);
/// Longest text of a server that is repeated in a message.
const SAID_CHARS_MAX: usize = 200;

/// Codes that mean "not you", whatever the status.
const DENIED: [&str; 12] = [
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "NotSignedUp",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
];
/// Codes that mean "later".
const BUSY: [&str; 6] = [
    "SlowDown",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
];

/// A reply that `object_store` must not interpret: it goes through it as the source of an error.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// A status that is no success.
    #[error("HTTP status {status}{}", said(.code.as_deref(), .message.as_deref()))]
    Refused {
        status: StatusCode,
        code: Option<String>,
        message: Option<String>,
        retry_after: Option<Duration>,
        /// How far the server's clock is from ours, and how.
        clock: Option<String>,
        /// For redirections: where to.
        elsewhere: Option<String>,
    },
    /// A success that is not what was asked for.
    #[error("expected {expected}, found {found}")]
    Answer {
        expected: &'static str,
        found: String,
    },
    /// Nothing, or too little, came in time.
    #[error("no answer, or too slow a one, within {:.1} s", .0.as_secs_f64())]
    Slow(Duration),
}

fn said(code: Option<&str>, message: Option<&str>) -> String {
    match (code, message) {
        (Some(code), Some(message)) => format!(" ({code}: {message})"),
        (Some(code), None) => format!(" ({code})"),
        _ => String::new(),
    }
}

/// The text of the first `<name>` element, cut and without control characters.
fn element(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once("</")?;
    let shown = text.chars().filter(|c| !c.is_control());
    Some(shown.take(SAID_CHARS_MAX).collect())
}

fn clock(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(DATE)?.to_str().ok()?;
    let server = DateTime::parse_from_rfc2822(text).ok()?.with_timezone(&Utc);
    let ahead = Utc::now() - server;
    let (by, how) = match ahead.to_std() {
        Ok(by) => (by, "ahead of"),
        Err(_) => ((-ahead).to_std().ok()?, "behind"),
    };
    (by > CLOCK_SKEW_NAMED).then(|| {
        let minutes = by.as_secs() / 60;
        format!("this host's clock is {minutes} minutes {how} the server's: set it right")
    })
}

impl Failure {
    /// Reads status, headers and the beginning of the body of a reply.
    pub(super) fn new(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let body = String::from_utf8_lossy(body);
        let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.to_owned());
        // The query of an address may hold a signature.
        let target = headers.get(LOCATION).and_then(|v| v.to_str().ok());
        let target = target.map(|url| url.split('?').next().unwrap_or_default().to_owned());
        let region = text("x-amz-bucket-region").map(|r| format!("the region `{r}`"));
        Self::Refused {
            status,
            code: element(&body, "Code"),
            message: element(&body, "Message"),
            retry_after: retry_after(headers, SystemTime::now()),
            clock: clock(headers),
            elsewhere: region.or_else(|| target.map(|t| format!("`{t}`"))),
        }
    }

    /// Whether the body says so: `NoSuchBucket` and others.
    pub(super) fn is_code(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code: Some(code), .. } if code == wanted)
    }

    pub(super) const fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Answer { .. } | Self::Slow(_) => None,
        }
    }

    fn explain(&self, origin: String, object: String) -> OriginError {
        let Self::Refused {
            status,
            code,
            retry_after,
            clock,
            elsewhere,
            ..
        } = self
        else {
            let Self::Answer { expected, found } = self else {
                let reason = self.to_string();
                return OriginError::Unavailable {
                    origin,
                    object,
                    reason,
                };
            };
            return OriginError::WrongAnswer {
                origin,
                object,
                expected: (*expected).to_owned(),
                found: found.clone(),
            };
        };
        let is = |codes: &[&str]| code.as_deref().is_some_and(|code| codes.contains(&code));
        let denied = |more: String| OriginError::Denied {
            origin: origin.clone(),
            object: object.clone(),
            reason: format!("{self}; {more}"),
        };
        if let Some(place) = elsewhere
            && status.is_redirection()
        {
            return denied(format!(
                "the bucket is at {place}: set AWS_REGION or AWS_ENDPOINT_URL"
            ));
        }
        if self.is_code("NoSuchBucket") {
            return denied("the bucket must be made first".to_owned());
        }
        let refused = matches!(*status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        if is(&DENIED) || (refused && !is(&BUSY)) {
            return denied(clock.clone().unwrap_or_else(|| PLACES.to_owned()));
        }
        let busy = matches!(
            *status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        if busy || is(&BUSY) {
            return OriginError::Busy {
                origin,
                object,
                reason: self.to_string(),
                retry_after: *retry_after,
            };
        }
        if *status == StatusCode::RANGE_NOT_SATISFIABLE {
            return OriginError::WrongAnswer {
                origin,
                object,
                expected: "an object that has the range".to_owned(),
                found: self.to_string(),
            };
        }
        OriginError::Unavailable {
            origin,
            object,
            reason: self.to_string(),
        }
    }
}

/// The first error of this type among an error and its causes.
pub(super) fn cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// The last cause: the ones before repeat it, with addresses.
fn root(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}

/// What an error of `object_store` means.
pub(super) fn explain(error: &object_store::Error, origin: &str, object: &str) -> OriginError {
    let (origin, object) = (origin.to_owned(), object.to_owned());
    if let Some(failure) = cause::<Failure>(error) {
        return failure.explain(origin, object);
    }
    if let Some(none) = cause::<NoCredentials>(error) {
        return OriginError::Denied {
            origin,
            object,
            reason: none.to_string(),
        };
    }
    match error {
        object_store::Error::NotFound { .. } => OriginError::NotFound { origin, object },
        // Wrong or missing headers of a success.
        object_store::Error::Generic { source, .. }
            if cause::<object_store::client::HttpError>(&**source).is_none() =>
        {
            OriginError::WrongAnswer {
                origin,
                object,
                expected: "the reply of an S3 server".to_owned(),
                found: root(error),
            }
        }
        _ => OriginError::Unavailable {
            origin,
            object,
            reason: root(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(status: u16, headers: &[(&'static str, &str)], body: &str) -> OriginError {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        let failure = Failure::new(StatusCode::from_u16(status).unwrap(), &map, body.as_bytes());
        failure.explain("s3://b".to_owned(), "o".to_owned())
    }

    fn xml(code: &str) -> String {
        format!("<?xml?><Error><Code>{code}</Code><Message>it says {code}</Message></Error>")
    }

    #[test]
    fn refusals_say_what_to_do() {
        for code in DENIED {
            let error = explained(400, &[], &xml(code));
            assert!(
                matches!(error, OriginError::Denied { .. }),
                "{code}: {error}"
            );
            assert!(error.to_string().contains("~/.aws/credentials"), "{error}");
        }
        let error = explained(403, &[], "");
        assert!(matches!(error, OriginError::Denied { .. }));
        let error = explained(301, &[("x-amz-bucket-region", "eu-9")], "");
        assert!(
            error.to_string().contains("`eu-9`: set AWS_REGION"),
            "{error}"
        );
        let error = explained(307, &[("location", "https://x/y?sig=secret")], "");
        let text = error.to_string();
        assert!(
            text.contains("https://x/y") && !text.contains("secret"),
            "{text}"
        );
        let error = explained(404, &[], &xml("NoSuchBucket"));
        assert!(error.to_string().contains("made first"), "{error}");
    }

    /// A server whose clock is 20 minutes off refuses; the message says so.
    #[test]
    fn a_clock_that_is_wrong_is_named() {
        for (minutes, how) in [(-20, "ahead of"), (20, "behind")] {
            let server = Utc::now() + chrono::TimeDelta::minutes(minutes);
            let date = server.to_rfc2822().replace("+0000", "GMT");
            let error = explained(403, &[("date", &date)], &xml("RequestTimeTooSkewed"));
            let text = error.to_string();
            assert!(text.contains("minutes") && text.contains(how), "{text}");
        }
    }

    #[test]
    fn busy_servers_are_left_alone_as_long_as_they_ask() {
        for (status, code) in [(503, "SlowDown"), (429, ""), (400, "Throttling")] {
            let error = explained(status, &[("retry-after", "7")], &xml(code));
            let OriginError::Busy { retry_after, .. } = error else {
                panic!("{status}: {error}");
            };
            assert_eq!(retry_after, Some(Duration::from_secs(7)));
        }
        let error = explained(500, &[], &xml("InternalError"));
        assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
    }
}
