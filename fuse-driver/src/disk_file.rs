//! A writable disk as one regular file: the mount point itself is the file.
//!
//! The kernel's page cache lies above: reads are cached there, writes go through at once, `fsync` is a flush of the disk. Parts
//! of sectors are allowed. The file's length is the disk's and cannot change.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyOpen, ReplyStatfs, ReplyWrite, Request, Session, WriteFlags,
};
use imgstore::disk::bytewise::Bytewise;
use imgstore::ids::{BLOCK_SIZE, to_usize};
use rustix::mount::UnmountFlags;

use crate::mount::FuseError;
use crate::tree::ROOT_INO;

/// Requests served at a time; each waits for the disk on its thread.
const THREADS: usize = 8;
/// Longest request the kernel may send.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// How far the kernel reads ahead.
const READAHEAD_BYTES: u32 = 128 << 10;
/// Attributes never change.
const TTL: Duration = Duration::from_secs(365 * 24 * 3600);

/// See the head of this file. Dropping it leaves the mount to the process's end, which aborts it.
#[derive(Debug)]
pub struct DiskFile {
    path: PathBuf,
    /// Ends by itself when the kernel lets go of the mount.
    session: Mutex<Option<BackgroundSession>>,
}

/// Takes away what a killed server left mounted.
fn unmount_dead(path: &Path) -> io::Result<()> {
    let is_dead =
        |error: &io::Error| error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error());
    if fs::symlink_metadata(path).is_err_and(|error| is_dead(&error)) {
        rustix::mount::unmount(path, UnmountFlags::DETACH)?;
    }
    Ok(())
}

/// An empty file to mount on: made where nothing is, kept where one is.
fn prepare(path: &Path) -> io::Result<()> {
    unmount_dead(path)?;
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_file() || meta.len() != 0 {
        let text = "the disk would hide what is there; name a file that is empty or does not exist";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    Ok(())
}

impl DiskFile {
    /// Serves `disk` as the file `path`, for the owner only. The file is made where it is missing.
    ///
    /// # Errors
    /// [`FuseError::Mount`] says what is in the way.
    pub fn mount(path: &Path, disk: Arc<Bytewise>, now: SystemTime) -> Result<Self, FuseError> {
        let failed = |source| FuseError::Mount {
            path: path.to_owned(),
            source,
        };
        prepare(path).map_err(failed)?;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::NoExec,
            MountOption::NoAtime,
            MountOption::FSName("dsec-disk".to_owned()),
            MountOption::Subtype("dsec".to_owned()),
        ];
        if disk.is_read_only() {
            config.mount_options.push(MountOption::RO);
        }
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let wire = DiskWire { disk, mounted: now };
        let session = Session::new(wire, path, &config).map_err(failed)?;
        let session = session.spawn().map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            session: Mutex::new(Some(session)),
        })
    }

    /// Takes away what a server that was killed left mounted at `path`; the empty file stays.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn clean_up(path: &Path) -> Result<(), FuseError> {
        unmount_dead(path).map_err(|source| FuseError::Unmount {
            path: path.to_owned(),
            source,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the kernel has let go of the mount. For one caller; others return at once.
    pub fn wait_for_end(&self) {
        let session = self.session.lock();
        let session = session.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = session.map(BackgroundSession::join) {
            tracing::debug!(%error, "the FUSE session ended");
        }
    }

    /// Takes the mount away. With `force` also while the file is open: it is served until it is closed or the process ends.
    ///
    /// # Errors
    /// [`FuseError::Unmount`], of kind [`io::ErrorKind::ResourceBusy`] while the file is in use.
    pub fn unmount(&self, force: bool) -> Result<(), FuseError> {
        let flags = if force {
            UnmountFlags::DETACH
        } else {
            UnmountFlags::empty()
        };
        match rustix::mount::unmount(&*self.path, flags) {
            // EINVAL: it is not mounted any more.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(source) => Err(FuseError::Unmount {
                path: self.path.clone(),
                source: source.into(),
            }),
        }
    }
}

/// Translates the kernel's requests.
#[derive(Debug)]
struct DiskWire {
    disk: Arc<Bytewise>,
    mounted: SystemTime,
}

/// Requests that failed.
static FAILED: AtomicU64 = AtomicU64::new(0);

fn errno(what: &str, error: &io::Error) -> Errno {
    let count = FAILED.fetch_add(1, Ordering::Relaxed);
    // A user can make as many as it likes, and the log must not grow with them.
    if count < 100 || count.is_power_of_two() {
        tracing::error!(what, %error, "a request failed");
    }
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Errno::ENOSPC,
        io::ErrorKind::ReadOnlyFilesystem => Errno::EROFS,
        io::ErrorKind::FileTooLarge => Errno::EFBIG,
        io::ErrorKind::InvalidInput => Errno::EINVAL,
        _ => Errno::EIO,
    }
}

fn answer(what: &str, done: io::Result<()>, reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(what, &error)),
    }
}

impl DiskWire {
    fn attr(&self) -> FileAttr {
        FileAttr {
            ino: INodeNo(ROOT_INO),
            size: self.disk.size(),
            blocks: self.disk.size().div_ceil(512),
            atime: self.mounted,
            mtime: self.mounted,
            ctime: self.mounted,
            crtime: self.mounted,
            kind: FileType::RegularFile,
            perm: if self.disk.is_read_only() {
                0o400
            } else {
                0o600
            },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The part of a range that is inside the file.
    fn inside(&self, offset: u64, len: u64) -> u64 {
        self.disk.size().saturating_sub(offset).min(len)
    }
}

impl Filesystem for DiskWire {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_BIG_WRITES] {
            if config.add_capabilities(flag).is_err() {
                tracing::info!(?flag, "the kernel's FUSE lacks a capability");
            }
        }
        let write = config.set_max_write(REQUEST_BYTES_MAX).err();
        let readahead = config.set_max_readahead(READAHEAD_BYTES).err();
        for limit in write.into_iter().chain(readahead) {
            tracing::info!(limit, "the kernel's FUSE lowers a limit");
        }
        Ok(())
    }

    fn getattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &self.attr());
    }

    fn setattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<fuser::TimeOrNow>,
        _mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // Times and modes are not kept; a disk has one size.
        match size {
            Some(size) if size != self.disk.size() => reply.error(Errno::EPERM),
            _ => reply.attr(&TTL, &self.attr()),
        }
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = self.inside(offset, u64::from(size));
        let mut bytes = vec![0; to_usize(len)];
        match self.disk.read(&mut bytes, offset.min(self.disk.size())) {
            Ok(()) => reply.data(&bytes),
            Err(error) => reply.error(errno("read", &error)),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = self.inside(offset, imgstore::ids::to_u64(data.len()));
        let part = data.get(..to_usize(len)).unwrap_or_default();
        if part.is_empty() && !data.is_empty() {
            return reply.error(Errno::ENOSPC);
        }
        match self.disk.write(part, offset) {
            Ok(()) => reply.written(u32::try_from(len).unwrap_or(0)),
            Err(error) => reply.error(errno("write", &error)),
        }
    }

    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        answer("flush", self.disk.flush(), reply);
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let bits = u32::try_from(mode).unwrap_or(u32::MAX);
        let punch = libc_mode::KEEP_SIZE | libc_mode::PUNCH_HOLE;
        let zero = bits & !libc_mode::KEEP_SIZE == libc_mode::ZERO_RANGE;
        if bits != punch && !zero {
            // Room cannot be reserved in a log.
            return reply.error(Errno::EOPNOTSUPP);
        }
        let len = self.inside(offset, length);
        if zero && len < length && bits & libc_mode::KEEP_SIZE == 0 {
            return reply.error(Errno::ENOSPC);
        }
        let start = offset.min(self.disk.size());
        answer("discard", self.disk.zero(start, len), reply);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // A close is no flush of the disk, as with any file.
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let block = u32::try_from(BLOCK_SIZE).unwrap_or(4096);
        let blocks = self.disk.size().div_ceil(BLOCK_SIZE);
        reply.statfs(blocks, 0, 0, 1, 0, block, 255, block);
    }
}

/// Bits of `fallocate`'s mode (`linux/falloc.h`).
mod libc_mode {
    /// The file's length stays.
    pub(super) const KEEP_SIZE: u32 = 0x01;
    /// The range reads as zeros and gives its room back.
    pub(super) const PUNCH_HOLE: u32 = 0x02;
    /// The range reads as zeros.
    pub(super) const ZERO_RANGE: u32 = 0x10;
}
