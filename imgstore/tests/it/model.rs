//! Trees as tests describe them: random ones, written to disk, and compared line by line.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use imgstore::ids::Digest;
use imgstore::source::content::ContentReader;
use imgstore::source::{Loaded, SourceError, SourceOptions, SourceSpec, load};
use imgstore::tree::{Content, DataRun, Inode, InodeId, Kind, Meta, Mtime, Place, ROOT, Tree};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags, chownat, linkat,
    lsetxattr, makedev, mkdirat, mknodat, symlinkat, utimensat,
};

/// Options with spool files in the default place for temporary files.
pub(crate) fn options() -> SourceOptions {
    SourceOptions::new(std::env::temp_dir())
}

/// Loads what a user would write as SOURCE.
pub(crate) fn load_text(text: &str) -> Result<Loaded, SourceError> {
    load(&text.parse::<SourceSpec>()?, &options())
}

pub(crate) fn load_path(path: &Path) -> Loaded {
    load_text(path.to_str().unwrap()).unwrap()
}

/// Runs a program that must succeed; gives its standard output.
pub(crate) fn run(program: &str, args: &[&str]) -> Vec<u8> {
    let output = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|e| panic!("`{program}` must be installed: {e}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {error}");
    output.stdout
}

/// Runs a shell script in a directory.
pub(crate) fn sh(dir: &Path, script: &str) -> String {
    let script = format!("set -e; cd '{}'; {script}", dir.display());
    String::from_utf8_lossy(&run("sh", &["-c", &script])).into_owned()
}

/// One line per name that says all about it: type, mode, owner, time, attributes, content, and the first name of its inode.
pub(crate) fn lines(tree: &Tree) -> Vec<String> {
    let mut first: HashMap<InodeId, String> = HashMap::new();
    let mut out = Vec::new();
    for (path, id) in tree.walk() {
        let inode = tree.inode(id);
        let name = format!("/{}", path.escape_ascii());
        let same = first.entry(id).or_insert_with(|| name.clone()).clone();
        let meta = &inode.meta;
        let kind = match &inode.kind {
            Kind::File(content) => format!("{} bytes {}", content.len, digest(content)),
            Kind::Dir(entries) => format!("{} entries", entries.len()),
            Kind::Symlink(target) => format!("-> {}", target.escape_ascii()),
            Kind::Char(major, minor) => format!("char {major}:{minor}"),
            Kind::Block(major, minor) => format!("block {major}:{minor}"),
            other => format!("{other:?}"),
        };
        let xattrs: Vec<String> = meta
            .xattrs
            .iter()
            .map(|(k, v)| format!("{}={}", k.escape_ascii(), v.escape_ascii()))
            .collect();
        out.push(format!(
            "{name} {:o} {}:{} {}.{:09} {kind} [{}] ={same}",
            inode.mode(),
            meta.uid,
            meta.gid,
            meta.mtime.sec,
            meta.mtime.nsec,
            xattrs.join(" "),
        ));
    }
    out
}

/// The lines of one path.
pub(crate) fn line(tree: &Tree, path: &str) -> String {
    let start = format!("/{path} ");
    let all = lines(tree);
    let found = all.iter().find(|line| line.starts_with(&start));
    found
        .unwrap_or_else(|| panic!("no `{path}` in {all:#?}"))
        .clone()
}

/// All paths, sorted as a walk gives them.
pub(crate) fn paths(tree: &Tree) -> Vec<String> {
    let walk = tree.walk();
    let names = walk.iter().skip(1);
    names
        .map(|(path, _)| path.escape_ascii().to_string())
        .collect()
}

/// The content of a file.
pub(crate) fn bytes(tree: &Tree, path: &str) -> Vec<u8> {
    let walk = tree.walk();
    let (_, id) = walk.iter().find(|(p, _)| p == path.as_bytes()).unwrap();
    let Kind::File(content) = &tree.inode(*id).kind else {
        panic!("`{path}` is no file");
    };
    let mut bytes = vec![0; usize::try_from(content.len).unwrap()];
    let reader = ContentReader::open(content).unwrap();
    reader.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A digest over the blocks that are not zeros, and where they are: the same for every way to store holes.
fn digest(content: &Content) -> Digest {
    let reader = ContentReader::open(content).unwrap();
    let mut hash = blake3::Hasher::new();
    let mut buf = vec![0; 4096];
    let mut done = 0;
    for run in reader.runs() {
        let mut at = (run.file_offset - run.file_offset % 4096).max(done);
        while at < run.file_offset + run.len {
            let len = usize::try_from((content.len - at).min(4096)).unwrap();
            reader.read_exact_at(&mut buf[..len], at).unwrap();
            if buf[..len].iter().any(|b| *b != 0) {
                hash.update(&at.to_le_bytes());
                hash.update(&buf[..len]);
            }
            at += 4096;
        }
        done = at;
    }
    reader.check_unchanged().unwrap();
    hash.finalize().into()
}

/// A content of these bytes at these offsets in a file of `len` bytes.
pub(crate) fn content(len: u64, pieces: &[(u64, Vec<u8>)]) -> Content {
    let file = tempfile::tempfile().unwrap();
    let mut runs = Vec::new();
    let mut at = 0;
    for (offset, bytes) in pieces {
        file.write_all_at(bytes, at).unwrap();
        let run_len = u64::try_from(bytes.len()).unwrap();
        if run_len > 0 {
            runs.push(DataRun {
                file_offset: *offset,
                len: run_len,
                stored_offset: at,
            });
        }
        at += run_len;
    }
    Content {
        len,
        place: Place::Runs(Arc::new(OwnedFd::from(file)), runs),
    }
}

/// What a random tree may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allow {
    pub(crate) sockets: bool,
    /// Hard links of devices, fifos and sockets: GNU tar archives them as inodes of their own.
    pub(crate) special_links: bool,
}

#[derive(Debug, Clone)]
enum Node {
    File(u64, Vec<(u64, Vec<u8>)>),
    Dir,
    Symlink(Vec<u8>),
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
    Socket,
    /// Another name of the n-th inode that is no directory.
    Link(usize),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_map(|b| if b == 0 || b == b'/' { b'x' } else { b });
    prop_oneof![
        4 => "[a-c]{1,3}".prop_map(String::into_bytes),
        1 => "\\.wh\\.[a-c]".prop_map(String::into_bytes),
        2 => vec(byte.clone(), 1..20),
        1 => vec(byte, 250..=255),
    ]
    .prop_filter("not a dot name", |n| n != b"." && n != b"..")
}

fn node(allow: Allow) -> impl Strategy<Value = Node> {
    let piece = (0_u64..4_000_000, vec(any::<u8>(), 0..5000));
    let file = (0_u64..5_000_000, vec(piece, 0..3)).prop_map(|(more, mut pieces)| {
        pieces.sort();
        let mut end = 0;
        pieces.retain(|(at, bytes)| {
            let keep = *at >= end;
            if keep {
                end = at + u64::try_from(bytes.len()).unwrap();
            }
            keep
        });
        Node::File(end + more % 2_000_000 * (more % 2), pieces)
    });
    let target = vec(1..=255_u8, 1..300);
    let sockets = u32::from(allow.sockets);
    prop_oneof![
        6 => file,
        5 => Just(Node::Dir),
        2 => target.prop_map(Node::Symlink),
        1 => (0..4096_u32, 0..1_048_576_u32).prop_map(|(a, b)| Node::Char(a, b)),
        1 => (0..4096_u32, 0..1_048_576_u32).prop_map(|(a, b)| Node::Block(a, b)),
        1 => Just(Node::Fifo),
        sockets => Just(Node::Socket),
        3 => any::<usize>().prop_map(Node::Link),
    ]
}

fn meta() -> impl Strategy<Value = Meta> {
    let id = prop_oneof![Just(0_u32), 0..70_000_u32, Just(4_294_967_294_u32)];
    // What ext4 can hold: 1901 to 2446.
    let sec = prop_oneof![
        0..4_000_000_000_i64,
        -2_000_000_000..0_i64,
        Just(15_000_000_000_i64)
    ];
    let nsec = prop_oneof![Just(0_u32), 0..1_000_000_000_u32];
    let xattr = prop_oneof![
        3 => "trusted\\.[a-z]{1,8}",
        1 => "trusted\\.overlay\\.[a-z]{1,8}",
        1 => "security\\.t[a-z]{1,8}",
        3 => "user\\.[a-z=%]{1,8}",
    ];
    let xattrs = btree_map(
        xattr.prop_map(String::into_bytes),
        vec(any::<u8>(), 0..60),
        0..3,
    );
    (0..0o10000_u16, id.clone(), id, sec, nsec, xattrs).prop_map(
        |(perm, uid, gid, sec, nsec, xattrs)| Meta {
            perm,
            uid,
            gid,
            mtime: Mtime { sec, nsec },
            xattrs,
        },
    )
}

/// A random tree that a disk can hold.
pub(crate) fn tree(allow: Allow) -> impl Strategy<Value = Tree> {
    let entry = (any::<usize>(), name(), node(allow), meta());
    (meta(), vec(entry, 0..40)).prop_map(move |(root, entries)| {
        let mut tree = Tree::new(storable(root, &Node::Dir));
        let mut dirs = vec![ROOT];
        let mut others: Vec<InodeId> = Vec::new();
        for (parent, name, node, meta) in entries {
            let dir = dirs[parent % dirs.len()];
            if tree.entries(dir).any(|(n, _)| n == name) {
                continue;
            }
            let meta = storable(meta, &node);
            let kind = match node {
                Node::Link(n) if !others.is_empty() => {
                    let id = others[n % others.len()];
                    tree.dir_mut(dir).unwrap().insert(name, id);
                    continue;
                }
                Node::File(len, pieces) => Kind::File(content(len, &pieces)),
                Node::Dir => Kind::Dir(BTreeMap::new()),
                Node::Symlink(target) => Kind::Symlink(target),
                Node::Char(a, b) => Kind::Char(a, b),
                Node::Block(a, b) => Kind::Block(a, b),
                Node::Fifo | Node::Link(_) => Kind::Fifo,
                Node::Socket => Kind::Socket,
            };
            let is_dir = matches!(kind, Kind::Dir(_));
            let is_special = !matches!(kind, Kind::File(_) | Kind::Symlink(_));
            let id = tree.add(Inode { meta, kind });
            tree.dir_mut(dir).unwrap().insert(name, id);
            if is_dir {
                dirs.push(id);
            } else if !is_special || allow.special_links {
                others.push(id);
            }
        }
        tree
    })
}

/// Linux has no modes on links, and `user.` attributes only on files and directories.
fn storable(mut meta: Meta, node: &Node) -> Meta {
    if matches!(node, Node::Symlink(_)) {
        meta.perm = 0o777;
    }
    if !matches!(node, Node::File(..) | Node::Dir) {
        meta.xattrs.retain(|name, _| !name.starts_with(b"user."));
    }
    meta
}

/// Writes a tree to an empty directory.
pub(crate) fn write_to_disk(tree: &Tree, dir: &Path) {
    let mut first: HashMap<InodeId, PathBuf> = HashMap::new();
    let walk = tree.walk();
    for (path, id) in &walk {
        let place = on_disk(dir, path);
        if let Some(there) = first.get(id) {
            linkat(CWD, there, CWD, &place, AtFlags::empty()).unwrap();
            continue;
        }
        make(tree.inode(*id), &place);
        first.insert(*id, place);
    }
    // Children first: entries move the times of their directories.
    for (path, id) in walk.iter().rev() {
        set_meta(tree.inode(*id), &on_disk(dir, path));
    }
}

fn on_disk(dir: &Path, path: &[u8]) -> PathBuf {
    if path.is_empty() {
        return dir.to_owned();
    }
    dir.join(OsString::from_vec(path.to_vec()))
}

fn make(inode: &Inode, place: &Path) {
    let node = |kind, a, b| mknodat(CWD, place, kind, Mode::RUSR, makedev(a, b)).unwrap();
    match &inode.kind {
        Kind::File(content) => {
            let file = File::create_new(place).unwrap();
            file.set_len(content.len).unwrap();
            let reader = ContentReader::open(content).unwrap();
            for run in reader.runs() {
                let mut bytes = vec![0; usize::try_from(run.len).unwrap()];
                reader.read_exact_at(&mut bytes, run.file_offset).unwrap();
                file.write_all_at(&bytes, run.file_offset).unwrap();
            }
        }
        Kind::Dir(_) if place.is_dir() => {}
        Kind::Dir(_) => mkdirat(CWD, place, Mode::RWXU).unwrap(),
        Kind::Symlink(target) => symlinkat(target.as_slice(), CWD, place).unwrap(),
        Kind::Char(a, b) => node(FileType::CharacterDevice, *a, *b),
        Kind::Block(a, b) => node(FileType::BlockDevice, *a, *b),
        Kind::Fifo => node(FileType::Fifo, 0, 0),
        Kind::Socket => node(FileType::Socket, 0, 0),
    }
}

fn set_meta(inode: &Inode, place: &Path) {
    let meta = &inode.meta;
    let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
    chownat(CWD, place, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).unwrap();
    if !matches!(inode.kind, Kind::Symlink(_)) {
        let mode = Mode::from_raw_mode(meta.perm.into());
        rustix::fs::chmod(place, mode).unwrap();
    }
    for (name, value) in &meta.xattrs {
        lsetxattr(place, name.as_slice(), value, XattrFlags::empty()).unwrap();
    }
    let time = Timespec {
        tv_sec: meta.mtime.sec,
        tv_nsec: meta.mtime.nsec.into(),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// The tree as every source but an upper directory gives it: data named like overlay marks is escaped.
pub(crate) fn escaped(tree: &Tree) -> Tree {
    let mut tree = tree.clone();
    for inode in &mut tree.inodes {
        for (name, value) in std::mem::take(&mut inode.meta.xattrs) {
            let name = match name.strip_prefix(b"trusted.overlay.") {
                Some(rest) => [b"trusted.overlay.overlay.", rest].concat(),
                None => name,
            };
            inode.meta.xattrs.insert(name, value);
        }
    }
    tree
}
