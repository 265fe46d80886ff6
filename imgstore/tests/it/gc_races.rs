//! A collector between any two calls of a publisher, and a publisher between any two calls of a collector.
//!
//! Every pair is tried at every call, with everything on the origin so old that only the protocol protects it. Whoever
//! meets the other in the middle may give way; what is tagged afterwards is whole, always.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
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

#[test]
fn collecting_between_any_two_calls_of_a_publisher() {
    assert!(at_every_call(build, gc) > 25);
    assert!(at_every_call(build_again, gc) > 25);
}

/// Mutations, seen red: a publisher that does not read the records after it wrote its lease; no second look.
#[test]
fn publishing_between_any_two_calls_of_a_collector() {
    assert!(at_every_call(gc, build) > 25);
    assert!(at_every_call(gc, build_again) > 25);
}

/// Mutations, seen red: tagging without a lease; no second look; records that are not read.
#[test]
fn collecting_between_any_two_calls_of_tag_and_untag_and_the_other_way_round() {
    for action in [tag_untagged as Action, rename] {
        at_every_call(action, gc);
        at_every_call(gc, action);
    }
}

/// Both are safe side by side, but one gives way. Mutation, seen red: a collector that does not look for other records.
#[test]
fn two_collectors_and_two_publishers() {
    at_every_call(gc, gc);
    at_every_call(build, build_again);
    let origin = copy_of(&start());
    let gave_way = Arc::new(AtomicUsize::new(0));
    let (free, count) = (Arc::clone(&origin), Arc::clone(&gave_way));
    let gate = Gate::new(Arc::clone(&origin) as _, move |call| {
        if call.object.starts_with("manifests/") && call.writes && !gc(&*free) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    });
    assert!(gc(&gate));
    assert_eq!(
        gave_way.load(Ordering::SeqCst),
        1,
        "one manifest is removed"
    );
}

/// A build that stops before it publishes its first object, and goes on when it is told to.
fn stopped_build(origin: Arc<MemOrigin>, go_on: Receiver<()>, stopped: Sender<()>) {
    let stops = Mutex::new(Some((go_on, stopped)));
    let gate = Gate::new(origin, move |call| {
        if call.writes
            && call.object.starts_with("packs/")
            && let Some((go_on, stopped)) = stops.lock().unwrap().take()
        {
            stopped.send(()).unwrap();
            go_on.recv().unwrap();
        }
        Ok(())
    });
    publish(&gate, 0b0_0111, "new").unwrap();
}

/// A publisher claims what it reuses between the collector's first look and its record, and finishes at any call of the
/// second look. It saw no record, so only the second look can save what it reused.
///
/// Mutations, seen red: no second look; tags read before leases.
#[test]
fn a_publisher_that_finishes_during_the_second_look() {
    let start = start();
    let mut at = 0;
    loop {
        let origin = copy_of(&start);
        let (go_on, told) = channel();
        let (says_stopped, stopped) = channel();
        let building = Arc::clone(&origin);
        let begin = Mutex::new(Some(move || {
            let build = std::thread::spawn(move || stopped_build(building, told, says_stopped));
            stopped.recv().unwrap();
            build
        }));
        let build = Arc::new(Mutex::new(None));
        let begun = Arc::clone(&build);
        let (records, calls) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&calls);
        let gate = Gate::new(Arc::clone(&origin) as _, move |call| {
            if call.writes && call.object.starts_with("gc/record-") {
                if records.fetch_add(1, Ordering::SeqCst) == 1 {
                    let begin = begin.lock().unwrap().take().unwrap();
                    *begun.lock().unwrap() = Some(begin());
                }
            } else if records.load(Ordering::SeqCst) == 2
                && counted.fetch_add(1, Ordering::SeqCst) == at
            {
                go_on.send(()).unwrap();
                begun.lock().unwrap().take().unwrap().join().unwrap();
            }
            Ok(())
        });
        assert!(gc(&gate));
        drop(gate);
        let calls = calls.load(Ordering::SeqCst);
        if at >= calls {
            assert!(calls > 10, "{calls}");
            // It was never told to go on, and ends with an error of its own thread.
            let build = build.lock().unwrap().take();
            assert!(build.is_some_and(|b| b.join().is_err()));
            return;
        }
        let when = format!("finished before call {at} of {calls}");
        tags_are_right(&*origin, &when);
        let tags = crate::collected::tags(&*origin);
        assert!(tags.contains_key("base/t:new"), "{when}");
        at += 1;
    }
}
