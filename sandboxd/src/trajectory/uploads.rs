//! Uploads that are too large for the log's database: files, so that a replay can send them again.
//!
//! `UPLOADS/SANDBOX/DIGEST` is a body that a request came with; what is still coming in is `N.part`. Equal bodies of a sandbox are kept
//! once. A sandbox may have `KEPT_BYTES_MAX`; of what goes beyond, the log has the digest only.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::ids;

/// Most bytes of the large uploads of one sandbox that are kept.
pub const KEPT_BYTES_MAX: u64 = 8 << 30;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Uploads {
    folder: PathBuf,
}

/// An upload that is coming in; it is gone unless it is kept.
#[derive(Debug)]
pub struct Incoming {
    file: File,
    path: PathBuf,
    room: u64,
}

impl Incoming {
    /// Adds what came; `false` if it is too much to be kept.
    ///
    /// # Errors
    /// What the disk says.
    pub fn add(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let len = bytes.len() as u64;
        if len > self.room {
            return Ok(false);
        }
        self.room -= len;
        self.file.write_all(bytes)?;
        Ok(true)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %self.path.display(), %error, "a part of an upload stays");
            }
            _ => {}
        }
    }
}

impl Uploads {
    /// Opens (or makes) the folder; what an earlier run was taking in is removed.
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(folder, private)?;
        for sandbox in fs::read_dir(folder)? {
            for file in fs::read_dir(sandbox?.path())? {
                let path = file?.path();
                if path.extension().is_some_and(|e| e == "part") {
                    fs::remove_file(path)?;
                }
            }
        }
        let folder = folder.to_owned();
        Ok(Self { folder })
    }

    /// A place for what comes in, of as many bytes as there is room for.
    pub(super) fn begin(&self, sandbox: &str, room: u64) -> io::Result<Incoming> {
        let folder = self.folder.join(sandbox);
        fs::create_dir_all(&folder)?;
        let path = folder.join(format!("{}.part", ids::random()));
        let file = File::create_new(&path)?;
        Ok(Incoming { file, path, room })
    }

    /// Keeps what came in; whether its bytes were not kept before.
    pub(super) fn keep(
        &self,
        sandbox: &str,
        digest: &str,
        incoming: &Incoming,
    ) -> io::Result<bool> {
        let path = self.path(sandbox, digest);
        if path.try_exists()? {
            return Ok(false);
        }
        fs::rename(&incoming.path, path)?;
        Ok(true)
    }

    pub(super) fn path(&self, sandbox: &str, digest: &str) -> PathBuf {
        self.folder.join(sandbox).join(digest)
    }

    /// Removes all of a sandbox.
    pub(super) fn forget(&self, sandbox: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.folder.join(sandbox)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}
