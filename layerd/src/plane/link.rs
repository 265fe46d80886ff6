//! The data plane's end of the connection to the control process.
//!
//! Writing is direct, under a lock: no thread in between. A control process that is stopped (not dead) would let the
//! socket fill up; after [`SEND_TIMEOUT`] the connection is given up, and whatever was to be said is said again when
//! the control process connects anew. Without a connection nothing is sent, and nothing is lost: what is needed stays pending.

use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::protocol::{ToControl, write_message};

/// How long a message may wait for room in the socket.
const SEND_TIMEOUT: Duration = Duration::from_millis(200);

#[derive(Debug, Default)]
struct Current {
    stream: Option<UnixStream>,
    generation: u64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Link {
    current: Mutex<Current>,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `stream` the connection; an older one is shut down. Its number, for [`Link::close`].
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn open(&self, stream: &UnixStream) -> std::io::Result<u64> {
        stream.set_write_timeout(Some(SEND_TIMEOUT))?;
        let stream = stream.try_clone()?;
        let mut current = self.lock();
        shut_down(current.stream.replace(stream));
        current.generation += 1;
        Ok(current.generation)
    }

    /// Ends the connection with this number, if it is still the current one.
    pub(crate) fn close(&self, generation: u64) {
        let mut current = self.lock();
        if current.generation == generation {
            shut_down(current.stream.take());
        }
    }

    /// Ends the connection, whichever it is.
    pub(crate) fn close_current(&self) {
        shut_down(self.lock().stream.take());
    }

    /// Sends a message; drops it when there is no connection.
    pub(crate) fn send(&self, message: &ToControl) {
        let mut current = self.lock();
        let Some(stream) = current.stream.as_mut() else {
            return;
        };
        if let Err(error) = write_message(stream, message, &[]) {
            tracing::warn!(%error, "the control process does not listen; waiting for it to connect again");
            shut_down(current.stream.take());
        }
    }
}

fn shut_down(stream: Option<UnixStream>) {
    if let Some(stream) = stream
        && let Err(error) = stream.shutdown(std::net::Shutdown::Both)
    {
        tracing::debug!(%error, "connection was gone already");
    }
}
