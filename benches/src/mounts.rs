//! Native mounts: file-backed EROFS by the mount API, OverlayFS above it, and taking them down again.
//!
//! `mount(8)` is avoided: it silently puts a loop device below an EROFS image.

use std::path::{Path, PathBuf};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount, move_mount,
    unmount,
};

use crate::error::{Context, Result};

/// A mount that is taken down when this is dropped.
#[derive(Debug)]
pub(crate) struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Adopts a mount that something else made.
    pub(crate) fn adopt(at: &Path) -> Self {
        Self { at: at.to_owned() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazy where something still holds it: the folder must be free again in any case.
        if unmount(&self.at, UnmountFlags::empty()).is_err() {
            unmount(&self.at, UnmountFlags::DETACH).unwrap_or_default();
        }
    }
}

/// How an EROFS image file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Past the page cache of the image file: one copy in memory.
    Direct,
    /// Through the page cache of the image file.
    Buffered,
}

/// Mounts the EROFS image in a file.
///
/// # Errors
/// Where the kernel refuses the image or the folder.
pub(crate) fn erofs(image: &Path, at: &Path, backing: Backing) -> Result<Mounted> {
    let during = || format!("mounting {} at {}", image.display(), at.display());
    let config = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).during(during())?;
    fsconfig_set_string(&config, "source", image).during(during())?;
    fsconfig_set_flag(&config, "ro").during(during())?;
    if backing == Backing::Direct {
        fsconfig_set_flag(&config, "directio").during(during())?;
    }
    attach(&config, at, MountAttrFlags::MOUNT_ATTR_RDONLY).during(during())
}

/// Mounts an overlay of `lowers`, the topmost first, with a new writable layer in the empty folder `upper`.
///
/// # Errors
/// Where the kernel refuses one of the folders.
pub(crate) fn overlay(lowers: &[PathBuf], upper: &Path, at: &Path) -> Result<Mounted> {
    let during = || format!("mounting an overlay at {}", at.display());
    let (data, work) = (upper.join("data"), upper.join("work"));
    for folder in [&data, &work] {
        std::fs::create_dir_all(folder).on("make", folder)?;
    }
    let config = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).during(during())?;
    for lower in lowers {
        fsconfig_set_string(&config, "lowerdir+", lower).during(during())?;
    }
    fsconfig_set_string(&config, "upperdir", &data).during(during())?;
    fsconfig_set_string(&config, "workdir", &work).during(during())?;
    attach(&config, at, MountAttrFlags::empty()).during(during())
}

/// Mounts a tmpfs.
///
/// # Errors
/// Where the kernel refuses.
pub(crate) fn tmpfs(at: &Path) -> Result<Mounted> {
    plain("tmpfs", at)
}

/// Mounts `/proc` into a root file system.
///
/// # Errors
/// Where the root has no such folder.
pub(crate) fn proc(root: &Path) -> Result<Mounted> {
    plain("proc", &root.join("proc"))
}

fn plain(kind: &str, at: &Path) -> Result<Mounted> {
    mount(kind, at, kind, MountFlags::empty(), None)
        .during(format!("mounting {kind} at {}", at.display()))?;
    Ok(Mounted::adopt(at))
}

fn attach(
    config: &rustix::fd::OwnedFd,
    at: &Path,
    attributes: MountAttrFlags,
) -> rustix::io::Result<Mounted> {
    fsconfig_create(config)?;
    let detached = fsmount(config, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    move_mount(
        &detached,
        "",
        rustix::fs::CWD,
        at,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?;
    Ok(Mounted::adopt(at))
}
