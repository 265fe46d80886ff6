//! What gives a layer its name, what is stored twice, and what stays visible when something fails.

use std::collections::BTreeMap;

use imgstore::build::{self, BuildOptions, BuildReport};
use imgstore::ids::{Axis, Digest, TagName};
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::{layer, verify};
use imgstore::tree::{Content, Inode, InodeId, Kind, Meta, ROOT, Tree};
use proptest::prelude::*;

use crate::random_tree::{Rng, Spool, cases, random_tree};

pub(crate) fn tag(version: &str) -> TagName {
    TagName::new(Axis::Workspace, "t", version).unwrap()
}

pub(crate) fn build_as(
    tree: &Tree,
    version: &str,
    origin: &dyn Origin,
    options: &BuildOptions,
) -> BuildReport {
    build::build(tree.into(), tag(version).into(), origin, options).unwrap()
}

/// The same tree with its inodes in another order in memory.
fn shuffled(tree: &Tree, rng: &mut Rng) -> Tree {
    let mut order: Vec<usize> = (1..tree.inodes.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(
            i,
            usize::try_from(rng.below(u64::try_from(i + 1).unwrap())).unwrap(),
        );
    }
    order.insert(0, 0);
    let place: BTreeMap<usize, usize> = order
        .iter()
        .enumerate()
        .map(|(new, old)| (*old, new))
        .collect();
    let inodes = order
        .iter()
        .map(|old| {
            let mut inode = tree.inodes[*old].clone();
            if let Kind::Dir(entries) = &mut inode.kind {
                entries
                    .values_mut()
                    .for_each(|id| *id = InodeId(place[&id.0]));
            }
            inode
        })
        .collect();
    Tree { inodes }
}

proptest! {
    #![proptest_config(cases(12))]
    #[test]
    fn name_depends_on_the_tree_alone(seed in any::<u64>(), size in 1usize..80) {
        let (tree, _spool) = random_tree(seed, size);
        let one = BuildOptions { threads: 1, ..BuildOptions::default() };
        let many = BuildOptions { threads: 7, ..BuildOptions::default() };
        let first = MemOrigin::default();
        let wanted = build_as(&tree, "1", &first, &one);
        let again = build_as(&shuffled(&tree, &mut Rng::new(seed)), "2", &first, &many);
        prop_assert_eq!(again.layer, wanted.layer);
        prop_assert_eq!((again.bytes_stored, again.segments_new), (0, 0));
        // Into an origin that is empty, and one that is full of other things.
        prop_assert_eq!(build_as(&tree, "1", &MemOrigin::default(), &many).layer, wanted.layer);
        let (other, _spool) = random_tree(seed ^ 1, 30);
        let full = MemOrigin::default();
        build_as(&other, "0", &full, &many);
        prop_assert_eq!(build_as(&tree, "1", &full, &many).layer, wanted.layer);
        let report = verify::verify(&full, &wanted.layer, &|_, _| ()).unwrap();
        prop_assert_eq!(report.damage, Vec::new());
    }

    /// Packs are equal byte for byte too, on any number of threads.
    #[test]
    fn objects_do_not_depend_on_threads(seed in any::<u64>()) {
        let (tree, _spool) = random_tree(seed, 60);
        let objects = |threads| {
            let origin = MemOrigin::default();
            build_as(&tree, "1", &origin, &BuildOptions { threads, ..BuildOptions::default() });
            let mut all = origin.snapshot();
            all.retain(|name, _| !name.starts_with("tags/")); // tags hold the time
            all
        };
        prop_assert!(objects(1) == objects(5));
    }
}

fn add(tree: &mut Tree, name: &str, content: Content) {
    let id = tree.add(Inode {
        meta: Meta {
            perm: 0o644,
            ..Meta::default()
        },
        kind: Kind::File(content),
    });
    tree.dir_mut(ROOT)
        .unwrap()
        .insert(name.as_bytes().to_vec(), id);
}

/// Many small files and some large ones; the same for the same numbers.
pub(crate) fn base_tree(spool: &mut Spool, files: usize) -> Tree {
    let mut tree = Tree::new(Meta::default());
    let mut rng = Rng::new(99);
    for i in 0..files {
        let len = usize::try_from(rng.below(30_000)).unwrap() + 1;
        add(
            &mut tree,
            &format!("lib/small-{i:04}").replace('/', "-"),
            spool.content(u64::try_from(len).unwrap(), &[(0, rng.bytes(len))]),
        );
    }
    for i in 0..3 {
        add(
            &mut tree,
            &format!("large-{i}"),
            spool.content(1_500_000, &[(0, rng.bytes(1_500_000))]),
        );
    }
    tree
}

/// An added file shifts its neighbourhood only; all other segments are found on the origin.
#[test]
fn added_files_leave_most_segments_as_they_were() {
    let mut spool = Spool::new();
    let origin = MemOrigin::default();
    let options = BuildOptions::default();
    let before = build_as(&base_tree(&mut spool, 600), "1", &origin, &options);
    let mut tree = base_tree(&mut spool, 600);
    for i in [100, 350] {
        add(
            &mut tree,
            &format!("lib-small-{i:04}b"),
            spool.content(20_000, &[(0, Rng::new(i).bytes(20_000))]),
        );
    }
    let after = build_as(&tree, "2", &origin, &options);
    assert!(before.segments_new > 40, "{before:?}");
    assert!(
        after.segments_new <= before.segments_new / 5,
        "{before:?} {after:?}"
    );
    assert_eq!(
        after.segments_new + after.segments_reused,
        u64::try_from(
            layer::open(&origin, &after.layer)
                .unwrap()
                .manifest
                .segments
                .len()
        )
        .unwrap()
    );
}

/// With `--dict` a moved file is found by chunk although no segment is equal; the result reads back and names do not depend on
/// what else is there.
#[test]
fn dictionary_is_used_by_chunk_and_gives_one_name() {
    let mut spool = Spool::new();
    let origin = MemOrigin::default();
    let plain = BuildOptions::default();
    let base = build_as(&base_tree(&mut spool, 300), "base", &origin, &plain);
    let mut tree = base_tree(&mut spool, 300);
    // All names change, so all small files are laid out anew.
    let entries = tree.dir_mut(ROOT).unwrap();
    *entries = entries
        .iter()
        .map(|(name, id)| {
            (
                [&b"x"[..], &name.iter().rev().copied().collect::<Vec<u8>>()].concat(),
                *id,
            )
        })
        .collect();
    add(
        &mut tree,
        "new",
        spool.content(50_000, &[(0, Rng::new(3).bytes(50_000))]),
    );
    let without = build_as(&tree, "no-dict", &MemOrigin::default(), &plain);
    let dict = BuildOptions {
        dict: vec![base.layer],
        ..BuildOptions::default()
    };
    let with = build_as(&tree, "dict", &origin, &dict);
    assert_ne!(with.layer, without.layer);
    assert!(with.bytes_stored < 200_000, "{with:?}");
    let second = MemOrigin::default();
    build_as(&base_tree(&mut spool, 300), "base", &second, &plain);
    assert_eq!(build_as(&tree, "dict", &second, &dict).layer, with.layer);
    assert_eq!(
        verify::verify(&origin, &with.layer, &|_, _| ())
            .unwrap()
            .damage,
        Vec::new()
    );
}

/// A dictionary's segment of which little is used is not referred to: one small read would fetch all of it.
#[test]
fn little_used_dictionary_segments_are_not_referred_to() {
    let mut spool = Spool::new();
    let origin = MemOrigin::default();
    let base = build_as(
        &base_tree(&mut spool, 300),
        "base",
        &origin,
        &BuildOptions::default(),
    );
    let mut tree = base_tree(&mut spool, 300);
    tree.dir_mut(ROOT)
        .unwrap()
        .retain(|name, _| name == b"lib-small-0007");
    let dict = BuildOptions {
        dict: vec![base.layer],
        ..BuildOptions::default()
    };
    let built = layer::open(&origin, &build_as(&tree, "one", &origin, &dict).layer).unwrap();
    let bases = layer::open(&origin, &base.layer).unwrap().manifest.segments;
    assert_eq!(built.manifest.segments.len(), 1);
    assert!(!bases.contains(&built.manifest.segments[0]));
}

/// Damages one object of each kind that a published layer has, in several ways.
fn damages(good: &BTreeMap<String, Vec<u8>>) -> Vec<(String, Option<Vec<u8>>)> {
    let mut out = Vec::new();
    for (name, bytes) in good {
        if name == "index.json" {
            continue;
        }
        let mut flipped = bytes.clone();
        flipped[bytes.len() / 3] ^= 1;
        let longer = [&bytes[..], b"x"].concat();
        let cut = bytes[..bytes.len() / 2].to_vec();
        for damaged in [Some(flipped), Some(cut), Some(longer), Some(vec![]), None] {
            out.push((name.clone(), damaged));
        }
    }
    out
}

/// Building the same tree again on top of a damaged, cut or missing object of any kind leaves everything right.
#[test]
fn building_again_repairs_damaged_objects() {
    let mut spool = Spool::new();
    let origin = MemOrigin::default();
    let options = BuildOptions::default();
    let tree = base_tree(&mut spool, 20);
    let built = build_as(&tree, "1", &origin, &options);
    let good = origin.snapshot();
    let kinds: std::collections::BTreeSet<_> = good
        .keys()
        .map(|name| name.split('/').next().unwrap())
        .collect();
    assert_eq!(kinds.len(), 8, "{kinds:?}");
    for (name, damaged) in damages(&good) {
        let len = damaged.as_ref().map(Vec::len);
        origin.tamper(|objects| {
            objects.clone_from(&good);
            match damaged {
                Some(bytes) => objects.insert(name.clone(), bytes),
                None => objects.remove(&name),
            };
        });
        assert_eq!(build_as(&tree, "1", &origin, &options).layer, built.layer);
        let report = verify::verify(&origin, &built.layer, &|_, _| ()).unwrap();
        assert_eq!(report.damage, Vec::new(), "`{name}` of {len:?} bytes");
        assert_eq!(
            layer::read_tag(&origin, &tag("1")).unwrap().layer,
            built.layer
        );
        if !name.starts_with("tags/") && !name.starts_with("packs/") && len != Some(0) {
            let now = origin.snapshot();
            assert!(now[&name] == good[&name], "`{name}` of {len:?} bytes");
        }
    }
}

/// A pack that is damaged on the origin is noticed when a build wants to refer to it: what is damaged is stored anew, the
/// rest is referred to.
#[test]
fn damaged_segments_are_stored_anew() {
    let mut spool = Spool::new();
    let origin = MemOrigin::default();
    let tree = base_tree(&mut spool, 20);
    let first = build_as(&tree, "1", &origin, &BuildOptions::default());
    origin.tamper(|objects| {
        let pack = objects
            .iter_mut()
            .find(|(name, _)| name.starts_with("packs/"))
            .unwrap()
            .1;
        pack[5000] ^= 1;
    });
    let mut more = base_tree(&mut spool, 20);
    add(
        &mut more,
        "zzz",
        spool.content(300_000, &[(0, Rng::new(4).bytes(300_000))]),
    );
    let right = |layer: &Digest| {
        let report = verify::verify(&origin, layer, &|_, _| ()).unwrap();
        report.damage.len()
    };
    let second = build_as(&more, "2", &origin, &BuildOptions::default());
    assert_eq!((right(&first.layer), right(&second.layer)), (1, 0));
    assert!(
        second.segments_reused >= first.segments_new - 2,
        "{second:?}"
    );
    let again = build_as(&tree, "1", &origin, &BuildOptions::default());
    assert_eq!((again.layer, right(&first.layer)), (first.layer, 0));
    assert_eq!(again.segments_new, 0, "the second build's copy is found");
}

/// Two builders publish different versions at once: both tags are in the index.
#[test]
fn concurrent_publishers_are_both_in_the_index() {
    let origin = MemOrigin::default();
    std::thread::scope(|scope| {
        for i in 0..8u64 {
            let origin = &origin;
            scope.spawn(move || {
                let (tree, _spool) = random_tree(i, 5);
                build_as(
                    &tree,
                    &format!("v{i}"),
                    origin,
                    &BuildOptions {
                        threads: 1,
                        ..BuildOptions::default()
                    },
                );
            });
        }
    });
    let bytes = origin.fetch_all("index.json", 1 << 20).unwrap();
    let index = imgstore::format::tag::Index::parse(&bytes).unwrap();
    assert_eq!(index.tags.len(), 8);
    let listed: BTreeMap<String, Digest> = layer::list_tags(&origin)
        .unwrap()
        .tags
        .into_iter()
        .map(|(t, l)| (t.to_string(), l))
        .collect();
    assert_eq!(index.tags, listed);
}

/// What readers would refuse is refused before anything is published.
#[test]
fn what_no_reader_would_accept_is_not_published() {
    let origin = MemOrigin::default();
    let (tree, _spool) = random_tree(1, 20);
    let mut naming = build::Naming::from(tag("1"));
    naming.labels.insert("note".into(), "x".repeat(1 << 20));
    let error = build::build((&tree).into(), naming, &origin, &BuildOptions::default());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("bytes of the tag"), "{error}");
    assert_eq!(origin.snapshot(), BTreeMap::new());

    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let mut opened = layer::open(&origin, &built.layer).unwrap();
    let record = layer::read_tag(&origin, &tag("1")).unwrap();
    let readable = |opened: &layer::Layer| {
        build::publish::check_readable(&opened.manifest, &opened.placement, &record)
    };
    readable(&opened).unwrap();
    opened.manifest.meta.size = (1 << 30) + 4096;
    let error = readable(&opened).unwrap_err().to_string();
    assert!(error.contains("metadata size"), "{error}");
}

/// A damaged tag stops neither a publish nor a listing; both leave it out, the listing with its name.
#[test]
fn damaged_tags_hide_no_others() {
    let origin = MemOrigin::default();
    let (tree, _spool) = random_tree(1, 20);
    build_as(&tree, "1", &origin, &BuildOptions::default());
    let object = imgstore::format::names::tag(&tag("1"));
    for damage in [b"{".to_vec(), vec![b' '; (1 << 20) + 1]] {
        origin.replace(&object, &damage).unwrap();
        build_as(&tree, "2", &origin, &BuildOptions::default());
        let listed = layer::list_tags(&origin).unwrap();
        let names: Vec<_> = listed.tags.iter().map(|(name, _)| name).collect();
        assert_eq!(names, [&tag("2")]);
        assert_eq!(listed.damaged.len(), 1);
        assert!(listed.damaged[0].to_string().contains(&object));
        let bytes = origin.fetch_all("index.json", 1 << 20).unwrap();
        let index = imgstore::format::tag::Index::parse(&bytes).unwrap();
        assert_eq!(
            index.tags.into_keys().collect::<Vec<_>>(),
            [tag("2").to_string()]
        );
    }
}

#[test]
fn old_temporary_files_are_removed_and_young_ones_kept() {
    let dir = tempfile::tempdir().unwrap();
    let tmp = dir.path().join("tmp");
    std::fs::create_dir(&tmp).unwrap();
    for (name, hours) in [("killed", 49), ("running", 47), ("pack-1", 0)] {
        let file = std::fs::File::create(tmp.join(name)).unwrap();
        let age = std::time::Duration::from_hours(hours);
        file.set_modified(std::time::SystemTime::now() - age)
            .unwrap();
    }
    imgstore::origin::dir::DirOrigin::create_root(dir.path()).unwrap();
    let mut left: Vec<_> = std::fs::read_dir(&tmp)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["pack-1", "running"]);
}
