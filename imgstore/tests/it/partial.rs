//! A part of an origin: everything of the chosen workloads, nothing else, within its bound, verified, and an error for the rest.

use imgstore::build::BuildOptions;
use imgstore::build::partial::{PartialError, Workload, plan_part, write_part};
use imgstore::format::trace::{Blocks, Trace, segments_of};
use imgstore::ids::Digest;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::layer::{self, LayerError};

use crate::build::{base_tree, build_as, tag};
use crate::random_tree::Spool;

fn workload(name: &str, layer: Digest, firsts: &[u32]) -> Workload {
    let blocks = |first: &u32| Blocks {
        first: *first,
        count: 3,
    };
    Workload {
        name: name.to_owned(),
        trace: Trace::new(firsts.iter().map(|first| (layer, blocks(first)))),
    }
}

fn bytes(origin: &MemOrigin) -> u64 {
    let objects = origin.snapshot();
    let sizes = objects.iter().filter(|(name, _)| *name != "index.json");
    sizes
        .map(|(_, bytes)| u64::try_from(bytes.len()).unwrap())
        .sum()
}

/// Which segments of the layer can be read.
fn readable(origin: &dyn Origin, digest: &Digest) -> Vec<usize> {
    let layer = layer::open(origin, digest).unwrap();
    let mut out = Vec::new();
    for index in 0..layer.manifest.segments.len() {
        match layer::read_segment(origin, &layer, index) {
            Ok(_) => out.push(index),
            Err(LayerError::Origin(OriginError::NotFound { .. })) => {}
            Err(e) => panic!("segment {index}: {e}"),
        }
    }
    out
}

/// Mutations that turn it red: every spot kept in `partial::place` (nothing is readable); the cost of descriptions left out of the
/// plan (the part is larger than its bound).
#[test]
fn a_part_holds_the_chosen_workloads_and_nothing_else_within_its_bound() {
    let mut spool = Spool::new();
    let tree = base_tree(&mut spool, 60);
    let origin = MemOrigin::default();
    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let manifest = layer::read_manifest(&origin, &built.layer).unwrap();
    // Two that share a segment, a long one, and a small one.
    let workloads = [
        workload("a", built.layer, &[10, 300]),
        workload("b", built.layer, &[300, 500]),
        workload(
            "c",
            built.layer,
            &[0, 100, 200, 400, 600, 700, 800, 900, 1000],
        ),
        workload("d", built.layer, &[1100]),
    ];
    let plan = plan_part(&origin, &workloads).unwrap();
    assert!(plan.curve.exact && plan.curve.points.len() == 4);
    for limit in 0..4 {
        let point = &plan.curve.points[limit];
        assert_eq!(plan.curve.best(point.bytes), Some(point));
        assert_ne!(plan.curve.best(point.bytes - 1), Some(point));
        let part = MemOrigin::default();
        let written = write_part(&plan, point, &origin, &part, &|_, _| ()).unwrap();
        assert!(
            bytes(&part) <= point.bytes,
            "{} of {}",
            bytes(&part),
            point.bytes
        );
        assert!(
            bytes(&part) + 2048 >= point.bytes,
            "{} of {}",
            bytes(&part),
            point.bytes
        );
        let mut expected = Vec::new();
        for w in &point.workloads {
            let runs = workloads[*w].trace.of_layer(&built.layer);
            expected.extend(segments_of(&manifest, &runs).unwrap());
        }
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(readable(&part, &built.layer), expected);
        assert_eq!(written.segments, u64::try_from(expected.len()).unwrap());
        assert_eq!(
            layer::read_tag(&part, &tag("1")).unwrap().layer,
            built.layer
        );
        // The metadata is whole: every name can be seen.
        layer::read_meta(&part, &manifest).unwrap();
    }
}

/// Mutation: `known::find` finds nothing.
#[test]
fn a_part_grows_by_other_workloads_and_stores_nothing_twice() {
    let mut spool = Spool::new();
    let tree = base_tree(&mut spool, 60);
    let origin = MemOrigin::default();
    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let part = MemOrigin::default();
    let write = |firsts: &[u32]| {
        let plan = plan_part(&origin, &[workload("w", built.layer, firsts)]).unwrap();
        write_part(&plan, &plan.curve.points[0], &origin, &part, &|_, _| ()).unwrap()
    };
    write(&[10, 300]);
    let before = readable(&part, &built.layer);
    let more = write(&[300, 900]);
    let after = readable(&part, &built.layer);
    assert_eq!((before.len(), after.len(), more.segments), (2, 3, 2));
    assert_eq!(write(&[10, 300, 900]).bytes_stored, 0);
    assert_eq!(readable(&part, &built.layer), after);
}

/// Mutation: frames copied without a look at their digest.
#[test]
fn damage_on_the_origin_does_not_get_into_a_part() {
    let mut spool = Spool::new();
    let tree = base_tree(&mut spool, 60);
    let origin = MemOrigin::default();
    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let plan = plan_part(&origin, &[workload("w", built.layer, &[10])]).unwrap();
    origin.tamper(|objects| {
        let packs = objects
            .iter_mut()
            .filter(|(name, _)| name.starts_with("packs/"));
        for (_, bytes) in packs {
            for byte in bytes.iter_mut().step_by(100) {
                *byte ^= 1;
            }
        }
    });
    let part = MemOrigin::default();
    let failed = write_part(&plan, &plan.curve.points[0], &origin, &part, &|_, _| ());
    assert!(
        matches!(failed, Err(PartialError::Layer(LayerError::Damaged { .. }))),
        "{failed:?}"
    );
    assert!(
        part.snapshot()
            .keys()
            .all(|name| !name.starts_with("tags/"))
    );
    let gone = workload("gone", Digest::of(b"gone"), &[1]);
    let error = plan_part(&origin, &[gone]).unwrap_err().to_string();
    assert!(error.contains(&Digest::of(b"gone").to_hex()), "{error}");
    let far = workload("far", built.layer, &[1 << 30]);
    let error = plan_part(&origin, &[far]).unwrap_err().to_string();
    assert!(
        error.contains("workload `far`") && error.contains("blocks of a trace"),
        "{error}"
    );
}
