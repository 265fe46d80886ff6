//! The files the kernel knows: by the inode numbers of the folder behind the mount, each held by a descriptor.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::OFlags;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Tree {
    root: u64,
    nodes: Mutex<HashMap<u64, (Arc<File>, u64)>>,
}

fn open_path(path: &Path) -> io::Result<File> {
    let flags = i32::try_from((OFlags::PATH | OFlags::NOFOLLOW).bits()).unwrap();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

fn time(seconds: i64, nanoseconds: i64) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    SystemTime::UNIX_EPOCH + seconds + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(0))
}

pub(crate) fn file_type(kind: std::fs::FileType) -> FileType {
    if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else if kind.is_fifo() {
        FileType::NamedPipe
    } else {
        FileType::RegularFile
    }
}

impl Tree {
    pub(crate) fn new(folder: &Path) -> io::Result<Self> {
        let root = open_path(folder)?;
        let ino = root.metadata()?.ino();
        let nodes = HashMap::from([(INodeNo::ROOT.0, (Arc::new(root), 1))]);
        Ok(Self {
            root: ino,
            nodes: Mutex::new(nodes),
        })
    }

    pub(crate) fn node(&self, ino: INodeNo) -> io::Result<Arc<File>> {
        let nodes = self.nodes.lock().unwrap();
        let node = nodes.get(&ino.0).map(|(file, _)| Arc::clone(file));
        node.ok_or_else(|| io::Error::from_raw_os_error(116)) // ESTALE
    }

    /// A path to the file itself, whatever it is called now.
    pub(crate) fn path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        let node = self.node(ino)?;
        Ok(format!("/proc/self/fd/{}", node.as_raw_fd()).into())
    }

    pub(crate) fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    /// Looks a name up, counting that the kernel now knows its file.
    pub(crate) fn lookup(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let file = open_path(&self.child(parent, name)?)?;
        let attr = self.attr_of(&file.metadata()?);
        let mut nodes = self.nodes.lock().unwrap();
        let node = nodes.entry(attr.ino.0).or_insert((Arc::new(file), 0));
        node.1 += 1;
        Ok(attr)
    }

    pub(crate) fn forget(&self, ino: INodeNo, times: u64) {
        let mut nodes = self.nodes.lock().unwrap();
        if let Some(node) = nodes.get_mut(&ino.0) {
            node.1 = node.1.saturating_sub(times);
            if node.1 == 0 {
                nodes.remove(&ino.0);
            }
        }
    }

    pub(crate) fn attr(&self, ino: INodeNo) -> io::Result<FileAttr> {
        Ok(self.attr_of(&self.node(ino)?.metadata()?))
    }

    fn attr_of(&self, meta: &Metadata) -> FileAttr {
        let ino = if meta.ino() == self.root {
            INodeNo::ROOT
        } else {
            INodeNo(meta.ino())
        };
        FileAttr {
            ino,
            size: meta.len(),
            blocks: meta.blocks(),
            atime: time(meta.atime(), meta.atime_nsec()),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            ctime: time(meta.ctime(), meta.ctime_nsec()),
            crtime: SystemTime::UNIX_EPOCH,
            kind: file_type(meta.file_type()),
            perm: u16::try_from(meta.mode() & 0o7777).unwrap(),
            nlink: u32::try_from(meta.nlink()).unwrap(),
            uid: meta.uid(),
            gid: meta.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}
