//! Asking the server of a disk.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::control::{REPLY_BYTES_MAX, Reply, Request, SOCKET, Status, receive, send};
use crate::error::ServeError;
use crate::listener::connect;

/// Longest wait for a reply: a merge reads and writes all of the layers.
const REPLY_MAX: Duration = Duration::from_secs(3600);
/// Longest wait for a status.
const STATUS_MAX: Duration = Duration::from_secs(10);

/// Sends one request to the server of the disk in `folder`.
///
/// # Errors
/// [`ServeError::NotAttached`] when there is none; [`ServeError::Refused`] with what it said.
pub fn ask(folder: &Path, request: &Request) -> Result<Reply, ServeError> {
    let gone = |error: &io::Error| {
        use io::ErrorKind::{ConnectionRefused, NotADirectory, NotFound};
        matches!(error.kind(), ConnectionRefused | NotADirectory | NotFound)
    };
    let silent = |error: io::Error| ServeError::Silent {
        folder: folder.to_owned(),
        what: format!("does not answer: {error}"),
    };
    let mut stream = match connect(&folder.join(SOCKET)) {
        Ok(stream) => stream,
        Err(error) if gone(&error) => return Err(ServeError::NotAttached(folder.to_owned())),
        Err(error) => return Err(silent(error)),
    };
    let wait = if matches!(request, Request::Status) {
        STATUS_MAX
    } else {
        REPLY_MAX
    };
    stream
        .set_read_timeout(Some(wait))
        .and_then(|()| stream.set_write_timeout(Some(STATUS_MAX)))
        .and_then(|()| send(&mut stream, request))
        .map_err(silent)?;
    match receive(&stream, REPLY_BYTES_MAX).map_err(silent)? {
        Reply::Refused(why) => Err(ServeError::Refused(why)),
        reply => Ok(reply),
    }
}

/// How the server of a disk is; `None` when there is none.
///
/// # Errors
/// When there is one that does not answer.
pub fn status(folder: &Path) -> Result<Option<Status>, ServeError> {
    match ask(folder, &Request::Status) {
        Ok(Reply::Status(status)) => Ok(Some(status)),
        Ok(other) => Err(ServeError::Silent {
            folder: folder.to_owned(),
            what: format!("answered {other:?}"),
        }),
        Err(ServeError::NotAttached(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
