//! A copy of a folder that somebody changes, in steps: most of it while they go on, the rest while they stand still.
//!
//! A step copies what differs from what the one before saw: another inode, or another time of change. That time has the
//! kernel's coarse clock, so what changed shortly before it was copied counts as changed once more. And a page that is mapped and dirty
//! changes without a new time: so each file is written out between looking at it and copying it, which makes the next
//! store to it fault and set the time.
//!
//! We are root, and whoever changes the folder is not our friend: nothing is opened through a link, at any depth.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Stat, Timespec, Timestamps,
    Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::sys;

mod joined;

pub(super) use joined::{Joined, join, joined};

/// Most files and folders of a copy.
const ENTRIES_MAX: usize = 1 << 20;
/// Coarse clocks tick at least this often, in milliseconds.
const TICK_MS: i64 = 20;
/// Bytes of one call that copies.
const COPY_BYTES: usize = 64 << 20;
/// Bytes copied through memory at a time.
const PIECE_BYTES: usize = 256 << 10;
/// Most bytes of an attribute's value, and of all names of a file (the kernel's bound).
const XATTR_BYTES_MAX: usize = 64 << 10;

/// What is looked at to see whether something changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    ino: u64,
    mode: u32,
    size: i64,
    changed: (i64, i64),
}

#[derive(Debug)]
struct Entry {
    stamp: Stamp,
    /// Copied when it had not just changed: the same stamp means the same content.
    settled: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Mirror {
    from: OwnedFd,
    to: OwnedFd,
    entries: BTreeMap<PathBuf, Entry>,
}

/// What went wrong, where.
#[derive(Debug, thiserror::Error)]
pub(super) enum MirrorError {
    /// A call failed.
    #[error("cannot copy `{path}` of a sandbox's changes: {source}", path = path.display())]
    File {
        /// Below the changes.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Too much.
    #[error("a sandbox changed more than {ENTRIES_MAX} files and folders")]
    TooMany,
}

type Result<T> = std::result::Result<T, MirrorError>;

trait On<T> {
    fn on(self, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> On<T> for std::result::Result<T, E> {
    fn on(self, path: &Path) -> Result<T> {
        self.map_err(|source| MirrorError::File {
            path: path.to_owned(),
            source: source.into(),
        })
    }
}

/// Whether something disappeared (or became something else) while it was looked at.
fn is_gone(error: &MirrorError) -> bool {
    let MirrorError::File { source, .. } = error else {
        return false;
    };
    let code = source.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        code,
        Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE | Errno::NXIO)
    )
}

impl Stamp {
    fn of(stat: &Stat) -> Self {
        Self {
            ino: stat.st_ino,
            mode: stat.st_mode,
            size: stat.st_size,
            changed: (stat.st_ctime, stat.st_ctime_nsec.cast_signed()),
        }
    }

    fn kind(self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// A folder's descriptor, opened without following anything.
fn folder(root: &OwnedFd, path: &Path) -> Result<OwnedFd> {
    let path_or_dot = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    open(root, path_or_dot, OFlags::RDONLY | OFlags::DIRECTORY).on(path)
}

fn open(root: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(root, path, flags, Mode::empty(), within)
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

fn name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// The name of something in an open folder that calls without an `at` form take.
fn through(folder: &OwnedFd, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd")
        .join(folder.as_raw_fd().to_string())
        .join(name)
}

impl Mirror {
    /// A copy of `from` that will be made at `to`, which must not exist.
    pub(super) fn new(from: &Path, to: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let from = rustix::fs::open(from, flags, Mode::empty()).on(from)?;
        std::fs::create_dir(to).on(to)?;
        let to = rustix::fs::open(to, flags, Mode::empty()).on(to)?;
        let entries = BTreeMap::new();
        Ok(Self { from, to, entries })
    }

    /// One step; how much was copied. `still`: nobody changes anything meanwhile.
    pub(super) fn step(&mut self, still: bool) -> Result<usize> {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let mut found = BTreeMap::new();
        walk(&self.from, &mut found)?;
        self.remove_others(&found)?;
        // By inode, what was copied in this step: hard links are made to it.
        let mut links: HashMap<u64, (Stamp, PathBuf)> = HashMap::new();
        let mut copied = 0;
        for (path, (stamp, nlink)) in found {
            let known = self.entries.get(&path);
            if known.is_some_and(|known| known.settled && known.stamp == stamp) {
                continue;
            }
            let settled = age_ms(stamp, now) > TICK_MS;
            let linked = links.get(&stamp.ino).filter(|(s, _)| *s == stamp);
            let made = match (stamp.kind(), linked) {
                (FileType::Directory, _) => self.make_folder(&path),
                (_, Some((_, first))) => self.link(first, &path),
                (FileType::RegularFile, _) => self.copy_file(&path, stamp, still),
                (_, None) => self.copy_special(&path, stamp),
            };
            match made {
                Err(error) if !still && is_gone(&error) => {
                    // It is something else next time; a part of it may have been made.
                    let at = folder(&self.to, parent(&path))?;
                    match rustix::fs::unlinkat(&at, name(&path), AtFlags::empty()) {
                        Err(Errno::NOENT | Errno::ISDIR) => continue,
                        removed => removed.on(&path)?,
                    }
                    continue;
                }
                made => made?,
            }
            copied += 1;
            if nlink > 1 {
                links.insert(stamp.ino, (stamp, path.clone()));
            }
            self.entries.insert(path, Entry { stamp, settled });
        }
        // Making something in a folder changes its times: all of them, children first.
        let is_folder = |(_, entry): &(&PathBuf, &Entry)| entry.stamp.kind() == FileType::Directory;
        for (path, _) in self.entries.iter().rev().filter(is_folder) {
            match self.copy_folder_attributes(path) {
                Err(error) if !still && is_gone(&error) => {}
                set => set?,
            }
        }
        Ok(copied)
    }

    /// Takes away what is not there any more, or is something else now: children first.
    fn remove_others(&mut self, found: &BTreeMap<PathBuf, (Stamp, u64)>) -> Result<()> {
        let stays = |path: &Path, entry: &Entry| {
            let now = found.get(path).map(|(stamp, _)| *stamp);
            now.is_some_and(|now| {
                let folder =
                    entry.stamp.kind() == FileType::Directory && now.kind() == FileType::Directory;
                folder || (entry.settled && now == entry.stamp)
            })
        };
        let others = self
            .entries
            .iter()
            .filter(|(path, entry)| !stays(path, entry));
        let others: Vec<PathBuf> = others.map(|(path, _)| path.clone()).collect();
        for path in others.iter().rev() {
            let entry = self.entries.remove(path);
            let is_folder = entry.is_some_and(|e| e.stamp.kind() == FileType::Directory);
            let flags = if is_folder {
                AtFlags::REMOVEDIR
            } else {
                AtFlags::empty()
            };
            let at = folder(&self.to, parent(path))?;
            match rustix::fs::unlinkat(&at, name(path), flags) {
                Err(Errno::NOENT) => {}
                removed => removed.on(path)?,
            }
        }
        Ok(())
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        if path.as_os_str().is_empty() {
            return Ok(());
        }
        let at = folder(&self.to, parent(path))?;
        match rustix::fs::mkdirat(&at, name(path), Mode::RWXU) {
            Err(Errno::EXIST) => Ok(()),
            made => made.on(path),
        }
    }

    fn link(&self, first: &Path, path: &Path) -> Result<()> {
        let (old, new) = (
            folder(&self.to, parent(first))?,
            folder(&self.to, parent(path))?,
        );
        rustix::fs::linkat(&old, name(first), &new, name(path), AtFlags::empty()).on(path)
    }

    fn copy_file(&self, path: &Path, stamp: Stamp, still: bool) -> Result<()> {
        let from = open(&self.from, path, OFlags::RDONLY | OFlags::NONBLOCK).on(path)?;
        let stat = rustix::fs::fstat(&from).on(path)?;
        if stat.st_ino != stamp.ino {
            return Err(Errno::STALE).on(path);
        }
        if !still {
            sys::write_out(from.as_fd()).on(path)?;
        }
        let at = folder(&self.to, parent(path))?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let to = rustix::fs::openat(&at, name(path), flags, Mode::RUSR | Mode::WUSR).on(path)?;
        copy_data(&from, &to, stat.st_size).on(path)?;
        copy_attributes(&from, &to, &stat).on(path)
    }

    fn copy_folder_attributes(&self, path: &Path) -> Result<()> {
        let (from, to) = (folder(&self.from, path)?, folder(&self.to, path)?);
        let stat = rustix::fs::fstat(&from).on(path)?;
        copy_attributes(&from, &to, &stat).on(path)
    }

    /// Links, whiteouts, devices, pipes, sockets.
    fn copy_special(&self, path: &Path, stamp: Stamp) -> Result<()> {
        let (from, to) = (
            folder(&self.from, parent(path))?,
            folder(&self.to, parent(path))?,
        );
        let stat = rustix::fs::statat(&from, name(path), AtFlags::SYMLINK_NOFOLLOW).on(path)?;
        if stat.st_ino != stamp.ino || stat.st_mode != stamp.mode {
            return Err(Errno::STALE).on(path);
        }
        if stamp.kind() == FileType::Symlink {
            let target = rustix::fs::readlinkat(&from, name(path), Vec::new()).on(path)?;
            rustix::fs::symlinkat(&*target, &to, name(path)).on(path)?;
        } else {
            let mode = Mode::from_raw_mode(stat.st_mode);
            rustix::fs::mknodat(&to, name(path), stamp.kind(), mode, stat.st_rdev).on(path)?;
        }
        let (uid, gid) = owner(&stat);
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(&to, name(path), Some(uid), Some(gid), nofollow).on(path)?;
        if stamp.kind() != FileType::Symlink {
            let mode = Mode::from_raw_mode(stat.st_mode);
            rustix::fs::chmodat(&to, name(path), mode, AtFlags::empty()).on(path)?;
        }
        let (old, new) = (through(&from, name(path)), through(&to, name(path)));
        let mut names = vec![0; XATTR_BYTES_MAX];
        let len = rustix::fs::llistxattr(&old, &mut names).on(path)?;
        names.truncate(len);
        for attribute in attributes(&names) {
            let mut value = vec![0; XATTR_BYTES_MAX];
            let len = rustix::fs::lgetxattr(&old, attribute, &mut value).on(path)?;
            value.truncate(len);
            rustix::fs::lsetxattr(&new, attribute, &value, XattrFlags::empty()).on(path)?;
        }
        rustix::fs::utimensat(&to, name(path), &times(&stat), nofollow).on(path)
    }
}

/// Milliseconds since something changed.
fn age_ms(stamp: Stamp, now: Timespec) -> i64 {
    let (seconds, nanos) = (now.tv_sec - stamp.changed.0, now.tv_nsec - stamp.changed.1);
    seconds
        .saturating_mul(1000)
        .saturating_add(nanos / 1_000_000)
}

/// All below a folder, with it, by path; with the number of its names.
fn walk(root: &OwnedFd, found: &mut BTreeMap<PathBuf, (Stamp, u64)>) -> Result<()> {
    let mut waiting = vec![PathBuf::new()];
    while let Some(path) = waiting.pop() {
        let opened = match folder(root, &path) {
            Err(error) if is_gone(&error) => continue,
            opened => opened?,
        };
        let stat = rustix::fs::fstat(&opened).on(&path)?;
        found.insert(path.clone(), (Stamp::of(&stat), 1));
        for entry in Dir::read_from(&opened).on(&path)? {
            let entry = entry.on(&path)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let below = path.join(name);
            let stat = match rustix::fs::statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat.on(&below)?,
            };
            let stamp = Stamp::of(&stat);
            if stamp.kind() == FileType::Directory {
                waiting.push(below);
            } else {
                found.insert(below, (stamp, stat.st_nlink));
            }
            if found.len() + waiting.len() > ENTRIES_MAX {
                return Err(MirrorError::TooMany);
            }
        }
    }
    Ok(())
}

/// Copies what is not a hole.
fn copy_data(from: &OwnedFd, to: &OwnedFd, size: i64) -> io::Result<()> {
    rustix::fs::ftruncate(to, u64::try_from(size).unwrap_or_default())?;
    let mut at = 0_u64;
    loop {
        let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            // No data behind this.
            Err(Errno::NXIO) => return Ok(()),
            start => start?,
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        let mut source = start;
        while source < end {
            let len = usize::try_from(end - source)
                .unwrap_or(COPY_BYTES)
                .min(COPY_BYTES);
            let mut target = source;
            let piece =
                rustix::fs::copy_file_range(from, Some(&mut source), to, Some(&mut target), len);
            let copied = match piece {
                // Another file system: what a sandbox writes has one of its own if it has a disk limit.
                Err(Errno::XDEV) => copy_piece(from, to, &mut source, len)?,
                copied => copied?,
            };
            if copied == 0 {
                // It has become shorter.
                return Ok(());
            }
        }
        at = end;
    }
}

/// Copies some bytes from `at` on, through memory; how many.
fn copy_piece(from: &OwnedFd, to: &OwnedFd, at: &mut u64, len: usize) -> io::Result<usize> {
    let mut buffer = vec![0; len.min(PIECE_BYTES)];
    let read = rustix::io::pread(from, &mut *buffer, *at)?;
    let mut rest = buffer.get(..read).unwrap_or_default();
    while !rest.is_empty() {
        let written = rustix::io::pwrite(to, rest, *at)?;
        *at += written as u64;
        rest = rest.get(written..).unwrap_or_default();
    }
    Ok(read)
}

fn owner(stat: &Stat) -> (Uid, Gid) {
    (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid))
}

fn times(stat: &Stat) -> Timestamps {
    let time = |tv_sec, nanos: u64| Timespec {
        tv_sec,
        tv_nsec: nanos.cast_signed(),
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

fn attributes(names: &[u8]) -> impl Iterator<Item = &OsStr> {
    names
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(OsStr::from_bytes)
}

/// Attributes, owner, mode and times of an open file or folder, in the order in which one does not undo another.
fn copy_attributes(from: &OwnedFd, to: &OwnedFd, stat: &Stat) -> io::Result<()> {
    let (uid, gid) = owner(stat);
    rustix::fs::fchown(to, Some(uid), Some(gid))?;
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode))?;
    let list = |file: &OwnedFd| -> io::Result<Vec<u8>> {
        let mut names = vec![0; XATTR_BYTES_MAX];
        let len = rustix::fs::flistxattr(file, &mut names)?;
        names.truncate(len);
        Ok(names)
    };
    let (wanted, had) = (list(from)?, list(to)?);
    for name in attributes(&had).filter(|name| !attributes(&wanted).any(|w| w == *name)) {
        rustix::fs::fremovexattr(to, name)?;
    }
    for name in attributes(&wanted) {
        let mut value = vec![0; XATTR_BYTES_MAX];
        let len = rustix::fs::fgetxattr(from, name, &mut value)?;
        value.truncate(len);
        rustix::fs::fsetxattr(to, name, &value, XattrFlags::empty())?;
    }
    Ok(rustix::fs::futimens(to, &times(stat))?)
}

#[cfg(test)]
mod tests;
