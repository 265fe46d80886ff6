//! A file tree in memory: what every source produces and every writer consumes.
//!
//! Metadata is in memory; file contents stay where they are (a file on disk, a spool) and are opened on demand.
//! Inodes are shared by hard links: a name holds an [`InodeId`], and two names with the same id are links of one file.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Index of an inode in [`Tree::inodes`]; 0 is the root directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(pub usize);

/// The root directory's id.
pub const ROOT: InodeId = InodeId(0);

/// A point in time as file systems store it: seconds since 1970 (may be negative) and nanoseconds after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mtime {
    /// Seconds since 1970-01-01T00:00:00Z.
    pub sec: i64,
    /// 0 to 999,999,999, counted forward from `sec` also before 1970.
    pub nsec: u32,
}

/// Who, when and how: all of an inode but its type and content.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky (`mode & 0o7777`).
    pub perm: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Mtime,
    /// Extended attributes: full name with prefix (`user.x`) to value.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A run of bytes that may hold data; everything outside runs reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRun {
    /// Offset in the file.
    pub file_offset: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the place where the bytes are stored.
    pub stored_offset: u64,
}

/// What `stat` said of a file when the tree was read; a difference later means that the file changed under the builder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device and inode number.
    pub file: (u64, u64),
    /// Size in bytes.
    pub size: u64,
    /// Modification time in seconds and nanoseconds.
    pub mtime: (i64, i64),
    /// Change time in seconds and nanoseconds.
    pub ctime: (i64, i64),
}

impl Stamp {
    /// The stamp of a file.
    pub fn of(meta: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        Self {
            file: (meta.dev(), meta.ino()),
            size: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Where the bytes of a regular file are.
#[derive(Debug, Clone)]
pub enum Place {
    /// A file of the host, read with its own holes skipped; it must not change while the layer is built.
    Path(PathBuf, Stamp),
    /// Runs of a file that is already open (a spool or an archive).
    Runs(Arc<OwnedFd>, Vec<DataRun>),
    /// In the layer that the tree was read from; its reader has the bytes.
    Layer,
}

/// The content of a regular file.
#[derive(Debug, Clone)]
pub struct Content {
    /// File size in bytes.
    pub len: u64,
    /// Where the bytes are.
    pub place: Place,
}

/// Type and content of an inode.
#[derive(Debug, Clone)]
pub enum Kind {
    /// A regular file.
    File(Content),
    /// A directory: names (no `.` and `..`) to inodes, in byte order.
    Dir(BTreeMap<Vec<u8>, InodeId>),
    /// A symbolic link and its target, 1 to 4,095 bytes.
    Symlink(Vec<u8>),
    /// A character device (major, minor). 0:0 is an OverlayFS whiteout.
    Char(u32, u32),
    /// A block device (major, minor).
    Block(u32, u32),
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
}

/// One inode.
#[derive(Debug, Clone)]
pub struct Inode {
    /// All but type and content.
    pub meta: Meta,
    /// Type and content.
    pub kind: Kind,
}

impl Inode {
    /// Type and permission bits as `stat` shows them.
    pub fn mode(&self) -> u16 {
        let kind: u16 = match self.kind {
            Kind::File(_) => 0o100_000,
            Kind::Dir(_) => 0o040_000,
            Kind::Symlink(_) => 0o120_000,
            Kind::Char(..) => 0o020_000,
            Kind::Block(..) => 0o060_000,
            Kind::Fifo => 0o010_000,
            Kind::Socket => 0o140_000,
        };
        kind | (self.meta.perm & 0o7777)
    }

    /// Whether this is an OverlayFS whiteout (character device 0:0).
    pub const fn is_whiteout(&self) -> bool {
        matches!(self.kind, Kind::Char(0, 0))
    }
}

/// A file tree. Inodes that no name reaches are ignored by every consumer.
#[derive(Debug, Clone)]
pub struct Tree {
    /// All inodes; index 0 is the root directory.
    pub inodes: Vec<Inode>,
}

impl Tree {
    /// A tree of one empty root directory.
    pub fn new(root: Meta) -> Self {
        Self {
            inodes: vec![Inode {
                meta: root,
                kind: Kind::Dir(BTreeMap::new()),
            }],
        }
    }

    /// Adds an inode that no name reaches yet.
    pub fn add(&mut self, inode: Inode) -> InodeId {
        self.inodes.push(inode);
        InodeId(self.inodes.len() - 1)
    }

    /// The inode with this id, which came from this tree.
    pub fn inode(&self, id: InodeId) -> &Inode {
        self.inodes
            .get(id.0)
            .expect("an inode id indexes its own tree")
    }

    /// The inode with this id, to change.
    pub fn inode_mut(&mut self, id: InodeId) -> &mut Inode {
        self.inodes
            .get_mut(id.0)
            .expect("an inode id indexes its own tree")
    }

    /// The entries of a directory; empty for anything else.
    pub fn entries(&self, id: InodeId) -> impl Iterator<Item = (&[u8], InodeId)> {
        let dir = match &self.inode(id).kind {
            Kind::Dir(entries) => Some(entries),
            _ => None,
        };
        dir.into_iter()
            .flatten()
            .map(|(name, child)| (name.as_slice(), *child))
    }

    /// The entries of a directory, to change; `None` for anything else.
    pub fn dir_mut(&mut self, id: InodeId) -> Option<&mut BTreeMap<Vec<u8>, InodeId>> {
        match &mut self.inode_mut(id).kind {
            Kind::Dir(entries) => Some(entries),
            _ => None,
        }
    }

    /// Every reachable name in depth-first byte order, parents first: (path without leading slash, id).
    /// The root is the empty path. A hard-linked inode comes once for each of its names.
    pub fn walk(&self) -> Vec<(Vec<u8>, InodeId)> {
        let mut out = vec![(Vec::new(), ROOT)];
        let mut stack: Vec<(Vec<u8>, InodeId)> = Vec::new();
        let push = |stack: &mut Vec<(Vec<u8>, InodeId)>, path: &[u8], id: InodeId| {
            let from = stack.len();
            for (name, child) in self.entries(id) {
                let mut full = path.to_vec();
                if !full.is_empty() {
                    full.push(b'/');
                }
                full.extend_from_slice(name);
                stack.push((full, child));
            }
            if let Some(added) = stack.get_mut(from..) {
                added.reverse();
            }
        };
        push(&mut stack, b"", ROOT);
        while let Some((path, id)) = stack.pop() {
            push(&mut stack, &path, id);
            out.push((path, id));
        }
        out
    }

    /// How many names reach each inode (directories: 2 + sub-directories), as `st_nlink` counts.
    pub fn link_counts(&self) -> HashMap<InodeId, u32> {
        let mut counts: HashMap<InodeId, u32> = HashMap::new();
        for (_, id) in self.walk() {
            let subdirs = self
                .entries(id)
                .filter(|(_, child)| matches!(self.inode(*child).kind, Kind::Dir(_)))
                .count();
            let is_dir = matches!(self.inode(id).kind, Kind::Dir(_));
            let links = counts.entry(id).or_insert(0);
            *links = if is_dir {
                u32::try_from(subdirs).unwrap_or(u32::MAX).saturating_add(2)
            } else {
                links.saturating_add(1)
            };
        }
        counts
    }
}
