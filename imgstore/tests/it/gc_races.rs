//! A collector between any two calls of a publisher, and a publisher between any two calls of a collector.
//!
//! Every pair is tried at every call, with everything on the origin so old that only the protocol protects it. Whoever
//! meets the other in the middle may give way; what is tagged afterwards is whole, always.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use imgstore::ids::LayerRef;
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::gc::GcError;
use imgstore::store::tags;

use crate::collected::{
    build_gave_way, collect, copy_of, index_is_right, publish, tag, tag_gave_way, tags_are_right,
};
use crate::gate::Gate;

/// Something that is done to an origin; whether it was done, or gave way.
type Action = fn(&dyn Origin) -> bool;

/// Builds a layer that has segments in a pack which nothing tagged needs.
fn build(origin: &dyn Origin) -> bool {
    let built = publish(origin, 0b0_0111, "new");
    if let Err(error) = &built {
        assert!(build_gave_way(error), "{error}");
    }
    built.is_ok()
}

/// Builds the layer again that lost its tag: every object is there already.
fn build_again(origin: &dyn Origin) -> bool {
    let built = publish(origin, 0b0_0011, "again");
    if let Err(error) = &built {
        assert!(build_gave_way(error), "{error}");
    }
    built.is_ok()
}

/// Gives the layer that lost its tag a name, if it is still there.
fn tag_untagged(origin: &dyn Origin) -> bool {
    let (tree, _spool) = crate::collected::tree(0b0_0011);
    let other = MemOrigin::default();
    let options = crate::collected::options();
    let naming = tag("x").into();
    let layer = imgstore::build::build((&tree).into(), naming, &other, &options).unwrap();
    let reference = LayerRef::Layer(layer.layer);
    match tags::tag(origin, &reference, &tag("found"), Duration::ZERO) {
        Ok(_) => true,
        Err(tags::TagError::Layer(_) | tags::TagError::Incomplete { .. }) => true,
        Err(error) => {
            assert!(tag_gave_way(&error), "{error}");
            false
        }
    }
}

/// Gives a layer another name and takes the first away: it is never without one.
fn rename(origin: &dyn Origin) -> bool {
    let old = LayerRef::Tag(tag("kept"));
    match tags::tag(origin, &old, &tag("renamed"), Duration::ZERO) {
        Ok(_) => tags::untag(origin, &tag("kept")).is_ok(),
        // Renamed already.
        Err(tags::TagError::Layer(_)) => true,
        Err(error) => {
            assert!(tag_gave_way(&error), "{error}");
            false
        }
    }
}

fn gc(origin: &dyn Origin) -> bool {
    match collect(origin, Duration::ZERO) {
        Ok(report) => report.complete,
        Err(GcError::Running { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// One layer with a tag; one whose tag is gone, with a pack that only it has; and objects of a publisher that died.
fn start() -> MemOrigin {
    let origin = MemOrigin::default();
    publish(&origin, 0b1_1000, "kept").unwrap();
    publish(&origin, 0b0_0011, "gone").unwrap();
    tags::untag(&origin, &tag("gone")).unwrap();
    origin
}

/// Runs `inner` before call number `at` of `outer`; the calls that `outer` made.
fn between(origin: &Arc<MemOrigin>, outer: Action, at: usize, inner: Action) -> usize {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let free: Arc<MemOrigin> = Arc::clone(origin);
    let done = Arc::new(Mutex::new(None));
    let result = Arc::clone(&done);
    let gate = Gate::new(Arc::clone(origin) as _, move |_| {
        if counted.fetch_add(1, Ordering::SeqCst) == at {
            *result.lock().unwrap() = Some(inner(&*free));
        }
        Ok(())
    });
    let outer_done = outer(&gate);
    let inner_done = *done.lock().unwrap();
    assert!(
        outer_done || inner_done != Some(false),
        "both gave way at call {at}"
    );
    calls.load(Ordering::SeqCst)
}

fn at_every_call(outer: Action, inner: Action) -> usize {
    let start = start();
    let mut at = 0;
    loop {
        let origin = copy_of(&start);
        let calls = between(&origin, outer, at, inner);
        let when = format!("inner at call {at} of {calls}");
        tags_are_right(&*origin, &when);
        index_is_right(&*origin);
        // Whoever gave way succeeds now, and nothing that was needed is gone.
        assert!(outer(&*origin) && inner(&*origin), "{when}");
        tags_are_right(&*origin, &when);
        assert!(gc(&*origin), "{when}");
        tags_are_right(&*origin, &when);
        let leases = origin.list("leases/").unwrap();
        assert_eq!(leases, [""; 0], "{when}");
        assert_eq!(origin.list("gc/").unwrap(), [""; 0], "{when}");
        at += 1;
        if at > calls {
            return calls;
        }
    }
}

/// Mutations: without the claim before a build publishes, without the collector's second look, and with the lease written
/// after the records are read, a tag points to a layer whose pack is gone.
#[test]
fn collecting_between_any_two_calls_of_a_publisher() {
    assert!(at_every_call(build, gc) > 25);
    assert!(at_every_call(build_again, gc) > 25);
}

#[test]
fn publishing_between_any_two_calls_of_a_collector() {
    assert!(at_every_call(gc, build) > 25);
    assert!(at_every_call(gc, build_again) > 25);
}

/// Mutation: tagging without a lease loses the layer between the two looks; reading tags before leases loses the renamed one.
#[test]
fn collecting_between_any_two_calls_of_tag_and_untag_and_the_other_way_round() {
    for action in [tag_untagged as Action, rename] {
        at_every_call(action, gc);
        at_every_call(gc, action);
    }
}

/// Mutation: a collector that does not look for other records.
#[test]
fn two_collectors_and_two_publishers() {
    at_every_call(gc, gc);
    at_every_call(build, build_again);
}
