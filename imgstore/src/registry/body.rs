//! Bodies of replies: bounded in size, and as slow as they like as long as they make progress.

use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::Response;
use tokio::time::timeout;

use super::error::RegistryError;
use crate::ids::to_u64;

/// A body must bring so many bytes in every window of this length; there is no limit for all of it.
const PROGRESS_WINDOW: Duration = Duration::from_secs(10);
const PROGRESS_BYTES: u64 = 32 << 10;
/// About the most bytes of an error document or a token.
pub(super) const SMALL_BYTES_MAX: usize = 1 << 20;
/// When a caller gives up.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Until {
    /// The reply must have begun by then.
    pub(crate) begin: Option<Instant>,
    /// And ended by then.
    pub(crate) end: Option<Instant>,
}

impl Until {
    /// Begun and ended by then.
    pub(crate) const fn ended(deadline: Instant) -> Self {
        Self {
            begin: Some(deadline),
            end: Some(deadline),
        }
    }

    /// What is left of `limit`.
    pub(super) fn left(point: Option<Instant>, limit: Duration) -> Duration {
        let left = point.map(|at| at.saturating_duration_since(Instant::now()));
        left.map_or(limit, |left| left.min(limit))
    }
}

pub(super) fn too_late(limit: Duration) -> RegistryError {
    RegistryError::Unavailable(format!("no answer within {:.1} s", limit.as_secs_f64()))
}

/// A body that is read piece by piece.
pub(super) struct Body {
    reply: Response,
    until: Until,
    window: Instant,
    in_window: u64,
    /// Bytes so far.
    pub(super) all: u64,
}

impl Body {
    pub(super) fn new(reply: Response, until: Until) -> Self {
        Self {
            reply,
            until,
            window: Instant::now(),
            in_window: 0,
            all: 0,
        }
    }

    fn broken(&self, why: impl std::fmt::Display) -> RegistryError {
        RegistryError::Unavailable(format!("body cut off after {} bytes: {why}", self.all))
    }

    /// The next bytes; none at the end.
    pub(super) async fn next(&mut self) -> Result<Bytes, RegistryError> {
        let limit = Until::left(self.until.end, PROGRESS_WINDOW);
        let Ok(chunk) = timeout(limit, self.reply.chunk()).await else {
            return Err(self.broken(format!("no bytes for {:.1} s", limit.as_secs_f64())));
        };
        let chunk = chunk.map_err(|e| self.broken(RegistryError::transport(e)))?;
        let Some(bytes) = chunk else {
            return Ok(Bytes::new());
        };
        self.all += to_u64(bytes.len());
        self.in_window += to_u64(bytes.len());
        if self.window.elapsed() > PROGRESS_WINDOW {
            if self.in_window < PROGRESS_BYTES {
                return Err(self.broken("it comes too slowly"));
            }
            self.window = Instant::now();
            self.in_window = 0;
        }
        Ok(bytes)
    }
}

/// The beginning of a body; a body that breaks off is as good.
pub(super) async fn beginning(reply: Response, until: Until) -> Vec<u8> {
    let mut body = Body::new(reply, until);
    let mut out = Vec::new();
    while let Ok(bytes) = body.next().await
        && !bytes.is_empty()
        && out.len() < SMALL_BYTES_MAX
    {
        out.extend_from_slice(&bytes);
    }
    out
}

pub(super) async fn read_all(
    reply: Response,
    max: u64,
    until: Until,
) -> Result<Vec<u8>, RegistryError> {
    let announced = reply.content_length();
    let too_long = |found: String| RegistryError::wrong(format!("at most {max} bytes"), found);
    if let Some(n) = announced.filter(|n| *n > max) {
        return Err(too_long(format!("{n} bytes announced")));
    }
    let mut body = Body::new(reply, until);
    let mut out = Vec::new();
    loop {
        let bytes = body.next().await?;
        if bytes.is_empty() {
            return Ok(out);
        }
        if body.all > max {
            return Err(too_long("more".to_owned()));
        }
        out.extend_from_slice(&bytes);
    }
}
