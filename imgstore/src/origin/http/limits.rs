//! How long the parts of a request over HTTP may take.
//!
//! There is no limit for a whole request: an object of a gigabyte may take its time, as long as it comes. Each stage
//! has one (connection, first byte), and a body must make progress. A caller's deadline cuts all of them short.

use std::time::{Duration, Instant};

use super::Failure;

/// See the head of this file.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Longest wait for a connection: name, TCP and TLS together.
    pub connect: Duration,
    /// Longest wait from the request to the end of the reply's headers.
    pub first_byte: Duration,
    /// A body must bring [`HttpLimits::progress_bytes`] in every such window.
    pub progress_window: Duration,
    /// See [`HttpLimits::progress_window`].
    pub progress_bytes: u64,
    /// A connection that was not used for so long is not used again: servers and firewalls close them in silence.
    pub idle_max: Duration,
    /// A connection this old is not used again, so that changed addresses and new servers are noticed.
    pub age_max: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            first_byte: Duration::from_secs(10),
            progress_window: Duration::from_secs(10),
            progress_bytes: 32 << 10,
            idle_max: Duration::from_secs(15),
            age_max: Duration::from_mins(5),
        }
    }
}

/// When the caller gives up.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Until {
    /// The reply must have begun by then.
    pub(super) begin: Option<Instant>,
    /// And ended by then.
    pub(super) end: Option<Instant>,
}

impl Until {
    /// What is left of `limit` for the reply to begin.
    ///
    /// # Errors
    /// When nothing is.
    pub(super) fn cut(self, limit: Duration) -> Result<Duration, Failure> {
        let Some(begin) = self.begin else {
            return Ok(limit);
        };
        let left = begin.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("no time is left for it".into());
        }
        Ok(left.min(limit))
    }
}
