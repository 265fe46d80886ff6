//! What a file tree looks like through system calls, and what a [`Tree`] should look like through them.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use imgstore::source::content::ContentReader;
use imgstore::tree::{Kind, Tree};

/// One name as `lstat`, `llistxattr`, `readlink` and `read` show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) mtime: (i64, i64),
    pub(crate) rdev: (u32, u32),
    pub(crate) nlink: u64,
    pub(crate) size: u64,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Link target, or BLAKE3 of the content.
    pub(crate) content: Vec<u8>,
    /// The first path (in byte order) with the same inode.
    pub(crate) same_as: Vec<u8>,
}

pub(crate) type Listing = BTreeMap<Vec<u8>, Seen>;

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0u8; 1 << 16];
    let len = rustix::fs::llistxattr(path, &mut names).unwrap();
    names[..len]
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .map(|name| {
            let mut value = vec![0u8; 1 << 16];
            let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect()
}

fn next_data(file: &std::fs::File, at: u64) -> u64 {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(next) => next,
        Err(rustix::io::Errno::NXIO) => u64::MAX,
        Err(e) => panic!("{e}"),
    }
}

/// A hash of all blocks that are not zeros, with their places: equal for equal files, however their holes are told.
fn hash_data(len: u64, next: impl Fn(u64) -> u64, read: impl Fn(&mut [u8], u64)) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    let mut block = [0u8; 4096];
    let mut at = 0;
    while at < len {
        let data = next(at);
        if data >= len {
            break;
        }
        at = data - data % 4096;
        let here = usize::try_from((len - at).min(4096)).unwrap();
        read(&mut block[..here], at);
        if block[..here] != [0u8; 4096][..here] {
            hasher.update(&at.to_le_bytes());
            hasher.update(&block[..here]);
        }
        at += 4096;
    }
    hasher.finalize().as_bytes().to_vec()
}

/// Walks a directory without following links.
pub(crate) fn observe(root: &Path) -> Listing {
    let mut out = Listing::new();
    let mut inodes: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut stack = vec![Vec::new()];
    let mut paths = Vec::new();
    while let Some(path) = stack.pop() {
        let full = root.join(OsStr::from_bytes(&path));
        if full.symlink_metadata().unwrap().is_dir() {
            for entry in std::fs::read_dir(&full).unwrap() {
                let name = entry.unwrap().file_name();
                let mut child = path.clone();
                if !child.is_empty() {
                    child.push(b'/');
                }
                child.extend_from_slice(name.as_bytes());
                stack.push(child);
            }
        }
        paths.push(path);
    }
    paths.sort();
    for path in paths {
        let full = root.join(OsStr::from_bytes(&path));
        let stat = full.symlink_metadata().unwrap();
        let content = if stat.is_symlink() {
            std::fs::read_link(&full)
                .unwrap()
                .as_os_str()
                .as_bytes()
                .to_vec()
        } else if stat.is_file() {
            let file = std::fs::File::open(&full).unwrap();
            hash_data(
                stat.len(),
                |at| next_data(&file, at),
                |buf, at| file.read_exact_at(buf, at).unwrap(),
            )
        } else {
            Vec::new()
        };
        let is_device =
            stat.mode() & 0o170_000 == 0o020_000 || stat.mode() & 0o170_000 == 0o060_000;
        let rdev = if is_device {
            (
                rustix::fs::major(stat.rdev()),
                rustix::fs::minor(stat.rdev()),
            )
        } else {
            (0, 0)
        };
        let same_as = inodes
            .entry(stat.ino())
            .or_insert_with(|| path.clone())
            .clone();
        let seen = Seen {
            mode: stat.mode(),
            owner: (stat.uid(), stat.gid()),
            mtime: (stat.mtime(), stat.mtime_nsec()),
            rdev,
            nlink: stat.nlink(),
            size: if stat.is_dir() { 0 } else { stat.len() },
            xattrs: xattrs(&full),
            content,
            same_as,
        };
        out.insert(path, seen);
    }
    out
}

/// What [`observe`] must see of a mounted `tree`.
pub(crate) fn expected(tree: &Tree) -> Listing {
    let links = tree.link_counts();
    let mut first: HashMap<usize, Vec<u8>> = HashMap::new();
    let mut walk = tree.walk();
    walk.sort();
    let mut out = Listing::new();
    for (path, id) in walk {
        let inode = tree.inode(id);
        let (size, content) = match &inode.kind {
            Kind::File(content) => {
                let reader = ContentReader::open(content).unwrap();
                let next = |at: u64| {
                    let run = reader
                        .runs()
                        .iter()
                        .find(|run| run.file_offset + run.len > at);
                    run.map_or(u64::MAX, |run| run.file_offset.max(at))
                };
                let hash = hash_data(content.len, next, |buf, at| {
                    reader.read_exact_at(buf, at).unwrap()
                });
                (content.len, hash)
            }
            Kind::Symlink(target) => (u64::try_from(target.len()).unwrap(), target.clone()),
            _ => (0, Vec::new()),
        };
        let rdev = match inode.kind {
            Kind::Char(major, minor) | Kind::Block(major, minor) => (major, minor),
            _ => (0, 0),
        };
        let seen = Seen {
            mode: u32::from(inode.mode()),
            owner: (inode.meta.uid, inode.meta.gid),
            mtime: (inode.meta.mtime.sec, i64::from(inode.meta.mtime.nsec)),
            rdev,
            nlink: u64::from(links[&id]),
            size,
            xattrs: inode.meta.xattrs.clone(),
            content,
            same_as: first.entry(id.0).or_insert_with(|| path.clone()).clone(),
        };
        out.insert(path, seen);
    }
    out
}

/// Panics with the first path that differs: a whole listing would not be readable.
pub(crate) fn assert_same(found: &Listing, wanted: &Listing) {
    for (path, want) in wanted {
        let name = String::from_utf8_lossy(path);
        let have = found
            .get(path)
            .unwrap_or_else(|| panic!("`{name}` is missing"));
        if have != want {
            let short = |s: &Seen| Seen {
                xattrs: BTreeMap::new(),
                ..s.clone()
            };
            assert_eq!(short(have), short(want), "`{name}` differs");
            panic!(
                "`{name}`: extended attributes differ: {:?}",
                have.xattrs.keys()
            );
        }
    }
    for path in found.keys() {
        assert!(
            wanted.contains_key(path),
            "`{}` should not be there",
            String::from_utf8_lossy(path)
        );
    }
}
