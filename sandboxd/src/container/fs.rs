//! The mount API in a few words: make a file system, clone a tree, attach either.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

/// Most lines of error text taken from the kernel.
const TEXT_LINES_MAX: usize = 16;

/// A new file system, mounted nowhere yet.
///
/// # Errors
/// The kernel's error number and its own words.
pub(crate) fn make(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    let say = |step: &str| {
        let (step, context) = (format!("{kind}: {step}"), context.as_fd());
        move |error: rustix::io::Errno| {
            let error = io::Error::from(error);
            io::Error::new(error.kind(), format!("{step}: {error}{}", words(context)))
        }
    };
    for (name, value) in options {
        fsconfig_set_string(&context, *name, *value).map_err(say(&format!("{name}={value}")))?;
    }
    fsconfig_create(&context).map_err(say("create"))?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(say("mount"))
}

/// What the kernel has to say about a context.
fn words(context: BorrowedFd<'_>) -> String {
    let mut text = String::new();
    for _ in 0..TEXT_LINES_MAX {
        let mut line = [0; 512];
        match rustix::io::read(context, &mut line) {
            Ok(len) if len > 0 => {
                text.push_str(": ");
                let line = line.get(..len).unwrap_or_default();
                text.push_str(String::from_utf8_lossy(line).trim_end());
            }
            _ => break,
        }
    }
    text
}

/// A copy of what is mounted at `path`, attached nowhere.
///
/// # Errors
/// What the kernel says.
pub(crate) fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|e| at("open_tree", path, e))
}

/// Attaches a mount at a path.
///
/// # Errors
/// What the kernel says.
pub(crate) fn attach(mount: impl AsFd, path: impl AsRef<Path>) -> io::Result<()> {
    let path = path.as_ref();
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mount, "", CWD, path, flags).map_err(|e| at("move_mount to", path, e))
}

/// Attaches a mount on what a descriptor stands for.
///
/// # Errors
/// What the kernel says.
pub(crate) fn attach_at(mount: impl AsFd, place: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", place, "", flags)?)
}

/// An error number with what was tried.
pub(crate) fn at(what: &str, path: &Path, error: rustix::io::Errno) -> io::Error {
    let error = io::Error::from(error);
    io::Error::new(
        error.kind(),
        format!("{what} `{}`: {error}", path.display()),
    )
}
