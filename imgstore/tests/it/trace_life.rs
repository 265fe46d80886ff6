//! Published traces live as long as somebody has a use for them, and go where their layers go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use imgstore::format::names;
use imgstore::format::trace::{Blocks, Trace};
use imgstore::ids::{Digest, LayerRef};
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::copy::{CopyReport, copy};
use imgstore::store::{tags, trace};

use crate::collected::{Aged, GRACE, collect, publish, tag, would_remove};

fn traced(layer: Digest, first: u32) -> Trace {
    Trace::new([(layer, Blocks { first, count: 4 })])
}

fn traces(origin: &dyn Origin) -> BTreeSet<String> {
    origin.list("traces/").unwrap().into_iter().collect()
}

fn object(trace: &Trace) -> String {
    names::trace(&trace.digest())
}

/// Turned red by: a survey that reads no labels (the trace that only a tag names goes).
#[test]
fn a_trace_is_collected_when_no_tag_names_it_and_its_layers_are_gone() {
    let place = Aged::mem();
    let origin = place.origin();
    let origin = origin.as_ref();
    let (kept, gone) = (
        publish(origin, 0b00011, "kept").unwrap().layer,
        publish(origin, 0b01100, "gone").unwrap().layer,
    );
    let write = |trace: &Trace| origin.replace(&object(trace), &trace.to_bytes()).unwrap();
    // Of a layer that stays, though no tag names it any more; of one that goes; of both; of one that goes, named by a tag; damaged.
    let of_kept = traced(kept, 0);
    let of_gone = traced(gone, 0);
    let of_both = Trace::merge([&traced(gone, 8), &traced(kept, 8)]);
    let foreign = traced(gone, 16);
    trace::publish(origin, &tag("gone"), &of_gone).unwrap();
    trace::publish(origin, &tag("kept"), &foreign).unwrap();
    write(&of_kept);
    write(&of_both);
    let damaged = names::trace(&Digest::of(b"damaged"));
    origin.replace(&damaged, b"{}").unwrap();
    let mine = "traces/00/README";
    origin.replace(mine, b"not ours").unwrap();
    place.pass(2 * GRACE);
    let everything = traces(origin);
    assert_eq!(everything.len(), 6);
    // A damaged one is of no use to anybody; the others have one while the layers are there.
    assert_eq!(would_remove(origin, GRACE), std::slice::from_ref(&damaged));
    tags::untag(origin, &tag("gone")).unwrap();
    place.pass(2 * GRACE);
    let young = traced(gone, 24);
    write(&young);
    let report = collect(origin, GRACE).unwrap();
    let removed: BTreeSet<String> = report
        .removed
        .iter()
        .map(|d| d.object.clone())
        .filter(|name| name.starts_with("traces/"))
        .collect();
    assert_eq!(removed, BTreeSet::from([object(&of_gone), damaged]));
    let left = [
        object(&of_kept),
        object(&of_both),
        object(&foreign),
        object(&young),
    ];
    let mut expected = BTreeSet::from(left);
    expected.insert(mine.to_owned());
    assert_eq!(traces(origin), expected);
    place.pass(2 * GRACE);
    collect(origin, GRACE).unwrap();
    expected.remove(&object(&young));
    assert_eq!(traces(origin), expected);
    assert_eq!(would_remove(origin, Duration::ZERO), [""; 0]);
}

fn copied(from: &Arc<MemOrigin>, to: &dyn Origin) -> CopyReport {
    let refs = [LayerRef::Tag(tag("t"))];
    copy(Arc::clone(from) as _, to, &refs, &|_, _| ()).unwrap()
}

/// Turned red by: a copy without the trace.
#[test]
fn a_copy_brings_the_trace_that_its_tag_names() {
    let from = Arc::new(MemOrigin::default());
    let layer = publish(from.as_ref(), 0b00111, "t").unwrap().layer;
    let trace = traced(layer, 0);
    trace::publish(from.as_ref(), &tag("t"), &trace).unwrap();
    let to = MemOrigin::default();
    let report = copied(&from, &to);
    assert_eq!((report.traces_copied, report.traces_lost), (1, 0));
    assert_eq!(trace::read(&to, &trace.digest()).unwrap(), trace);
    let report = copied(&from, &to);
    assert_eq!((report.traces_copied, report.bytes_copied), (0, 0));
    assert!(!report.layers[0].changed);
    // Damaged or gone on the target: brought again.
    for damage in [Some(b"{}".to_vec()), None] {
        to.tamper(|objects| match damage {
            Some(bytes) => drop(objects.insert(object(&trace), bytes)),
            None => drop(objects.remove(&object(&trace))),
        });
        assert_eq!(copied(&from, &to).traces_copied, 1);
        assert_eq!(trace::read(&to, &trace.digest()).unwrap(), trace);
    }
    // Damaged or gone on the source: said, and the layer comes all the same.
    for damage in [Some(b"{}".to_vec()), None] {
        from.tamper(|objects| match damage {
            Some(bytes) => drop(objects.insert(object(&trace), bytes)),
            None => drop(objects.remove(&object(&trace))),
        });
        let to = MemOrigin::default();
        let report = copied(&from, &to);
        assert_eq!((report.traces_copied, report.traces_lost), (0, 1));
        assert_eq!(traces(&to), BTreeSet::new());
        assert_eq!(crate::collected::tags(&to).len(), 1);
    }
}
