//! A directory of the host as a tree.
//!
//! Directories are opened one at a time beneath the root with no symbolic link on the way, so a name swapped for a link
//! while the walk runs is an error and not an escape. Mount points are crossed, as tar does. Names with the same (device,
//! inode) are one inode; `st_nlink` is not believed, some file systems get it wrong. A directory that changes while it is
//! listed, a name that vanishes, a file whose content is later found changed ([`super::content`]): each is an error.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, open, readlinkat, statat};
use rustix::io::Errno;

use super::{Session, SourceError, host_file};
use crate::tree::{Content, Inode, InodeId, Kind, Meta, Place, ROOT, Stamp, Tree};

/// Most bytes of an attribute's value and of a file's list of names (Linux: `XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const XATTR_BYTES_MAX: usize = 65_536;

/// A directory that still has to be listed.
#[derive(Debug)]
struct Todo {
    id: InodeId,
    /// Path below the root.
    path: Vec<u8>,
    stamp: Stamp,
    /// Index of the parent in `Walk::dirs`.
    parent: Option<usize>,
}

#[derive(Debug)]
struct Walk<'a> {
    top: &'a Path,
    root: OwnedFd,
    tree: Tree,
    links: HashMap<(u64, u64), InodeId>,
    /// (device, inode, parent) of each directory listed, to notice one inside itself.
    dirs: Vec<(u64, u64, Option<usize>)>,
    todo: Vec<Todo>,
    buf: Vec<u8>,
}

/// Reads all names and attributes below `top`, which itself may be a symbolic link.
pub(super) fn walk(top: &Path, session: &mut Session<'_>) -> Result<Tree, SourceError> {
    let fail = |what| move |e: Errno| SourceError::io(top, what, e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = open(top, flags, Mode::empty()).map_err(fail("open source directory"))?;
    let stat = fstat(&root).map_err(fail("stat source directory"))?;
    let mut walk = Walk {
        top,
        tree: Tree::new(Meta::default()),
        links: HashMap::new(),
        dirs: Vec::new(),
        todo: vec![Todo {
            id: ROOT,
            path: Vec::new(),
            stamp: host_file::stamp_of(&stat),
            parent: None,
        }],
        buf: vec![0; XATTR_BYTES_MAX],
        root,
    };
    let mut meta = meta_of(&stat);
    let place = format!("/proc/self/fd/{}", walk.root.as_raw_fd());
    // The root may be given as a link, and its magic link is one: here links are followed.
    meta.xattrs = read_xattrs(&mut walk.buf, place.as_bytes(), true)
        .map_err(fail("read extended attributes of"))?;
    walk.tree.inode_mut(ROOT).meta = meta;
    while let Some(todo) = walk.todo.pop() {
        walk.list(todo, session)?;
    }
    Ok(walk.tree)
}

impl Walk<'_> {
    fn host_path(&self, relative: &[u8]) -> PathBuf {
        let mut path = self.top.as_os_str().as_bytes().to_vec();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(relative);
        PathBuf::from(std::ffi::OsString::from_vec(path))
    }

    fn fail(&self, path: &[u8], what: &'static str, e: impl Into<io::Error>) -> SourceError {
        SourceError::io(self.host_path(path), what, e)
    }

    fn changed(&self, path: &[u8], how: &'static str) -> SourceError {
        SourceError::Changed {
            path: self.host_path(path),
            how,
        }
    }

    fn open_dir(&self, path: &[u8]) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { b"." } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        host_file::open_beneath(self.root.as_fd(), path, flags)
    }

    fn list(&mut self, todo: Todo, session: &mut Session<'_>) -> Result<(), SourceError> {
        let path = todo.path.as_slice();
        let fd = self
            .open_dir(path)
            .map_err(|e| self.fail(path, "open directory", e))?;
        let before = host_file::stamp(&fd).map_err(|e| self.fail(path, "stat", e))?;
        if before.file != todo.stamp.file {
            return Err(self.changed(path, "another directory has its name now"));
        }
        let index = self.enter(&todo)?;
        let names = names_of(&fd).map_err(|e| self.fail(path, "list directory", e))?;
        let subdirs = self.todo.len();
        for name in names {
            let mut child_path = path.to_vec();
            if !child_path.is_empty() {
                child_path.push(b'/');
            }
            child_path.extend_from_slice(&name);
            let id = self.read_child(&fd, &name, child_path, index, session)?;
            if let Some(entries) = self.tree.dir_mut(todo.id) {
                entries.insert(name, id);
            }
        }
        // Depth first in byte order: the next to be listed is at the end.
        if let Some(added) = self.todo.get_mut(subdirs..) {
            added.reverse();
        }
        let after = host_file::stamp(&fd).map_err(|e| self.fail(path, "stat", e))?;
        if after.mtime != before.mtime || after.ctime != before.ctime {
            return Err(self.changed(path, "names were added, removed or changed in it"));
        }
        Ok(())
    }

    /// Notes the directory, unless it is one of its own parents.
    fn enter(&mut self, todo: &Todo) -> Result<usize, SourceError> {
        let (dev, ino) = todo.stamp.file;
        let mut above = todo.parent;
        while let Some((d, i, parent)) = above.and_then(|index| self.dirs.get(index)) {
            if (*d, *i) == (dev, ino) {
                return Err(SourceError::Loop(self.host_path(&todo.path)));
            }
            above = *parent;
        }
        self.dirs.push((dev, ino, todo.parent));
        Ok(self.dirs.len() - 1)
    }

    fn read_child(
        &mut self,
        dir: &OwnedFd,
        name: &[u8],
        path: Vec<u8>,
        parent: usize,
        session: &mut Session<'_>,
    ) -> Result<InodeId, SourceError> {
        let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT)
            .map_err(|e| self.fail(&path, "stat", e))?;
        let stamp = host_file::stamp_of(&stat);
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let is_dir = file_type == FileType::Directory;
        let key = stamp.file;
        session.meter.count(1, 0);
        if let Some(id) = self.links.get(&key).filter(|_| !is_dir) {
            return Ok(*id);
        }
        let kind = self.kind_of(dir, name, &path, &stat)?;
        let mut meta = meta_of(&stat);
        let mut place = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
        place.extend_from_slice(name);
        meta.xattrs = read_xattrs(&mut self.buf, &place, false)
            .map_err(|e| self.fail(&path, "read extended attributes of", e))?;
        let id = self.tree.add(Inode { meta, kind });
        if is_dir {
            self.todo.push(Todo {
                id,
                path,
                stamp,
                parent: Some(parent),
            });
        } else {
            self.links.insert(key, id);
        }
        Ok(id)
    }

    fn kind_of(
        &self,
        dir: &OwnedFd,
        name: &[u8],
        path: &[u8],
        stat: &Stat,
    ) -> Result<Kind, SourceError> {
        let (major, minor) = (
            rustix::fs::major(stat.st_rdev),
            rustix::fs::minor(stat.st_rdev),
        );
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let stamp = host_file::stamp_of(stat);
                Kind::File(Content {
                    len: stamp.size,
                    place: Place::Path(self.host_path(path), stamp),
                })
            }
            FileType::Directory => Kind::Dir(Default::default()),
            FileType::Symlink => Kind::Symlink(
                readlinkat(dir, name, Vec::new())
                    .map_err(|e| self.fail(path, "read symbolic link", e))?
                    .into_bytes(),
            ),
            FileType::CharacterDevice => Kind::Char(major, minor),
            FileType::BlockDevice => Kind::Block(major, minor),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::Unknown => {
                return Err(SourceError::unsupported(
                    path,
                    "file type",
                    "a file, directory, symbolic link, device, fifo or socket",
                    format!("mode {:o}", stat.st_mode),
                ));
            }
        })
    }
}

fn names_of(fd: &OwnedFd) -> rustix::io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(fd)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn meta_of(stat: &Stat) -> Meta {
    Meta {
        perm: u16::try_from(stat.st_mode & 0o7777).unwrap_or(0),
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: host_file::mtime(stat.st_mtime, stat.st_mtime_nsec),
        xattrs: Default::default(),
    }
}

type Xattrs = std::collections::BTreeMap<Vec<u8>, Vec<u8>>;

fn read_xattrs(buf: &mut [u8], place: &[u8], follow: bool) -> rustix::io::Result<Xattrs> {
    use rustix::fs::{getxattr, lgetxattr, listxattr, llistxattr};
    let listed = if follow {
        listxattr(place, &mut *buf)
    } else {
        llistxattr(place, &mut *buf)
    };
    let len = match listed {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(e) => return Err(e),
    };
    let list = buf.get(..len).unwrap_or_default().to_vec();
    let mut xattrs = Xattrs::new();
    for name in list.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let len = if follow {
            getxattr(place, name, &mut *buf)?
        } else {
            lgetxattr(place, name, &mut *buf)?
        };
        let value = buf.get(..len).unwrap_or_default().to_vec();
        xattrs.insert(name.to_vec(), value);
    }
    Ok(xattrs)
}
