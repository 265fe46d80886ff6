//! The Connect protocol with JSON messages: calls of one message each way, and calls that are answered with a stream.
//!
//! <https://connectrpc.com/docs/protocol>. Of a stream each message is an envelope: flags (one byte), length (u32, big-endian),
//! payload; the last one has flag 2 and says whether it went well. Compression is not spoken.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt as _};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::access::header;
use crate::container::link::LinkError;
use crate::error::{ApiError, ErrorKind};

/// Content type of streams.
const STREAM: &str = "application/connect+json";
/// Flag of a stream's last envelope.
const END: u8 = 2;
/// Flag of a compressed one.
const COMPRESSED: u8 = 1;
/// Bytes before an envelope's payload.
const HEAD_BYTES: usize = 5;
/// Seconds between two signs of life, unless the client says otherwise.
const KEEPALIVE_SECONDS: u64 = 90;

/// An error of a call.
#[derive(Debug)]
pub(super) struct RpcError {
    code: &'static str,
    message: String,
}

impl RpcError {
    pub(super) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid_argument", message)
    }

    pub(super) fn unexpected(answer: &impl std::fmt::Debug) -> Self {
        Self::new("internal", format!("the agent answered {answer:?}"))
    }

    pub(super) fn unknown(method: &str) -> Self {
        Self::new("unimplemented", format!("`{method}` is not served here"))
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.code == "not_found"
    }

    pub(super) fn status(&self) -> StatusCode {
        match self.code {
            "invalid_argument" | "failed_precondition" => StatusCode::BAD_REQUEST,
            "unauthenticated" => StatusCode::UNAUTHORIZED,
            "permission_denied" => StatusCode::FORBIDDEN,
            "not_found" => StatusCode::NOT_FOUND,
            "already_exists" => StatusCode::CONFLICT,
            "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
            "unimplemented" => StatusCode::NOT_IMPLEMENTED,
            "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn json(&self) -> Value {
        json!({"code": self.code, "message": self.message})
    }
}

impl std::fmt::Display for RpcError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for RpcError {
    fn into_response(self) -> Response {
        (self.status(), Json(self.json())).into_response()
    }
}

impl From<ApiError> for RpcError {
    fn from(error: ApiError) -> Self {
        let code = match error.kind {
            ErrorKind::Invalid => "invalid_argument",
            ErrorKind::Unauthenticated => "unauthenticated",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Conflict => "already_exists",
            ErrorKind::Exhausted => "resource_exhausted",
            ErrorKind::Unavailable | ErrorKind::SandboxGone => "unavailable",
            ErrorKind::Refused => "failed_precondition",
            ErrorKind::InfraFailed => "internal",
            ErrorKind::UnknownOutcome => "unknown",
        };
        Self::new(code, error.message)
    }
}

impl From<LinkError> for RpcError {
    fn from(error: LinkError) -> Self {
        ApiError::from(error).into()
    }
}

/// One call: its message, and whether a stream is the answer.
#[derive(Debug)]
pub(super) struct Call {
    message: Value,
    pub(super) streams: bool,
    pub(super) timeout: Option<Duration>,
    pub(super) keepalive: Duration,
}

impl Call {
    /// Reads a call.
    pub(super) fn read(headers: &HeaderMap, body: &Bytes) -> Result<Self, RpcError> {
        let kind = header(headers, "content-type").unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        let streams = kind == STREAM;
        if !streams && kind != "application/json" {
            let message =
                format!("content type `{kind}`: `application/json` or `{STREAM}` is expected");
            return Err(RpcError::new("unimplemented", message));
        }
        let text = if streams {
            only_message(body)?
        } else {
            body.as_ref()
        };
        let text: &[u8] = if text.is_empty() { b"{}" } else { text };
        let message = serde_json::from_slice(text)
            .map_err(|e| RpcError::invalid(format!("the message: {e}")))?;
        let number = |name: &str| {
            let Some(text) = header(headers, name) else {
                return Ok(None);
            };
            let parsed = text.parse::<u64>().map(Some);
            parsed.map_err(|_bad| {
                RpcError::invalid(format!("header `{name}` of `{text}`: a number is expected"))
            })
        };
        let seconds = number("keepalive-ping-interval")?.unwrap_or(KEEPALIVE_SECONDS);
        Ok(Self {
            message,
            streams,
            timeout: number("connect-timeout-ms")?.map(Duration::from_millis),
            keepalive: Duration::from_secs(seconds.clamp(1, 3600)),
        })
    }

    /// The message as a type.
    pub(super) fn message<T: DeserializeOwned>(&self) -> Result<T, RpcError> {
        serde_json::from_value(self.message.clone())
            .map_err(|e| RpcError::invalid(format!("the message: {e}")))
    }
}

/// The payload of the one envelope that a body is.
fn only_message(body: &[u8]) -> Result<&[u8], RpcError> {
    let wrong = || RpcError::invalid("the body: one envelope is expected");
    let (head, payload) = body.split_first_chunk::<HEAD_BYTES>().ok_or_else(wrong)?;
    let [flags, a, b, c, d] = *head;
    #[expect(clippy::big_endian_bytes, reason = "the protocol's order")]
    let len = u32::from_be_bytes([a, b, c, d]);
    if flags & COMPRESSED != 0 {
        return Err(RpcError::new(
            "unimplemented",
            "compressed messages are not taken",
        ));
    }
    if usize::try_from(len) != Ok(payload.len()) {
        return Err(wrong());
    }
    Ok(payload)
}

fn envelope(flags: u8, message: &Value) -> Bytes {
    let payload = message.to_string();
    // Messages are pieces of output and entries: far below the bound.
    let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(payload.len() + HEAD_BYTES);
    bytes.push(flags);
    #[expect(clippy::big_endian_bytes, reason = "the protocol's order")]
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(payload.as_bytes());
    bytes.into()
}

/// An answer of one message.
pub(super) fn unary(answer: Result<Value, RpcError>) -> Response {
    match answer {
        Ok(message) => Json(message).into_response(),
        Err(error) => error.into_response(),
    }
}

/// An answer that is a stream; its first error is its end.
pub(super) fn stream(
    messages: impl Stream<Item = Result<Value, RpcError>> + Send + 'static,
) -> Response {
    let mut failed = None;
    let pieces = messages
        .map(Some)
        .chain(futures_util::stream::once(async { None }))
        .filter_map(move |item| {
            let piece = match item {
                _ if failed.is_some() => None,
                Some(Ok(message)) => Some(envelope(0, &message)),
                Some(Err(error)) => {
                    failed = Some(());
                    Some(envelope(END, &json!({"error": error.json()})))
                }
                None => Some(envelope(END, &json!({}))),
            };
            async move { piece.map(Ok::<_, Infallible>) }
        });
    ([("content-type", STREAM)], Body::from_stream(pieces)).into_response()
}

/// A stream of one error.
pub(super) fn failed_stream(error: RpcError) -> Response {
    stream(futures_util::stream::once(async { Err(error) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(kind: &'static str) -> HeaderMap {
        [("content-type", kind)]
            .into_iter()
            .map(|(n, v)| (n.parse().unwrap(), v.parse().unwrap()))
            .collect()
    }

    #[test]
    fn calls_are_read_with_and_without_an_envelope() {
        let call = Call::read(
            &headers("application/json; charset=utf-8"),
            &Bytes::from_static(b"{\"path\":\"/\"}"),
        )
        .unwrap();
        assert_eq!((call.message, call.streams), (json!({"path": "/"}), false));
        let call = Call::read(&headers(STREAM), &Bytes::from_static(b"\0\0\0\0\x02{}")).unwrap();
        assert_eq!((call.message, call.streams), (json!({}), true));
        for bad in [
            &b"\0\0\0\0\x03{}"[..],
            b"\0\0\0",
            b"",
            b"\0\0\0\0\x02{}\0\0\0\0\0",
            b"\x01\0\0\0\x02{}",
        ] {
            assert!(
                Call::read(&headers(STREAM), &Bytes::from_static(bad)).is_err(),
                "{bad:?}"
            );
        }
        assert!(Call::read(&headers("application/proto"), &Bytes::new()).is_err());
        assert!(Call::read(&headers("application/json"), &Bytes::from_static(b"{")).is_err());
    }

    /// Mutation: a stream that goes on after an error, or ends without an end, differs.
    #[tokio::test]
    async fn a_stream_ends_once_and_says_how() {
        use http_body_util::BodyExt as _;
        let all = |items: Vec<Result<Value, RpcError>>| async {
            let body = stream(futures_util::stream::iter(items)).into_body();
            body.collect().await.unwrap().to_bytes()
        };
        assert_eq!(
            &*all(vec![Ok(json!(1)), Ok(json!(22))]).await,
            b"\0\0\0\0\x011\0\0\0\0\x0222\x02\0\0\0\x02{}"
        );
        let failed = all(vec![
            Ok(json!(1)),
            Err(RpcError::invalid("x")),
            Ok(json!(2)),
        ])
        .await;
        let said = "{\"error\":{\"code\":\"invalid_argument\",\"message\":\"x\"}}";
        assert_eq!(
            &failed[6..11],
            [2, 0, 0, 0, u8::try_from(said.len()).unwrap()]
        );
        assert_eq!(&failed[11..], said.as_bytes());
    }
}
