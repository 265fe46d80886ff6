//! Project quotas: a number that a folder gives to all below it, and what those may take together (`quotactl_fd(2)`,
//! `FS_IOC_FSSETXATTR`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

/// `struct fsxattr` (linux/fs.h).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent: u32,
    extents: u32,
    project: u32,
    cow_extent: u32,
    padding: [u8; 8],
}

const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
/// What is made below has the same project.
const INHERIT: u32 = 0x200;

/// `struct if_dqblk` (linux/quota.h).
#[repr(C)]
#[derive(Default)]
struct Quota {
    blocks_hard: u64,
    blocks_soft: u64,
    bytes: u64,
    inodes_hard: u64,
    inodes_soft: u64,
    inodes: u64,
    blocks_time: u64,
    inodes_time: u64,
    valid: u32,
}

const SET_QUOTA: u32 = 0x80_0008;
/// `Q_XGETQSTAT`, which answers for every file system.
const GET_STATE: u32 = 0x5805;
const PROJECT: u32 = 2;
/// `QIF_BLIMITS | QIF_ILIMITS`.
const LIMITS: u32 = 1 | 4;
/// `FS_QUOTA_PDQ_ENFD`.
const ENFORCED: u16 = 1 << 5;

fn quotactl(
    file: BorrowedFd<'_>,
    command: u32,
    id: u32,
    what: *mut libc::c_void,
) -> io::Result<()> {
    // SAFETY: the callers pass a pointer to what the command reads or writes, which lives until the call returns.
    let done = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            file.as_raw_fd(),
            command << 8 | PROJECT,
            id,
            what,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether the file system of `file` keeps limits of projects, and not only counts.
pub(crate) fn is_enforced(file: BorrowedFd<'_>) -> bool {
    // `struct fs_quota_stat` is shorter; its flags are behind a version and a byte.
    let mut state = [0_u16; 128];
    quotactl(file, GET_STATE, 0, state.as_mut_ptr().cast()).is_ok()
        && state.get(1).is_some_and(|flags| flags & ENFORCED != 0)
}

/// Sets what a project may take: bytes (of which 1024 are counted together) and inodes; zero is without limit.
///
/// # Errors
/// What the kernel says.
pub(crate) fn limit(file: BorrowedFd<'_>, project: u32, bytes: u64, inodes: u64) -> io::Result<()> {
    let mut quota = Quota {
        blocks_hard: bytes / 1024,
        blocks_soft: bytes / 1024,
        inodes_hard: inodes,
        inodes_soft: inodes,
        valid: LIMITS,
        ..Quota::default()
    };
    quotactl(
        file,
        SET_QUOTA,
        project,
        std::ptr::from_mut(&mut quota).cast(),
    )
}

fn attributes(folder: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut found = Attributes::default();
    // SAFETY: the call writes one whole `fsxattr`.
    let done = unsafe {
        libc::ioctl(
            folder.as_raw_fd(),
            FS_IOC_FSGETXATTR,
            std::ptr::from_mut(&mut found),
        )
    };
    if done == 0 {
        Ok(found)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The project that a folder gives to what is made below it, if it does.
///
/// # Errors
/// What the kernel says: ENOTTY or EOPNOTSUPP where there are no projects.
pub(crate) fn project(folder: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let found = attributes(folder)?;
    Ok((found.flags & INHERIT != 0).then_some(found.project))
}

/// Gives a folder, which is empty, to a project, with all that will be made below it.
///
/// # Errors
/// What the kernel says.
pub(crate) fn give(folder: BorrowedFd<'_>, project: u32) -> io::Result<()> {
    let mut wanted = attributes(folder)?;
    wanted.flags |= INHERIT;
    wanted.project = project;
    // SAFETY: the call reads one whole `fsxattr`.
    let done = unsafe {
        libc::ioctl(
            folder.as_raw_fd(),
            FS_IOC_FSSETXATTR,
            std::ptr::from_mut(&mut wanted),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
