//! One file a composition: what a new control process must know of the mounts it finds.
//!
//! A few small records that are written once and deleted once: files that are replaced atomically need no database. They
//! are a memory aid, not the truth: the truth is what the kernel has mounted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use layerd_client::api::Mount;

use crate::kill::step;

/// Ending of a record that is being written.
const TMP: &str = "tmp";

/// Why a record could not be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} record `{path}`: {source}")]
pub(crate) struct RecordError {
    pub(crate) what: &'static str,
    pub(crate) path: PathBuf,
    #[source]
    pub(crate) source: io::Error,
}

/// The records' folder.
#[derive(Debug)]
pub(crate) struct Records {
    folder: PathBuf,
}

impl Records {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }

    /// Keeps a composition's record.
    ///
    /// # Errors
    /// What the disk said.
    pub(crate) fn put(&self, mount: &Mount) -> Result<(), RecordError> {
        let path = self.path(&mount.id);
        let tmp = path.with_extension(TMP);
        let write = || {
            step("writing a record");
            fs::write(&tmp, serde_json::to_vec_pretty(mount)?)?;
            step("renaming a record");
            fs::rename(&tmp, &path)?;
            step("recorded");
            Ok(())
        };
        write().map_err(|source| RecordError {
            what: "write",
            path: path.clone(),
            source,
        })
    }

    /// Forgets a composition.
    ///
    /// # Errors
    /// What the disk said; a missing record is none.
    pub(crate) fn remove(&self, id: &str) -> Result<(), RecordError> {
        let path = self.path(id);
        step("removing a record");
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(RecordError {
                what: "remove",
                path,
                source,
            }),
            _ => Ok(()),
        }
    }

    /// All records that can be read; half-written ones of a process that was killed are removed. One that cannot be understood is reported and left alone.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub(crate) fn all(&self) -> Result<Vec<Mount>, RecordError> {
        let failed = |source| RecordError {
            what: "list",
            path: self.folder.clone(),
            source,
        };
        let mut mounts = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|e| e == "json") {
                mounts.extend(read(&path));
            } else if path.extension().is_some_and(|e| e == TMP)
                && let Err(error) = fs::remove_file(&path)
            {
                tracing::warn!(path = %path.display(), %error, "a half-written record stays");
            }
        }
        Ok(mounts)
    }
}

fn read(path: &Path) -> Option<Mount> {
    let bytes = fs::read(path);
    let parsed = bytes.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
    parsed
        .inspect_err(|error| tracing::error!(path = %path.display(), %error, "a record of a mount cannot be read; that mount is not adopted"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use layerd_client::api::MountState;

    #[test]
    fn records_come_back_and_a_broken_one_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::new(folder.path().to_owned());
        let mount = Mount {
            id: "a1".to_owned(),
            refs: vec!["base/x:1".to_owned()],
            layers: vec!["00".to_owned()],
            mountpoint: "/mnt/x".into(),
            rw: false,
            upper: None,
            lowers: Vec::new(),
            state: MountState::Alive,
        };
        records.put(&mount).unwrap();
        fs::write(folder.path().join("b2.json"), b"{").unwrap();
        assert_eq!(records.all().unwrap(), [mount]);
        records.remove("a1").unwrap();
        records.remove("a1").unwrap();
        assert_eq!(records.all().unwrap(), []);
    }
}
