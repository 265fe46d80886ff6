//! The socket that users talk to: taken by one daemon, whatever an earlier one left.
//!
//! A socket file that nobody answers at is a left-over of a daemon that was killed, and is replaced. Looking and replacing are
//! two steps, so they are taken under a lock on a file beside it (`SOCKET.lock`, which stays): of two daemons that start at a
//! time over one stale socket, one would otherwise remove the other's.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::{ControlError, failed};

/// A socket that this process owns.
#[derive(Debug)]
pub(super) struct OwnSocket {
    path: PathBuf,
    /// What tells it from another file, so that nobody else's is ever removed.
    file: Identity,
    _lock: File,
}

/// Device, inode number and time of creation (numbers are used again).
type Identity = (u64, u64, i64, i64);

fn identity(meta: &fs::Metadata) -> Identity {
    (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec())
}

/// Locks the file beside a socket for as long as it is open.
fn take_lock(path: &Path) -> Result<File, ControlError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock_path = PathBuf::from(name);
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock_path)
        .map_err(failed("open", &lock_path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ControlError::SocketTaken(path.to_owned())),
        Err(e) => Err(failed("lock", &lock_path)(e.into())),
    }
}

/// Listens at `path`.
///
/// # Errors
/// [`ControlError::SocketTaken`] when another daemon does, [`ControlError::NoSocket`] when something else is there.
pub(super) fn take(path: &Path) -> Result<(UnixListener, OwnSocket), ControlError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed("create", folder))?;
    }
    let lock = take_lock(path)?;
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(ControlError::NoSocket(path.to_owned()));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        _ => match UnixStream::connect(path) {
            Ok(_) => return Err(ControlError::SocketTaken(path.to_owned())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(failed("replace", path))?;
            }
            Err(e) => return Err(failed("use socket", path)(e)),
        },
    }
    let listener = UnixListener::bind(path).map_err(failed("listen at", path))?;
    fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(failed("protect", path))?;
    listener
        .set_nonblocking(true)
        .map_err(failed("listen at", path))?;
    let meta = fs::symlink_metadata(path).map_err(failed("listen at", path))?;
    let own = OwnSocket {
        path: path.to_owned(),
        file: identity(&meta),
        _lock: lock,
    };
    Ok((listener, own))
}

/// The socket file goes with its owner, if it is still the owner's.
impl Drop for OwnSocket {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|m| identity(&m) == self.file);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutations: without the check of the file's type, the file is removed; without the lock, the second `take` replaces
    /// the socket of a daemon that has bound it and does not listen yet.
    #[test]
    fn only_a_socket_that_nobody_has_is_replaced_and_only_the_own_one_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        fs::write(&path, b"precious").unwrap();
        assert!(matches!(take(&path), Err(ControlError::NoSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        fs::remove_file(&path).unwrap();

        let lock = take_lock(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        assert!(matches!(take(&path), Err(ControlError::SocketTaken(_))));
        assert!(fs::exists(&path).unwrap());
        drop(lock);
        let (listener, own) = take(&path).unwrap();
        assert!(matches!(take(&path), Err(ControlError::SocketTaken(_))));

        drop(listener);
        fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(own);
        assert!(fs::exists(&path).unwrap(), "somebody else's");
        drop(other);
    }
}
