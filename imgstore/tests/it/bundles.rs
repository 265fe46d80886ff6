//! Bundles: a mount by a tag costs two requests, and a bundle that is missing, damaged or old costs requests and nothing else.

use std::sync::Arc;

use imgstore::format::bundle::{BUNDLE_META_MAX, Bundle, encode};
use imgstore::format::names;
use imgstore::ids::Digest;
use imgstore::origin::Origin;
use imgstore::origin::counting::{CountingOrigin, Traffic};
use imgstore::origin::mem::MemOrigin;
use imgstore::store::bundle::{self, State};
use imgstore::store::copy::copy;
use imgstore::store::repair::repair;
use imgstore::store::{layer, tags};
use std::time::Duration;

use crate::build::tag;
use crate::random_tree::Rng;
use crate::two_origins::{KINDS, Pair, clone_of, damage, faults, pair, pair_at_level, tagged};

/// What a mount reads of a layer that its host does not know; the bytes of manifest and metadata, and the requests.
fn mount(origin: &Arc<MemOrigin>, version: &str) -> (layer::Layer, Vec<u8>, u64) {
    let traffic = Arc::new(Traffic::default());
    let inner = Arc::clone(origin) as Arc<dyn Origin>;
    let origin = CountingOrigin::new(inner, Arc::clone(&traffic));
    let tag = layer::read_tag(&origin, &tag(version)).unwrap();
    let described = bundle::describe(&origin, &tag.layer, tag.bundled).unwrap();
    let meta = described
        .meta
        .unwrap_or_else(|| layer::read_meta(&origin, &described.layer.manifest).unwrap());
    (described.layer, meta, traffic.requests())
}

fn without_bundle(origin: &MemOrigin, digest: &Digest) {
    origin.tamper(|objects| drop(objects.remove(&names::bundle(digest)).unwrap()));
}

#[test]
fn a_layer_is_described_in_two_requests_and_without_a_bundle_in_four() {
    let Pair { origin, second, .. } = pair();
    let (layer, meta, requests) = mount(&origin, "2");
    assert_eq!(requests, 2);
    let there = layer::open(origin.as_ref(), &second).unwrap();
    assert!(layer.manifest == there.manifest && layer.placement == there.placement);
    assert!(meta == layer::read_meta(origin.as_ref(), &there.manifest).unwrap());
    // An origin of an earlier version: the tag does not say so, and nobody asks.
    without_bundle(&origin, &second);
    let object = names::tag(&tag("2"));
    origin.tamper(|objects| {
        let text = String::from_utf8(objects[&object].clone()).unwrap();
        let old = text.replace(r#""bundled":true,"#, "");
        assert_ne!(old, text);
        objects.insert(object.clone(), old.into_bytes());
    });
    assert_eq!(faults(&origin, "2"), [""; 0]);
    let (again, old_meta, requests) = mount(&origin, "2");
    assert_eq!(requests, 4);
    assert!(again.placement == layer.placement && old_meta == meta);
    // A name that is given later says what is true then.
    for bundled in [false, true] {
        if bundled {
            let whole = pair().origin.snapshot();
            let object = names::bundle(&second);
            origin.tamper(|all| drop(all.insert(object.clone(), whole[&object].clone())));
        }
        tags::tag(origin.as_ref(), &tagged("2"), &tag("3"), Duration::ZERO).unwrap();
        let said = layer::read_tag(origin.as_ref(), &tag("3")).unwrap();
        assert_eq!(said.bundled, bundled);
    }
}

/// Damaged in every way, or the one of another layer: the parts are read one by one, `verify` tells, `repair` writes it anew.
#[test]
fn a_bad_bundle_costs_requests_and_is_told_and_mended() {
    let Pair {
        origin: good,
        second,
        ..
    } = pair();
    let (right, right_meta, _) = mount(&good, "2");
    let object = names::bundle(&second);
    let mut rng = Rng::new(5);
    for kind in KINDS.iter().cycle().take(200) {
        let origin = clone_of(&good);
        damage(&origin, &object, kind, &mut rng);
        if origin.snapshot() == good.snapshot() {
            continue;
        }
        let (layer, meta, requests) = mount(&origin, "2");
        assert!(layer.manifest == right.manifest && layer.placement == right.placement);
        assert!(meta == right_meta);
        assert_eq!(requests, 5, "{kind}");
        let said = faults(&origin, "2").join("\n");
        assert!(said.contains(&object), "{kind}: {said}");
        let report = repair(origin.as_ref(), None, &tagged("2"), &|_, _| ()).unwrap();
        assert_eq!(
            report.objects_written,
            std::slice::from_ref(&object),
            "{kind}"
        );
        assert_eq!(report.left, []);
        assert!(origin.snapshot()[&object] == good.snapshot()[&object]);
        let report = repair(origin.as_ref(), None, &tagged("2"), &|_, _| ()).unwrap();
        assert_eq!(report.objects_written, [""; 0], "{kind}: a second time");
    }
}

/// A placement that changes takes its bundle along. Turned red by: `bundle::state` that does not compare placements (and a repair that writes
/// the placement first, in `repair::a_repair_that_dies_…`).
#[test]
fn bundles_follow_their_placements() {
    let Pair {
        origin,
        first,
        second,
    } = pair_at_level(1);
    let from = pair_at_level(19);
    // A frame that only another origin has, otherwise compressed: both layers get other placements.
    let loaded = layer::open(origin.as_ref(), &second).unwrap();
    let (pack, range) = loaded.placement.find(2).unwrap();
    let object = names::pack(&pack.digest);
    let at = usize::try_from(range.start + 20).unwrap();
    let before = clone_of(&origin);
    origin.tamper(|objects| objects.get_mut(&object).unwrap()[at] ^= 4);
    let theirs = Some(Arc::clone(&from.origin) as Arc<dyn Origin>);
    let report = repair(origin.as_ref(), theirs, &tagged("2"), &|_, _| ()).unwrap();
    assert_eq!(report.layers_healed, [first]);
    for (digest, version) in [(first, "1"), (second, "2")] {
        let layer = layer::open(origin.as_ref(), &digest).unwrap();
        let old = layer::open(before.as_ref(), &digest).unwrap();
        assert_ne!(layer.placement, old.placement);
        assert_eq!(
            bundle::state(origin.as_ref(), &layer).unwrap(),
            State::Right
        );
        assert_eq!(mount(&origin, version).2, 2);
        // As after a crash between placement and bundle.
        let object = names::bundle(&digest);
        let was = before.snapshot()[&object].clone();
        origin.tamper(|all| drop(all.insert(object.clone(), was)));
        let said = faults(&origin, version).join("\n");
        assert!(said.contains("expected the layer's placement"), "{said}");
        let report = repair(origin.as_ref(), None, &tagged(version), &|_, _| ()).unwrap();
        assert_eq!(report.objects_written, [object]);
    }
    // Another origin that has one of the files already: its own placement.
    let to = pair_at_level(19).origin;
    to.tamper(|objects| objects.retain(|name, _| !name.contains(&second.to_hex())));
    copy(origin, to.as_ref(), &[tagged("2")], &|_, _| ()).unwrap();
    let layer = layer::open(to.as_ref(), &second).unwrap();
    assert_eq!(bundle::state(to.as_ref(), &layer).unwrap(), State::Right);
    assert_eq!(mount(&to, "2").2, 2);
    // One that is gone is brought again.
    without_bundle(&to, &second);
    let report = copy(before, to.as_ref(), &[tagged("2")], &|_, _| ()).unwrap();
    assert!(report.layers[0].changed);
    assert_eq!(faults(&to, "2"), [""; 0]);
}

/// What is too large for a bundle has none, and a bundle has nothing behind its end.
#[test]
fn bundles_are_bounded() {
    let Pair { origin, second, .. } = pair();
    let object = names::bundle(&second);
    let mut bytes = origin.fetch_all(&object, 1 << 20).unwrap();
    let whole = Bundle::parse(&bytes, &second).unwrap();
    let meta = origin
        .fetch_all(&names::meta(&whole.manifest.meta.digest), 1 << 20)
        .unwrap();
    let made = |len| encode(&whole.manifest_bytes, &whole.placement, &meta, len);
    assert!(made(whole.manifest.meta.size).unwrap() == bytes);
    assert!(made(BUNDLE_META_MAX).is_some());
    assert_eq!(made(BUNDLE_META_MAX + 1), None);
    let large = vec![0; 8 << 20];
    assert_eq!(
        encode(&whole.manifest_bytes, &whole.placement, &large, 4096),
        None
    );
    bytes.push(0);
    let error = Bundle::parse(&bytes, &second).unwrap_err().to_string();
    assert!(error.contains("digest of a bundle"), "{error}");
    let digest = *Digest::of(&bytes[44..]).as_bytes();
    bytes[12..44].copy_from_slice(&digest);
    let error = Bundle::parse(&bytes, &second).unwrap_err().to_string();
    assert!(error.contains("end of a bundle"), "{error}");
    for len in 0..bytes.len() - 1 {
        Bundle::parse(&bytes[..len], &second).unwrap_err();
    }
}
