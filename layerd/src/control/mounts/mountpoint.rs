//! Where a composition is seen: the folder it is mounted on, and what its root looks like.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use super::MountsError;

/// The mountpoint as the kernel will show it.
pub(super) fn check_mountpoint(mountpoint: &Path) -> Result<PathBuf, MountsError> {
    if !mountpoint.is_absolute() {
        return Err(MountsError::Request(format!(
            "mountpoint `{}` must be an absolute path",
            mountpoint.display()
        )));
    }
    let real =
        fs::canonicalize(mountpoint).map_err(MountsError::io("use mountpoint", mountpoint))?;
    if !real.is_dir() {
        return Err(MountsError::Request(format!(
            "mountpoint `{}` is not a directory",
            real.display()
        )));
    }
    Ok(real)
}

/// The root of an overlay has the attributes of its upper directory: those of the top layer's root.
pub(super) fn copy_root_attributes(
    lower: Option<&PathBuf>,
    upper: &Path,
) -> Result<(), MountsError> {
    let Some(lower) = lower else { return Ok(()) };
    let meta = fs::metadata(lower).map_err(MountsError::io("read", lower))?;
    chown(upper, Some(meta.uid()), Some(meta.gid()))
        .and_then(|()| fs::set_permissions(upper, meta.permissions()))
        .map_err(MountsError::io("set attributes of", upper))
}
