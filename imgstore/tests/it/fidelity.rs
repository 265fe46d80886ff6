//! What goes in comes out, through the kernel: random trees, and each hard case by name.

use std::collections::BTreeMap;

use imgstore::build::{self, BuildOptions, BuildReport};
use imgstore::ids::{Axis, TagName};
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::tree::{Content, Inode, Kind, Meta, Mtime, ROOT, Tree};
use proptest::prelude::*;

use crate::kernel_mount::KernelMount;
use crate::observe::{assert_same, expected, observe};
use crate::random_tree::{Rng, Spool, cases, random_tree};

fn build_with(tree: &Tree, origin: &dyn Origin, options: &BuildOptions) -> BuildReport {
    let tag = TagName::new(Axis::Base, "t", "1").unwrap();
    build::build(tree.into(), tag.into(), origin, options).unwrap()
}

/// Builds, mounts with the kernel and compares every name.
fn round_trip(tree: &Tree) {
    let origin = MemOrigin::default();
    let report = build_with(tree, &origin, &BuildOptions::default());
    let mount = KernelMount::of(&origin, &report.layer);
    assert_same(&observe(mount.path()), &expected(tree));
}

fn file(tree: &mut Tree, name: &[u8], content: Content) {
    let id = tree.add(Inode {
        meta: Meta {
            perm: 0o644,
            ..Meta::default()
        },
        kind: Kind::File(content),
    });
    tree.dir_mut(ROOT).unwrap().insert(name.to_vec(), id);
}

proptest! {
    #![proptest_config(cases(24))]
    #[test]
    fn random_trees_come_back_equal(seed in any::<u64>(), size in 1usize..120) {
        let (tree, _spool) = random_tree(seed, size);
        round_trip(&tree);
    }
}

#[test]
fn sizes_around_block_and_chunk_borders() {
    let (mut tree, mut spool, mut rng) = (Tree::new(Meta::default()), Spool::new(), Rng::new(1));
    for len in [
        0usize, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, 600_000,
    ] {
        let bytes = rng.bytes(len);
        file(
            &mut tree,
            format!("f{len}").as_bytes(),
            spool.content(u64::try_from(len).unwrap(), &[(0, bytes)]),
        );
    }
    round_trip(&tree);
}

#[test]
fn directory_of_100_000_entries() {
    let mut tree = Tree::new(Meta::default());
    let empty = Spool::new().content(0, &[]);
    for i in 0..100_000 {
        file(&mut tree, format!("entry-{i:06}").as_bytes(), empty.clone());
    }
    let origin = MemOrigin::default();
    let report = build_with(&tree, &origin, &BuildOptions::default());
    let mount = KernelMount::of(&origin, &report.layer);
    let mut names: Vec<_> = std::fs::read_dir(mount.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names.len(), 100_000);
    assert_eq!(
        (names[0].to_str(), names[99_999].to_str()),
        (Some("entry-000000"), Some("entry-099999"))
    );
    assert!(
        mount
            .path()
            .join("entry-050000")
            .symlink_metadata()
            .unwrap()
            .is_file()
    );
}

/// Directory sizes at which the last block is exactly full or has one entry.
#[test]
fn directories_that_fill_blocks_exactly() {
    let mut tree = Tree::new(Meta::default());
    let empty = Spool::new().content(0, &[]);
    for count in [0usize, 1, 2, 15, 16, 31, 255, 256, 257] {
        let mut entries = BTreeMap::new();
        for i in 0..count {
            let id = tree.add(Inode {
                meta: Meta::default(),
                kind: Kind::File(empty.clone()),
            });
            // 12 + 244 bytes an entry: sixteen fill a block.
            entries.insert(format!("{i:0244}").into_bytes(), id);
        }
        let dir = tree.add(Inode {
            meta: Meta {
                perm: 0o755,
                ..Meta::default()
            },
            kind: Kind::Dir(entries),
        });
        tree.dir_mut(ROOT)
            .unwrap()
            .insert(format!("dir{count}").into_bytes(), dir);
    }
    round_trip(&tree);
}

#[test]
fn sparse_file_of_a_tebibyte_keeps_its_holes() {
    use rustix::fs::SeekFrom;
    let (mut tree, mut spool) = (Tree::new(Meta::default()), Spool::new());
    let tib = 1u64 << 40;
    file(
        &mut tree,
        b"huge",
        spool.content(
            tib,
            &[(5 << 30, b"middle".to_vec()), (tib - 3, b"end".to_vec())],
        ),
    );
    file(
        &mut tree,
        b"small",
        spool.content(1 << 20, &[(8192, vec![7; 4096])]),
    );
    let origin = MemOrigin::default();
    let report = build_with(&tree, &origin, &BuildOptions::default());
    assert!(report.bytes_stored < 3 << 20, "{report:?}");
    let mount = KernelMount::of(&origin, &report.layer);
    let huge = std::fs::File::open(mount.path().join("huge")).unwrap();
    assert_eq!(huge.metadata().unwrap().len(), tib);
    let mut bytes = [9u8; 8];
    std::os::unix::fs::FileExt::read_exact_at(&huge, &mut bytes, (5 << 30) - 1).unwrap();
    assert_eq!(&bytes, b"\0middle\0");
    std::os::unix::fs::FileExt::read_exact_at(&huge, &mut bytes[..3], tib - 3).unwrap();
    assert_eq!(&bytes[..3], b"end");
    assert_eq!(rustix::fs::seek(&huge, SeekFrom::Data(0)).unwrap(), 5 << 30);
    let small = std::fs::File::open(mount.path().join("small")).unwrap();
    assert_eq!(rustix::fs::seek(&small, SeekFrom::Data(0)).unwrap(), 8192);
    assert_eq!(
        rustix::fs::seek(&small, SeekFrom::Hole(8192)).unwrap(),
        12_288
    );
}

/// Names, targets and attributes that the format cannot hold are refused by name, never dropped.
#[test]
fn what_cannot_be_stored_is_refused() {
    type Change = fn(&mut Inode);
    let cases: [(Change, &str); 6] = [
        (|i| i.meta.uid = u32::MAX, "no owner"),
        (
            |i| i.kind = Kind::Symlink(vec![b'x'; 4096]),
            "1 to 4095 bytes",
        ),
        (|i| i.kind = Kind::Char(4096, 0), "12 bits of major"),
        (
            |i| {
                i.meta.mtime = Mtime {
                    sec: 0,
                    nsec: 1_000_000_000,
                }
            },
            "nanoseconds",
        ),
        (
            |i| drop(i.meta.xattrs.insert(b"system.nfs4_acl".to_vec(), vec![1])),
            "system.nfs4_acl",
        ),
        (
            |i| drop(i.meta.xattrs.insert(b"user.big".to_vec(), vec![0; 65_536])),
            "65535",
        ),
    ];
    for (change, text) in cases {
        let mut tree = Tree::new(Meta::default());
        let mut inode = Inode {
            meta: Meta::default(),
            kind: Kind::Fifo,
        };
        change(&mut inode);
        let id = tree.add(inode);
        tree.dir_mut(ROOT).unwrap().insert(b"odd-one".to_vec(), id);
        let origin = MemOrigin::default();
        let tag = TagName::new(Axis::Base, "t", "1").unwrap();
        let error = build::build(
            (&tree).into(),
            tag.into(),
            &origin,
            &BuildOptions::default(),
        )
        .unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(
            origin.list("tags/").unwrap().is_empty()
                && origin.list("manifests/").unwrap().is_empty()
        );
    }
}

/// Zero blocks among others in every pattern: the fine chunk index, with gaps between the chunks of a segment. With device
/// ids in place of flat addresses, kernel 6.18 reads some of these blocks as zeros.
#[test]
fn holes_between_blocks() {
    let (mut tree, mut spool, mut rng) = (Tree::new(Meta::default()), Spool::new(), Rng::new(7));
    for blocks in [2usize, 3, 17, 64, 74, 269] {
        let mut bytes = rng.bytes(blocks * 4096 - 100);
        for block in bytes.chunks_mut(4096) {
            if rng.below(2) == 0 {
                block.fill(0);
            }
        }
        let len = u64::try_from(bytes.len()).unwrap();
        file(
            &mut tree,
            format!("f{blocks}").as_bytes(),
            spool.content(len, &[(0, bytes)]),
        );
    }
    round_trip(&tree);
}
