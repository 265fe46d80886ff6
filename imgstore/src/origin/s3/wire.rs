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

use super::failure::Failure;

/// Longest wait for a TCP or TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the next bytes.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time for one request with both bodies: a part of an upload has 8 MiB.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
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
            .timeout(REQUEST_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
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
async fn beginning(reply: HttpResponse) -> Bytes {
    let mut stream = reply.into_body().bytes_stream();
    let mut out = BytesMut::new();
    while let Some(Ok(bytes)) = stream.next().await {
        out.extend_from_slice(&bytes);
        if out.len() >= ERROR_BYTES_MAX {
            out.truncate(ERROR_BYTES_MAX);
            break;
        }
    }
    out.freeze()
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
        let reply = self.0.call(request).await?;
        let status = reply.status();
        if status.is_success() {
            return check(reply, ranged);
        }
        let headers = reply.headers().clone();
        let body = beginning(reply).await;
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
