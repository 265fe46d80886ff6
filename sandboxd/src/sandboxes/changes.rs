//! What a sandbox has changed, as one digest: equal for equal trees, whatever the times of their files.
//!
//! Looked at while its processes stand still, without a copy. Links are told, never followed. What the ancestors of a forked sandbox
//! changed counts as its own.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::mirror::{Joined, joined};
use super::{Sandbox, Service, blocking, living, on_disk};
use crate::api::State;
use crate::error::ApiError;

/// Bytes read at a time.
const READ_BYTES: usize = 256 << 10;
/// Most bytes of a file's attribute names, and of one value.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// The overlay's notes: that a folder hides what lies below is told apart, the others are about where a file came from.
const OVERLAY: &[u8] = b"trusted.overlay.";

/// Answer to `GET /v1/sandboxes/ID/changes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Changes {
    /// BLAKE3 over every changed entry: path, kind, mode, owner, attributes, links, contents; no times.
    pub digest: String,
    /// Files, folders, links and removals.
    pub entries: u64,
    /// Bytes of contents.
    pub bytes: u64,
}

impl Service {
    /// What a sandbox has changed.
    ///
    /// # Errors
    /// `SandboxGone`, or what the disk says.
    pub(crate) async fn changes(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<Changes, ApiError> {
        let _changing = sandbox.changing.lock().await;
        let (service, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        blocking(move || {
            let record = sandbox.record();
            let place = living(&record)?;
            let own = service.store.rw(&record.info.id).join("upper");
            let generations = [record.frozen.clone(), vec![own]].concat();
            let paused = record.info.state == State::Paused;
            let backend = service.backends.of(&place)?;
            if !paused {
                backend.freeze(&place)?;
            }
            let looked = digest(&generations);
            if !paused {
                backend.resume(&place)?;
            }
            looked
        })
        .await
    }
}

/// What is being added up.
struct Sum {
    hasher: blake3::Hasher,
    changes: (u64, u64),
    /// Files with several names, by generation and inode, and the first name that was met.
    linked: HashMap<(usize, u64), PathBuf>,
}

/// The digest of what an overlay wrote, in folders that lie on each other, lowest first.
pub(super) fn digest(generations: &[PathBuf]) -> Result<Changes, ApiError> {
    let mut sum = Sum {
        hasher: blake3::Hasher::new(),
        changes: (0, 0),
        linked: HashMap::new(),
    };
    for (below, joined) in joined(generations)? {
        // The root's own attributes are the layers'.
        if let Some(root) = generations
            .get(joined.of)
            .filter(|_| below != Path::new(""))
        {
            entry(root, (&below, joined), &mut sum).map_err(on_disk)?;
        }
    }
    Ok(Changes {
        digest: sum.hasher.finalize().to_hex().to_string(),
        entries: sum.changes.0,
        bytes: sum.changes.1,
    })
}

/// Adds a text with its length, so that no two sequences of texts look alike.
fn add(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// Adds one entry.
fn entry(root: &Path, (below, joined): (&Path, Joined), sum: &mut Sum) -> io::Result<()> {
    let path = root.join(below);
    let meta = fs::symlink_metadata(&path)?;
    sum.changes.0 += 1;
    add(&mut sum.hasher, below.as_os_str().as_bytes());
    for number in [meta.mode(), meta.uid(), meta.gid()] {
        sum.hasher.update(&number.to_le_bytes());
    }
    attributes(&path, joined.opaque, sum)?;
    let kind = meta.file_type();
    if kind.is_symlink() {
        add(
            &mut sum.hasher,
            fs::read_link(&path)?.as_os_str().as_bytes(),
        );
    } else if kind.is_char_device() || kind.is_block_device() {
        sum.hasher.update(&meta.rdev().to_le_bytes());
    } else if kind.is_file() {
        file(&path, (below, joined), &meta, sum)?;
    }
    Ok(())
}

fn file(
    path: &Path,
    (below, joined): (&Path, Joined),
    meta: &Metadata,
    sum: &mut Sum,
) -> io::Result<()> {
    if joined.names > 1 {
        let first = sum
            .linked
            .entry((joined.of, meta.ino()))
            .or_insert_with(|| below.to_owned());
        add(&mut sum.hasher, first.as_os_str().as_bytes());
        if first != below {
            return Ok(());
        }
    }
    let no_follow = nix::libc::O_NOFOLLOW;
    let mut file = File::options()
        .read(true)
        .custom_flags(no_follow)
        .open(path)?;
    let mut contents = blake3::Hasher::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let len = file.read(&mut buffer)?;
        if len == 0 {
            break;
        }
        contents.update(buffer.get(..len).unwrap_or_default());
        sum.changes.1 += len as u64;
    }
    add(&mut sum.hasher, contents.finalize().as_bytes());
    Ok(())
}

fn attributes(path: &Path, opaque: bool, sum: &mut Sum) -> io::Result<()> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let len = match rustix::fs::llistxattr(path, &mut names) {
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        listed => listed?,
    };
    names.truncate(len);
    let mut names: Vec<&[u8]> = names
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty() && !name.starts_with(OVERLAY))
        .collect();
    names.sort_unstable();
    let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
    for name in names {
        let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value)?;
        add(&mut sum.hasher, name);
        add(&mut sum.hasher, value.get(..len).unwrap_or_default());
    }
    // Nothing else has these lengths: the list ends here.
    let end = if opaque { u64::MAX - 1 } else { u64::MAX };
    sum.hasher.update(&end.to_le_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn tree(change: impl FnOnce(&Path)) -> Changes {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/f"), b"text").unwrap();
        fs::hard_link(root.join("a/f"), root.join("a/g")).unwrap();
        symlink("/etc", root.join("l")).unwrap();
        change(root);
        digest(&[root.to_owned()]).unwrap()
    }

    /// Mutation: with the time of change added, the first assertion fails; without the mode, the third.
    #[test]
    fn equal_trees_have_equal_digests_and_others_have_not() {
        let plain = tree(|_| {});
        assert_eq!((plain.entries, plain.bytes), (5, 4));
        let touched = tree(|root| {
            let old = std::time::SystemTime::UNIX_EPOCH;
            File::open(root.join("a/f"))
                .unwrap()
                .set_modified(old)
                .unwrap();
        });
        assert_eq!(touched, plain);
        let mode = |root: &Path| {
            fs::set_permissions(root.join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        };
        let others = [
            tree(mode),
            tree(|root| fs::write(root.join("a/f"), b"texT").unwrap()),
            tree(|root| fs::rename(root.join("a/f"), root.join("a/h")).unwrap()),
            tree(|root| {
                fs::remove_file(root.join("a/g")).unwrap();
                fs::copy(root.join("a/f"), root.join("a/g")).unwrap();
            }),
            tree(|root| {
                fs::remove_file(root.join("l")).unwrap();
                symlink("/usr", root.join("l")).unwrap();
            }),
            tree(|root| {
                let value = b"y";
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(root.join("a"), "trusted.overlay.opaque", value, flags)
                    .unwrap();
            }),
        ];
        for (n, other) in others.iter().enumerate() {
            assert_ne!(other.digest, plain.digest, "{n}");
        }
    }
}
