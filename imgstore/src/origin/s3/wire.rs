//! Requests to an S3 server as they go out, and replies as they come in, below `object_store`.
//!
//! Redirections are not followed, so that no signature or session token reaches another host. A reply that is no success,
//! ignores the range, or is encoded becomes a [`Failure`]; only "not there" and "there already" are left to `object_store`.

use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderName, HeaderValue, RANGE};
use reqwest::{Method, StatusCode};
use tokio::time::timeout;

use super::failure::Failure;

/// Longest wait for a TCP or TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the next bytes.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for the beginning of a reply; where a part of an upload (8 MiB) goes up first, the second.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time for a reply of a page of a list, and most bytes of it.
const PAGE_TIMEOUT: Duration = Duration::from_secs(120);
const PAGE_BYTES_MAX: usize = 64 << 20;
/// A connection that was not used for so long is not used again: servers and firewalls close them in silence.
const IDLE_MAX: Duration = Duration::from_secs(15);
/// Connections kept open for reuse.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// Most bytes of an error document that are read.
const ERROR_BYTES_MAX: usize = 16 << 10;

/// Makes the client that `object_store` uses.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        crate::origin::http::general::install_crypto();
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_MAX)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            // Whatever features other crates switch on: what is stored is what is wanted.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build();
        let client = client.map_err(|e| object_store::Error::Generic {
            store: "S3",
            source: Box::new(e),
        })?;
        Ok(HttpClient::new(Wire(client)))
    }
}

#[derive(Debug)]
struct Wire(reqwest::Client);

fn failed(failure: Failure) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, failure)
}

/// The beginning of a body; what cannot be read is left out.
async fn beginning(reply: HttpResponse, max: usize) -> Bytes {
    let mut stream = reply.into_body().bytes_stream();
    let mut out = BytesMut::new();
    while let Some(Ok(bytes)) = stream.next().await {
        out.extend_from_slice(&bytes);
        if out.len() >= max {
            out.truncate(max);
            break;
        }
    }
    out.freeze()
}

/// A page of a list, whole: `object_store` would read it without an end.
async fn page(reply: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (parts, body) = reply.into_parts();
    let mut stream = body.bytes_stream();
    let mut out = BytesMut::new();
    let read = async {
        while let Some(bytes) = stream.next().await {
            out.extend_from_slice(&bytes?);
            if out.len() > PAGE_BYTES_MAX {
                return Err(failed(Failure::Answer {
                    expected: "a page of a list of at most 64 MiB",
                    found: "more".to_owned(),
                }));
            }
        }
        Ok(())
    };
    match timeout(PAGE_TIMEOUT, read).await {
        Ok(done) => done?,
        Err(_elapsed) => return Err(failed(Failure::Slow(PAGE_TIMEOUT))),
    }
    Ok(HttpResponse::from_parts(parts, out.to_vec().into()))
}

#[async_trait]
impl HttpService for Wire {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        const TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
        if let Some(token) = request.headers_mut().get_mut(TOKEN) {
            // Then nothing below prints it.
            token.set_sensitive(true);
        }
        let plain = HeaderValue::from_static("identity");
        request.headers_mut().insert(ACCEPT_ENCODING, plain);
        let ranged = request.headers().contains_key(RANGE);
        let head = request.method() == Method::HEAD;
        let listed = request
            .uri()
            .query()
            .is_some_and(|q| q.contains("list-type="));
        let limit = match *request.method() {
            Method::PUT | Method::POST => UPLOAD_TIMEOUT,
            _ => REPLY_TIMEOUT,
        };
        let Ok(reply) = timeout(limit, self.0.call(request)).await else {
            return Err(failed(Failure::Slow(limit)));
        };
        let reply = reply?;
        let status = reply.status();
        if status.is_success() {
            let reply = check(reply, ranged)?;
            return if listed { page(reply).await } else { Ok(reply) };
        }
        let headers = reply.headers().clone();
        let body = timeout(REPLY_TIMEOUT, beginning(reply, ERROR_BYTES_MAX)).await;
        let body = body.unwrap_or_default();
        let failure = Failure::new(status, &headers, &body);
        let missing = status == StatusCode::NOT_FOUND
            && (head || failure.is_code("NoSuchKey") || !has_code(&failure));
        if missing || status == StatusCode::PRECONDITION_FAILED {
            let mut reply = HttpResponse::new(body.to_vec().into());
            *reply.status_mut() = status;
            return Ok(reply);
        }
        Err(failed(failure))
    }
}

fn has_code(failure: &Failure) -> bool {
    matches!(failure, Failure::Refused { code: Some(_), .. })
}

fn check(reply: HttpResponse, ranged: bool) -> Result<HttpResponse, HttpError> {
    if ranged && reply.status() != StatusCode::PARTIAL_CONTENT {
        return Err(failed(Failure::Answer {
            expected: "HTTP status 206 for a range",
            found: format!("HTTP status {}", reply.status()),
        }));
    }
    match reply.headers().get(CONTENT_ENCODING) {
        Some(value) if value != "identity" && value != "aws-chunked" && !value.is_empty() => {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            Err(failed(Failure::Answer {
                expected: "an unencoded body",
                found: format!("`Content-Encoding: {value}`"),
            }))
        }
        _ => Ok(reply),
    }
}
