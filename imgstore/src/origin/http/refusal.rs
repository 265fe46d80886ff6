//! What a status means, and how a server that wants to know who asks is reported.

use std::time::SystemTime;

use hyper::header::{CONTENT_ENCODING, TRANSFER_ENCODING, WWW_AUTHENTICATE};
use hyper::{HeaderMap, StatusCode};

use super::retry_after::retry_after;
use crate::origin::OriginError;

/// Who refuses what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    pub(super) origin: &'a str,
    pub(super) object: &'a str,
    /// Whether the origin's address has a user and a password.
    pub(super) credentials: bool,
}

/// The schemes that a server offers, from however many headers with however many challenges each. A challenge begins with
/// a word behind which there is a space or an end, and no `=` before the next comma starts it anew.
fn schemes(headers: &HeaderMap) -> Vec<String> {
    let mut out = Vec::new();
    for value in headers.get_all(WWW_AUTHENTICATE) {
        let text = String::from_utf8_lossy(value.as_bytes());
        for part in outside_quotes(&text) {
            let word = part.split_whitespace().next().unwrap_or_default();
            let is_name = !word.is_empty() && !word.contains('=');
            let known = out.iter().any(|s: &String| s.eq_ignore_ascii_case(word));
            if is_name && !known {
                out.push(word.to_owned());
            }
        }
    }
    out
}

/// The parts between commas that are not inside quotes.
fn outside_quotes(text: &str) -> Vec<&str> {
    let mut quoted = false;
    let mut escaped = false;
    text.split(|c| {
        if escaped {
            escaped = false;
            return false;
        }
        match c {
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ',' => return !quoted,
            _ => {}
        }
        false
    })
    .collect()
}

fn denied(subject: Subject<'_>, status: StatusCode, headers: &HeaderMap) -> OriginError {
    let offered = schemes(headers);
    let offers = if offered.is_empty() {
        String::new()
    } else {
        format!(", which asks for {}", offered.join(" or "))
    };
    let hint = if subject.credentials {
        "the user and password in the origin's address are wrong or no longer valid"
    } else {
        "user and password (Basic) go into the origin's address, as in `https://user:password@host/`"
    };
    OriginError::Denied {
        origin: subject.origin.to_owned(),
        object: subject.object.to_owned(),
        reason: format!("HTTP status {status}{offers}; {hint}"),
    }
}

/// Whether a reply can be looked at any further.
///
/// # Errors
/// What its status or its encoding means.
pub(super) fn check(
    subject: Subject<'_>,
    status: StatusCode,
    headers: &HeaderMap,
) -> Result<(), OriginError> {
    let (origin, object) = (subject.origin.to_owned(), subject.object.to_owned());
    let wait = retry_after(headers, SystemTime::now());
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => {
            return Err(OriginError::NotFound { origin, object });
        }
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            return Err(denied(subject, status, headers));
        }
        StatusCode::TOO_MANY_REQUESTS => {}
        StatusCode::SERVICE_UNAVAILABLE if wait.is_some() => {}
        StatusCode::RANGE_NOT_SATISFIABLE => return Ok(()),
        _ if status.is_success() => return check_encoding(subject, headers),
        _ => {
            return Err(OriginError::Unavailable {
                origin,
                object,
                reason: format!("HTTP status {status}"),
            });
        }
    }
    Err(OriginError::Busy {
        origin,
        object,
        reason: wait.map_or_else(
            || format!("HTTP status {status}"),
            |wait| {
                format!(
                    "HTTP status {status}, to be asked again in {} s",
                    wait.as_secs()
                )
            },
        ),
        retry_after: wait,
    })
}

/// An object is stored as it is read: one that comes encoded is another one.
fn check_encoding(subject: Subject<'_>, headers: &HeaderMap) -> Result<(), OriginError> {
    for (name, shown, plain) in [
        (CONTENT_ENCODING, "Content-Encoding", "identity"),
        (TRANSFER_ENCODING, "Transfer-Encoding", "chunked"),
    ] {
        for value in headers.get_all(&name) {
            let text = String::from_utf8_lossy(value.as_bytes());
            if !text.trim().eq_ignore_ascii_case(plain) {
                return Err(OriginError::WrongAnswer {
                    origin: subject.origin.to_owned(),
                    object: subject.object.to_owned(),
                    expected: "an unencoded body".to_owned(),
                    found: format!("`{shown}: {text}`"),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Several headers, several challenges in one, commas and quotes inside of quotes: what is asked for is named.
    #[test]
    fn s73_challenges_of_all_shapes_are_named() {
        let cases: [(&[&str], &[&str]); 5] = [
            (&["Basic realm=\"a, Digest b\""], &["Basic"]),
            (
                &[
                    "Bearer realm=\"https://x/t\",service=\"s\"",
                    "Basic realm=x",
                ],
                &["Bearer", "Basic"],
            ),
            (
                &["Negotiate, Basic realm=\"q\\\"uote, Bearer\", charset=\"UTF-8\", Bearer"],
                &["Negotiate", "Basic", "Bearer"],
            ),
            (&["basic", "BASIC realm=1"], &["basic"]),
            (&[], &[]),
        ];
        for (values, expected) in cases {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(WWW_AUTHENTICATE, value.parse().unwrap());
            }
            assert_eq!(schemes(&headers), expected, "{values:?}");
        }
    }
}
