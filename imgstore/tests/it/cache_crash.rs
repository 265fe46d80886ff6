//! The cache after a crash at every single step of filling and evicting, and after power cuts there.
//!
//! What must be true whenever it is opened again: whatever decodes and has its digest is right, and everything else is recognised
//! (that is all that a reader is ever given); after SIGKILL nothing is even damaged; temporary files are gone after the scan;
//! the count is what the disk says; the limit holds; a pin that was made is there; and filling goes on.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use imgstore::format::frame;
use imgstore::ids::Digest;
use imgstore::store::cache::disk::{CacheDisk, RealDisk};
use imgstore::store::cache::lock::CacheLock;
use imgstore::store::cache::{CacheSettings, SegmentCache, fsck, names};

use crate::cache_disk::StoppingDisk;
use crate::random_tree::Rng;

/// Room for about six of the segments.
const LIMIT: u64 = 150_000;
const SEGMENTS: u32 = 14;

/// A segment's digest, plain bytes and frame.
fn segment(n: u32) -> (Digest, Vec<u8>, Vec<u8>) {
    let len = 4096 * (1 + usize::try_from(n % 5).unwrap());
    let mut plain = vec![0; len];
    let mut noise = blake3::Hasher::new();
    noise.update(&n.to_le_bytes());
    noise.finalize_xof().fill(&mut plain);
    let stored = frame::encode(&plain, 1);
    (Digest::of(&plain), plain, stored)
}

fn open(root: &Path, disk: &Arc<StoppingDisk>) -> Option<SegmentCache> {
    let lock = CacheLock::take(root, "test").unwrap();
    let settings = CacheSettings::new(LIMIT).with_reserve(Some(0));
    let disk = Arc::clone(disk) as Arc<dyn CacheDisk>;
    SegmentCache::open(root, lock, settings, disk).ok()
}

/// What the caller was told is done, when everything stopped.
#[derive(Debug, Default)]
struct Told {
    pinned: bool,
    unpinning: bool,
}

/// Fills, evicts, pins, describes layers, and evicts those. Errors are what a stopped disk gives.
fn work(root: &Path, disk: &Arc<StoppingDisk>) -> Told {
    let mut told = Told::default();
    let Some(cache) = open(root, disk) else {
        return told;
    };
    let cache = Arc::new(cache);
    drop(cache.scan());
    let layers = [Digest::of(b"one"), Digest::of(b"two")];
    let (pinned, _, stored) = segment(0);
    let hold = cache.hold_layer(layers[0]);
    for layer in &layers {
        for name in names::LAYER_FILES {
            drop(cache.put_layer_file(layer, name, &[7; 5000]));
        }
    }
    drop(cache.put(&pinned, &stored));
    told.pinned = cache
        .pin(&layers[0], "base/one:1", vec![(pinned, 8192)])
        .is_ok();
    for n in 1..SEGMENTS {
        let (digest, _, stored) = segment(n);
        drop(cache.put(&digest, &stored));
    }
    drop(hold);
    // A damaged description is removed and fetched again; a segment is replaced.
    drop(cache.drop_layer(&layers[0]));
    drop(cache.put_layer_file(&layers[0], names::MANIFEST, &[8; 5000]));
    let (digest, _, stored) = segment(SEGMENTS - 1);
    drop(cache.put(&digest, &stored));
    told.unpinning = disk.ran_through();
    drop(cache.unpin(&layers[0]));
    told
}

/// Bytes of disk below a folder.
fn du(path: &Path) -> u64 {
    let stat = RealDisk.stat(path).unwrap().unwrap();
    let below = |path: &Path| -> u64 {
        let entries = fs::read_dir(path).unwrap();
        entries.map(|e| du(&e.unwrap().path())).sum()
    };
    stat.bytes + if stat.is_folder { below(path) } else { 0 }
}

/// The real disk, without waiting for it.
fn never_synced(root: &Path) -> Arc<StoppingDisk> {
    Arc::new(StoppingDisk::new(root, usize::MAX))
}

/// Opens what a crash left and checks all that must be true; `whole`: not even a damaged file may be there.
fn check(root: &Path, told: &Told, whole: bool, case: &str) {
    let cache = open(root, &never_synced(root)).unwrap();
    cache.scan().unwrap();
    let tmp = fs::read_dir(root.join("tmp")).unwrap().count();
    assert_eq!(tmp, 0, "{case}: temporary files stay");
    if told.pinned && !told.unpinning {
        assert_eq!(cache.pins().len(), 1, "{case}: a pin is lost");
    }
    let used = du(root) - RealDisk.stat(root).unwrap().unwrap().bytes;
    assert_eq!(cache.usage().bytes, used, "{case}: the count is wrong");
    assert!(used <= LIMIT, "{case}: {used} bytes are above the limit");
    let mut there = 0;
    for n in 0..SEGMENTS {
        let (digest, plain, stored) = segment(n);
        let Some(read) = cache.files().read(&digest, 1 << 20).unwrap() else {
            continue;
        };
        let served = frame::decode(&read, plain.len() as u64).ok();
        let served = served.filter(|bytes| Digest::of(bytes) == digest);
        assert!(
            served.is_none_or(|bytes| bytes == plain),
            "{case}: wrong bytes"
        );
        if whole {
            assert!(read == stored, "{case}: segment {n} is damaged");
        }
        there += 1;
    }
    if told.pinned && whole && !told.unpinning {
        assert!(there > 0, "{case}: the pinned segment is gone");
    }
    drop(cache);
    // Damage is found without reading, and afterwards there is none; then filling goes on.
    let found = fsck::check(root, true, &|_, _| {}).unwrap();
    let in_segments = |d: &&fsck::CacheDamage| d.path.starts_with(root.join("segments"));
    let damaged = found.damage.iter().filter(in_segments).count();
    assert_eq!(damaged as u64 + found.segments_right, there, "{case}");
    assert!(!whole || damaged == 0, "{case}: {:?}", found.damage);
    work(root, &never_synced(root));
    let cache = open(root, &never_synced(root)).unwrap();
    cache.scan().unwrap();
    let (digest, _, stored) = segment(SEGMENTS - 1);
    assert!(
        cache.files().read(&digest, 1 << 20).unwrap().unwrap() == stored,
        "{case}"
    );
}

/// Steps of the work when nothing stops it.
fn steps() -> usize {
    let root = tempfile::tempdir().unwrap();
    let disk = Arc::new(StoppingDisk::new(root.path(), usize::MAX));
    let told = work(root.path(), &disk);
    assert!(told.pinned && disk.ran_through());
    disk.steps()
}

fn cases(usual: u64) -> u64 {
    let wanted = std::env::var("DSEC_CASES").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Every step, in `tools/check` too. Mutations that turn it red: writing to the final name instead of `tmp/` (damaged
/// segments), `clear_tmp` that removes nothing (temporary files stay), a scan that does not count layers (count).
#[test]
fn s2_s50_a_process_killed_at_any_step_leaves_a_cache_that_is_right() {
    let steps = steps();
    assert!(steps > 150, "{steps}");
    for stop_at in 0..=steps {
        let root = tempfile::tempdir().unwrap();
        let disk = Arc::new(StoppingDisk::new(root.path(), stop_at));
        let told = work(root.path(), &disk);
        check(
            root.path(),
            &told,
            true,
            &format!("stopped at step {stop_at} of {steps}"),
        );
    }
}

/// Mutations that turn it red: pins that are not synced before they get their name (a pin is lost), `frame::decode`
/// without the digest (wrong bytes).
#[test]
fn s4_power_that_fails_at_any_write_leaves_a_cache_that_is_right() {
    let steps = steps();
    let rounds = cases(1);
    for round in 0..rounds {
        for stop_at in 0..=steps {
            let mut rng = Rng::new(round * 1_000_003 + stop_at as u64);
            let (ran, left) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let disk = Arc::new(StoppingDisk::new(ran.path(), stop_at));
            let told = work(ran.path(), &disk);
            disk.cut_power(&mut rng, left.path());
            check(
                left.path(),
                &told,
                false,
                &format!("round {round}, power cut at step {stop_at} of {steps}"),
            );
        }
    }
}
