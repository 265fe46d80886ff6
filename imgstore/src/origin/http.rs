//! Any static web server with ranges, read-only.
//!
//! A reply is trusted for nothing: status, `Content-Range`, length and encoding are checked here, and the bytes are
//! checked against a digest by the reader. A server that ignores the range and sends the whole object is refused
//! instead of downloaded. Retries are a decorator's part.

use std::io::Read;
use std::sync::OnceLock;
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::blocking::Client;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, RANGE,
};

use super::plain_http::{PlainHttp, Timeouts};
use super::{ByteRange, Created, Origin, OriginError};
use crate::ids::to_u64;

/// Longest wait for a TCP or TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for one request with its body; a segment range is at most a few MiB.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Connections kept open for reuse.
const IDLE_CONNECTIONS_MAX: usize = 32;

/// A web server.
#[derive(Debug)]
pub struct HttpOrigin {
    url: String,
    /// The short way, for `http://`.
    plain: Option<PlainHttp>,
    /// The general way: encryption, redirects. Made when it is first needed: it has a thread and a TLS configuration.
    client: OnceLock<Client>,
}

/// A reply of either way: at most so many bytes of the body as were asked for, plus one.
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

/// TLS needs one crypto provider per process.
fn install_crypto() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // An error means that another part of the process installed one before: that one serves.
        drop(rustls::crypto::ring::default_provider().install_default());
    });
}

fn make_client() -> Result<Client, reqwest::Error> {
    install_crypto();
    Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(REQUEST_TIMEOUT)
        .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
        .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
        .build()
}

impl HttpOrigin {
    /// Prepares a client; nothing is sent yet. `url` has no trailing slash.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the client cannot be made (no TLS roots, for example).
    pub fn open(url: &str) -> Result<Self, OriginError> {
        let timeouts = Timeouts {
            connect: CONNECT_TIMEOUT,
            request: REQUEST_TIMEOUT,
        };
        let origin = Self {
            url: url.to_owned(),
            plain: PlainHttp::new(url, timeouts),
            client: OnceLock::new(),
        };
        if origin.plain.is_none() {
            origin.client("")?;
        }
        Ok(origin)
    }

    fn client(&self, object: &str) -> Result<&Client, OriginError> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let client = make_client().map_err(|e| self.unavailable(object, describe(&e)))?;
        Ok(self.client.get_or_init(|| client))
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

    /// GET of at most `body_max` bytes (and one more, so that too long a body is noticed).
    fn get(&self, object: &str, range: Option<&str>, body_max: u64) -> Result<Reply, OriginError> {
        let reply = match &self.plain {
            Some(plain) => {
                let reply = plain
                    .get(object, range, body_max)
                    .map_err(|e| self.unavailable(object, chain(&*e)))?;
                Reply {
                    status: reply.parts.status,
                    headers: reply.parts.headers,
                    body: reply.body,
                }
            }
            None => self.get_generally(object, range, body_max)?,
        };
        let reply = if self.plain.is_some() && reply.status.is_redirection() {
            self.get_generally(object, range, body_max)?
        } else {
            reply
        };
        self.check(object, reply.status, &reply.headers)?;
        Ok(reply)
    }

    fn get_generally(
        &self,
        object: &str,
        range: Option<&str>,
        body_max: u64,
    ) -> Result<Reply, OriginError> {
        let mut request = self
            .client(object)?
            .get(format!("{}/{object}", self.url))
            .header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        let reply = request
            .send()
            .map_err(|e| self.unavailable(object, describe(&e)))?;
        let (status, headers) = (reply.status(), reply.headers().clone());
        let mut body = Vec::new();
        reply
            .take(body_max.saturating_add(1))
            .read_to_end(&mut body)
            .map_err(|e| {
                let got = body.len();
                self.unavailable(object, format!("body cut off after {got} bytes: {e}"))
            })?;
        Ok(Reply {
            status,
            headers,
            body,
        })
    }

    fn check(
        &self,
        object: &str,
        status: StatusCode,
        headers: &HeaderMap,
    ) -> Result<(), OriginError> {
        if status == StatusCode::NOT_FOUND || status == StatusCode::GONE {
            return Err(OriginError::NotFound {
                origin: self.url.clone(),
                object: object.to_owned(),
            });
        }
        if !status.is_success() && status != StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(self.unavailable(object, format!("HTTP status {status}")));
        }
        match headers.get(CONTENT_ENCODING) {
            Some(encoding) if encoding.as_bytes() != b"identity" => {
                let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
                let found = format!("`Content-Encoding: {encoding}`");
                Err(self.wrong(object, "an unencoded body", found))
            }
            _ => Ok(()),
        }
    }
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// reqwest's text without its sources hides the cause ("error sending request"); join them.
fn describe(error: &reqwest::Error) -> String {
    chain(error)
}

/// An error and all its causes.
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
        let last = range.start.saturating_add(range.len).saturating_sub(1);
        let asked = format!("bytes={}-{last}", range.start);
        let reply = self.get(object, Some(&asked), range.len)?;
        if reply.status != StatusCode::PARTIAL_CONTENT {
            return Err(self.wrong(
                object,
                format!("HTTP status 206 for `Range: {asked}`"),
                format!("HTTP status {}", reply.status),
            ));
        }
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
        let body = reply.body;
        if to_u64(body.len()) != range.len {
            return Err(self.wrong(
                object,
                format!("{} bytes", range.len),
                format!("{} bytes", body.len()),
            ));
        }
        Ok(body)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        let reply = self.get(object, None, max_len)?;
        if reply.status != StatusCode::OK {
            return Err(self.wrong(
                object,
                "HTTP status 200",
                format!("HTTP status {}", reply.status),
            ));
        }
        let announced = content_length(&reply.headers);
        if announced.is_some_and(|n| n > max_len) {
            return Err(self.wrong(
                object,
                format!("at most {max_len} bytes"),
                format!("{} bytes announced", announced.unwrap_or(0)),
            ));
        }
        let body = reply.body;
        let len = to_u64(body.len());
        if len > max_len || announced.is_some_and(|n| n != len) {
            return Err(self.wrong(
                object,
                format!("{} bytes", announced.unwrap_or(max_len)),
                format!("{len} bytes"),
            ));
        }
        Ok(body)
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
        let reply = self
            .client(object)?
            .head(format!("{}/{object}", self.url))
            .header(ACCEPT_ENCODING, "identity")
            .send()
            .map_err(|e| self.unavailable(object, describe(&e)))?;
        self.check(object, reply.status(), reply.headers())?;
        let length = content_length(reply.headers());
        length.ok_or_else(|| self.wrong(object, "a `Content-Length` header", "none"))
    }
}
