//! What is done differently on a 3FS mount.
//!
//! Reads bypass the page cache (`O_DIRECT`, which FUSE turns into one request a read): what is fetched again after it did
//! not verify must come from the servers, not from pages in which a lost chunk was filled with zeros. A read of fewer
//! bytes than asked for means a lost chunk or a wrong length, and is an error: to go on behind it would start a
//! read inside of the hole, and there 3FS fills with zeros. Sizes come from the servers where a remembered one is not the
//! expected one: a host remembers attributes for 30 s.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, IFlags, OFlags, StatxFlags};
use rustix::io::Errno;

use super::chunks::Piece;
use super::sys;
use crate::ids::to_usize;

/// Buffers begin at multiples of this: a MiB that began elsewhere would touch a page more than FUSE has in one request.
const PAGE_BYTES: usize = 4096;

/// Whether `folder` is on 3FS. Not told by `statfs`, which says only "FUSE", but by an `ioctl` that 3FS answers.
///
/// # Errors
/// When the folder cannot be opened, or its file system fails rather than not knowing the question.
pub(crate) fn is_three_fs(folder: &Path) -> io::Result<bool> {
    let file = File::open(folder)?;
    match sys::magic(file.as_fd()) {
        Ok(magic) => Ok(magic == sys::MAGIC),
        Err(
            Errno::NOTTY
            | Errno::INVAL
            | Errno::NOSYS
            | Errno::OPNOTSUPP
            | Errno::PERM
            | Errno::ACCESS,
        ) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Opens an object for reads that bypass the page cache.
///
/// # Errors
/// What the file system said.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let direct = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
    let mut options = OpenOptions::new();
    match options.read(true).custom_flags(direct).open(path) {
        Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => File::open(path),
        opened => opened,
    }
}

/// The size of an open file that the servers know.
///
/// # Errors
/// What the file system said.
pub(crate) fn size(file: &File) -> io::Result<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    Ok(rustix::fs::statx(file, c"", flags, StatxFlags::SIZE)?.stx_size)
}

/// As [`size`], by path.
///
/// # Errors
/// What the file system said.
pub(crate) fn size_of(path: &Path) -> io::Result<u64> {
    let flags = AtFlags::STATX_FORCE_SYNC;
    Ok(rustix::fs::statx(CWD, path, flags, StatxFlags::SIZE)?.stx_size)
}

/// The size of an object, from the servers unless what the host remembers is `expected`.
///
/// # Errors
/// What the file system said.
pub(crate) fn size_expecting(path: &Path, expected: u64) -> io::Result<u64> {
    let remembered = std::fs::metadata(path)?.len();
    if remembered == expected {
        return Ok(remembered);
    }
    size_of(path)
}

/// Memory for one piece after another.
pub(crate) struct PieceBuffer(Vec<u8>);

impl PieceBuffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; to_usize(super::CHUNK_BYTES) + PAGE_BYTES])
    }

    /// The wanted bytes of a piece, read at once; how many bytes came in place of `piece.len` if they were fewer.
    ///
    /// # Errors
    /// What the file system said.
    pub(crate) fn read(&mut self, file: &File, piece: Piece) -> io::Result<Result<&[u8], usize>> {
        let start = self.0.as_ptr().align_offset(PAGE_BYTES);
        let room = start
            .checked_add(piece.len)
            .and_then(|end| self.0.get_mut(start..end));
        let room = room.ok_or_else(|| io::Error::other("a piece longer than a chunk"))?;
        let got = loop {
            match file.read_at(room, piece.start) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        if got < piece.len {
            return Ok(Err(got));
        }
        Ok(Ok(room.get(piece.skip..).unwrap_or_default()))
    }
}

/// Makes a published object immutable: nothing on any host can then open it for writing, link or unlink it.
///
/// # Errors
/// When the file system does not do that; nothing depends on it.
pub(crate) fn seal(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let flags = rustix::fs::ioctl_getflags(&file)?;
    Ok(rustix::fs::ioctl_setflags(
        &file,
        flags | IFlags::IMMUTABLE,
    )?)
}

/// Takes back [`seal`] before an object is removed or replaced. One that is missing or was never sealed is no error.
///
/// # Errors
/// When a sealed object stays sealed.
pub(crate) fn unseal(path: &Path) -> io::Result<()> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    match rustix::fs::ioctl_getflags(&file) {
        Ok(flags) if flags.contains(IFlags::IMMUTABLE) => Ok(rustix::fs::ioctl_setflags(
            &file,
            flags - IFlags::IMMUTABLE,
        )?),
        // Without flags there is no seal.
        Ok(_) | Err(_) => Ok(()),
    }
}
