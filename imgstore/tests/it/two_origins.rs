//! What tests of copying, mending and checking share: a few related layers, and ways to damage what stores them.

use std::sync::Arc;

use imgstore::build::BuildOptions;
use imgstore::ids::{Digest, LayerRef};
use imgstore::origin::mem::MemOrigin;
use imgstore::store::verify;
use imgstore::tree::{Inode, Kind, Meta, ROOT, Tree};

use crate::build::{build_as, tag};
use crate::random_tree::{Rng, Spool};

/// A tree of files `f0`, `f1`, … of 300 KB of noise, each of its own seed: one segment a file.
pub(crate) fn tree_of(spool: &mut Spool, seeds: impl IntoIterator<Item = u64>) -> Tree {
    tree_with(spool, seeds, |seed| Rng::new(seed).bytes(300_000))
}

/// Bytes that compress, and otherwise at every level.
fn words(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let vocabulary: Vec<Vec<u8>> = (0..500).map(|n| Rng::new(n).bytes(6)).collect();
    (0..50_000).flat_map(|_| rng.pick(&vocabulary)).collect()
}

fn tree_with(
    spool: &mut Spool,
    seeds: impl IntoIterator<Item = u64>,
    bytes: fn(u64) -> Vec<u8>,
) -> Tree {
    let mut tree = Tree::new(Meta::default());
    for seed in seeds {
        let content = spool.content(300_000, &[(0, bytes(seed))]);
        let id = tree.add(Inode {
            meta: Meta::default(),
            kind: Kind::File(content),
        });
        let name = format!("f{seed}").into_bytes();
        tree.dir_mut(ROOT).unwrap().insert(name, id);
    }
    tree
}

/// An origin with layer 1 (files 0 to 4) and layer 2 (files 0 to 5), which shares most of its segments.
pub(crate) struct Pair {
    pub(crate) origin: Arc<MemOrigin>,
    pub(crate) first: Digest,
    pub(crate) second: Digest,
}

fn pair_of(level: i32, bytes: fn(u64) -> Vec<u8>) -> Pair {
    let origin = Arc::new(MemOrigin::default());
    let options = BuildOptions {
        level,
        threads: 1,
        ..BuildOptions::default()
    };
    let mut spool = Spool::new();
    let mut build = |files, version| {
        let tree = tree_with(&mut spool, 0..files, bytes);
        build_as(&tree, version, origin.as_ref(), &options).layer
    };
    let (first, second) = (build(5, "1"), build(6, "2"));
    Pair {
        origin,
        first,
        second,
    }
}

pub(crate) fn pair() -> Pair {
    pair_of(1, |seed| Rng::new(seed).bytes(300_000))
}

/// Layers whose frames differ by the level at which they were compressed.
pub(crate) fn pair_at_level(level: i32) -> Pair {
    pair_of(level, words)
}

/// Another origin with the same objects.
pub(crate) fn clone_of(origin: &MemOrigin) -> Arc<MemOrigin> {
    let copy = MemOrigin::default();
    copy.tamper(|objects| *objects = origin.snapshot());
    Arc::new(copy)
}

pub(crate) fn tagged(version: &str) -> LayerRef {
    LayerRef::Tag(tag(version))
}

/// What `verify` says of a tag: the damaged objects and what is wrong with them, or why there is no layer.
pub(crate) fn faults(origin: &MemOrigin, version: &str) -> Vec<String> {
    match verify::verify_ref(origin, &tagged(version), &|_, _| ()) {
        Ok(report) => report
            .damage
            .into_iter()
            .map(|d| format!("{}: {}", d.object, d.what))
            .collect(),
        Err(e) => vec![e.to_string()],
    }
}

/// The objects below a folder.
pub(crate) fn objects(origin: &MemOrigin, folder: &str) -> Vec<String> {
    let all = origin.snapshot().into_keys();
    all.filter(|name| name.starts_with(folder)).collect()
}

/// Kinds of damage to one object.
pub(crate) const KINDS: [&str; 5] = ["flip", "zeros", "cut", "missing", "swapped"];

/// Does `kind` of damage to `object`; `swapped` exchanges its bytes with those of another object of its folder, or of any.
pub(crate) fn damage(origin: &MemOrigin, object: &str, kind: &str, rng: &mut Rng) {
    origin.tamper(|objects| {
        let len = u64::try_from(objects[object].len()).unwrap();
        let at = usize::try_from(rng.below(len)).unwrap();
        let folder = object.split('/').next().unwrap();
        let others: Vec<String> = objects.keys().filter(|o| *o != object).cloned().collect();
        let near: Vec<String> = others
            .iter()
            .filter(|o| o.starts_with(folder))
            .cloned()
            .collect();
        let bytes = objects.get_mut(object).unwrap();
        match kind {
            "flip" => bytes[at] ^= 1 << rng.below(8),
            "zeros" => {
                let end = bytes.len().min(at + 100_000);
                bytes[at..end].fill(0);
            }
            "cut" => bytes.truncate(at),
            "missing" => drop(objects.remove(object)),
            "swapped" => {
                let other = rng.pick(if near.is_empty() { &others } else { &near });
                let theirs = objects[&other].clone();
                let ours = objects.insert(object.to_owned(), theirs).unwrap();
                objects.insert(other, ours);
            }
            _ => panic!("unknown kind {kind}"),
        }
    });
}
