//! Any static web server with ranges, read-only.
//!
//! A reply is trusted for nothing: status, `Content-Range`, length and encoding are checked here, and the bytes are
//! checked against a digest by the reader. A server that ignores the range and sends the whole object is refused
//! instead of downloaded. Retries are a decorator's part.

use std::io::Read;
use std::sync::OnceLock;
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, RANGE};

use super::{ByteRange, Created, Origin, OriginError};
use crate::ids::{to_u64, to_usize};

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
    client: Client,
}

/// TLS needs one crypto provider per process.
fn install_crypto() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // An error means that another part of the process installed one before: that one serves.
        drop(rustls::crypto::ring::default_provider().install_default());
    });
}

impl HttpOrigin {
    /// Prepares a client; nothing is sent yet. `url` has no trailing slash.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the client cannot be made (no TLS roots, for example).
    pub fn open(url: &str) -> Result<Self, OriginError> {
        install_crypto();
        let client = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(REQUEST_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| OriginError::Unavailable {
                origin: url.to_owned(),
                object: String::new(),
                reason: describe(&e),
            })?;
        Ok(Self {
            url: url.to_owned(),
            client,
        })
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

    fn request(&self, object: &str) -> RequestBuilder {
        self.client
            .get(format!("{}/{object}", self.url))
            .header(ACCEPT_ENCODING, "identity")
    }

    fn send(&self, object: &str, request: RequestBuilder) -> Result<Response, OriginError> {
        let reply = request
            .send()
            .map_err(|e| self.unavailable(object, describe(&e)))?;
        let status = reply.status();
        if status == StatusCode::NOT_FOUND || status == StatusCode::GONE {
            return Err(OriginError::NotFound {
                origin: self.url.clone(),
                object: object.to_owned(),
            });
        }
        if !status.is_success() && status != StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(self.unavailable(object, format!("HTTP status {status}")));
        }
        if let Some(encoding) = reply
            .headers()
            .get(CONTENT_ENCODING)
            .filter(|v| v.as_bytes() != b"identity")
        {
            let found = format!(
                "`Content-Encoding: {}`",
                String::from_utf8_lossy(encoding.as_bytes())
            );
            return Err(self.wrong(object, "an unencoded body", found));
        }
        Ok(reply)
    }

    fn read_body(
        &self,
        object: &str,
        reply: Response,
        len_max: u64,
        hint: usize,
    ) -> Result<Vec<u8>, OriginError> {
        let mut body = Vec::with_capacity(hint);
        reply
            .take(len_max.saturating_add(1))
            .read_to_end(&mut body)
            .map_err(|e| {
                self.unavailable(
                    object,
                    format!("body cut off after {} bytes: {e}", body.len()),
                )
            })?;
        Ok(body)
    }
}

/// reqwest's text without its sources hides the cause ("error sending request"); join them.
fn describe(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
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
        let reply = self.send(object, self.request(object).header(RANGE, &asked))?;
        if reply.status() != StatusCode::PARTIAL_CONTENT {
            return Err(self.wrong(
                object,
                format!("HTTP status 206 for `Range: {asked}`"),
                format!("HTTP status {}", reply.status()),
            ));
        }
        let header = reply
            .headers()
            .get(CONTENT_RANGE)
            .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
        if header.as_deref().and_then(parse_content_range) != Some((range.start, last)) {
            return Err(self.wrong(
                object,
                format!("`Content-Range: bytes {}-{last}/…`", range.start),
                header.unwrap_or_else(|| "none".to_owned()),
            ));
        }
        let body = self.read_body(object, reply, range.len, to_usize(range.len))?;
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
        let reply = self.send(object, self.request(object))?;
        if reply.status() != StatusCode::OK {
            return Err(self.wrong(
                object,
                "HTTP status 200",
                format!("HTTP status {}", reply.status()),
            ));
        }
        let announced = reply.content_length();
        if announced.is_some_and(|n| n > max_len) {
            return Err(self.wrong(
                object,
                format!("at most {max_len} bytes"),
                format!("{} bytes announced", announced.unwrap_or(0)),
            ));
        }
        let body = self.read_body(object, reply, max_len, 0)?;
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
        let request = self
            .client
            .head(format!("{}/{object}", self.url))
            .header(ACCEPT_ENCODING, "identity");
        let reply = self.send(object, request)?;
        let length = reply
            .headers()
            .get(reqwest::header::CONTENT_LENGTH)
            .and_then(|v| v.to_str().ok()?.parse().ok());
        length.ok_or_else(|| self.wrong(object, "a `Content-Length` header", "none"))
    }
}
