//! The format of version 1, held fast: a tiny origin in `tests/golden/v1/`, and the digests that building its trees must give.
//!
//! A change that turns one of these red changes the name of every layer that was ever published: it needs a new format
//! version, not a new golden file. While a version has not been released, `DSEC_GOLDEN_WRITE=1 cargo test -p imgstore
//! --test it golden` builds the origin anew and fails with the digests to put here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use imgstore::build::{self, BuildOptions};
use imgstore::ids::{Axis, Digest, TagName};
use imgstore::origin::Origin;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::{layer, verify};
use imgstore::tree::{Content, Inode, InodeId, Kind, Meta, Mtime, ROOT, Tree};

use crate::kernel_mount::KernelMount;
use crate::observe::{assert_same, expected, observe};
use crate::random_tree::{Rng, Spool};

/// What a build of version 1 gives: the layer, its metadata image, its chunk table, its segments.
struct Golden {
    layer: &'static str,
    meta: &'static str,
    chunks: &'static str,
    segments: &'static [(&'static str, u64)],
}

/// [`base_tree`] by itself.
const BASE: Golden = Golden {
    layer: "2ceb4783609518a05853d969407237303553f64f2634b2e416bc757bc24747f3",
    meta: "d96fa1ca74a03519f4221ecb61845f70f48e54635e9fca1ed92c4d8cc0fe6ac3",
    chunks: "163a1608454dd130f3c4692542f034e31a4e67326ed15fad1a33d11cf243df15",
    segments: &[
        (
            "ae9b7b6c5655d4437419d609f3128e059ef33d0d9faf80f6f6d17829245968ed",
            69_632,
        ),
        (
            "0cfd090748d5c3d52e831056b61c8bc77a1a192dabf7c70f03bff29eccd862ea",
            262_144,
        ),
        (
            "27b1167f4642217c2524c979322708ad3d6e8d4e8cbf40a51f06d549b6d07f53",
            262_144,
        ),
        (
            "334a75538486fd64a8b420208615904589ad616aec445e1351499a30393c2edd",
            131_072,
        ),
    ],
};

/// [`toolkit_tree`] with the base as its dictionary.
const TOOLKIT: Golden = Golden {
    layer: "1ede513fd82bda0a622a766c9db9951dd1fd87d0742ecf8dc5a29115f46c7206",
    meta: "566180cf8b989ede28b28692565051be0f71f8da9b95d18a7bb705a9ea7c55d6",
    chunks: "d8448342ae8b59c31e024f32a7a0eba272e1b783fcfed8bb09a002508c752ea4",
    segments: &[
        (
            "1658b3c2796f40f1c97333d08ee215d5528fff0ab7ddc21261130bc30021a757",
            4_096,
        ),
        (
            "0cfd090748d5c3d52e831056b61c8bc77a1a192dabf7c70f03bff29eccd862ea",
            262_144,
        ),
        (
            "27b1167f4642217c2524c979322708ad3d6e8d4e8cbf40a51f06d549b6d07f53",
            262_144,
        ),
        (
            "334a75538486fd64a8b420208615904589ad616aec445e1351499a30393c2edd",
            131_072,
        ),
    ],
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1")
}

fn add(tree: &mut Tree, parent: InodeId, name: &[u8], meta: &Meta, kind: Kind) -> InodeId {
    let id = tree.add(Inode {
        meta: meta.clone(),
        kind,
    });
    tree.dir_mut(parent).unwrap().insert(name.to_vec(), id);
    id
}

fn meta(perm: u16, sec: i64) -> Meta {
    Meta {
        perm,
        mtime: Mtime {
            sec,
            nsec: 123_456_789,
        },
        ..Meta::default()
    }
}

fn file(spool: &mut Spool, bytes: Vec<u8>) -> Kind {
    let len = u64::try_from(bytes.len()).unwrap();
    Kind::File(spool.content(len, &[(0, bytes)]))
}

/// Ten chunks that differ and compress to almost nothing.
fn large() -> Vec<u8> {
    (1..=10u8).flat_map(|n| vec![n; 64 << 10]).collect()
}

/// One of everything.
fn base_tree(spool: &mut Spool) -> Tree {
    let mut tree = Tree::new(meta(0o755, 1_700_000_000));
    let plain = meta(0o644, 1_700_000_001);
    let usr = add(
        &mut tree,
        ROOT,
        b"usr",
        &meta(0o1777, -86_400),
        Kind::Dir(BTreeMap::new()),
    );
    let text = file(spool, b"a small file\n".to_vec());
    let text = add(&mut tree, usr, b"text", &meta(0o4755, -1), text);
    tree.dir_mut(ROOT)
        .unwrap()
        .insert(b"hard link".to_vec(), text);
    let mut rich = meta(0o600, 8_589_934_592);
    (rich.uid, rich.gid) = (4_294_967_294, 70_000);
    let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xd2\x04\0\0\x04\0\x04\0\xff\xff\xff\xff\x10\0\x04\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";
    rich.perm = 0o640;
    rich.xattrs = BTreeMap::from([
        (b"user.binary".to_vec(), vec![0, 255, 10]),
        (
            b"security.capability".to_vec(),
            b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec(),
        ),
        (b"system.posix_acl_access".to_vec(), acl.to_vec()),
        (b"trusted.empty".to_vec(), Vec::new()),
    ]);
    let large = file(spool, large());
    add(&mut tree, usr, b"large", &rich, large);
    let holes: Content = spool.content(5 << 30, &[(4 << 30, vec![7; 5000])]);
    add(&mut tree, usr, b"holes", &plain, Kind::File(holes));
    let empty = file(spool, Vec::new());
    add(&mut tree, usr, b"empty", &plain, empty);
    add(&mut tree, usr, b"not \xff UTF-8", &plain, Kind::Fifo);
    add(&mut tree, usr, &[b'n'; 255], &plain, Kind::Socket);
    add(&mut tree, usr, b"tty", &plain, Kind::Char(5, 1));
    add(&mut tree, usr, b"disk", &plain, Kind::Block(259, 1_000_000));
    let link = meta(0o777, 0);
    add(
        &mut tree,
        ROOT,
        b"link",
        &link,
        Kind::Symlink(b"usr/text".to_vec()),
    );
    add(
        &mut tree,
        ROOT,
        b"long link",
        &link,
        Kind::Symlink(vec![b'l'; 4095]),
    );
    let many = add(
        &mut tree,
        ROOT,
        b"many",
        &meta(0o755, 1),
        Kind::Dir(BTreeMap::new()),
    );
    for n in 0..300 {
        let name = format!("a name that is not short, number {n:04}");
        add(
            &mut tree,
            many,
            name.as_bytes(),
            &link,
            Kind::Symlink(b"x".to_vec()),
        );
    }
    tree
}

/// A block that does not compress, which is stored raw, and what the base has.
fn toolkit_tree(spool: &mut Spool) -> Tree {
    let mut tree = Tree::new(meta(0o755, 1_700_000_002));
    let noise = file(spool, Rng::new(42).bytes(4096));
    add(&mut tree, ROOT, b"noise", &meta(0o644, 1), noise);
    let copy = file(spool, large());
    add(&mut tree, ROOT, b"copy", &meta(0o644, 2), copy);
    tree
}

/// Publishes both trees; gives the names of the layers.
fn publish(origin: &dyn Origin) -> [Digest; 2] {
    let mut spool = Spool::new();
    let build = |tree: &Tree, axis, dict| {
        let options = BuildOptions {
            dict,
            ..BuildOptions::default()
        };
        let tag = TagName::new(axis, "golden", "1").unwrap();
        let report = build::build(tree.into(), tag.into(), origin, &options).unwrap();
        report.layer
    };
    let base = build(&base_tree(&mut spool), Axis::Base, Vec::new());
    let toolkit = build(&toolkit_tree(&mut spool), Axis::Toolkit, vec![base]);
    [base, toolkit]
}

/// The digests of a layer as they stand in this file.
fn as_code(origin: &dyn Origin, digest: &Digest) -> String {
    let manifest = layer::read_manifest(origin, digest).unwrap();
    let (meta, chunks) = (manifest.meta.digest, manifest.chunks.digest);
    let segments = manifest.segments.iter();
    let segments: Vec<String> = segments
        .map(|s| format!("(\"{}\", {}),", s.digest(), s.len()))
        .collect();
    let segments = segments.join(" ");
    format!("layer: \"{digest}\", meta: \"{meta}\", chunks: \"{chunks}\", segments: &[{segments}],")
}

fn assert_golden(origin: &dyn Origin, digest: &Digest, golden: &Golden) {
    let manifest = layer::read_manifest(origin, digest).unwrap();
    // What is built from segments comes last, so that the first difference is the cause.
    let segments: Vec<(String, u64)> = manifest
        .segments
        .iter()
        .map(|segment| (segment.digest().to_hex(), segment.len()))
        .collect();
    let wanted: Vec<(String, u64)> = golden
        .segments
        .iter()
        .map(|(digest, len)| ((*digest).to_owned(), *len))
        .collect();
    assert_eq!(segments, wanted);
    assert_eq!(manifest.chunks.digest.to_hex(), golden.chunks);
    assert_eq!(manifest.meta.digest.to_hex(), golden.meta);
    assert_eq!(digest.to_hex(), golden.layer);
}

#[test]
fn golden_trees_have_the_names_they_always_had() {
    if std::env::var_os("DSEC_GOLDEN_WRITE").is_some() {
        let new = folder().with_extension("new");
        let origin = DirOrigin::create_root(&new).unwrap();
        let digests = publish(&origin).map(|digest| as_code(&origin, &digest));
        fs::remove_dir(new.join("tmp")).unwrap();
        if folder().try_exists().unwrap() {
            fs::remove_dir_all(folder()).unwrap();
        }
        fs::rename(new, folder()).unwrap();
        panic!(
            "a new origin was written; its digests:\n{}",
            digests.join("\n")
        );
    }
    let origin = MemOrigin::default();
    let [base, toolkit] = publish(&origin);
    assert_golden(&origin, &base, &BASE);
    assert_golden(&origin, &toolkit, &TOOLKIT);
}

/// What was published long ago is read by the code of today.
#[test]
fn golden_origin_is_read_right() {
    if std::env::var_os("DSEC_GOLDEN_WRITE").is_some() {
        return; // The other test is writing it.
    }
    let origin = DirOrigin::open(&folder()).unwrap();
    let listed: Vec<String> = layer::list_tags(&origin)
        .unwrap()
        .tags
        .iter()
        .map(|(tag, layer)| format!("{tag} {layer}"))
        .collect();
    let wanted = [
        format!("base/golden:1 {}", BASE.layer),
        format!("toolkit/golden:1 {}", TOOLKIT.layer),
    ];
    assert_eq!(listed, wanted);
    let mut spool = Spool::new();
    for (golden, tree) in [
        (BASE, base_tree(&mut spool)),
        (TOOLKIT, toolkit_tree(&mut spool)),
    ] {
        let digest: Digest = golden.layer.parse().unwrap();
        let report = verify::verify(&origin, &digest, &|_, _| ()).unwrap();
        assert_eq!(report.damage, Vec::new());
        assert_golden(&origin, &digest, &golden);
        let mount = KernelMount::of(&origin, &digest);
        assert_same(&observe(mount.path()), &expected(&tree));
    }
    let toolkit = layer::open(&origin, &TOOLKIT.layer.parse().unwrap()).unwrap();
    assert_eq!(
        toolkit.placement.packs.len(),
        2,
        "its own pack, and the dictionary's"
    );
}
