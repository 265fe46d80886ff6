//! A sandbox's root: an overlay of read-only layers and one folder for what it writes, its ids mapped.
//!
//! An overlay cannot be mapped itself, what it is made of can: each layer is cloned for this sandbox and mapped to its ids, and so is the
//! folder it writes to. On disk, owners are those of the image (0 is root), whichever range the sandbox has: what it wrote can be
//! packed or become another's lower as it is. Nothing of this is attached anywhere: it is held by the sandbox's mount
//! namespace alone and goes with it.
//!
//! Layers that are attached nowhere can be used in an overlay from Linux 6.15 on.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use rustix::mount::MountAttrFlags;

use super::fs as mounts;
use crate::sys;

/// Most layers of one root: the kernel's limit for an overlay.
pub const LAYERS_MAX: usize = 500;

/// Why there is no root.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// Too few or too many layers.
    #[error("a root has 1 to {LAYERS_MAX} layers, not {0}")]
    Layers(usize),
    /// A folder would not be made or cloned.
    #[error("cannot {what} `{path}`: {source}")]
    Folder {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The overlay would not be mounted.
    #[error("cannot join {layers} layers: {source}")]
    Overlay {
        /// How many.
        layers: usize,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

fn folder(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RootError {
    let path = path.to_owned();
    move |source| RootError::Folder { what, path, source }
}

/// Makes the folders that a sandbox writes to; the root's attributes are those of the topmost layer's.
///
/// # Errors
/// What the disk says.
pub fn make_writable(rw: &Path, top: &Path) -> Result<(), RootError> {
    for name in ["", "upper", "work"] {
        let path = rw.join(name);
        match fs::create_dir(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.map_err(folder("create", &path))?,
        }
    }
    let upper = rw.join("upper");
    let meta = fs::metadata(top).map_err(folder("read", top))?;
    chown(&upper, Some(meta.uid()), Some(meta.gid()))
        .and_then(|()| fs::set_permissions(&upper, meta.permissions()))
        .map_err(folder("set attributes of", &upper))
}

fn mapped(path: &Path, userns: BorrowedFd<'_>) -> Result<OwnedFd, RootError> {
    let clone = mounts::clone_tree(path).map_err(folder("clone", path))?;
    sys::idmap_mount(clone.as_fd(), userns).map_err(folder("map the ids of", path))?;
    Ok(clone)
}

/// Joins `layers` (lowest first) and `rw` (see [`make_writable`]).
///
/// # Errors
/// See [`RootError`]; nothing is left.
pub(crate) fn compose(
    layers: &[PathBuf],
    rw: &Path,
    userns: BorrowedFd<'_>,
) -> Result<OwnedFd, RootError> {
    if layers.is_empty() || layers.len() > LAYERS_MAX {
        return Err(RootError::Layers(layers.len()));
    }
    let lowers: Vec<OwnedFd> = layers
        .iter()
        .rev()
        .map(|layer| mapped(layer, userns))
        .collect::<Result<_, _>>()?;
    let writable = mapped(rw, userns)?;
    let path = |fd: &OwnedFd, below: &str| format!("/proc/self/fd/{}{below}", fd.as_raw_fd());
    let mut options = vec![("source", "dsec".to_owned())];
    options.extend(lowers.iter().map(|lower| ("lowerdir+", path(lower, ""))));
    options.push(("upperdir", path(&writable, "/upper")));
    options.push(("workdir", path(&writable, "/work")));
    // What is written holds whole files and whole folders: it is packed and handed on as it is.
    for name in ["redirect_dir", "metacopy", "index"] {
        options.push((name, "off".to_owned()));
    }
    let options: Vec<(&str, &str)> = options.iter().map(|(n, v)| (*n, &**v)).collect();
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    mounts::make("overlay", &options, attributes).map_err(|source| RootError::Overlay {
        layers: layers.len(),
        source,
    })
}
