//! Mounts through the mount API (`fsopen`, `fsconfig`, `fsmount`, `move_mount`).
//!
//! Not `mount(8)`, which silently puts a loop device under a file, and not `mount(2)`, whose options end at one page: an
//! overlay of 500 layers needs 500 `lowerdir+`. The kernel's own error text is read from the file system context and
//! becomes part of the error.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    open_tree, unmount,
};

use crate::kill::step;

/// Most lines of error text taken from the kernel.
const TEXT_LINES_MAX: usize = 16;

/// Why the kernel would not mount or unmount.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    /// A mount failed.
    #[error("cannot mount {kind} at `{target}`: {step}: {source}{}{text}", if text.is_empty() { "" } else { ": the kernel says: " })]
    Mount {
        /// Type of the file system.
        kind: &'static str,
        /// Where.
        target: PathBuf,
        /// The call that failed.
        step: String,
        /// The kernel's error text.
        text: String,
        /// Its error number.
        #[source]
        source: io::Error,
    },
    /// Something else is seen at the mount point than what was mounted.
    #[error("mounted {kind} at `{target}`, but a file system of type {found:#x} is seen there")]
    Hidden {
        /// Type of the file system.
        kind: &'static str,
        /// Where.
        target: PathBuf,
        /// Its magic number.
        found: i64,
    },
    /// An unmount failed.
    #[error("cannot unmount `{path}`: {source}")]
    Unmount {
        /// Where.
        path: PathBuf,
        /// The kernel's error number.
        #[source]
        source: rustix::io::Errno,
    },
}

impl MountError {
    /// Whether somebody still uses what was to be unmounted.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Unmount { source, .. } if *source == rustix::io::Errno::BUSY)
    }
}

/// `statfs` types.
const EROFS_MAGIC: i64 = 0xE0F5_E1E2;
const OVERLAY_MAGIC: i64 = 0x794C_7630;

/// A file system that is being put together.
struct Context<'a> {
    kind: &'static str,
    target: &'a Path,
    fs: OwnedFd,
}

impl<'a> Context<'a> {
    fn open(kind: &'static str, target: &'a Path) -> Result<Self, MountError> {
        let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|source| MountError::Mount {
            kind,
            target: target.to_owned(),
            step: "fsopen".to_owned(),
            text: String::new(),
            source: source.into(),
        })?;
        Ok(Self { kind, target, fs })
    }

    /// What the kernel has to say about the last failure: lines `e text`, one a read.
    fn text(&self) -> String {
        let mut lines = Vec::new();
        let mut buffer = [0; 4096];
        while lines.len() < TEXT_LINES_MAX {
            let Ok(len) = rustix::io::read(&self.fs, &mut buffer) else {
                break;
            };
            let line = String::from_utf8_lossy(buffer.get(..len).unwrap_or_default()).into_owned();
            let line = line.strip_prefix("e ").unwrap_or(&line).trim_end();
            lines.push(line.to_owned());
        }
        lines.join("; ")
    }

    fn failed(&self, step: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> MountError {
        let step = step.into();
        move |source| MountError::Mount {
            kind: self.kind,
            target: self.target.to_owned(),
            step,
            text: self.text(),
            source: source.into(),
        }
    }

    fn set(&self, key: &str, value: &Path) -> Result<(), MountError> {
        fsconfig_set_string(self.fs.as_fd(), key, value)
            .map_err(self.failed(format!("option `{key}={}`", value.display())))
    }

    fn flag(&self, key: &str) -> Result<(), MountError> {
        fsconfig_set_flag(self.fs.as_fd(), key).map_err(self.failed(format!("option `{key}`")))
    }

    /// Makes the mount and puts it in place.
    fn finish(&self, magic: i64, attributes: MountAttrFlags) -> Result<(), MountError> {
        step("creating a file system");
        fsconfig_create(self.fs.as_fd()).map_err(self.failed("creating the file system"))?;
        let mount = fsmount(self.fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(self.failed("fsmount"))?;
        step("putting a mount in place");
        move_mount(
            mount.as_fd(),
            "",
            CWD,
            self.target,
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )
        .map_err(self.failed("move_mount"))?;
        step("mounted");
        let probed = self.probe(magic);
        if probed.is_err() {
            // By its descriptor: at the target something else may be seen.
            let fd = format!("/proc/self/fd/{}", mount.as_raw_fd());
            if let Err(error) = unmount(fd, UnmountFlags::DETACH) {
                tracing::warn!(target = %self.target.display(), %error, "a mount that nobody sees stays");
            }
        }
        probed
    }

    fn probe(&self, magic: i64) -> Result<(), MountError> {
        let found = rustix::fs::statfs(self.target).map_err(self.failed("statfs"))?;
        if found.f_type == magic {
            return Ok(());
        }
        Err(MountError::Hidden {
            kind: self.kind,
            target: self.target.to_owned(),
            found: found.f_type,
        })
    }
}

/// Mounts the EROFS image in the file `source` (whole: metadata and data in one address space) at `target`.
/// With `directio` the kernel keeps one copy of file data in memory instead of two.
///
/// # Errors
/// [`MountError::Mount`] with the kernel's text.
pub(crate) fn erofs(source: &Path, target: &Path, directio: bool) -> Result<(), MountError> {
    let context = Context::open("erofs", target)?;
    context.set("source", source)?;
    if directio {
        context.flag("directio")?;
    }
    context.flag("ro")?;
    context.finish(EROFS_MAGIC, MountAttrFlags::MOUNT_ATTR_RDONLY)
}

/// Where an overlay's writes go.
#[derive(Debug, Clone)]
pub(crate) struct Upper {
    /// The changed files.
    pub(crate) upper: PathBuf,
    /// The kernel's scratch folder, on the same file system.
    pub(crate) work: PathBuf,
}

/// Mounts an overlay of `lowers` (the top one first), read-only without `upper`, at `target`.
///
/// # Errors
/// [`MountError::Mount`] with the kernel's text.
pub(crate) fn overlay(
    name: &str,
    lowers: &[PathBuf],
    upper: Option<&Upper>,
    target: &Path,
) -> Result<(), MountError> {
    let context = Context::open("overlay", target)?;
    context.set("source", Path::new(name))?;
    for lower in lowers {
        context.set("lowerdir+", lower)?;
    }
    // Plain container semantics: a copied-up file is whole, a renamed folder is a copy, so an upper directory can be packed.
    for (key, value) in [
        ("metacopy", "off"),
        ("redirect_dir", "off"),
        ("index", "off"),
        ("xino", "auto"),
    ] {
        context.set(key, Path::new(value))?;
    }
    let attributes = match upper {
        Some(upper) => {
            context.set("upperdir", &upper.upper)?;
            context.set("workdir", &upper.work)?;
            MountAttrFlags::empty()
        }
        None => MountAttrFlags::MOUNT_ATTR_RDONLY,
    };
    context.finish(OVERLAY_MAGIC, attributes)
}

/// Shows the mount at `source` at `target` too.
///
/// # Errors
/// [`MountError::Mount`].
pub(crate) fn bind(source: &Path, target: &Path) -> Result<(), MountError> {
    let failed = |step: &str| {
        let step = step.to_owned();
        move |source: rustix::io::Errno| MountError::Mount {
            kind: "bind",
            target: target.to_owned(),
            step,
            text: String::new(),
            source: source.into(),
        }
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    step("binding");
    let tree = open_tree(CWD, source, flags).map_err(failed("open_tree"))?;
    move_mount(
        tree.as_fd(),
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(failed("move_mount"))?;
    step("bound");
    Ok(())
}

/// Unmounts, if nobody uses it.
///
/// # Errors
/// [`MountError::Unmount`], see [`MountError::is_busy`].
pub(crate) fn umount(path: &Path) -> Result<(), MountError> {
    umount_with(path, UnmountFlags::NOFOLLOW)
}

/// Takes a mount out of the tree at once, also while it is used.
///
/// # Errors
/// [`MountError::Unmount`].
pub(crate) fn detach(path: &Path) -> Result<(), MountError> {
    umount_with(path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
}

/// Aborts a FUSE connection: whoever waits for its server gets an error now. The mount itself usually stays, in use.
///
/// # Errors
/// [`MountError::Unmount`], unless that is only because the mount is in use.
pub(crate) fn abort(path: &Path) -> Result<(), MountError> {
    match umount_with(path, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE) {
        Err(error) if !error.is_busy() => Err(error),
        _ => Ok(()),
    }
}

fn umount_with(path: &Path, flags: UnmountFlags) -> Result<(), MountError> {
    step("unmounting");
    let unmounted = unmount(path, flags).map_err(|source| MountError::Unmount {
        path: path.to_owned(),
        source,
    });
    step("unmounted");
    unmounted
}
