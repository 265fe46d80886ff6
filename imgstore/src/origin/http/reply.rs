//! Receiving a reply: no more of it than is wanted, and no slower than a bound.

use std::time::Instant;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes};
use hyper::header::CONTENT_LENGTH;
use hyper::{HeaderMap, Method, StatusCode};
use tokio::time::timeout_at;

use super::Failure;
use super::limits::{HttpLimits, Until};
use crate::ids::{to_u64, to_usize};

/// Most memory taken because a server announces a long body; more comes with the bytes.
const FIRST_BYTES_MAX: u64 = 4 << 20;
/// Most bytes read of a body that nobody wants, so that the connection can be used again.
const UNWANTED_BYTES_MAX: u64 = 4 << 10;

/// One request.
#[derive(Debug)]
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) object: &'a str,
    /// The value of the `Range` header.
    pub(super) range: Option<&'a str>,
    /// The body of a reply with another status is of no interest.
    pub(super) wanted: StatusCode,
    pub(super) body_max: u64,
    pub(super) until: Until,
}

/// Status, headers and body; of the body at most one byte more than was wanted, so that too long a one is noticed.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    /// Whether that was all of it: the connection can be used again.
    pub(super) whole: bool,
}

pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Takes a reply whose headers are there.
///
/// # Errors
/// When the body breaks off, stalls, or is not there in time.
pub(super) async fn receive<B>(
    reply: hyper::Response<B>,
    ask: &Ask<'_>,
    limits: &HttpLimits,
) -> Result<Reply, Failure>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Failure>,
{
    let (parts, mut incoming) = reply.into_parts();
    let (status, headers) = (parts.status, parts.headers);
    let announced = content_length(&headers);
    if status != ask.wanted {
        let mut body = Vec::new();
        let end = Until {
            end: ask.until.end.or(ask.until.begin),
            begin: None,
        };
        let whole = collect(&mut incoming, &mut body, UNWANTED_BYTES_MAX, end, limits).await;
        return Ok(Reply {
            status,
            headers,
            body: Vec::new(),
            // The status says what there is to say; a body that fails only costs the connection.
            whole: whole.unwrap_or(false),
        });
    }
    if announced.is_some_and(|len| len > ask.body_max) && ask.method != Method::HEAD {
        return Ok(Reply {
            status,
            headers,
            body: Vec::new(),
            whole: false,
        });
    }
    let first = announced
        .unwrap_or(0)
        .min(ask.body_max.saturating_add(1))
        .min(FIRST_BYTES_MAX);
    let mut body = Vec::with_capacity(to_usize(first));
    let max = ask.body_max.saturating_add(1);
    let whole = collect(&mut incoming, &mut body, max, ask.until, limits)
        .await
        .map_err(|error| {
            format!(
                "the body broke off after {} of {} bytes: {error}",
                body.len(),
                announced.map_or_else(|| "unknown".to_owned(), |len| len.to_string())
            )
        })?;
    Ok(Reply {
        status,
        headers,
        body,
        whole,
    })
}

/// Collects at most `max` bytes; whether that was all.
async fn collect<B>(
    incoming: &mut B,
    body: &mut Vec<u8>,
    max: u64,
    until: Until,
    limits: &HttpLimits,
) -> Result<bool, Failure>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Failure>,
{
    let max = to_usize(max);
    let mut window_end = Instant::now() + limits.progress_window;
    let mut window_bytes = 0;
    loop {
        let wake = until.end.map_or(window_end, |end| end.min(window_end));
        let data = match timeout_at(wake.into(), incoming.frame()).await {
            Ok(None) => return Ok(true),
            // Trailers are no data.
            Ok(Some(frame)) => frame.map_err(Into::into)?.into_data().unwrap_or_default(),
            Err(_elapsed) => Bytes::new(),
        };
        let now = Instant::now();
        window_bytes += to_u64(data.len());
        let room = max.saturating_sub(body.len());
        body.extend_from_slice(data.get(..room).unwrap_or(&data));
        if body.len() >= max {
            return Ok(false);
        }
        if until.end.is_some_and(|end| now >= end) {
            return Err("it was not complete at the deadline".into());
        }
        if now >= window_end {
            if window_bytes < limits.progress_bytes {
                let seconds = limits.progress_window.as_secs_f64();
                return Err(format!("only {window_bytes} bytes came within {seconds:.1} s").into());
            }
            window_end = now + limits.progress_window;
            window_bytes = 0;
        }
    }
}
