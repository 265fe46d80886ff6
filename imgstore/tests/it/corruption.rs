//! The corruption campaign: every kind of damage to every kind of object on every kind of origin, thousands of times, from a seed.
//! Each time a reader gets the right bytes or an error that says something, within a bounded time; never wrong bytes,
//! never a panic. Where a second, undamaged origin is there, it gets the right bytes.
//!
//! The way is the daemon's: names and descriptions by [`OriginSet::first`], ranges by [`OriginSet::fetch`], frames by
//! [`frame::verified`], which is also the only exit of the data plane. (The daemon's own tests do some dozens through the kernel.)
//! A new kind of origin is one line in [`KINDS`] and a site in `kinds` or `servers`.
//!
//! Mutation that was seen red: the digest not compared in `frame::verified_into`.

mod kinds;
mod layers;
mod servers;

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use imgstore::fetch::origins::OriginSet;
use imgstore::fetch::plan::{RANGE_BYTES_MAX, plan};
use imgstore::format::{erofs, frame, names};
use imgstore::ids::Digest;
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::bundle;
use imgstore::store::layer::{self, Layer, LayerError};

use crate::bad_web::{PAGE, gzip};
use crate::random_tree::Rng;
use kinds::{Final, KINDS, Kind, Lie, Site};
use layers::{Truth, World};

/// What is done to an object or to answers about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Flip,
    Zero,
    Truncate,
    Missing,
    Swap,
    Stale,
    WrongLength,
    WholeForRange,
    Gzip,
    Html,
}

const FAULTS: [Fault; 10] = [
    Fault::Flip,
    Fault::Zero,
    Fault::Truncate,
    Fault::Missing,
    Fault::Swap,
    Fault::Stale,
    Fault::WrongLength,
    Fault::WholeForRange,
    Fault::Gzip,
    Fault::Html,
];

/// Which object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Tag,
    Manifest,
    Placement,
    Meta,
    Pack,
    Bundle,
    Index,
}

const SUBJECTS: [Subject; 7] = [
    Subject::Tag,
    Subject::Manifest,
    Subject::Placement,
    Subject::Meta,
    Subject::Pack,
    Subject::Bundle,
    Subject::Index,
];

/// Longest time for one case.
const CASE_MAX: Duration = Duration::from_secs(20);

/// Every combination once.
const ROUND: usize = FAULTS.len() * SUBJECTS.len();

/// A share of a round number of rounds: ten times as many for `tools/soak`.
fn cases(kind: &Kind) -> usize {
    let factor = if std::env::var("DSEC_CASES").is_ok() {
        10
    } else {
        1
    };
    kind.rounds * ROUND * factor
}

/// What a reader made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Right,
    Refused,
}

/// What lies on the damaged origin in place of the right bytes, or how it answers.
enum Damage {
    Stored(Vec<(String, Option<Vec<u8>>)>),
    Answers(Lie),
}

fn below(rng: &mut Rng, n: usize) -> usize {
    usize::try_from(rng.below(u64::try_from(n.max(1)).unwrap())).unwrap()
}

fn damage(rng: &mut Rng, world: &World, fault: Fault, subject: Subject, object: &str) -> Damage {
    let mut bytes = world.objects[object].clone();
    let one = |bytes: Option<Vec<u8>>| Damage::Stored(vec![(object.to_owned(), bytes)]);
    match fault {
        Fault::Flip => {
            for _ in 0..=below(rng, 3) {
                let at = below(rng, bytes.len());
                bytes[at] ^= 1 << rng.below(8);
            }
            one(Some(bytes))
        }
        Fault::Zero => {
            let from = below(rng, bytes.len());
            let len = below(rng, bytes.len() - from) + 1;
            bytes[from..from + len].fill(0);
            one(Some(bytes))
        }
        Fault::Truncate => {
            bytes.truncate(below(rng, bytes.len()));
            one(Some(bytes))
        }
        Fault::Missing => one(None),
        Fault::Swap => {
            let other = rng.pick(&world.others(subject.folder(), object));
            Damage::Stored(vec![
                (object.to_owned(), world.objects.get(&other).cloned()),
                (other, Some(bytes)),
            ])
        }
        Fault::Stale => one(Some(world.earlier(rng, subject, object))),
        Fault::WrongLength => Damage::Answers(Lie::WrongLength(rng.next())),
        Fault::WholeForRange => Damage::Answers(Lie::Whole),
        // As the object itself, or as an answer about it.
        Fault::Gzip if rng.below(2) == 0 => one(Some(gzip(&bytes))),
        Fault::Gzip => Damage::Answers(Lie::Gzip(rng.below(2) == 0)),
        Fault::Html if rng.below(2) == 0 => one(Some(PAGE.to_vec())),
        Fault::Html => Damage::Answers(Lie::Html(rng.below(2) == 0)),
    }
}

impl Subject {
    fn folder(self) -> &'static str {
        match self {
            Self::Tag => "tags/",
            Self::Manifest => "manifests/",
            Self::Placement => "placements/",
            Self::Meta => "meta/",
            Self::Pack => "packs/",
            Self::Bundle => "bundles/",
            Self::Index => "",
        }
    }

    fn object(self, rng: &mut Rng, world: &World) -> String {
        match self {
            Self::Tag => names::tag(&world.tag),
            Self::Manifest => names::manifest(&world.layer),
            Self::Placement => names::placement(&world.layer),
            Self::Meta => names::meta(&world.loaded.manifest.meta.digest),
            Self::Pack => {
                let pack = rng.pick(&world.loaded.placement.packs);
                names::pack(&pack.digest)
            }
            Self::Bundle => names::bundle(&world.layer),
            Self::Index => names::INDEX.to_owned(),
        }
    }
}

/// Reads a layer as the daemon does, by its bundle if it is `bundled` or part by part, and compares what comes out with what
/// went in.
fn read(set: &OriginSet, world: &World, bundled: bool) -> Result<(), LayerError> {
    let tag = set.first(|origin| layer::read_tag(origin, &world.tag))?;
    let digest = tag.layer;
    let described = set.first(|origin| bundle::describe(origin, &digest, bundled))?;
    let loaded = described.layer;
    let meta = match described.meta {
        Some(meta) => meta,
        None => set.first(|origin| {
            let meta = layer::read_meta(origin, &loaded.manifest)?;
            // The daemon does this too, and takes another origin's where it fails.
            erofs::check::check(&meta, &loaded.manifest).map_err(|source| LayerError::Damaged {
                object: "meta".to_owned(),
                origin: origin.address(),
                source,
            })?;
            Ok(meta)
        })?,
    };
    // Whatever the tag says now: it must be a layer that was published, byte for byte.
    let truth = &world.truth[&digest];
    assert!(meta == truth.meta, "wrong metadata");
    let failed = match read_segments(set, &loaded, truth) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    // The placement has no digest: when nothing is where it says, the daemon looks at another origin's.
    let placement = set.first_from(1, |origin| {
        layer::read_placement(origin, &digest, &loaded.manifest)
    })?;
    if placement == loaded.placement {
        return Err(failed);
    }
    read_segments(
        set,
        &Layer {
            placement,
            ..loaded
        },
        truth,
    )
}

fn read_segments(set: &OriginSet, loaded: &Layer, truth: &Truth) -> Result<(), LayerError> {
    let all = 0..loaded.manifest.segments.len();
    for range in plan(&loaded.placement, all, RANGE_BYTES_MAX) {
        let object = names::pack(&range.pack);
        let packs = &loaded.placement.packs;
        let size = packs.iter().find(|p| p.digest == range.pack).unwrap().size;
        let mut right = vec![false; range.parts.len()];
        let mut failure = None;
        // Once more from elsewhere, as the data plane asks for it.
        for first in 0..2 {
            let deadline = Instant::now() + CASE_MAX;
            let (fetched, _) = set.fetch(&object, size, range.range, first, deadline);
            let fetched = match fetched {
                Ok(fetched) => fetched,
                Err(error) => {
                    failure = Some(LayerError::from(error));
                    continue;
                }
            };
            for (n, (part, stored)) in range.split(&fetched.bytes).enumerate() {
                let segment = &loaded.manifest.segments[part.index];
                let stored = stored.expect("an answer has the length that was asked for");
                match frame::verified(stored, &segment.digest(), segment.len()) {
                    Ok(plain) => {
                        assert!(plain == truth.segments[part.index], "wrong data");
                        right[n] = true;
                    }
                    Err(source) => {
                        failure = Some(LayerError::Damaged {
                            object: object.clone(),
                            origin: fetched.origin.clone(),
                            source,
                        });
                    }
                }
            }
            if right.iter().all(|right| *right) {
                break;
            }
        }
        if let Some(error) = failure.filter(|_| right.contains(&false)) {
            return Err(error);
        }
    }
    Ok(())
}

/// Lists the tags of an origin by its index; what a tag leads to is a published layer or nothing.
fn read_index(set: &OriginSet, world: &World) -> Result<(), LayerError> {
    let tags = set.first(layer::list_tags)?;
    for (_, digest) in tags.tags {
        if !world.truth.contains_key(&digest) {
            assert!(
                set.first(|origin| layer::open(origin, &digest)).is_err(),
                "a layer that nobody published"
            );
        }
    }
    match tags.damaged.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn case(site: &dyn Site, world: &World, rng: &mut Rng, n: usize) -> Outcome {
    let fault = FAULTS[n % FAULTS.len()];
    let subject = SUBJECTS[n / FAULTS.len() % SUBJECTS.len()];
    let object = subject.object(rng, world);
    let damage = damage(rng, world, fault, subject, &object);
    let with_second = rng.below(3) == 0;
    let damaged = site.origin();
    let first: Arc<dyn Origin> = match &damage {
        Damage::Stored(changes) => {
            for (name, bytes) in changes {
                site.put(name, bytes.as_deref());
            }
            damaged
        }
        Damage::Answers(lie) => site.lie(damaged, &object, lie),
    };
    let mut origins = vec![first];
    if with_second {
        origins.push(Arc::clone(&world.good) as Arc<dyn Origin>);
    }
    let lists = subject != Subject::Index;
    let set = OriginSet::new(origins)
        .decorated(|inner| Arc::new(Final { inner, lists }) as Arc<dyn Origin>);
    let read = if lists {
        // What is in the bundle is not read elsewhere while that is whole.
        let parts = [Subject::Manifest, Subject::Placement, Subject::Meta];
        read(&set, world, !parts.contains(&subject))
    } else {
        read_index(&set, world)
    };
    site.honest();
    if let Damage::Stored(changes) = &damage {
        for (name, _) in changes {
            site.put(name, world.objects.get(name).map(Vec::as_slice));
        }
    }
    match read {
        Ok(()) => Outcome::Right,
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() > 20, "`{text}` says nothing");
            // Index and tag have no digest: a layer's name with a flipped digit is a name, and nobody has that layer.
            let unnoticed =
                subject == Subject::Index || (subject == Subject::Tag && fault == Fault::Flip);
            assert!(
                !with_second || unnoticed,
                "{fault:?} of {subject:?} in spite of a good second origin: {text}"
            );
            Outcome::Refused
        }
    }
}

/// The cases of one kind of origin; how many gave the right bytes.
fn run(kind: &Kind) {
    let count = cases(kind);
    let start = Instant::now();
    let world = World::new();
    let site = (kind.make)(&world);
    let right = AtomicUsize::new(0);
    // Nothing is damaged yet.
    let whole = OriginSet::new(vec![site.origin()]);
    read(&whole, &world, true).unwrap();
    for n in 0..count {
        let seed = u64::try_from(n).unwrap() ^ u64::from(kind.name.as_bytes()[0]) << 32;
        let began = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            case(&*site, &world, &mut Rng::new(seed), n)
        }));
        let outcome = outcome.unwrap_or_else(|_| {
            panic!(
                "case {n} of `{}`: {:?} of {:?}, see above",
                kind.name,
                FAULTS[n % FAULTS.len()],
                SUBJECTS[n / FAULTS.len() % SUBJECTS.len()]
            )
        });
        assert!(began.elapsed() < CASE_MAX, "case {n} of `{}`", kind.name);
        right.fetch_add(usize::from(outcome == Outcome::Right), Ordering::Relaxed);
    }
    read(&whole, &world, true).unwrap();
    let right = right.into_inner();
    println!(
        "{count} cases of `{}`: {right} right, {} refused, {:.1} s",
        kind.name,
        count - right,
        start.elapsed().as_secs_f64()
    );
    // Both happen: else nothing was damaged, or nothing was read.
    assert!(right > count / 20 && count - right > count / 4);
}

fn kind(name: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.name == name).unwrap()
}

#[test]
fn damage_on_a_mem_origin_is_never_read_as_data() {
    run(kind("mem"));
}

#[test]
fn damage_on_a_dir_origin_is_never_read_as_data() {
    run(kind("dir"));
}

#[test]
fn damage_on_an_http_origin_is_never_read_as_data() {
    run(kind("http"));
}

#[test]
fn damage_on_s3_is_never_read_as_data() {
    run(kind("s3"));
}

#[test]
fn damage_on_a_registry_is_never_read_as_data() {
    run(kind("oci"));
}

#[test]
fn damage_on_a_3fs_mount_is_never_read_as_data() {
    run(kind("3fs-mount"));
}

#[test]
fn damage_on_3fs_rings_is_never_read_as_data() {
    run(kind("3fs-rings"));
}

#[test]
fn the_campaign_has_ten_thousand_cases_and_a_test_for_each_kind() {
    let all: usize = KINDS.iter().map(cases).sum();
    println!("{all} cases of {} kinds of origins", KINDS.len());
    assert!(all >= 10_000, "{all}");
    let here = include_str!("corruption.rs");
    for kind in KINDS.iter() {
        let call = format!("run(kind({:?}))", kind.name);
        assert!(here.contains(&call), "no test runs `{}`", kind.name);
    }
}

/// The good origin's own objects, for whoever makes a site.
fn fill(world: &World, site: &dyn Site) {
    for (name, bytes) in &world.objects {
        site.put(name, Some(bytes));
    }
}

/// All that is known of a digest: shared with `layers`.
type Digests = HashMap<Digest, Truth>;

/// An origin with these objects.
fn mem(objects: &BTreeMap<String, Vec<u8>>) -> MemOrigin {
    let origin = MemOrigin::default();
    origin.tamper(|all| all.clone_from(objects));
    origin
}
