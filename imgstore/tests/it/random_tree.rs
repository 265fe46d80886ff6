//! Random trees with everything a layer must keep, from a seed. Contents lie in an unlinked spool file.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use imgstore::tree::{Content, DataRun, Inode, InodeId, Kind, Meta, Mtime, Place, ROOT, Tree};

pub(crate) use crate::rng::Rng;

/// A property's cases: as given, or as many as `DSEC_CASES` says (`tools/soak`).
pub(crate) fn cases(usual: u32) -> proptest::test_runner::Config {
    let wanted = std::env::var("DSEC_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    proptest::test_runner::Config {
        cases: wanted.unwrap_or(usual),
        max_shrink_iters: 20,
        failure_persistence: None,
        ..Default::default()
    }
}

/// Where contents are put.
pub(crate) struct Spool {
    file: File,
    fd: Arc<OwnedFd>,
    end: u64,
}

impl Spool {
    pub(crate) fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        let fd = Arc::new(OwnedFd::from(file.try_clone().unwrap()));
        Self { file, fd, end: 0 }
    }

    /// A content of these pieces at these offsets; the rest is a hole.
    pub(crate) fn content(&mut self, len: u64, pieces: &[(u64, Vec<u8>)]) -> Content {
        let mut runs = Vec::new();
        for (file_offset, bytes) in pieces {
            self.file.write_all_at(bytes, self.end).unwrap();
            let n = u64::try_from(bytes.len()).unwrap();
            runs.push(DataRun {
                file_offset: *file_offset,
                len: n,
                stored_offset: self.end,
            });
            self.end += n;
        }
        Content {
            len,
            place: Place::Runs(Arc::clone(&self.fd), runs),
        }
    }
}

fn name(rng: &mut Rng) -> Vec<u8> {
    let len = rng.pick(&[1usize, 2, 5, 8, 13, 40, 254, 255]);
    let mut name = match rng.below(3) {
        0 => rng.bytes(len), // any bytes at all
        _ => (0..len)
            .map(|_| rng.pick(b"abcdefghijklmnopqrstuvwxyz._-0123456789"))
            .collect(),
    };
    for b in &mut name {
        if *b == b'/' || *b == 0 {
            *b = b'x';
        }
    }
    if name == b"." || name == b".." {
        b"dot".to_vec()
    } else {
        name
    }
}

fn xattrs(rng: &mut Rng, kind: &Kind) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut out = BTreeMap::new();
    if rng.below(3) > 0 {
        return out;
    }
    for _ in 0..rng.below(4) {
        // Only files and directories can have user attributes.
        let user = matches!(kind, Kind::File(_) | Kind::Dir(_));
        let prefix = if user {
            rng.pick(&["user.", "trusted.", "security."])
        } else {
            rng.pick(&["trusted.", "security."])
        };
        let rest = rng.pick(&[
            "a",
            "binary",
            "x.y.z",
            "long-name-of-an-attribute-that-goes-on-and-on",
        ]);
        let len = rng.pick(&[0usize, 1, 3, 4, 17, 255, 2000]);
        out.insert(format!("{prefix}{rest}").into_bytes(), rng.bytes(len));
    }
    if rng.below(3) == 0 && matches!(kind, Kind::File(_)) {
        // VFS_CAP_REVISION_2 with the effective bit: cap_net_raw.
        let caps = [
            1u8, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        out.insert(b"security.capability".to_vec(), caps.to_vec());
    }
    out
}

fn mtime(rng: &mut Rng) -> Mtime {
    let sec = rng.pick(&[
        0i64,
        -1,
        -473_385_600,
        1_700_000_000,
        4_294_967_296,
        15_000_000_000,
        1,
    ]);
    Mtime {
        sec,
        nsec: u32::try_from(rng.below(1_000_000_000)).unwrap(),
    }
}

fn content(rng: &mut Rng, spool: &mut Spool) -> Content {
    let len = rng.pick(&[
        0u64, 1, 100, 4095, 4096, 4097, 20_000, 65_535, 65_536, 65_537, 300_000, 1_100_000,
    ]);
    let n = usize::try_from(len).unwrap();
    let bytes = match rng.below(4) {
        0 => rng.bytes(n),
        1 => vec![0; n],
        2 => b"the same text again and again\n"
            .iter()
            .copied()
            .cycle()
            .take(n)
            .collect(),
        _ => {
            // Blocks of zeros among others.
            let mut bytes = rng.bytes(n);
            for block in bytes.chunks_mut(4096) {
                if rng.below(2) == 0 {
                    block.fill(0);
                }
            }
            bytes
        }
    };
    if rng.below(5) == 0 {
        let far = rng.pick(&[1u64 << 20, (1 << 32) + 12_345]);
        return spool.content(far + len, &[(far, bytes)]);
    }
    spool.content(len, &[(0, bytes)])
}

fn kind(rng: &mut Rng, spool: &mut Spool) -> Kind {
    match rng.below(12) {
        0 => Kind::Symlink(rng.pick(&[
            b"a".to_vec(),
            b"../x/y".to_vec(),
            vec![b'z'; 4000],
            vec![b'q'; 4095],
            vec![0xff; 60],
        ])),
        1 => Kind::Char(
            rng.pick(&[0, 1, 5, 4095]),
            rng.pick(&[0, 3, 255, 256, 1_048_575]),
        ),
        2 => Kind::Block(rng.pick(&[7, 8, 259]), rng.pick(&[0, 16, 70_000])),
        3 => Kind::Fifo,
        4 => Kind::Socket,
        _ => Kind::File(content(rng, spool)),
    }
}

fn meta(rng: &mut Rng, kind: &Kind) -> Meta {
    let perm = rng.pick(&[0o755u16, 0o644, 0, 0o4755, 0o2755, 0o1777, 0o7777, 0o600]);
    let id = |rng: &mut Rng| {
        rng.pick(&[
            0u32,
            1000,
            65_535,
            65_536,
            70_000,
            4_000_000_000,
            u32::MAX - 1,
        ])
    };
    let perm = if matches!(kind, Kind::Symlink(_)) {
        0o777
    } else {
        perm
    };
    Meta {
        perm,
        uid: id(rng),
        gid: id(rng),
        mtime: mtime(rng),
        xattrs: xattrs(rng, kind),
    }
}

/// A tree of about `size` names.
pub(crate) fn random_tree(seed: u64, size: usize) -> (Tree, Spool) {
    let mut rng = Rng::new(seed);
    let mut spool = Spool::new();
    let root_kind = Kind::Dir(BTreeMap::new());
    let mut tree = Tree::new(meta(&mut rng, &root_kind));
    let mut dirs = vec![ROOT];
    let mut others: Vec<InodeId> = Vec::new();
    for _ in 0..size {
        let dir = rng.pick(&dirs);
        let name = name(&mut rng);
        if tree.dir_mut(dir).unwrap().contains_key(&name) {
            continue;
        }
        let id = match rng.below(10) {
            0 if !others.is_empty() => rng.pick(&others), // a hard link to anything but a directory
            1 | 2 => {
                let kind = Kind::Dir(BTreeMap::new());
                let id = tree.add(Inode {
                    meta: meta(&mut rng, &kind),
                    kind,
                });
                dirs.push(id);
                id
            }
            _ => {
                let kind = kind(&mut rng, &mut spool);
                let id = tree.add(Inode {
                    meta: meta(&mut rng, &kind),
                    kind,
                });
                others.push(id);
                id
            }
        };
        tree.dir_mut(dir).unwrap().insert(name, id);
    }
    (tree, spool)
}
