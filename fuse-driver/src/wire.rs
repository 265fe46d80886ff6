//! Translates the kernel's requests: look up in the tree, call the image, reply. No decisions.

use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, mpsc};
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, Notifier, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, Request,
};
use imgstore::ids::{BLOCK_SIZE, to_u64};
use imgstore::image::BlockImage;

use crate::tree::{Opened, ROOT_INO, Tree};

/// How long the kernel may believe names and attributes. Nothing changes behind its back: a removed name is
/// invalidated, a length never changes.
const TTL: Duration = Duration::from_secs(365 * 24 * 3600);
/// Reads that may be in the kernel's queue without being waited for (read-ahead, asynchronous direct I/O).
const BACKGROUND_MAX: u16 = 64;
/// Longest request the kernel may send or ask for. EROFS asks for at most 128 KiB.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// How far the kernel reads ahead in a file's page cache: joins small neighbours into one request. More fetches what
/// nobody wants (measured with the imports of a Python program: 12.5 MB at 64 KiB, 13 MB at 128 KiB, 11.3 MB without).
const READAHEAD_BYTES: u32 = 64 << 10;
/// Bytes put into the page cache by one notification.
const PRELOAD_STEP: u64 = 256 << 10;

/// What the request loop and [`crate::mount::FuseMount`] share.
#[derive(Debug)]
pub(crate) struct Shared {
    tree: RwLock<Tree>,
    notifier: OnceLock<Notifier>,
    mounted: SystemTime,
}

impl Shared {
    pub(crate) fn new(mounted: SystemTime) -> Self {
        Self {
            tree: RwLock::new(Tree::new()),
            notifier: OnceLock::new(),
            mounted,
        }
    }

    pub(crate) fn tree(&self) -> RwLockReadGuard<'_, Tree> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tree_mut(&self) -> RwLockWriteGuard<'_, Tree> {
        self.tree.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to tell the kernel something; set once the session exists.
    pub(crate) fn set_notifier(&self, notifier: Notifier) {
        // A second session on the same tree does not exist, so the cell is empty.
        if self.notifier.set(notifier).is_err() {
            tracing::error!("the FUSE notifier was set twice");
        }
    }

    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.notifier.get()
    }

    fn attr(&self, ino: u64, kind: FileType, len: u64) -> FileAttr {
        let dir = kind == FileType::Directory;
        FileAttr {
            ino: INodeNo(ino),
            size: len,
            blocks: len.div_ceil(512),
            atime: self.mounted,
            mtime: self.mounted,
            ctime: self.mounted,
            crtime: self.mounted,
            kind,
            perm: if dir { 0o500 } else { 0o400 },
            nlink: if dir { 2 } else { 1 },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The request loop's half.
#[derive(Debug)]
pub(crate) struct Wire(pub(crate) Arc<Shared>);

/// Puts the first bytes of an image into the page cache of its (already looked up) inode.
fn preload(shared: &Shared, opened: &Opened) -> io::Result<()> {
    let Some(notifier) = shared.notifier() else {
        return Ok(());
    };
    let mut at = 0;
    while at < opened.preload {
        let len = PRELOAD_STEP.min(opened.preload - at);
        let bytes = read_now(&*opened.file.image, at, len)?;
        notifier.store(INodeNo(opened.file.ino), at, &bytes)?;
        at += len;
    }
    Ok(())
}

/// Reads and waits for the answer. Not for the loop threads.
fn read_now(image: &dyn BlockImage, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let len = u32::try_from(len).map_err(io::Error::other)?;
    let (send, receive) = mpsc::sync_channel(1);
    let done = Box::new(move |answer: Result<&[u8], _>| {
        // The receiver waits below; it cannot be gone.
        drop(send.send(answer.map(<[u8]>::to_vec)));
    });
    image.read_at(offset, len, done);
    receive
        .recv()
        .map_err(io::Error::other)?
        .map_err(io::Error::other)
}

impl Filesystem for Wire {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // Pages that were stored stay: neither an open nor an attribute read drops them.
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::info!(
                    ?flag,
                    "the kernel's FUSE lacks a capability; reads are slower"
                );
            }
        }
        let background = config.set_max_background(BACKGROUND_MAX).err();
        let request = config.set_max_write(REQUEST_BYTES_MAX).err();
        let readahead = config.set_max_readahead(READAHEAD_BYTES).err();
        let limits = background.map(u32::from).into_iter();
        for limit in limits.chain(request).chain(readahead) {
            tracing::info!(limit, "the kernel's FUSE lowers a limit");
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let tree = self.0.tree();
        let name = name.to_str().filter(|_| parent.0 == ROOT_INO);
        match name.and_then(|name| tree.lookup(name)) {
            Some(file) => {
                let attr = self
                    .0
                    .attr(file.ino, FileType::RegularFile, file.image.len());
                reply.entry(&TTL, &attr, Generation(file.ino));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        if ino.0 == ROOT_INO {
            return reply.attr(&TTL, &self.0.attr(ROOT_INO, FileType::Directory, 0));
        }
        let tree = self.0.tree();
        let opened = handle.and_then(|handle| tree.handle(handle.0));
        match opened.or_else(|| tree.inode(ino.0)) {
            Some(file) => {
                let attr = self.0.attr(ino.0, FileType::RegularFile, file.image.len());
                reply.attr(&TTL, &attr);
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(opened) = self.0.tree_mut().open(ino.0) else {
            return reply.error(Errno::ENOENT);
        };
        if opened.preload == 0 {
            return reply.opened(FileHandle(opened.handle), FopenFlags::FOPEN_KEEP_CACHE);
        }
        // The open is answered when the pages are there, so that whoever opened the file finds them.
        let shared = Arc::clone(&self.0);
        let run = move || match preload(&shared, &opened) {
            Ok(()) => reply.opened(FileHandle(opened.handle), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => {
                tracing::error!(ino = opened.file.ino, %error, "cannot read the start of an image");
                shared.tree_mut().release(opened.handle);
                reply.error(Errno::EIO);
            }
        };
        let spawned = std::thread::Builder::new()
            .name("fuse-preload".to_owned())
            .spawn(run);
        if let Err(error) = spawned {
            // The reply was dropped with the closure, which answers EIO.
            tracing::error!(%error, "cannot start a thread to load an image's metadata");
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let image = match self.0.tree().handle(handle.0) {
            Some(file) => Arc::clone(&file.image),
            None => return reply.error(Errno::EBADF),
        };
        image.read_at(
            offset,
            size,
            Box::new(move |answer| match answer {
                Ok(bytes) => reply.data(bytes),
                Err(_) => reply.error(Errno::EIO),
            }),
        );
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.tree_mut().release(handle.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino.0 != ROOT_INO {
            return reply.error(Errno::ENOTDIR);
        }
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (next, ino, name) in self.0.tree().entries(from) {
            let kind = if ino == ROOT_INO {
                FileType::Directory
            } else {
                FileType::RegularFile
            };
            if reply.add(INodeNo(ino), to_u64(next), kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let (files, bytes) = self.0.tree().totals();
        let block = u32::try_from(BLOCK_SIZE).unwrap_or(4096);
        let blocks = bytes.div_ceil(BLOCK_SIZE);
        reply.statfs(blocks, 0, 0, to_u64(files), 0, block, 255, block);
    }
}
