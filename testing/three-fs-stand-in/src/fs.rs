//! The requests of the kernel, answered as 3FS's client would: a pass-through with the oddities of
//! its semantics. Times a host may remember attributes, entries and missing names: 30, 30 and 5 s.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{AtFlags, CWD};

use crate::holes;
use crate::mount::{CHUNK_BYTES, Event, Shared};
use crate::tree::{Tree, file_type};

const TTL: Duration = Duration::from_secs(30);
const NEGATIVE_TTL: Duration = Duration::from_secs(5);
/// `_IOR('h', 2, u32)`, and what 3FS answers.
const IOC_MAGIC: u32 = 0x8004_6802;
const MAGIC: u32 = 0x8f3f_5fff;
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
/// The kernel asks this before it sets flags.
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IMMUTABLE_FL: u32 = 0x10;
const FS_XFLAG_IMMUTABLE: u32 = 0x8;

#[derive(Debug)]
struct Handle {
    file: File,
    ino: u64,
    writes: bool,
}

#[derive(Debug)]
pub(crate) struct Server {
    tree: Tree,
    shared: Arc<Shared>,
    handles: Mutex<HashMap<u64, Arc<Handle>>>,
    next: AtomicU64,
}

fn text(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

impl Server {
    pub(crate) fn new(folder: &Path, shared: Arc<Shared>) -> io::Result<Self> {
        Ok(Self {
            tree: Tree::new(folder)?,
            shared,
            handles: Mutex::new(HashMap::new()),
            next: AtomicU64::new(1),
        })
    }

    fn delay(&self) {
        let latency = self.shared.lock().latency;
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
    }

    fn keep(&self, file: File, writes: bool) -> io::Result<FileHandle> {
        let ino = file.metadata()?.ino();
        self.shared.note(Event::Open(ino, writes));
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let handle = Arc::new(Handle { file, ino, writes });
        self.handles.lock().unwrap().insert(number, handle);
        Ok(FileHandle(number))
    }

    fn handle(&self, fh: FileHandle) -> io::Result<Arc<Handle>> {
        let handles = self.handles.lock().unwrap();
        let handle = handles.get(&fh.0).cloned();
        handle.ok_or_else(|| io::Error::from_raw_os_error(9)) // EBADF
    }

    /// Refused on immutable files: writing, linking, unlinking.
    fn mutable(&self, ino: u64) -> io::Result<()> {
        if self.shared.lock().flags.get(&ino).copied().unwrap_or(0) & FS_IMMUTABLE_FL != 0 {
            return Err(io::Error::from_raw_os_error(1)); // EPERM
        }
        Ok(())
    }

    fn mutable_child(&self, parent: INodeNo, name: &OsStr) -> io::Result<fs::Metadata> {
        let meta = fs::symlink_metadata(self.tree.child(parent, name)?)?;
        self.mutable(meta.ino())?;
        Ok(meta)
    }

    /// A fresh file may have the number of one that is gone.
    fn is_new(&self, ino: u64) {
        let mut state = self.shared.lock();
        state.gone.retain(|gone| *gone != ino);
        state.lost.remove(&ino);
        state.flags.remove(&ino);
    }

    fn open_io(&self, ino: INodeNo, flags: OpenFlags) -> io::Result<FileHandle> {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        if writes {
            self.mutable(ino.0)?;
        }
        let path = self.tree.path(ino)?;
        self.keep(
            OpenOptions::new().read(true).write(writes).open(path)?,
            writes,
        )
    }

    fn create_io(
        &self,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
    ) -> io::Result<(FileAttr, FileHandle)> {
        let path = self.tree.child(parent, name)?;
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(mode).open(path)?;
        self.is_new(file.metadata()?.ino());
        let attr = self.tree.lookup(parent, name)?;
        Ok((attr, self.keep(file, true)?))
    }

    fn read_io(&self, fh: FileHandle, offset: u64, size: u32) -> io::Result<Vec<u8>> {
        let handle = self.handle(fh)?;
        self.shared.note(Event::Read(handle.ino, offset, size));
        self.shared.pass();
        let mut bytes = vec![0; usize::try_from(size).unwrap()];
        let mut len = 0;
        while len < bytes.len() {
            let at = offset + u64::try_from(len).unwrap();
            match handle.file.read_at(&mut bytes[len..], at)? {
                0 => break,
                n => len += n,
            }
        }
        bytes.truncate(len);
        let state = self.shared.lock();
        if state.gone.contains(&handle.ino) {
            return Ok(Vec::new());
        }
        let lost = state.lost.get(&handle.ino).cloned().unwrap_or_default();
        drop(state);
        if !lost.is_empty() {
            holes::apply(&mut bytes, offset, CHUNK_BYTES, &lost, false).unwrap();
        }
        Ok(bytes)
    }

    fn unlink_io(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        let meta = self.mutable_child(parent, name)?;
        fs::remove_file(self.tree.child(parent, name)?)?;
        self.shared.note(Event::Unlink(text(name)));
        if meta.nlink() == 1 {
            self.shared.lock().gone.push(meta.ino());
        }
        Ok(())
    }

    fn rename_io(&self, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)) -> io::Result<()> {
        self.mutable_child(from.0, from.1)?;
        let replaced = match self.mutable_child(to.0, to.1) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            found => Some(found?),
        };
        let (source, target) = (
            self.tree.child(from.0, from.1)?,
            self.tree.child(to.0, to.1)?,
        );
        fs::rename(source, target)?;
        self.shared.note(Event::Rename(text(from.1), text(to.1)));
        if let Some(meta) = replaced.filter(|meta| meta.nlink() == 1) {
            self.shared.lock().gone.push(meta.ino());
        }
        Ok(())
    }

    fn link_io(&self, ino: INodeNo, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        self.mutable(ino.0)?;
        let (source, target) = (self.tree.path(ino)?, self.tree.child(parent, name)?);
        rustix::fs::linkat(CWD, source, CWD, target, AtFlags::SYMLINK_FOLLOW)?;
        self.shared.note(Event::Link(ino.0, text(name)));
        self.tree.lookup(parent, name)
    }

    fn ioctl_io(&self, ino: INodeNo, cmd: u32, data: &[u8], room: u32) -> io::Result<Vec<u8>> {
        let known = self.shared.lock().flags.get(&ino.0).copied().unwrap_or(0);
        let mut answer = match cmd {
            IOC_MAGIC => MAGIC.to_le_bytes().to_vec(),
            FS_IOC_GETFLAGS => u64::from(known).to_le_bytes().to_vec(),
            FS_IOC_FSGETXATTR => {
                let immutable = known & FS_IMMUTABLE_FL != 0;
                let flags = if immutable { FS_XFLAG_IMMUTABLE } else { 0 };
                // `struct fsxattr`: flags, and zeros.
                let mut answer = flags.to_le_bytes().to_vec();
                answer.resize(28, 0);
                answer
            }
            FS_IOC_SETFLAGS => {
                let flags = u32::from_le_bytes(data[..4].try_into().unwrap());
                self.shared.lock().flags.insert(ino.0, flags);
                self.shared.note(Event::SetFlags(ino.0, flags));
                Vec::new()
            }
            _ => return Err(io::Error::from_raw_os_error(25)), // ENOTTY
        };
        answer.truncate(usize::try_from(room).unwrap());
        Ok(answer)
    }

    fn entries(&self, ino: INodeNo) -> io::Result<Vec<(INodeNo, FileType, std::ffi::OsString)>> {
        let dot = |name: &str| (ino, FileType::Directory, name.into());
        let mut out = vec![dot("."), dot("..")];
        for entry in fs::read_dir(self.tree.path(ino)?)? {
            let entry = entry?;
            let kind = file_type(entry.file_type()?);
            out.push((INodeNo(entry.metadata()?.ino()), kind, entry.file_name()));
        }
        out[2..].sort_by(|a, b| a.2.cmp(&b.2));
        Ok(out)
    }

    fn missing(&self, what: &'static str) {
        self.shared.note(Event::Missing(what));
    }
}

fn answer_entry(reply: ReplyEntry, found: io::Result<FileAttr>) {
    match found {
        Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
        Err(e) => reply.error(e.into()),
    }
}

fn answer(reply: ReplyEmpty, done: io::Result<()>) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e.into()),
    }
}

fn nothing() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let bytes = u32::try_from(CHUNK_BYTES).unwrap();
        config.set_max_write(bytes).unwrap();
        // The kernel may offer less.
        if let Err(most) = config.set_max_readahead(bytes) {
            config.set_max_readahead(most).unwrap();
        }
        config.set_max_background(32).unwrap();
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.delay();
        let found = self.tree.lookup(parent, name);
        self.shared.note(Event::Lookup(text(name), found.is_ok()));
        match found {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                reply.entry(&NEGATIVE_TTL, &nothing(), Generation(0));
            }
            found => answer_entry(reply, found),
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        self.tree.forget(ino, nlookup);
    }

    fn getattr(&self, _r: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.delay();
        match self.tree.attr(ino) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(e) => reply.error(e.into()),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || {
            self.mutable(ino.0)?;
            let path = self.tree.path(ino)?;
            if let Some(size) = size {
                OpenOptions::new().write(true).open(&path)?.set_len(size)?;
            }
            if let Some(mode) = mode {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))?;
            }
            self.tree.attr(ino)
        };
        match set() {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(e) => reply.error(e.into()),
        }
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        use std::os::unix::ffi::OsStrExt as _;
        let node = self.tree.node(ino);
        let target = node.and_then(|node| Ok(rustix::fs::readlinkat(&*node, c"", Vec::new())?));
        match target {
            Ok(target) => reply.data(OsStr::from_bytes(target.to_bytes()).as_bytes()),
            Err(e) => reply.error(e.into()),
        }
    }

    fn mknod(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        self.missing("mknod");
        reply.error(Errno::ENOSYS);
    }

    fn mkdir(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        self.delay();
        let make = || {
            fs::create_dir(self.tree.child(parent, name)?)?;
            self.tree.lookup(parent, name)
        };
        answer_entry(reply, make());
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.delay();
        answer(reply, self.unlink_io(parent, name));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let path = self.tree.child(parent, name);
        answer(reply, path.and_then(fs::remove_dir));
    }

    fn symlink(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let make = || {
            std::os::unix::fs::symlink(target, self.tree.child(parent, name)?)?;
            self.tree.lookup(parent, name)
        };
        answer_entry(reply, make());
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.delay();
        if !flags.is_empty() {
            self.missing("rename flags");
            return reply.error(Errno::ENOSYS);
        }
        answer(reply, self.rename_io((parent, name), (newparent, newname)));
    }

    fn link(
        &self,
        _request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        self.delay();
        answer_entry(reply, self.link_io(ino, newparent, newname));
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_io(ino, flags) {
            Ok(handle) => reply.opened(handle, FopenFlags::empty()),
            Err(e) => reply.error(e.into()),
        }
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        self.delay();
        match self.create_io(parent, name, mode & !umask) {
            Ok((attr, handle)) => {
                reply.created(&TTL, &attr, Generation(0), handle, FopenFlags::empty());
            }
            Err(e) => reply.error(e.into()),
        }
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.delay();
        match self.read_io(fh, offset, size) {
            Ok(bytes) => reply.data(&bytes),
            Err(e) => reply.error(e.into()),
        }
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let handle = self.handle(fh);
        match handle.and_then(|handle| handle.file.write_all_at(data, offset)) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap()),
            Err(e) => reply.error(e.into()),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(handle) = self.handles.lock().unwrap().remove(&fh.0) {
            self.shared.note(Event::Release(handle.ino, handle.writes));
        }
        reply.ok();
    }

    fn fsync(&self, _r: &Request, ino: INodeNo, _fh: FileHandle, _data: bool, reply: ReplyEmpty) {
        self.delay();
        self.shared.note(Event::Fsync(ino.0));
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.delay();
        let entries = match self.entries(ino) {
            Ok(entries) => entries,
            Err(e) => return reply.error(e.into()),
        };
        let from = usize::try_from(offset).unwrap();
        for (at, (ino, kind, name)) in entries.into_iter().enumerate().skip(from) {
            if reply.add(ino, u64::try_from(at + 1).unwrap(), kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn fsyncdir(&self, _r: &Request, _ino: INodeNo, _fh: FileHandle, _d: bool, reply: ReplyEmpty) {
        self.missing("fsyncdir");
        reply.error(Errno::EIO);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(
            1 << 20,
            1 << 19,
            1 << 19,
            1 << 20,
            1 << 19,
            2 << 20,
            255,
            2 << 20,
        );
    }

    fn setxattr(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _value: &[u8],
        _flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.missing("setxattr");
        reply.error(Errno::ENOTSUP);
    }

    fn getxattr(&self, _r: &Request, _ino: INodeNo, _n: &OsStr, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOTSUP);
    }

    fn listxattr(&self, _request: &Request, _ino: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOTSUP);
    }

    fn ioctl(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        match self.ioctl_io(ino, cmd, in_data, out_size) {
            Ok(answer) => reply.ioctl(0, &answer),
            Err(e) => reply.error(e.into()),
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        _length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        self.missing("fallocate");
        reply.error(Errno::ENOSYS);
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: i64,
        _whence: i32,
        reply: ReplyLseek,
    ) {
        self.missing("lseek");
        reply.error(Errno::ENOSYS);
    }

    fn copy_file_range(
        &self,
        _request: &Request,
        _ino_in: INodeNo,
        _fh_in: FileHandle,
        _offset_in: u64,
        _ino_out: INodeNo,
        _fh_out: FileHandle,
        _offset_out: u64,
        _len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.missing("copy_file_range");
        reply.error(Errno::ENOSYS);
    }
}
