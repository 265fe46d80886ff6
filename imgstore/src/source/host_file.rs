//! Opening files of the host without following links, whatever the length of their path.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2};

use crate::tree::{Mtime, Stamp};

/// The kernel takes paths up to 4,095 bytes; longer ones are opened in pieces.
const PIECE_MAX: usize = 4000;

/// Opens `path` under `base` with no symbolic link anywhere in it.
pub(super) fn open_beneath(
    base: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> io::Result<OwnedFd> {
    open_in_pieces(
        base,
        path,
        flags,
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )
}

/// Opens a path of the host whose last part is no symbolic link.
pub(super) fn open_path(path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    open_in_pieces(CWD, path, flags, ResolveFlags::empty())
}

fn open_in_pieces(
    base: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let mut at: Option<OwnedFd> = None;
    let mut rest = path;
    while rest.len() > PIECE_MAX {
        let window = rest.get(..PIECE_MAX).unwrap_or_default();
        let Some(cut) = window
            .iter()
            .rposition(|b| *b == b'/')
            .filter(|cut| *cut > 0)
        else {
            break;
        };
        let (piece, tail) = rest.split_at(cut);
        let from = at.as_ref().map_or(base, |fd| fd.as_fd());
        let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        at = Some(openat2(from, piece, step, Mode::empty(), resolve)?);
        rest = without_leading_slashes(tail);
    }
    let from = at.as_ref().map_or(base, |fd| fd.as_fd());
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat2(from, rest, flags, Mode::empty(), resolve)?)
}

fn without_leading_slashes(path: &[u8]) -> &[u8] {
    let from = path.iter().position(|b| *b != b'/').unwrap_or(path.len());
    path.get(from..).unwrap_or_default()
}

/// What an open file is.
pub(super) fn stamp(fd: impl AsFd) -> io::Result<Stamp> {
    Ok(stamp_of(&fstat(fd)?))
}

pub(super) fn is_regular(fd: impl AsFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::RegularFile)
}

/// What `stat` said a file is.
pub(super) fn stamp_of(stat: &Stat) -> Stamp {
    let time = |sec, nsec| (sec, i64::try_from(nsec).unwrap_or(0));
    Stamp {
        file: (stat.st_dev, stat.st_ino),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// A time of `stat`.
pub(super) fn mtime(sec: i64, nsec: u64) -> Mtime {
    Mtime {
        sec,
        nsec: u32::try_from(nsec).unwrap_or(0),
    }
}
