//! Listening on a unix socket until told to stop, also at paths longer than a socket's address can be.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};

use crate::error::ServeError;

/// Tells every [`Listener`] that shares it to stop.
#[derive(Debug)]
pub(crate) struct Stop {
    reader: io::PipeReader,
    /// Closed to stop.
    writer: Mutex<Option<io::PipeWriter>>,
}

impl Stop {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self {
            reader,
            writer: Mutex::new(Some(writer)),
        })
    }

    pub(crate) fn stop(&self) {
        drop(self.writer().take());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.writer().is_none()
    }

    fn writer(&self) -> std::sync::MutexGuard<'_, Option<io::PipeWriter>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A path to `path` that is short enough for a socket's address, while the folder is held open.
fn short(path: &Path) -> io::Result<(File, PathBuf)> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = File::open(folder.unwrap_or(Path::new(".")))?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let at = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
    Ok((folder, at.join(name)))
}

/// Connects, also where the path is longer than an address can be.
pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_folder, short) = short(path)?;
    UnixStream::connect(short)
}

/// A socket that accepts until it is told to stop. Its file goes away with it.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`, for the owner only. A socket there that nobody listens on is replaced.
    pub(crate) fn bind(path: &Path) -> Result<Self, ServeError> {
        let failed = |error| ServeError::io("listen at", path)(error);
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
            Ok(meta) if !meta.file_type().is_socket() => {
                let text = format!("`{}` is there and is no socket", path.display());
                return Err(ServeError::InUse(text));
            }
            Ok(_) if connect(path).is_ok() => {
                let text = format!("somebody listens at `{}` already", path.display());
                return Err(ServeError::InUse(text));
            }
            Ok(_) => fs::remove_file(path).map_err(failed)?,
        }
        let (_folder, short) = short(path).map_err(failed)?;
        let socket = UnixListener::bind(short).map_err(failed)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        // A client that goes away between the poll and the accept must not block the loop.
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// The next client; `None` when told to stop.
    pub(crate) fn accept(&self, stop: &Stop) -> io::Result<Option<UnixStream>> {
        loop {
            let mut ready = [
                PollFd::new(&self.socket, PollFlags::IN),
                PollFd::new(&stop.reader, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if stop.is_stopped() {
                return Ok(None);
            }
            match self.socket.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a socket's file stays");
        }
    }
}
