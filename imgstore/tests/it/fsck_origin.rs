//! Checking a whole origin: what is damaged is told once with its extent, what nothing needs is told apart.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use imgstore::build::BuildOptions;
use imgstore::format::names;
use imgstore::origin::Origin;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::fsck_origin::{FsckReport, fsck, mend};
use imgstore::store::layer;

use crate::build::{build_as, tag};
use crate::random_tree::{Rng, Spool};
use crate::two_origins::{KINDS, Pair, clone_of, damage, faults, objects, pair, tree_of};
use crate::watched_origin::WatchedOrigin;

fn checked(origin: &dyn Origin, deep: bool) -> FsckReport {
    fsck(origin, deep, &|_, _| ()).unwrap()
}

#[test]
fn a_right_origin_is_told_right() {
    let Pair { origin, .. } = pair();
    let watched = WatchedOrigin::new(&origin);
    let report = checked(&watched, true);
    assert_eq!((report.tags, report.layers, report.packs), (2, 2, 2));
    assert_eq!(report.segments_right, 6);
    assert_eq!((report.damage, report.orphans), (vec![], vec![]));
    assert!(report.listed && report.damaged_layers.is_empty());
    assert_eq!(checked(&watched, false).segments_right, 0);
    assert_eq!(watched.writes(), 0);
    let empty = checked(&MemOrigin::default(), true);
    assert_eq!((empty.damage, empty.tags), (vec![], 0));
}

/// Every object damaged in every way is named by a deep check, with what was expected and found; without `deep`, all but
/// changed bytes in packs. Red when `read_pack` does not hash (the seek table), or `index` is left out.
#[test]
fn every_damage_is_named() {
    let Pair { origin: good, .. } = pair();
    let mut rng = Rng::new(3);
    let mut cases = 0;
    for object in objects(&good, "") {
        for kind in KINDS {
            let origin = clone_of(&good);
            damage(&origin, &object, kind, &mut rng);
            if origin.snapshot() == good.snapshot() {
                continue; // the zeros were zeros
            }
            let same = |version| {
                let read = |origin| layer::read_tag(origin, &tag(version)).map(|t| t.layer).ok();
                read(origin.as_ref()) == read(good.as_ref())
            };
            if object.starts_with("tags/") && kind == "flip" && same("1") && same("2") {
                continue; // in a date, say
            }
            cases += 1;
            // Another tag in its place, or none at all, is what a user may have wanted: only the index tells.
            // A placement with other numbers leads to the wrong place of a pack.
            let instead = match object.split('/').next().unwrap() {
                "tags" => names::INDEX,
                "placements" => "packs/",
                _ => "nothing",
            };
            let says = |report: &FsckReport| {
                report.damage.iter().any(|d| {
                    (d.object == object || d.object.starts_with(instead))
                        && d.what.contains("expected")
                        && d.what.contains("found")
                })
            };
            let report = checked(origin.as_ref(), true);
            assert!(says(&report), "{kind} {object}: {report:?}");
            let quick = checked(origin.as_ref(), false);
            let in_packs = object.starts_with("packs/") || object.starts_with("placements/");
            if !in_packs || kind == "cut" || kind == "missing" {
                assert!(says(&quick), "{kind} {object}: {quick:?}");
            }
        }
    }
    assert!(cases > 50, "only {cases} cases");
}

/// Layers that share a damaged pack are all listed; a part of one pack is one damage.
#[test]
fn damaged_layers_are_those_that_need_the_damage() {
    let Pair {
        origin,
        first,
        second,
    } = pair();
    let loaded = layer::open(origin.as_ref(), &second).unwrap();
    let (pack, _) = loaded.placement.find(5).unwrap();
    let only_second = names::pack(&pack.digest);
    let (pack, _) = loaded.placement.find(0).unwrap();
    let both = names::pack(&pack.digest);
    assert_ne!(only_second, both);
    let good = origin.snapshot();
    for (object, hit) in [(&only_second, vec![second]), (&both, vec![first, second])] {
        for deep in [false, true] {
            origin.tamper(|objects| drop(objects.remove(object)));
            let report = checked(origin.as_ref(), deep);
            let mut hit = hit.clone();
            hit.sort();
            assert_eq!(report.damaged_layers, hit);
            assert_eq!(report.damage.len(), 1);
            origin.tamper(|objects| *objects = good.clone());
        }
    }
}

/// Parts without a tag are orphans and no damage; they are listed, never removed.
#[test]
fn what_nothing_needs_is_listed_and_stays() {
    let Pair { origin, second, .. } = pair();
    let before = origin.snapshot();
    origin.tamper(|objects| {
        objects.remove(&names::tag(&tag("2")));
        objects.remove(&names::placement(&second));
        objects.insert("packs/ab/foreign".to_owned(), vec![1]);
        objects.insert("tmp/123-0".to_owned(), vec![1]);
    });
    imgstore::store::tags::rebuild_index(origin.as_ref()).unwrap();
    origin.age("tmp/123-0", SystemTime::now() - Duration::from_hours(49));
    let report = checked(origin.as_ref(), true);
    assert_eq!(report.damage, []);
    assert_eq!(report.stale_temporaries, ["tmp/123-0"]);
    assert!(report.orphans.contains(&"packs/ab/foreign".to_owned()));
    assert!(report.orphans.contains(&names::manifest(&second)));
    // Its pack, metadata, chunk table, bundle and manifest, and the foreign one.
    assert_eq!(report.orphans.len(), 6, "{:?}", report.orphans);
    mend(origin.as_ref(), &report).unwrap();
    assert_eq!(origin.snapshot().len(), before.len());
    origin.age("tmp/123-0", SystemTime::now());
    assert_eq!(checked(origin.as_ref(), true).stale_temporaries, [""; 0]);
}

/// What the origin can mend itself: the index, and places of segments that another pack holds. Red when `mend` skips either.
#[test]
fn the_index_and_placements_are_mended() {
    let Pair {
        origin,
        first,
        second,
    } = pair();
    let mut spool = Spool::new();
    // A second copy of all segments, as a repack makes it.
    let more = Arc::new(MemOrigin::default());
    build_as(
        &tree_of(&mut spool, 0..9),
        "more",
        more.as_ref(),
        &BuildOptions::default(),
    );
    let theirs = more.snapshot();
    origin.tamper(|objects| {
        for (name, bytes) in theirs {
            objects.entry(name).or_insert(bytes);
        }
    });
    let report = checked(origin.as_ref(), true);
    assert_eq!(report.damage.len(), 1, "the index: {:?}", report.damage);
    assert_eq!(mend(origin.as_ref(), &report).unwrap(), [names::INDEX]);
    assert_eq!(checked(origin.as_ref(), true).damage, []);

    let loaded = layer::open(origin.as_ref(), &first).unwrap();
    let pack = names::pack(&loaded.placement.packs[0].digest);
    origin.tamper(|objects| drop(objects.remove(&pack)));
    origin.tamper(|objects| drop(objects.remove(&names::placement(&second))));
    let report = checked(origin.as_ref(), false);
    let mut hit = [first, second];
    hit.sort();
    assert_eq!(report.damaged_layers, hit);
    let written = mend(origin.as_ref(), &report).unwrap();
    assert!(written.contains(&names::placement(&first)), "{written:?}");
    let report = checked(origin.as_ref(), true);
    assert_eq!((report.damage, report.damaged_layers), (vec![], vec![]));
    assert_eq!(
        (faults(&origin, "1"), faults(&origin, "2")),
        (vec![], vec![])
    );
}

/// An origin that cannot be listed is checked by its index.
#[test]
fn without_lists_the_index_says_what_there_is() {
    let Pair { origin, first, .. } = pair();
    origin.tamper(|objects| drop(objects.remove(&names::placement(&first))));
    let report = checked(&WatchedOrigin::without_lists(&origin), true);
    assert_eq!((report.tags, report.listed), (2, false));
    assert_eq!(report.damaged_layers, [first]);
}

#[test]
fn a_directory_is_checked_with_its_temporary_files() {
    let dir = tempfile::tempdir().unwrap();
    let origin = DirOrigin::create_root(dir.path()).unwrap();
    let mut spool = Spool::new();
    build_as(
        &tree_of(&mut spool, 0..2),
        "1",
        &origin,
        &BuildOptions::default(),
    );
    let stale = std::fs::File::create(dir.path().join("tmp/old")).unwrap();
    stale
        .set_modified(SystemTime::now() - Duration::from_hours(50))
        .unwrap();
    let report = checked(&origin, true);
    assert_eq!((report.damage, report.orphans), (vec![], vec![]));
    assert_eq!(report.stale_temporaries, ["tmp/old"]);
}
