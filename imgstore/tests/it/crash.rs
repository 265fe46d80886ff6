//! An origin that stops for ever after the n-th write, for every n: publishing, naming, collecting and repairing.
//!
//! A write that was under way may have been done or not: both are tried. Afterwards a reader sees the old state or the
//! new one, doing it again succeeds, and a collection takes what was left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use imgstore::ids::LayerRef;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::lease::pin;
use imgstore::store::tags;

use crate::collected::{
    GRACE, collect, copy_of, index_is_right, needs, objects, publish, tag, tags as tags_of,
    tags_are_right,
};
use crate::gate::{Gate, dead};

type Action = fn(&dyn Origin) -> Result<(), String>;

fn text<T, E: std::fmt::Display>(result: Result<T, E>) -> Result<(), String> {
    result.map(drop).map_err(|e| e.to_string())
}

fn build(origin: &dyn Origin) -> Result<(), String> {
    text(publish(origin, 0b0_1110, "new"))
}

/// A tag that points to another layer already.
fn rebuild(origin: &dyn Origin) -> Result<(), String> {
    text(publish(origin, 0b1_0110, "kept"))
}

/// The same layer again, of which a pack and the placement are damaged.
fn repair(origin: &dyn Origin) -> Result<(), String> {
    text(publish(origin, 0b0_0001, "damaged"))
}

fn name(origin: &dyn Origin) -> Result<(), String> {
    let kept = LayerRef::Tag(tag("kept"));
    text(tags::tag(origin, &kept, &tag("named"), Duration::ZERO))
}

fn untag(origin: &dyn Origin) -> Result<(), String> {
    match tags::untag(origin, &tag("kept")) {
        // Done before.
        Err(tags::TagError::Layer(e)) if e.to_string().starts_with("no layer") => Ok(()),
        other => text(other),
    }
}

fn pin(origin: &dyn Origin) -> Result<(), String> {
    let kept = LayerRef::Tag(tag("kept"));
    text(pin::create(origin, &[kept], GRACE, Duration::ZERO))
}

fn gc(origin: &dyn Origin) -> Result<(), String> {
    text(collect(origin, Duration::ZERO))
}

/// A tagged layer, one whose tag is gone, and one that is damaged (only for [`repair`], the others would not accept it).
fn start(with_damage: bool) -> MemOrigin {
    let origin = MemOrigin::default();
    publish(&origin, 0b0_0011, "kept").unwrap();
    publish(&origin, 0b0_1100, "gone").unwrap();
    tags::untag(&origin, &tag("gone")).unwrap();
    if with_damage {
        let layer = publish(&origin, 0b0_0001, "damaged")
            .unwrap()
            .layer
            .to_hex();
        let pack = needs(&origin, &layer)
            .into_iter()
            .find(|o| o.starts_with("packs/"))
            .unwrap();
        tags::untag(&origin, &tag("damaged")).unwrap();
        tags::untag(&origin, &tag("kept")).unwrap();
        origin.tamper(|all| {
            let middle = all[&pack].len() / 3;
            all.get_mut(&pack).unwrap()[middle] ^= 1;
        });
    }
    origin
}

/// Runs `action` until write number `n`, which is done or not; the number of writes it came to.
fn until(origin: &Arc<MemOrigin>, action: Action, n: usize, done: bool) -> usize {
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&writes);
    let gate = Gate::new(Arc::clone(origin) as _, move |call| {
        let so_far = counted.load(Ordering::SeqCst);
        if so_far > n || (so_far == n && call.writes && !done) {
            counted.store(so_far.max(n + 1), Ordering::SeqCst);
            return Err::<(), OriginError>(dead(call.object));
        }
        if call.writes {
            counted.store(so_far + 1, Ordering::SeqCst);
        }
        Ok(())
    });
    let result = action(&gate);
    let writes = writes.load(Ordering::SeqCst);
    // Cleaning up at the end may fail without making the whole fail.
    assert!(result.is_ok() || writes > n, "{result:?}");
    writes
}

fn at_every_write(action: Action, with_damage: bool) -> usize {
    let start = start(with_damage);
    let whole = copy_of(&start);
    action(&*whole).unwrap();
    let (old, new) = (tags_of(&start), tags_of(&*whole));
    let mut n = 0;
    loop {
        let mut writes = 0;
        for done in [false, true] {
            let when = format!("write {n}, done: {done}");
            let origin = copy_of(&start);
            writes = until(&origin, action, n, done);
            let seen = tags_of(&*origin);
            assert!(seen == old || seen == new, "{when}: {seen:?}");
            tags_are_right(&*origin, &when);
            // A collector that died has a record, which runs out.
            make_old(&origin, "gc/");
            action(&*origin).unwrap_or_else(|e| panic!("{when}: again: {e}"));
            assert_eq!(tags_of(&*origin), new, "{when}: again");
            tags_are_right(&*origin, &when);
            index_is_right(&*origin);
            // The process that died held leases, which run out.
            make_old(&origin, "leases/");
            collect(&*origin, Duration::ZERO).unwrap();
            tags_are_right(&*origin, &when);
            let layers = tags_of(&*origin).into_values();
            let needed = layers.flat_map(|l| needs(&*origin, &l.to_hex())).collect();
            assert_eq!(
                objects(&*origin),
                needed,
                "{when}: what was left behind is gone"
            );
            assert_eq!(origin.list("gc/").unwrap(), [""; 0], "{when}");
            assert_eq!(origin.list("leases/").unwrap(), [""; 0], "{when}");
        }
        n += 1;
        if writes < n {
            return n;
        }
    }
}

fn make_old(origin: &MemOrigin, folder: &str) {
    for name in origin.list(folder).unwrap() {
        origin.age(&name, std::time::SystemTime::UNIX_EPOCH);
    }
}

/// Mutations, seen red: the tag before everything else; a lease that never runs out.
#[test]
fn publishing_stops_after_any_write() {
    assert!(at_every_write(build, false) > 8);
    assert!(at_every_write(rebuild, false) > 8);
}

#[test]
fn repairing_stops_after_any_write() {
    assert!(at_every_write(repair, true) > 8);
}

#[test]
fn naming_and_leasing_stop_after_any_write() {
    assert!(at_every_write(name, false) > 3);
    assert!(at_every_write(untag, false) > 2);
    assert!(at_every_write(pin, false) > 0);
}

#[test]
fn collecting_stops_after_any_write() {
    assert!(at_every_write(gc, false) > 8);
}

/// In which order a collected layer goes: at no time is there a manifest whose placement, metadata or packs are gone.
///
/// Mutation, seen red: packs first.
#[test]
fn what_names_others_goes_first() {
    let start = start(false);
    let origin = copy_of(&start);
    let seen = Arc::clone(&origin);
    let gate = Gate::new(Arc::clone(&origin) as _, move |call| {
        if call.writes && !call.object.starts_with("gc/") {
            for manifest in seen.list("manifests/").unwrap() {
                let missing = needs(&*seen, &manifest[13..77])
                    .difference(&objects(&*seen))
                    .count();
                assert_eq!(missing, 0, "before {}", call.object);
            }
        }
        Ok(())
    });
    assert!(collect(&gate, Duration::ZERO).unwrap().removed.len() > 5);
}
