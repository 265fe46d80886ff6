//! The mount: files in memory. Folders have odd numbers, files even ones.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::{Event, Journal};

/// Nobody else changes anything.
const TTL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    names: HashMap<u64, HashMap<String, u64>>,
    bytes: HashMap<u64, Vec<u8>>,
    links: HashMap<u64, u32>,
    last: u64,
}

#[derive(Debug)]
pub(crate) struct Server {
    state: Mutex<State>,
    journal: Journal,
}

fn is_folder(ino: u64) -> bool {
    ino % 2 == 1
}

fn text(name: &OsStr) -> String {
    name.to_str().unwrap().to_owned()
}

fn place(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

impl State {
    fn attr(&self, ino: u64) -> FileAttr {
        let size = self.bytes.get(&ino).map_or(0, |bytes| bytes.len() as u64);
        let folder = is_folder(ino);
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if folder {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: if folder { 0o755 } else { 0o644 },
            nlink: if folder {
                2
            } else {
                self.links.get(&ino).copied().unwrap_or(0)
            },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn find(&self, folder: INodeNo, name: &OsStr) -> Result<u64, Errno> {
        let names = self.names.get(&folder.0).ok_or(Errno::ENOTDIR)?;
        names.get(&text(name)).copied().ok_or(Errno::ENOENT)
    }

    fn named(&mut self, folder: INodeNo, name: &OsStr, ino: u64) -> Event {
        let names = self.names.entry(folder.0).or_default();
        names.insert(text(name), ino);
        *self.links.entry(ino).or_default() += 1;
        Event::Name {
            folder: folder.0,
            name: text(name),
            file: ino,
        }
    }

    fn new_number(&mut self, folder: bool) -> u64 {
        self.last += 2;
        self.last + u64::from(folder)
    }
}

impl Server {
    pub(crate) fn new(journal: Journal) -> Self {
        let state = State {
            names: HashMap::from([(1, HashMap::new())]),
            ..State::default()
        };
        Self {
            state: Mutex::new(state),
            journal,
        }
    }

    fn change<T>(
        &self,
        change: impl FnOnce(&mut State) -> Result<(T, Event), Errno>,
    ) -> Result<T, Errno> {
        let mut state = self.state.lock().unwrap();
        let (value, event) = change(&mut state)?;
        // In the order in which readers see it.
        self.journal.note(event);
        Ok(value)
    }

    fn make(&self, parent: INodeNo, name: &OsStr, folder: bool) -> Result<FileAttr, Errno> {
        self.change(|state| {
            if state.find(parent, name).is_ok() {
                return Err(Errno::EEXIST);
            }
            let ino = state.new_number(folder);
            if folder {
                state.names.insert(ino, HashMap::new());
            }
            let event = state.named(parent, name, ino);
            Ok((state.attr(ino), event))
        })
    }

    fn take(&self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        self.change(|state| {
            let ino = state.find(parent, name)?;
            if state.names.get(&ino).is_some_and(|names| !names.is_empty()) {
                return Err(Errno::ENOTEMPTY);
            }
            if let Some(names) = state.names.get_mut(&parent.0) {
                names.remove(&text(name));
            }
            *state.links.entry(ino).or_insert(1) -= 1;
            let event = Event::Unname {
                folder: parent.0,
                name: text(name),
            };
            Ok(((), event))
        })
    }
}

fn answer_entry(reply: ReplyEntry, made: Result<FileAttr, Errno>) {
    match made {
        Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
        Err(e) => reply.error(e),
    }
}

fn answer(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(e),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.state.lock().unwrap();
        let found = state.find(parent, name).map(|ino| state.attr(ino));
        answer_entry(reply, found);
    }

    fn getattr(&self, _r: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.state.lock().unwrap().attr(ino.0));
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
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
        if let Some(size) = size {
            let len = place(size);
            let cut = self.change(|state| {
                state.bytes.entry(ino.0).or_default().resize(len, 0);
                Ok(((), Event::Cut { file: ino.0, len }))
            });
            cut.unwrap();
        }
        reply.attr(&TTL, &self.state.lock().unwrap().attr(ino.0));
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
        answer_entry(reply, self.make(parent, name, true));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.take(parent, name));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.take(parent, name));
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
        if parent != newparent || !flags.is_empty() {
            return reply.error(Errno::EXDEV);
        }
        let renamed = self.change(|state| {
            let ino = state.find(parent, name)?;
            let names = state.names.entry(parent.0).or_default();
            names.remove(&text(name));
            if let Some(old) = names.insert(text(newname), ino) {
                *state.links.entry(old).or_insert(1) -= 1;
            }
            let event = Event::Rename {
                folder: parent.0,
                from: text(name),
                to: text(newname),
            };
            Ok(((), event))
        });
        answer(reply, renamed);
    }

    fn link(
        &self,
        _request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let made = self.change(|state| {
            if state.find(newparent, newname).is_ok() {
                return Err(Errno::EEXIST);
            }
            let event = state.named(newparent, newname, ino.0);
            Ok((state.attr(ino.0), event))
        });
        answer_entry(reply, made);
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        match self.make(parent, name, false) {
            Ok(attr) => {
                let handle = FileHandle(0);
                reply.created(&TTL, &attr, Generation(0), handle, FopenFlags::empty());
            }
            Err(e) => reply.error(e),
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = self.state.lock().unwrap();
        let bytes = state.bytes.get(&ino.0).map_or(&[][..], |bytes| bytes);
        let from = place(offset).min(bytes.len());
        let to = (from + usize::try_from(size).unwrap()).min(bytes.len());
        reply.data(&bytes[from..to]);
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let at = place(offset);
        let written = self.change(|state| {
            let bytes = state.bytes.entry(ino.0).or_default();
            if bytes.len() < at + data.len() {
                bytes.resize(at + data.len(), 0);
            }
            bytes[at..at + data.len()].copy_from_slice(data);
            let event = Event::Write {
                file: ino.0,
                offset: at,
                bytes: data.to_vec(),
            };
            Ok(((), event))
        });
        written.unwrap();
        reply.written(u32::try_from(data.len()).unwrap());
    }

    fn fsync(&self, _r: &Request, ino: INodeNo, _fh: FileHandle, _data: bool, reply: ReplyEmpty) {
        self.journal.note(Event::Sync(ino.0));
        reply.ok();
    }

    fn fsyncdir(&self, _r: &Request, ino: INodeNo, _fh: FileHandle, _d: bool, reply: ReplyEmpty) {
        self.journal.note(Event::Sync(ino.0));
        reply.ok();
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

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let state = self.state.lock().unwrap();
        let mut entries: Vec<_> = state.names.get(&ino.0).into_iter().flatten().collect();
        entries.sort();
        for (at, (name, ino)) in entries.into_iter().enumerate().skip(place(offset)) {
            let kind = state.attr(*ino).kind;
            if reply.add(INodeNo(*ino), at as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
