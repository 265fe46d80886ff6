//! Any static web server with ranges, read-only.
//!
//! A reply is trusted for nothing: status, `Content-Range`, length and encoding are checked here, and the bytes are
//! checked against a digest by the reader. A server that ignores the range and sends the whole object is refused
//! instead of downloaded. How long what may take is in `limits`; retries, and whom to ask next, are the part of
//! [`crate::fetch::origins`].

pub(crate) mod general;
mod limits;
mod plain;
mod refusal;
mod reply;
mod resolve;
pub(crate) mod retry_after;

use std::io::Read;
use std::sync::OnceLock;
use std::time::Instant;

use hyper::header::CONTENT_RANGE;
use hyper::{Method, StatusCode};
use reqwest::Url;

use super::{ByteRange, Created, Origin, OriginError};
use crate::ids::to_u64;
use general::GeneralHttp;
pub use limits::HttpLimits;
use limits::Until;
use plain::PlainHttp;
use refusal::Subject;
use reply::{Ask, Reply, content_length};
use resolve::Resolver;

/// What goes wrong below HTTP.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A web server.
#[derive(Debug)]
pub struct HttpOrigin {
    /// The address as it may be shown.
    url: String,
    /// Whether there is more in the address than may be shown.
    credentials: bool,
    /// The address itself, for the general client.
    base: String,
    limits: HttpLimits,
    /// The short way, for `http://`.
    plain: Option<PlainHttp>,
    /// The general way. Made when it is first needed: it has a thread and a TLS configuration.
    general: OnceLock<GeneralHttp>,
}

/// An address without user and password.
pub(super) fn without_credentials(url: &str) -> String {
    let Ok(mut parsed) = Url::parse(url) else {
        return url.to_owned();
    };
    if parsed.username().is_empty() && parsed.password().is_none() {
        return url.to_owned();
    }
    // They fail for addresses that can have neither.
    if parsed.set_password(None).is_err() || parsed.set_username("").is_err() {
        return "an address with credentials".to_owned();
    }
    parsed.as_str().trim_end_matches('/').to_owned()
}

impl HttpOrigin {
    /// Prepares a client; nothing is sent yet. `url` has no trailing slash.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the client cannot be made (no TLS roots, for example).
    pub fn open(url: &str) -> Result<Self, OriginError> {
        Self::open_with(url, HttpLimits::default())
    }

    /// As [`HttpOrigin::open`], with other limits.
    ///
    /// # Errors
    /// As for [`HttpOrigin::open`].
    pub fn open_with(url: &str, limits: HttpLimits) -> Result<Self, OriginError> {
        let shown = without_credentials(url);
        let origin = Self {
            credentials: shown != url,
            url: shown,
            base: url.to_owned(),
            limits,
            plain: PlainHttp::new(url, limits, Resolver::system()),
            general: OnceLock::new(),
        };
        if origin.plain.is_none() {
            origin.general("")?;
        }
        Ok(origin)
    }

    fn general(&self, object: &str) -> Result<&GeneralHttp, OriginError> {
        if let Some(general) = self.general.get() {
            return Ok(general);
        }
        let general = GeneralHttp::new(&self.base, self.limits)
            .map_err(|e| self.unavailable(object, chain(&*e)))?;
        Ok(self.general.get_or_init(|| general))
    }

    fn unavailable(&self, object: &str, reason: String) -> OriginError {
        OriginError::Unavailable {
            origin: self.url.clone(),
            object: object.to_owned(),
            reason,
        }
    }

    fn wrong(
        &self,
        object: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> OriginError {
        OriginError::WrongAnswer {
            origin: self.url.clone(),
            object: object.to_owned(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// Sends a request, the short way if that leads there; the reply's status is one to look at.
    fn send(&self, ask: &Ask<'_>) -> Result<Reply, OriginError> {
        let failed = |e: Failure| self.unavailable(ask.object, chain(&*e));
        let reply = match &self.plain {
            Some(plain) => plain.send(ask).map_err(failed)?,
            None => self.general(ask.object)?.send(ask).map_err(failed)?,
        };
        let reply = if self.plain.is_some() && reply.status.is_redirection() {
            self.general(ask.object)?.send(ask).map_err(failed)?
        } else {
            reply
        };
        let subject = Subject {
            origin: &self.url,
            object: ask.object,
            credentials: self.credentials,
        };
        refusal::check(subject, reply.status, &reply.headers)?;
        if reply.status != ask.wanted {
            let asked = ask.range.map(|range| format!(" for `Range: {range}`"));
            return Err(self.wrong(
                ask.object,
                format!(
                    "HTTP status {}{}",
                    ask.wanted.as_u16(),
                    asked.unwrap_or_default()
                ),
                format!("HTTP status {}", reply.status),
            ));
        }
        Ok(reply)
    }

    fn get_range(
        &self,
        object: &str,
        range: ByteRange,
        until: Until,
    ) -> Result<Vec<u8>, OriginError> {
        let last = range.start.saturating_add(range.len).saturating_sub(1);
        let asked = format!("bytes={}-{last}", range.start);
        let reply = self.send(&Ask {
            method: Method::GET,
            object,
            range: Some(&asked),
            wanted: StatusCode::PARTIAL_CONTENT,
            body_max: range.len,
            until,
        })?;
        let header = reply
            .headers
            .get(CONTENT_RANGE)
            .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
        if header.as_deref().and_then(parse_content_range) != Some((range.start, last)) {
            return Err(self.wrong(
                object,
                format!("`Content-Range: bytes {}-{last}/…`", range.start),
                header.unwrap_or_else(|| "none".to_owned()),
            ));
        }
        self.check_length(object, &reply, format!("{} bytes", range.len), |len| {
            len == range.len
        })?;
        Ok(reply.body)
    }

    fn get_whole(&self, object: &str, max_len: u64, until: Until) -> Result<Vec<u8>, OriginError> {
        let reply = self.send(&Ask {
            method: Method::GET,
            object,
            range: None,
            wanted: StatusCode::OK,
            body_max: max_len,
            until,
        })?;
        self.check_length(object, &reply, format!("at most {max_len} bytes"), |len| {
            len <= max_len
        })?;
        Ok(reply.body)
    }

    /// Whether what is announced and what came are what they may be, and the same.
    fn check_length(
        &self,
        object: &str,
        reply: &Reply,
        expected: String,
        right: impl Fn(u64) -> bool,
    ) -> Result<(), OriginError> {
        let announced = content_length(&reply.headers);
        if let Some(len) = announced.filter(|len| !right(*len)) {
            return Err(self.wrong(object, expected, format!("{len} bytes announced")));
        }
        let len = to_u64(reply.body.len());
        if !right(len) || announced.is_some_and(|n| n != len) {
            return Err(self.wrong(object, expected, format!("{len} bytes")));
        }
        Ok(())
    }
}

/// An error and all its causes: the text of the outermost one alone hides the reason.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// `bytes START-END/TOTAL` as (start, end inclusive).
fn parse_content_range(text: &str) -> Option<(u64, u64)> {
    let (range, _total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.split_once('-')?;
    Some((start.trim().parse().ok()?, end.trim().parse().ok()?))
}

impl Origin for HttpOrigin {
    fn address(&self) -> String {
        self.url.clone()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.get_range(object, range, Until::default())
    }

    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let until = Until {
            begin: Some(deadline),
            end: Some(deadline),
        };
        self.get_range(object, range, until)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.get_whole(object, max_len, Until::default())
    }

    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let until = Until {
            begin: Some(deadline),
            end: None,
        };
        self.get_whole(object, max_len, until)
    }

    fn create(&self, _object: &str, _content: &mut dyn Read) -> Result<Created, OriginError> {
        Err(OriginError::Unsupported {
            origin: self.url.clone(),
            what: "be written",
        })
    }

    fn replace(&self, _object: &str, _content: &[u8]) -> Result<(), OriginError> {
        Err(OriginError::Unsupported {
            origin: self.url.clone(),
            what: "be written",
        })
    }

    fn list(&self, _prefix: &str) -> Result<Vec<String>, OriginError> {
        Err(OriginError::Unsupported {
            origin: self.url.clone(),
            what: "be listed",
        })
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        let reply = self.send(&Ask {
            method: Method::HEAD,
            object,
            range: None,
            wanted: StatusCode::OK,
            body_max: 0,
            until: Until::default(),
        })?;
        let length = content_length(&reply.headers);
        length.ok_or_else(|| self.wrong(object, "a `Content-Length` header", "none"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_not_shown() {
        for (url, shown) in [
            ("http://user:word@host:81/x", "http://host:81/x"),
            ("https://token@host", "https://host"),
            ("http://host/a@b:c", "http://host/a@b:c"),
            ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ] {
            assert_eq!(without_credentials(url), shown);
            let origin = HttpOrigin::open(url).unwrap();
            assert_eq!(origin.address(), shown);
        }
    }
}
