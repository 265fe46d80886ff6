//! Limits by project quota, where the state's file system has it: no device, no image, nothing to format.
//!
//! The project is the number of the folder's own inode: nobody else has it while the folder is there, and nothing has to be
//! remembered. Inside a sandbox a project cannot be changed: the kernel lets only the host's own user namespace do that.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::{Disk, DiskError, failed};
use crate::sys::quota;

fn open(folder: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    File::options().read(true).custom_flags(flags).open(folder)
}

/// Whether limits of projects are kept where `folder` is: a file system may count and not enforce them.
pub(super) fn is_kept(folder: &Path) -> bool {
    open(folder).is_ok_and(|folder| quota::is_enforced(folder.as_fd()))
}

fn number(folder: &File) -> io::Result<u32> {
    let inode = folder.metadata()?.ino();
    u32::try_from(inode).map_err(|_large| {
        io::Error::other(format!(
            "inode {inode} is no number of a project: at most {} is expected; mount the state's file system without 64-bit inodes",
            u32::MAX
        ))
    })
}

/// Makes the folder `at` and limits what it will hold.
pub(super) fn attach(disk: &Disk, at: &Path) -> Result<(), DiskError> {
    fs::create_dir_all(at).map_err(failed("create", at))?;
    let folder = open(at).map_err(failed("open", at))?;
    let fd = folder.as_fd();
    if !quota::is_enforced(fd) {
        let error = io::Error::other(
            "its file system keeps no limits of projects (mount option `prjquota`)",
        );
        return Err(failed("limit", at)(error));
    }
    let project = number(&folder).map_err(failed("number", at))?;
    // The limit first: nothing is ever in the project without one.
    quota::limit(fd, project, disk.mib << 20, disk.inodes).map_err(failed("limit", at))?;
    quota::give(fd, project).map_err(failed("give a project to", at))
}

/// Takes the limit of a folder's project away, if it has one: its number will be another's.
pub(super) fn detach(at: &Path) -> io::Result<()> {
    let folder = match open(at) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let project = match quota::project(folder.as_fd()) {
        // No projects here.
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(nix::libc::ENOTTY | nix::libc::EOPNOTSUPP)
            ) =>
        {
            return Ok(());
        }
        found => found?,
    };
    match project {
        Some(project) if number(&folder).ok() == Some(project) => {
            quota::limit(folder.as_fd(), project, 0, 0)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod vm_tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::super::{Disks, Keeper};
    use super::*;

    #[test]
    fn projects_limit_folders_in_the_vm() {
        test_vm::suite(
            "disk::project::vm_tests::projects_limit_folders_in_the_vm",
            &[],
            &[
                ("ext4", || {
                    is_limited(
                        "ext4",
                        "mkfs.ext4 -q -O quota,project -E quotatype=prjquota",
                    )
                }),
                ("xfs", || is_limited("xfs", "mkfs.xfs -q")),
                ("off", not_enforced_is_not_used),
            ],
        );
    }

    fn mounted(name: &str, make: &str, option: &str) -> PathBuf {
        let at = std::env::temp_dir().join(format!("quota-{name}"));
        let line = format!(
            "truncate -s 400M {at}.img && {make} {at}.img && mkdir {at} && mount -o loop{option} {at}.img {at}",
            at = at.display()
        );
        assert!(
            Command::new("sh")
                .arg("-c")
                .arg(line)
                .status()
                .unwrap()
                .success()
        );
        at
    }

    /// Mutations: the limit is not set; `INHERIT` is not; `detach` leaves the limit.
    fn is_limited(name: &str, make: &str) {
        let state = mounted(name, make, ",prjquota");
        let disks = Disks::new(&state);
        assert_eq!(disks.keeper(), Keeper::Project);
        let disk = Disk {
            inodes: 50,
            ..Disk::of(16, disks.keeper())
        };
        let at = state.join("rw");
        disks.attach(&disk, &state.join("image"), &at).unwrap();
        // Through an overlay, as in a sandbox: root itself, who made it, is above limits on ext4; its overlays are not.
        let root = state.join("root");
        let line = "mkdir -p $0 $1/upper $1/work $0.low \
            && mount -t overlay o -o lowerdir=$0.low,upperdir=$1/upper,workdir=$1/work $0";
        let made = Command::new("sh")
            .args(["-c", line])
            .args([&root, &at])
            .status();
        assert!(made.unwrap().success());
        fs::create_dir(root.join("below")).unwrap();
        let big = root.join("below/big");
        let full = fs::write(&big, vec![1; 40 << 20]).unwrap_err();
        let full = full.raw_os_error().unwrap();
        assert!(
            [nix::libc::EDQUOT, nix::libc::ENOSPC].contains(&full),
            "{full}"
        );
        let len = fs::metadata(&big).unwrap().len();
        assert!((12 << 20..=16 << 20).contains(&len), "{len}");
        fs::remove_file(&big).unwrap();
        let files = (0..100).find(|n| fs::write(root.join(format!("below/{n}")), b"").is_err());
        // Five folders (two of them the overlay's), and the rest.
        assert_eq!(files, Some(45));
        // Beside it there is room.
        fs::write(state.join("other"), vec![1; 40 << 20]).unwrap();
        detach(&at).unwrap();
        fs::write(&big, vec![1; 40 << 20]).unwrap();
        assert!(
            Command::new("umount")
                .arg(&root)
                .status()
                .unwrap()
                .success()
        );
        fs::remove_dir_all(&at).unwrap();
        detach(&at).unwrap();
    }

    /// Mutation: `is_enforced` looks whether projects are counted only.
    fn not_enforced_is_not_used() {
        let make = "mkfs.ext4 -q -O quota,project -E quotatype=prjquota";
        let state = mounted("off", make, "");
        let disks = Disks::new(&state);
        assert_eq!(disks.keeper(), Keeper::Loop);
        let disk = Disk::of(16, Keeper::Project);
        let refused = disks.attach(&disk, &state.join("image"), &state.join("rw"));
        assert!(refused.unwrap_err().to_string().contains("prjquota"));
    }
}
