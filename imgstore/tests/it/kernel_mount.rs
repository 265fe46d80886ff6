//! Mounts a published layer with the kernel alone, no daemon: the flat image as a file, or a file per segment.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use imgstore::ids::Digest;
use imgstore::origin::Origin;
use imgstore::store::layer;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

/// A mount that goes away with the value.
pub(crate) struct KernelMount {
    point: PathBuf,
    _dir: tempfile::TempDir,
}

impl KernelMount {
    /// Writes the flat image of `layer` beside the mount point and mounts it.
    pub(crate) fn of(origin: &dyn Origin, digest: &Digest) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("flat.erofs");
        write_flat(origin, digest, &image);
        let point = dir.path().join("mnt");
        std::fs::create_dir(&point).unwrap();
        mount_erofs(&image, &[], &point);
        Self { point, _dir: dir }
    }

    /// Mounts a metadata image with one device per segment.
    pub(crate) fn with_devices(meta: &Path, segments: &[PathBuf]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let point = dir.path().join("mnt");
        std::fs::create_dir(&point).unwrap();
        mount_erofs(meta, segments, &point);
        Self { point, _dir: dir }
    }

    /// The mount point.
    pub(crate) fn path(&self) -> &Path {
        &self.point
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        unmount(&self.point, UnmountFlags::DETACH).unwrap();
    }
}

/// Metadata, then all segments.
pub(crate) fn write_flat(origin: &dyn Origin, digest: &Digest, path: &Path) {
    let layer = layer::open(origin, digest).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&layer::read_meta(origin, &layer.manifest).unwrap())
        .unwrap();
    for index in 0..layer.manifest.segments.len() {
        file.write_all(&layer::read_segment(origin, &layer, index).unwrap())
            .unwrap();
    }
}

/// File-backed mount by the mount API: `mount(8)` would make a loop device.
fn mount_erofs(image: &Path, devices: &[PathBuf], point: &Path) {
    let fs = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_set_string(fs.as_fd(), "source", image).unwrap();
    for device in devices {
        fsconfig_set_string(fs.as_fd(), "device", device).unwrap();
    }
    fsconfig_set_flag(fs.as_fd(), "ro").unwrap();
    fsconfig_create(fs.as_fd()).unwrap();
    let mount = fsmount(
        fs.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )
    .unwrap();
    move_mount(
        mount.as_fd(),
        "",
        rustix::fs::CWD,
        point,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .unwrap();
}
