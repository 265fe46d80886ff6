//! Copying between origins: only what is missing, never half a layer, never a wrong byte.

use std::collections::BTreeSet;
use std::sync::Arc;

use imgstore::build::BuildOptions;
use imgstore::format::names;
use imgstore::ids::LayerRef;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::copy::{CopyError, CopyReport, copy};
use imgstore::store::{fsck_origin, layer, verify};

use crate::build::{build_as, tag};
use crate::random_tree::{Rng, Spool, random_tree};
use crate::two_origins::{clone_of, faults, objects, pair, tagged, tree_of};
use crate::watched_origin::WatchedOrigin;

fn copied(from: &Arc<MemOrigin>, to: &dyn Origin, refs: &[LayerRef]) -> CopyReport {
    copy(Arc::clone(from) as _, to, refs, &|_, _| ()).unwrap()
}

/// The second layer brings only what the first has not; a third run brings nothing and writes nothing.
/// Red when `find_present` finds nothing (all segments copied), and when the placement is always written (1 write).
#[test]
fn copies_only_what_is_missing() {
    let from = pair();
    let to = Arc::new(MemOrigin::default());
    let first = copied(&from.origin, to.as_ref(), &[tagged("1")]);
    assert_eq!((first.segments_copied, first.segments_present), (5, 0));
    assert_eq!((first.packs_whole, first.packs_new), (1, 0));
    assert_eq!(first.layers[0].layer, from.first);
    let second = copied(&from.origin, to.as_ref(), &[tagged("2")]);
    assert_eq!((second.segments_copied, second.segments_present), (1, 5));
    assert!(
        (300_000..400_000).contains(&second.bytes_copied),
        "{second:?}"
    );
    assert!(second.bytes_read < 400_000, "{second:?}");
    assert_eq!(faults(&to, "1"), [""; 0]);
    assert_eq!(faults(&to, "2"), [""; 0]);

    let watched = WatchedOrigin::new(&to);
    let again = copied(&from.origin, &watched, &[tagged("1"), tagged("2")]);
    assert_eq!((again.segments_copied, again.segments_present), (0, 6));
    assert_eq!((again.bytes_copied, watched.writes()), (0, 0));
    assert!(again.layers.iter().all(|layer| !layer.changed));
    // Nothing but what is needed to know what the layers are: their tags twice, manifests, placements.
    assert_eq!(again.requests, 8);
    // All objects have the names they have at home.
    assert_eq!(objects(&to, ""), objects(&from.origin, ""));
}

/// Most of a pack is needed: the pack. Less: a new pack, without the rest. The layer's name and contents are the same.
#[test]
fn a_small_part_of_a_pack_goes_into_a_new_one() {
    let origin = Arc::new(MemOrigin::default());
    let mut spool = Spool::new();
    let options = BuildOptions::default();
    build_as(&tree_of(&mut spool, 0..9), "all", origin.as_ref(), &options);
    let part = build_as(
        &tree_of(&mut spool, [2, 3]),
        "part",
        origin.as_ref(),
        &options,
    );
    assert_eq!(part.segments_new, 0);
    let to = Arc::new(MemOrigin::default());
    let report = copied(&origin, to.as_ref(), &[tagged("part")]);
    assert_eq!((report.packs_whole, report.packs_new), (0, 1));
    assert_eq!(report.segments_copied, 2);
    assert!(report.bytes_copied < 700_000, "{report:?}");
    assert_eq!(faults(&to, "part"), [""; 0]);
    assert_ne!(objects(&to, "packs/"), objects(&origin, "packs/"));
}

/// A layer that refers to chunks of another one takes their segments along, not the layer.
#[test]
fn dictionaries_come_as_segments() {
    let origin = Arc::new(MemOrigin::default());
    let mut spool = Spool::new();
    let options = BuildOptions::default();
    let base = build_as(
        &tree_of(&mut spool, 0..4),
        "base",
        origin.as_ref(),
        &options,
    );
    let with_dict = BuildOptions {
        dict: vec![base.layer],
        ..options
    };
    // Most of a file of the base, under another name and with another end.
    let mut tree = tree_of(&mut spool, [77]);
    let content = spool.content(300_000, &[(0, Rng::new(2).bytes(262_144))]);
    let id = tree.add(imgstore::tree::Inode {
        meta: Default::default(),
        kind: imgstore::tree::Kind::File(content),
    });
    tree.dir_mut(imgstore::tree::ROOT)
        .unwrap()
        .insert(b"like-f2".to_vec(), id);
    let child = build_as(&tree, "child", origin.as_ref(), &with_dict);
    assert!(child.segments_reused > 0);
    let to = Arc::new(MemOrigin::default());
    copied(&origin, to.as_ref(), &[tagged("child")]);
    assert_eq!(faults(&to, "child"), [""; 0]);
    assert_eq!(objects(&to, "manifests/"), [names::manifest(&child.layer)]);
    assert_eq!(objects(&to, "tags/"), [names::tag(&tag("child"))]);
}

/// Whatever write a copy dies at: every tag on the target is whole, and doing it again finishes. Red when the tag is written
/// before the placement, or the manifest before the packs and a tag was there.
/// Mutation: the tag is written before the manifest.
#[test]
fn a_copy_that_dies_at_any_write_leaves_no_half_layer() {
    let from = pair();
    let mut steps = 0;
    for before in [Vec::new(), vec![tagged("1")]] {
        for dies_after in 0.. {
            let to = Arc::new(MemOrigin::default());
            if !before.is_empty() {
                copied(&from.origin, to.as_ref(), &before);
            }
            let watched = WatchedOrigin::dying_after(&to, dies_after);
            let died = copy(
                Arc::clone(&from.origin) as _,
                &watched,
                &[tagged("1"), tagged("2")],
                &|_, _| (),
            )
            .is_err();
            for (name, _) in layer::list_tags(to.as_ref()).unwrap().tags {
                assert_eq!(
                    faults(&to, name.version()),
                    [""; 0],
                    "after {dies_after} writes"
                );
            }
            let tags: BTreeSet<String> = objects(&to, "tags/").into_iter().collect();
            let report = copied(&from.origin, to.as_ref(), &[tagged("1"), tagged("2")]);
            let state = fsck_origin::fsck(to.as_ref(), true, &|_, _| ()).unwrap();
            assert_eq!((state.damage, state.orphans), (vec![], vec![]));
            // The pack that came whole, behind the lease, is found again.
            if dies_after >= 2 && before.is_empty() {
                assert!(report.segments_present >= 5, "{dies_after}: {report:?}");
            }
            steps += 1;
            if !died {
                assert_eq!(tags.len(), 2);
                break;
            }
        }
    }
    assert!(steps > 15, "only {steps} steps");
}

/// One bit of a needed frame differs on the source: an error that names it, and nothing visible on the target. A bit of
/// another frame: the pack cannot go whole, the layer can. Red when frames are appended unverified.
#[test]
fn damage_on_the_source_is_named_and_not_copied() {
    let from = pair();
    let loaded = layer::open(from.origin.as_ref(), &from.first).unwrap();
    let (pack, range) = loaded.placement.find(3).unwrap();
    let object = names::pack(&pack.digest);
    let at = usize::try_from(range.start + range.len / 2).unwrap();
    from.origin
        .tamper(|objects| objects.get_mut(&object).unwrap()[at] ^= 1);
    let to = Arc::new(MemOrigin::default());
    let error = copy(
        Arc::clone(&from.origin) as _,
        to.as_ref(),
        &[tagged("1")],
        &|_, _| (),
    );
    let error = error.unwrap_err();
    assert!(matches!(error, CopyError::Damaged { .. }), "{error}");
    let text = error.to_string();
    for part in [
        object.as_str(),
        "segment 3 at offset",
        "expected",
        "found",
        "dsec repair",
    ] {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
    assert_eq!(objects(&to, "manifests/"), [""; 0]);
    assert_eq!(objects(&to, "tags/"), [""; 0]);

    // The seek table at the end belongs to no segment.
    let from = pair();
    from.origin.tamper(|objects| {
        let bytes = objects.get_mut(&object).unwrap();
        let last = bytes.len() - 6;
        bytes[last] ^= 1;
    });
    let report = copied(&from.origin, to.as_ref(), &[tagged("1")]);
    assert_eq!((report.packs_whole, report.packs_new), (0, 1));
    assert_eq!(faults(&to, "1"), [""; 0]);
}

/// The target claims to have a segment and its bytes are wrong: copied anew.
#[test]
fn damage_on_the_target_is_not_referred_to() {
    let from = pair();
    let to = Arc::new(MemOrigin::default());
    copied(&from.origin, to.as_ref(), &[tagged("1")]);
    let object = objects(&to, "packs/")[0].clone();
    to.tamper(|objects| objects.get_mut(&object).unwrap()[5000] ^= 1);
    let report = copied(&from.origin, to.as_ref(), &[tagged("2")]);
    assert_eq!((report.segments_copied, report.segments_present), (2, 4));
    assert_eq!(faults(&to, "2"), [""; 0]);
}

/// Every part of the source damaged in every way: an error, or a target that is whole.
#[test]
fn a_damaged_source_gives_an_error_or_a_whole_layer() {
    let mut rng = Rng::new(7);
    let good = pair().origin;
    for object in objects(&good, "") {
        for kind in crate::two_origins::KINDS {
            let from = clone_of(&good);
            crate::two_origins::damage(&from, &object, kind, &mut rng);
            let to = Arc::new(MemOrigin::default());
            let done = copy(
                from as _,
                to.as_ref(),
                &[tagged("1"), tagged("2")],
                &|_, _| (),
            );
            for (name, _) in layer::list_tags(to.as_ref()).unwrap().tags {
                assert_eq!(faults(&to, name.version()), [""; 0], "{kind} {object}");
            }
            if let Err(error) = done {
                let text = error.to_string();
                assert!(
                    text.contains("expected")
                        || text.contains("does not exist")
                        || text.contains("no layer"),
                    "{text}"
                );
            }
        }
    }
}

/// Between directories, as users have them, and with random trees: both tell the same of every layer.
#[test]
fn directories_copy_random_layers() {
    let dir = tempfile::tempdir().unwrap();
    let from = Arc::new(DirOrigin::create_root(&dir.path().join("from")).unwrap());
    let to = DirOrigin::create_root(&dir.path().join("to")).unwrap();
    let mut refs = Vec::new();
    for seed in 0..3 {
        let (tree, _spool) = random_tree(seed, 40);
        let version = format!("v{seed}");
        build_as(&tree, &version, from.as_ref(), &BuildOptions::default());
        refs.push(tagged(&version));
    }
    let report = copy(Arc::clone(&from) as _, &to, &refs, &|_, _| ()).unwrap();
    for (reference, copied) in refs.iter().zip(&report.layers) {
        let report = verify::verify_ref(&to, reference, &|_, _| ()).unwrap();
        assert_eq!(report.damage, []);
        assert_eq!(
            layer::resolve(from.as_ref(), reference).unwrap(),
            copied.layer
        );
    }
    assert_eq!(
        std::fs::read_dir(dir.path().join("to/tmp"))
            .unwrap()
            .count(),
        0
    );
    let digest = LayerRef::Layer(report.layers[0].layer);
    let third = Arc::new(MemOrigin::default());
    copy(
        from as _,
        third.as_ref(),
        std::slice::from_ref(&digest),
        &|_, _| (),
    )
    .unwrap();
    assert_eq!(objects(&third, "tags/"), [""; 0]);
    assert_eq!(
        verify::verify_ref(third.as_ref(), &digest, &|_, _| ())
            .unwrap()
            .damage,
        []
    );
}

/// An origin that fails is an error, and no reason to copy again what is there.
#[test]
fn an_origin_that_fails_is_not_taken_for_damage() {
    let from = pair();
    let to = Arc::new(MemOrigin::default());
    copied(&from.origin, to.as_ref(), &[tagged("1")]);
    let dead = WatchedOrigin::dying_after(&to, 0);
    let error = copy(
        Arc::clone(&from.origin) as _,
        &dead,
        &[tagged("2")],
        &|_, _| (),
    );
    let unavailable = |e: &CopyError| {
        matches!(e, CopyError::Origin(OriginError::Unavailable { .. }))
            || e.to_string().contains("dead")
    };
    assert!(error.as_ref().is_err_and(unavailable), "{error:?}");
    assert_eq!(faults(&to, "1"), [""; 0]);
}
