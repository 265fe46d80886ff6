//! Disk limits: by project quota where the state's file system keeps it (`project`), else by a file system in a file.
//!
//! That is an ext4 without a journal (after a crash of the machine the sandbox is gone too) in a sparse file beside the sandbox's record, on a
//! loop device that the kernel frees by itself, mounted at the folder the sandbox writes to. It is full when it is full: no
//! space or no inodes inside, and nothing of the host's. Formatting is done once for each size; a sandbox gets a copy of the few blocks
//! that are not holes.

mod project;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rustix::fs::SeekFrom;
use rustix::mount::{MountAttrFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::container::fs as mounts;
use crate::sys::loops;

/// Smallest and largest limit.
pub const MIB_MIN: u64 = 16;
/// See [`MIB_MIN`].
pub const MIB_MAX: u64 = 1 << 20;
/// Bytes of disk for which there is one inode.
const BYTES_PER_INODE: u64 = 8192;
/// Sizes whose formatted image is kept.
const TEMPLATES_MAX: usize = 16;
/// Devices that are tried when others take them first.
const TRIES: u32 = 256;
const COPY_BYTES: usize = 256 << 10;

/// A sandbox's disk limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Disk {
    /// MiB that it may write, the file system's own structures included.
    pub mib: u64,
    /// Files and folders that it may make.
    pub inodes: u64,
    /// What keeps the limit.
    pub by: Keeper,
}

/// What keeps a disk limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keeper {
    /// A file system in a file, on a loop device.
    Loop,
    /// A project's quota of the file system that the daemon's state is on.
    Project,
}

impl Disk {
    /// A limit of so many MiB.
    pub fn of(mib: u64, by: Keeper) -> Self {
        Self {
            mib,
            inodes: (mib << 20) / BYTES_PER_INODE,
            by,
        }
    }
}

/// Why there is no disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A file or device would not.
    #[error("a sandbox's disk: cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Formatting failed.
    #[error("a sandbox's disk: `mkfs.ext4` (package e2fsprogs): {said}")]
    Format {
        /// What it said.
        said: String,
    },
    /// No device was free.
    #[error("a sandbox's disk: {TRIES} loop devices were taken by others first")]
    NoDevice,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { what, path, source }
}

/// Formatted images, one a size.
#[derive(Debug)]
pub struct Disks {
    folder: PathBuf,
    keeper: Keeper,
    formatting: Mutex<()>,
}

impl Disks {
    /// For sandboxes in the folder `state`; formatted images are kept there too.
    pub fn new(state: &Path) -> Self {
        let keeper = if project::is_kept(state) {
            Keeper::Project
        } else {
            Keeper::Loop
        };
        Self {
            folder: state.join("disks"),
            keeper,
            formatting: Mutex::new(()),
        }
    }

    /// What keeps the limits of new sandboxes.
    pub fn keeper(&self) -> Keeper {
        self.keeper
    }

    /// Makes the folder `at`, limited: perhaps as a file system in the file `image`. Blocks.
    ///
    /// # Errors
    /// See [`DiskError`]; the file may be left, nothing is mounted.
    pub fn attach(&self, disk: &Disk, image: &Path, at: &Path) -> Result<(), DiskError> {
        if disk.by == Keeper::Project {
            return project::attach(disk, at);
        }
        let template = self.template(disk)?;
        let file = copy(&template, image)?;
        fs::create_dir_all(at).map_err(failed("create", at))?;
        let (device, path) = show(&file)?;
        let source = path.to_string_lossy();
        let options = [("source", &*source)];
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
        let mount = mounts::make("ext4", &options, attributes).map_err(failed("mount", image))?;
        drop(device);
        mounts::attach(&mount, at).map_err(failed("mount at", at))
    }

    /// The formatted image of a size.
    fn template(&self, disk: &Disk) -> Result<PathBuf, DiskError> {
        let _turn = self
            .formatting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let path = self.folder.join(format!("{}.ext4", disk.mib));
        if path.try_exists().map_err(failed("look at", &path))? {
            return Ok(path);
        }
        fs::create_dir_all(&self.folder).map_err(failed("create", &self.folder))?;
        self.make_room()?;
        let unfinished = self.folder.join("unfinished");
        let file = File::create(&unfinished).map_err(failed("create", &unfinished))?;
        file.set_len(disk.mib << 20)
            .map_err(failed("size", &unfinished))?;
        let ran = Command::new("mkfs.ext4")
            .args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal"])
            .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"])
            .args(["-N", &disk.inodes.to_string()])
            .arg(&unfinished)
            .output()
            .map_err(failed("run", Path::new("mkfs.ext4")))?;
        if !ran.status.success() {
            let said = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
            return Err(DiskError::Format { said });
        }
        fs::rename(&unfinished, &path).map_err(failed("rename", &unfinished))?;
        Ok(path)
    }

    /// Removes one of too many sizes; whoever copies it has it open.
    fn make_room(&self) -> Result<(), DiskError> {
        let listed = fs::read_dir(&self.folder).map_err(failed("list", &self.folder))?;
        let all: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
        match all.first() {
            Some(one) if all.len() >= TEMPLATES_MAX => {
                fs::remove_file(one).map_err(failed("remove", one))
            }
            _ => Ok(()),
        }
    }
}

/// Copies a file without its holes.
fn copy(from: &Path, to: &Path) -> Result<File, DiskError> {
    let source = File::open(from).map_err(failed("open", from))?;
    let len = source.metadata().map_err(failed("look at", from))?.len();
    let target = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(to)
        .map_err(failed("create", to))?;
    target.set_len(len).map_err(failed("size", to))?;
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = 0;
    loop {
        let begin = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            // Nothing but a hole follows.
            Err(rustix::io::Errno::NXIO) => return Ok(target),
            found => found.map_err(|e| failed("read", from)(e.into()))?,
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(begin));
        let end = end.map_err(|e| failed("read", from)(e.into()))?;
        at = begin;
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(COPY_BYTES);
            let part = buffer.get_mut(..want.min(COPY_BYTES)).unwrap_or_default();
            source
                .read_exact_at(part, at)
                .map_err(failed("read", from))?;
            target.write_all_at(part, at).map_err(failed("write", to))?;
            at += part.len() as u64;
        }
    }
}

/// Shows a file as a block device; it goes when the last who has it open closes it.
fn show(file: &File) -> Result<(File, PathBuf), DiskError> {
    let control = Path::new("/dev/loop-control");
    let open = |path: &Path| File::options().read(true).write(true).open(path);
    let asked = open(control).map_err(failed("open", control))?;
    for _ in 0..TRIES {
        let number = loops::free(&asked).map_err(failed("ask", control))?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = open(&path).map_err(failed("open", &path))?;
        match loops::configure(&device, file) {
            Ok(()) => return Ok((device, path)),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
            Err(e) => return Err(failed("set up", &path)(e)),
        }
    }
    Err(DiskError::NoDevice)
}

/// Unmounts what is mounted at a folder, if anything is, and takes its limit away. With the last mount the device is free again.
///
/// # Errors
/// What the kernel says.
pub fn detach(at: &Path) -> io::Result<()> {
    match rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        // Nothing is there, or nothing is mounted there.
        Ok(()) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::INVAL) => project::detach(at),
        Err(error) => Err(error.into()),
    }
}
