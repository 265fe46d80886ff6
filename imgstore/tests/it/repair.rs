//! Mending from another origin: whatever was damaged is right afterwards, for every layer that shared it.

use std::sync::Arc;

use imgstore::build::BuildOptions;
use imgstore::format::names;
use imgstore::ids::{Digest, LayerRef};
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::repair::{RepairReport, repair};
use imgstore::store::{fsck_origin, layer};

use crate::build::{build_as, tag};
use crate::random_tree::{Rng, Spool, cases};
use crate::two_origins::{
    KINDS, Pair, clone_of, damage, faults, objects, pair, pair_at_level, tagged, tree_of,
};
use crate::watched_origin::WatchedOrigin;

fn repaired(origin: &dyn Origin, from: &Arc<MemOrigin>, version: &str) -> RepairReport {
    let from = Some(Arc::clone(from) as Arc<dyn Origin>);
    repair(origin, from, &tagged(version), &|_, _| ()).unwrap()
}

/// Flips a bit in the frame of segment `index` of `layer`; gives the pack's name.
fn hit(origin: &MemOrigin, layer: &Digest, index: usize) -> String {
    let loaded = layer::open(origin, layer).unwrap();
    let (pack, range) = loaded.placement.find(index).unwrap();
    let object = names::pack(&pack.digest);
    let at = usize::try_from(range.start + range.len / 2).unwrap();
    origin.tamper(|objects| objects.get_mut(&object).unwrap()[at] ^= 4);
    object
}

/// Red when `Staging::of` or any `replace` is done without damage.
#[test]
fn what_is_right_is_left_alone() {
    let Pair { origin, .. } = pair();
    let watched = WatchedOrigin::new(&origin);
    let report = repaired(&watched, &clone_of(&origin), "1");
    assert_eq!((report.segments_checked, report.segments_damaged), (5, 0));
    assert_eq!((watched.writes(), report.objects_written.len()), (0, 0));
    // The other origin is not even asked.
    assert_eq!((report.requests, report.bytes_read), (0, 0));
}

/// Every object that a layer needs, damaged in every way, and the tag as well: mended from a copy, byte for byte.
/// Mutation: `run` does not put the manifest.
#[test]
fn every_kind_of_object_is_mended() {
    let Pair { origin: good, .. } = pair();
    let mut rng = Rng::new(11);
    let mut mended = 0;
    for object in objects(&good, "") {
        for kind in KINDS {
            let origin = clone_of(&good);
            damage(&origin, &object, kind, &mut rng);
            let before = faults(&origin, "1").len() + faults(&origin, "2").len();
            for version in ["2", "1"] {
                let report = repaired(origin.as_ref(), &good, version);
                assert_eq!(report.left, [], "{kind} {object}");
                assert_eq!(faults(&origin, version), [""; 0], "{kind} {object}");
                if before == 0 {
                    assert_eq!(report.objects_written, [""; 0], "{kind} {object}");
                }
            }
            if before > 0 {
                mended += 1;
                let (now, then) = (origin.snapshot(), good.snapshot());
                assert!(now[&object] == then[&object], "{kind} {object}");
            }
            let watched = WatchedOrigin::new(&origin);
            repaired(&watched, &good, "2");
            assert_eq!(watched.writes(), 0, "{kind} {object}: the second repair");
        }
    }
    assert!(
        mended > 30,
        "only {mended} cases had damage that the layer sees"
    );
}

/// The other origin packed the same segments otherwise, so the pack cannot have its bytes again: the good frame goes into a
/// new pack, and every placement that referred to the damaged one changes. Red when `place_other` is not called.
#[test]
fn other_layers_are_healed_when_the_pack_cannot_be_rebuilt() {
    let Pair {
        origin,
        first,
        second,
    } = pair_at_level(1);
    let from = pair_at_level(19);
    assert_eq!(from.second, second, "the level does not change the name");
    let pack = hit(&origin, &second, 2);
    let hit = || (faults(&origin, "1").len(), faults(&origin, "2").len());
    assert_eq!(hit(), (1, 1));
    let report = repaired(origin.as_ref(), &from.origin, "2");
    assert_eq!((report.packs_rebuilt, report.packs_new), (0, 1));
    assert_eq!((report.segments_damaged, report.segments_mended), (1, 1));
    assert_eq!(report.layers_healed, [first]);
    assert_eq!(hit(), (0, 0));
    // The old pack still holds the rest.
    assert!(objects(&origin, "packs/").contains(&pack));
    assert!(report.bytes_read < 400_000, "{report:?}");
}

/// The same layers in other packs: copied one by one in another order of versions.
fn repacked(origin: &Arc<MemOrigin>) -> Arc<MemOrigin> {
    let to = Arc::new(MemOrigin::default());
    let mut spool = Spool::new();
    // What is in both layers comes from a pack with more in it.
    build_as(
        &tree_of(&mut spool, 0..20),
        "more",
        to.as_ref(),
        &BuildOptions::default(),
    );
    for version in ["1", "2"] {
        imgstore::store::copy::copy(
            Arc::clone(origin) as _,
            to.as_ref(),
            &[tagged(version)],
            &|_, _| (),
        )
        .unwrap();
    }
    to
}

/// A segment of another layer in the same pack is damaged too, which the asked layer does not need.
#[test]
fn damage_that_only_others_see_is_mended_along() {
    let origin = Arc::new(MemOrigin::default());
    let mut spool = Spool::new();
    let options = BuildOptions::default();
    let all = build_as(&tree_of(&mut spool, 0..9), "all", origin.as_ref(), &options);
    build_as(
        &tree_of(&mut spool, [2, 3]),
        "part",
        origin.as_ref(),
        &options,
    );
    let good = clone_of(&origin);
    for index in 0..9 {
        hit(&origin, &all.layer, index);
    }
    let report = repaired(origin.as_ref(), &good, "part");
    assert_eq!((report.segments_damaged, report.packs_rebuilt), (9, 1));
    assert_eq!(report.layers_healed, [all.layer]);
    assert_eq!(faults(&origin, "all"), [""; 0]);
    assert_eq!(origin.snapshot(), good.snapshot());
}

/// Another pack of the same origin holds the segment: nothing is read elsewhere.
#[test]
fn the_origin_mends_itself_where_it_can() {
    let Pair { origin, second, .. } = pair();
    let other = repacked(&origin);
    // Both origins' objects in one place: segments lie in two packs.
    let theirs = other.snapshot();
    origin.tamper(|objects| {
        for (name, bytes) in theirs {
            if name.starts_with("packs/") || name.contains("more") {
                objects.insert(name, bytes);
            }
        }
    });
    let more = layer::read_tag(other.as_ref(), &tag("more")).unwrap().layer;
    let needed: Vec<_> = ["manifests/", "placements/", "meta/", "chunks/"]
        .iter()
        .flat_map(|folder| objects(&other, folder))
        .collect();
    origin.tamper(|objects| {
        for name in needed {
            objects
                .entry(name.clone())
                .or_insert_with(|| other.snapshot()[&name].clone());
        }
    });
    assert_eq!(
        layer::read_tag(origin.as_ref(), &tag("more"))
            .unwrap()
            .layer,
        more
    );
    hit(&origin, &second, 1);
    assert_eq!(faults(&origin, "2").len(), 1);
    let report = repair(origin.as_ref(), None, &tagged("2"), &|_, _| ()).unwrap();
    assert_eq!((report.left, report.segments_mended), (vec![], 1));
    assert_eq!(faults(&origin, "1"), [""; 0]);
    assert_eq!(faults(&origin, "2"), [""; 0]);
}

#[test]
fn an_origin_that_cannot_list_has_the_asked_layer_mended_and_says_so() {
    let Pair { origin, second, .. } = pair_at_level(1);
    let from = pair_at_level(19).origin;
    hit(&origin, &second, 2);
    let report = repaired(&WatchedOrigin::without_lists(&origin), &from, "2");
    assert!(!report.other_layers_checked);
    assert_eq!(report.left, []);
    assert_eq!(faults(&origin, "2"), [""; 0]);
    assert_eq!(faults(&origin, "1").len(), 1, "what nobody could find");
}

/// The same segment damaged on both: named and left, everything else mended, nothing wrong written.
#[test]
fn what_nobody_has_is_named() {
    let Pair { origin, second, .. } = pair();
    let from = clone_of(&origin);
    let pack = hit(&origin, &second, 1);
    hit(&origin, &second, 3);
    hit(&from, &second, 3);
    let report = repaired(origin.as_ref(), &from, "2");
    assert_eq!((report.segments_damaged, report.segments_mended), (2, 1));
    assert_eq!(report.left.len(), 1);
    assert_eq!(report.left[0].object, pack);
    for part in ["segment 3 at offset", "expected", "found"] {
        assert!(report.left[0].what.contains(part), "{:?}", report.left);
    }
    let left = faults(&origin, "2");
    assert!(
        left.len() == 1 && left[0].contains("segment 3 "),
        "{left:?}"
    );
}

/// Whatever write a repair dies at, nothing that was right is wrong, and the next one finishes.
#[test]
fn a_repair_that_dies_at_any_write_does_no_harm() {
    let Pair {
        origin: good,
        second,
        ..
    } = pair_at_level(1);
    let mut steps = 0;
    for from in [Arc::clone(&good), pair_at_level(19).origin] {
        for dies_after in 0.. {
            let origin = clone_of(&good);
            hit(&origin, &second, 2);
            let manifest = layer::read_manifest(origin.as_ref(), &second).unwrap();
            for object in [
                names::meta(&manifest.meta.digest),
                names::chunks(&manifest.chunks.digest),
                names::tag(&tag("2")),
            ] {
                origin.tamper(|objects| drop(objects.remove(&object)));
            }
            let watched = WatchedOrigin::dying_after(&origin, dies_after);
            let there = Some(Arc::clone(&from) as Arc<dyn Origin>);
            let died = repair(&watched, there, &tagged("2"), &|_, _| ()).is_err();
            let found = faults(&origin, "1");
            // Its bundle may be ahead of its placement, and is right then.
            let hit = found.iter().filter(|f| !f.starts_with("bundles/"));
            assert!(hit.count() <= 1 && found.len() <= 2, "{found:?}");
            let now = fsck_origin::fsck(origin.as_ref(), true, &|_, _| ()).unwrap();
            let named = |what: &str| now.damage.iter().any(|d| d.what.contains(what));
            assert!(!named("magic") && !named("JSON"), "{:?}", now.damage);
            repaired(origin.as_ref(), &from, "2");
            for version in ["1", "2"] {
                assert_eq!(faults(&origin, version), [""; 0], "{dies_after}");
            }
            steps += 1;
            if !died {
                break;
            }
        }
    }
    assert!(steps >= 10, "only {steps} steps");
}

proptest::proptest! {
    #![proptest_config(cases(40))]
    /// Any damage to any objects: after a repair of both layers from a good copy, everything is right.
    #[test]
    fn random_damage_is_mended(seed in proptest::prelude::any::<u64>(), hits in 1usize..6) {
        let Pair { origin, first, second } = shared_pair();
        let good = clone_of(&origin);
        let mut rng = Rng::new(seed);
        for _ in 0..hits {
            let all = objects(&origin, "");
            let object = rng.pick(&all);
            damage(&origin, &object, rng.pick(&KINDS), &mut rng);
        }
        for (layer, version) in [(first, "1"), (second, "2")] {
            let report = repaired(origin.as_ref(), &good, version);
            proptest::prop_assert_eq!(report.left, vec![]);
            proptest::prop_assert_eq!(report.layer, layer);
        }
        for version in ["1", "2"] {
            proptest::prop_assert_eq!(faults(&origin, version), Vec::<String>::new());
        }
        let watched = WatchedOrigin::new(&origin);
        repaired(&watched, &good, "2");
        repaired(&watched, &good, "1");
        proptest::prop_assert_eq!(watched.writes(), 0);
    }
}

/// Built once: the cases take a copy.
fn shared_pair() -> Pair {
    static PAIR: std::sync::OnceLock<Pair> = std::sync::OnceLock::new();
    let pair = PAIR.get_or_init(pair);
    Pair {
        origin: clone_of(&pair.origin),
        first: pair.first,
        second: pair.second,
    }
}

#[test]
fn a_layer_can_be_named_by_its_digest() {
    let Pair { origin, first, .. } = pair();
    let good = clone_of(&origin);
    origin.tamper(|objects| drop(objects.remove(&names::manifest(&first))));
    let from = Some(good as Arc<dyn Origin>);
    let report = repair(origin.as_ref(), from, &LayerRef::Layer(first), &|_, _| ()).unwrap();
    assert_eq!(report.objects_written, [names::manifest(&first)]);
    assert_eq!(faults(&origin, "1"), [""; 0]);
}
