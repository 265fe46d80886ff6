//! One writer a cache folder: `ROOT/lock`, locked with flock(2), with the holder's name and process in it.
//!
//! The lock belongs to the open file, so it ends with the process whatever ends it, and nothing has to be cleaned up. The
//! data plane does not hold it (the descriptor is not inherited): it outlives the control process, only reads frames, and the
//! next control process takes the lock and then adopts it. What the file says is for people; only flock decides.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::names;

/// Most bytes of the holder's name that are read.
const HOLDER_BYTES_MAX: u64 = 200;

/// Why the folder cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Somebody else has it.
    #[error("the cache `{root}` is in use by {holder}; end it, or use another folder")]
    Taken {
        /// The folder.
        root: PathBuf,
        /// Who says to hold it.
        holder: String,
    },
    /// The lock's file cannot be used.
    #[error("cannot lock `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
}

/// The lock; it ends when this is dropped.
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

impl CacheLock {
    /// Takes the folder for this process without waiting. `who` is what others are told, for example `layerd`.
    ///
    /// # Errors
    /// [`LockError::Taken`] names the process that holds it.
    pub fn take(root: &Path, who: &str) -> Result<Self, LockError> {
        let path = root.join(names::LOCK);
        let failed = |source| LockError::Io {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LockError::Taken {
                    root: root.to_owned(),
                    holder: holder(&file),
                });
            }
            Err(e) => return Err(failed(e.into())),
        }
        let name = format!("{who}, process {}\n", std::process::id());
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(name.as_bytes()));
        if let Err(error) = written {
            // A full disk must not keep a cache from being used, or made smaller.
            tracing::debug!(path = %path.display(), %error, "the lock does not say who holds it");
        }
        Ok(Self { _file: file })
    }
}

fn holder(file: &File) -> String {
    let mut text = String::new();
    let read = file.take(HOLDER_BYTES_MAX).read_to_string(&mut text);
    match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "another process (`fuser -v` on its file `lock` shows which)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_taker_is_told_who_has_it_and_the_end_frees_it() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("lock"), "a longer name of an earlier one").unwrap();
        let lock = CacheLock::take(root.path(), "layerd").unwrap();
        let error = CacheLock::take(root.path(), "dsec fsck").unwrap_err();
        let expected = format!(
            "the cache `{}` is in use by layerd, process {}; end it, or use another folder",
            root.path().display(),
            std::process::id()
        );
        assert_eq!(error.to_string(), expected);
        drop(lock);
        CacheLock::take(root.path(), "dsec fsck").unwrap();
    }
}
