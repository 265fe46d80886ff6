//! The cache on a real folder.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use super::disk::{CacheDisk, RealDisk};
use super::lock::CacheLock;
use super::*;
use crate::ids::{Digest, to_u64};

pub(super) fn frame(n: u32, len: usize) -> (Digest, Vec<u8>) {
    let bytes: Vec<u8> = n.to_le_bytes().into_iter().cycle().take(len).collect();
    (Digest::of(&bytes), bytes)
}

pub(super) fn open_on(
    root: &Path,
    settings: CacheSettings,
    disk: Arc<dyn CacheDisk>,
) -> SegmentCache {
    let lock = CacheLock::take(root, "test").unwrap();
    SegmentCache::open(root, lock, settings, disk).unwrap()
}

fn open(root: &Path, bytes_max: u64) -> SegmentCache {
    let settings = CacheSettings::new(bytes_max).with_reserve(Some(0));
    let cache = open_on(root, settings, Arc::new(RealDisk));
    cache.scan().unwrap();
    cache
}

/// Bytes of disk of everything below a folder, folders included: what `du` says.
fn disk_bytes(path: &Path) -> u64 {
    let stat = RealDisk.stat(path).unwrap().unwrap();
    let below = |path: &Path| -> u64 {
        let entries = fs::read_dir(path).unwrap();
        entries.map(|e| disk_bytes(&e.unwrap().path())).sum()
    };
    stat.bytes + if stat.is_folder { below(path) } else { 0 }
}

/// What our folders take of the disk, as `du` says: the root itself is not ours.
fn used(root: &Path) -> u64 {
    disk_bytes(root) - RealDisk.stat(root).unwrap().unwrap().bytes
}

#[test]
fn what_was_put_is_read_and_a_missing_frame_is_none() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 1 << 20);
    let (digest, bytes) = frame(1, 5000);
    assert_eq!(cache.files().read(&digest, 1 << 20).unwrap(), None);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::Yes);
    assert_eq!(cache.files().read(&digest, 1 << 20).unwrap(), Some(bytes));
    assert_eq!(cache.files().read(&digest, 10).unwrap().unwrap().len(), 10);
    assert_eq!(cache.segment_bytes(&digest), Some(8192));
}

#[test]
fn putting_a_frame_twice_counts_it_once() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 1 << 20);
    let (digest, bytes) = frame(9, 2000);
    cache.put(&digest, &bytes).unwrap();
    let once = cache.usage();
    cache.put(&digest, &bytes).unwrap();
    assert_eq!(cache.usage(), once);
    assert_eq!(once.bytes, used(root.path()));
}

/// Mutation: counting `frame.len()` instead of blocks in `RealDisk::create` makes the sums differ.
#[test]
fn the_count_is_what_the_disk_says_and_the_oldest_goes_first() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 512 << 10);
    let frames: Vec<_> = (0..60).map(|n| frame(n, 10_000)).collect();
    for (digest, bytes) in frames.iter().take(30) {
        cache.put(digest, bytes).unwrap();
        assert_eq!(cache.usage().bytes, used(root.path()));
    }
    cache.touch(&[frames[0].0]);
    for (digest, bytes) in frames.iter().skip(30) {
        cache.put(digest, bytes).unwrap();
        assert_eq!(cache.usage().bytes, used(root.path()));
        assert!(used(root.path()) <= 512 << 10);
    }
    let there = |n: usize| cache.files().contains(&frames[n].0).unwrap();
    let first = (1..60).find(|n| there(*n)).unwrap();
    assert!(first > 10 && cache.deeds().evicted > 10);
    assert!((first..60).all(there), "what is younger is there");
    drop(cache);
    let cache = open(root.path(), 512 << 10);
    assert_eq!(cache.usage().bytes, used(root.path()));
}

/// Mutation: `clear_tmp` that removes whatever lies in `tmp`: red.
#[test]
fn foreign_files_are_neither_counted_nor_removed() {
    let root = tempfile::tempdir().unwrap();
    let (digest, bytes) = frame(1, 3000);
    open(root.path(), 1 << 20).put(&digest, &bytes).unwrap();
    let hex = digest.to_hex();
    let shard = format!("segments/{}", &hex[..2]);
    let layer = format!("layers/{}", Digest::of(b"layer"));
    let foreign = [
        "notes.txt".to_owned(),
        "tmp/upload-1".to_owned(),
        "tmp/17-4".to_owned(),
        "tmp/dsec-1-1".to_owned(),
        "segments/README".to_owned(),
        format!("{shard}/notes.txt"),
        format!("{shard}/{hex}.bak"),
        format!("{shard}/{}", hex.to_uppercase()),
        format!("segments/zz/{hex}"),
        format!("{layer}/mine"),
        "pins/mine.json".to_owned(),
    ];
    for name in &foreign {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, vec![7; 60_000]).unwrap();
    }
    fs::write(root.path().join(&layer).join("meta.erofs"), b"x").unwrap();
    let ours = root.path().join("tmp").join(names::tmp_name(1, 1));
    fs::write(&ours, b"half").unwrap();
    let cache = open(root.path(), 1);
    assert_eq!(cache.usage().segments, 0);
    assert!(!cache.files().contains(&digest).unwrap());
    assert!(!ours.try_exists().unwrap());
    assert!(
        !root
            .path()
            .join(&layer)
            .join("meta.erofs")
            .try_exists()
            .unwrap()
    );
    for name in &foreign {
        assert_eq!(
            fs::read(root.path().join(name)).unwrap().len(),
            60_000,
            "{name}"
        );
    }
}

#[test]
fn s61_within_the_limit_under_three_times_as_much_from_many_threads() {
    const LIMIT: u64 = 3 << 20;
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), LIMIT);
    let start = Barrier::new(5);
    let peak = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for thread in 0..4_u32 {
            let (cache, start) = (&cache, &start);
            writers.push(scope.spawn(move || {
                start.wait();
                for n in 0..100 {
                    // Some frames come from two threads at once.
                    let id = (n * 7 + thread / 2 * 1000) % 2000;
                    let (digest, bytes) =
                        frame(id, 1000 + usize::try_from(id * 37 % 60_000).unwrap());
                    cache.put(&digest, &bytes).unwrap();
                    if let Some(read) = cache.files().read(&digest, 1 << 20).unwrap() {
                        assert!(read == bytes);
                    }
                }
            }));
        }
        start.wait();
        while !writers.iter().all(|writer| writer.is_finished()) {
            // Files may go while we look at them.
            peak.fetch_max(walk(root.path()), Ordering::Relaxed);
        }
    });
    let peak = peak.into_inner();
    assert!(peak <= LIMIT + LIMIT / 20 && peak > LIMIT / 2, "{peak}");
    assert_eq!(cache.usage().bytes, used(root.path()));
    assert!(cache.deeds().evicted > 50);
}

/// Bytes of disk below a folder in which files come and go.
fn walk(path: &Path) -> u64 {
    let Ok(Some(stat)) = RealDisk.stat(path) else {
        return 0;
    };
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let below = if stat.is_folder {
        entries.map(|e| walk(&e.path())).sum()
    } else {
        0
    };
    stat.bytes + below
}

#[test]
fn pins_hold_over_restarts_and_beyond_the_limit_they_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let frames: Vec<_> = (0..40).map(|n| frame(n, 20_000)).collect();
    let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
    let of = |range: std::ops::Range<usize>| -> Vec<(Digest, u64)> {
        frames[range].iter().map(|(d, _)| (*d, 20_480)).collect()
    };
    let cache = open(root.path(), 512 << 10);
    for (digest, bytes) in &frames[..4] {
        cache.put(digest, bytes).unwrap();
    }
    cache.pin(&a, "base/a:1", of(0..4)).unwrap();
    cache.pin(&a, "base/a:1", of(0..4)).unwrap();
    let error = cache.pin(&b, "base/b:1", of(3..40)).unwrap_err();
    assert!(
        matches!(error, CacheError::PinTooLarge { needed, .. } if needed == 36 * 20_480 + 4096),
        "{error}"
    );
    drop(cache);
    let cache = open(root.path(), 512 << 10);
    assert_eq!(cache.pins().len(), 1);
    for (digest, bytes) in &frames[4..] {
        cache.put(digest, bytes).unwrap();
        assert!(used(root.path()) <= 512 << 10);
    }
    let there = |n: usize| cache.files().contains(&frames[n].0).unwrap();
    assert!((0..4).all(there), "pinned");
    assert!(!there(4) && there(39));
    assert!(cache.unpin(&a).unwrap() && !cache.unpin(&a).unwrap());
    for (digest, bytes) in &frames[4..] {
        cache.put(digest, bytes).unwrap();
    }
    assert!(!(0..4).any(there), "no longer pinned");
}

#[test]
fn a_smaller_limit_than_the_pins_keeps_the_oldest_pins_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 1 << 20);
    for n in 0..4 {
        let (digest, bytes) = frame(n, 20_000);
        cache.put(&digest, &bytes).unwrap();
        let layer = Digest::of(&n.to_le_bytes());
        cache
            .pin(&layer, "base/x:1", vec![(digest, 100_000)])
            .unwrap();
    }
    drop(cache);
    let cache = open(root.path(), 300_000);
    assert_eq!(cache.pins().len(), 2);
    assert!(used(root.path()) <= 300_000);
}

/// A cache of pinned segments alone: nothing else is kept, nothing waits, the limit holds.
#[test]
fn a_cache_full_of_pins_keeps_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 100_000);
    let room = 100_000 - cache.usage().bytes;
    let (pinned, bytes) = frame(1, usize::try_from(room).unwrap() - 16_384);
    cache
        .pin(
            &Digest::of(b"l"),
            "base/l:1",
            vec![(pinned, to_u64(bytes.len()))],
        )
        .unwrap();
    assert_eq!(cache.put(&pinned, &bytes).unwrap(), Kept::Yes);
    for n in 2..10 {
        let (digest, bytes) = frame(n, 20_000);
        assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::No);
    }
    assert!(cache.files().contains(&pinned).unwrap());
    assert_eq!((cache.deeds().evicted, cache.deeds().not_kept), (0, 8));
    assert!(used(root.path()) <= 100_000);
}

/// Mutation: the marker's format is not compared; a damaged marker is taken for ours.
#[test]
fn s5_every_format_of_a_cache_folder_is_used_or_refused_by_the_rule() {
    let root = tempfile::tempdir().unwrap();
    // What the version before the marker wrote.
    let (digest, bytes) = frame(1, 3000);
    let old = names::segment_path(&root.path().join("segments"), &digest);
    fs::create_dir_all(old.parent().unwrap()).unwrap();
    fs::write(&old, &bytes).unwrap();
    fs::create_dir(root.path().join("tmp")).unwrap();
    for name in ["12-3", "layer-12-3"] {
        fs::write(root.path().join("tmp").join(name), b"half").unwrap();
    }
    let cache = open(root.path(), 1 << 20);
    assert_eq!(cache.files().read(&digest, 1 << 20).unwrap(), Some(bytes));
    assert_eq!(cache.usage().segments, 1);
    assert_eq!(fs::read_dir(root.path().join("tmp")).unwrap().count(), 0);
    drop(cache);
    let marker = root.path().join("cache.json");
    let whole = marker::bytes(1);
    assert_eq!(fs::read(&marker).unwrap(), whole);
    for other in [0, 2, u64::MAX] {
        fs::write(&marker, marker::bytes(other)).unwrap();
        let lock = CacheLock::take(root.path(), "test").unwrap();
        let opened =
            SegmentCache::open(root.path(), lock, CacheSettings::new(1), Arc::new(RealDisk));
        assert!(
            matches!(opened.unwrap_err(), CacheError::Format { found, known: 1, .. } if found == other)
        );
        assert!(old.try_exists().unwrap(), "nothing is touched");
    }
    for bit in (0..whole.len() * 8).step_by(23) {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(&marker, damaged).unwrap();
        drop(open(root.path(), 1 << 20));
        assert_eq!(fs::read(&marker).unwrap(), whole, "bit {bit}");
    }
}

/// Mutation: a shared lock.
#[test]
fn two_cannot_open_one_folder_and_the_error_names_the_process() {
    let root = tempfile::tempdir().unwrap();
    let _cache = open(root.path(), 1);
    let error = CacheLock::take(root.path(), "other").unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("process {}", std::process::id()))
    );
}

#[test]
fn layers_that_nobody_holds_go_in_their_turn_and_held_ones_stay() {
    let root = tempfile::tempdir().unwrap();
    let cache = Arc::new(open(root.path(), 200_000));
    let layers: Vec<Digest> = (0..6_u8).map(|n| Digest::of(&[n])).collect();
    let held = cache.hold_layer(layers[0]);
    for layer in &layers {
        cache
            .put_layer_file(layer, names::MANIFEST, &[1; 3000])
            .unwrap();
        cache
            .put_layer_file(layer, names::META, &[2; 40_000])
            .unwrap();
        assert_eq!(cache.usage().bytes, used(root.path()));
        assert!(used(root.path()) <= 200_000);
    }
    let there = |n: usize| {
        root.path()
            .join("layers")
            .join(layers[n].to_hex())
            .join("meta.erofs")
            .try_exists()
            .unwrap()
    };
    assert!(there(0) && there(5) && !there(1));
    assert!(
        !root
            .path()
            .join("layers")
            .join(layers[1].to_hex())
            .try_exists()
            .unwrap()
    );
    drop(held);
    for n in 0..20 {
        let (digest, bytes) = frame(n, 20_000);
        cache.put(&digest, &bytes).unwrap();
    }
    assert!(!there(0) && cache.usage().layers == 0);
}

/// What must be there for the mounted is there, and the limit is passed by nothing else.
#[test]
fn descriptions_of_held_layers_are_kept_even_beyond_the_limit() {
    let root = tempfile::tempdir().unwrap();
    let cache = Arc::new(open(root.path(), 30_000));
    let layer = Digest::of(b"l");
    let _held = cache.hold_layer(layer);
    cache
        .put_layer_file(&layer, names::META, &[2; 100_000])
        .unwrap();
    let (digest, bytes) = frame(1, 4000);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::No);
    assert!(
        root.path()
            .join("layers")
            .join(layer.to_hex())
            .join("meta.erofs")
            .try_exists()
            .unwrap()
    );
}

/// An open file keeps its bytes: a reader in the middle of a frame that is evicted has all of it.
#[test]
fn s68_eviction_under_readers_gives_right_bytes_or_nothing() {
    let root = tempfile::tempdir().unwrap();
    let cache = open(root.path(), 300_000);
    let frames: Vec<_> = (0..8).map(|n| frame(n, 60_000)).collect();
    let stop = AtomicU64::new(0);
    let (right, missing) = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|seed: usize| {
                let (cache, frames, stop) = (&cache, &frames, &stop);
                scope.spawn(move || {
                    let (mut right, mut missing) = (0_u64, 0_u64);
                    let mut n = seed;
                    while stop.load(Ordering::Relaxed) == 0 {
                        n = (n * 5 + 3) % 8;
                        match cache.files().read(&frames[n].0, 1 << 20).unwrap() {
                            Some(read) => {
                                assert!(read == frames[n].1);
                                right += 1;
                            }
                            None => missing += 1,
                        }
                        n += seed;
                    }
                    (right, missing)
                })
            })
            .collect();
        for round in 0..500 {
            let (digest, bytes) = &frames[round % 8];
            cache.put(digest, bytes).unwrap();
        }
        stop.store(1, Ordering::Relaxed);
        let sums = readers.into_iter().map(|r| r.join().unwrap());
        sums.fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    });
    assert!(right > 30, "{right} right, {missing} missing");
    assert!(cache.deeds().evicted > 200);
    assert_eq!(cache.usage().bytes, used(root.path()));
}

/// As many segments as the ledger counts, and no more, however many files there are.
#[test]
fn s63_more_files_than_are_counted_are_cleaned_in_the_background() {
    let root = tempfile::tempdir().unwrap();
    let segments = root.path().join("segments");
    for n in 0..3000_u32 {
        let path = names::segment_path(&segments, &Digest::of(&n.to_le_bytes()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"").unwrap();
    }
    let settings = CacheSettings::new(1 << 30)
        .with_reserve(Some(0))
        .with_files_max(1000);
    let cache = open_on(root.path(), settings, Arc::new(RealDisk));
    assert!(
        !cache.deeds().scanned && cache.usage().segments == 0,
        "opening counts nothing"
    );
    let (digest, bytes) = frame(1, 100);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::Yes);
    cache.scan().unwrap();
    assert!(cache.deeds().scanned && cache.usage().segments <= 1000);
    assert!(cache.files().contains(&digest).unwrap());
    let left: usize = fs::read_dir(&segments)
        .unwrap()
        .map(|shard| fs::read_dir(shard.unwrap().path()).unwrap().count())
        .sum();
    assert_eq!(to_u64(left), cache.usage().segments);
}

/// What an old cache has too much is the scan's to evict: a mount and a fetch do not wait for that.
/// Mutation: `make_room` that evicts all at once before the scan is done: red.
#[test]
fn s63_before_the_scan_is_done_a_writer_evicts_no_more_than_it_adds() {
    let root = tempfile::tempdir().unwrap();
    let settings = CacheSettings::new(2 << 20).with_reserve(Some(0));
    let cache = Arc::new(open_on(root.path(), settings, Arc::new(RealDisk)));
    for n in 0..60 {
        let (digest, bytes) = frame(n, 20_000);
        cache.put(&digest, &bytes).unwrap();
    }
    drop(cache);
    let settings = CacheSettings::new(400_000).with_reserve(Some(0));
    let cache = Arc::new(open_on(root.path(), settings, Arc::new(RealDisk)));
    for shard in 0..=u8::MAX {
        cache.scan_shard(shard).unwrap();
    }
    let over = cache.usage().segments;
    assert_eq!(over, 60);
    let layer = Digest::of(b"l");
    let _held = cache.hold_layer(layer);
    cache
        .put_layer_file(&layer, names::META, &[2; 30_000])
        .unwrap();
    let gone = over - cache.usage().segments;
    assert!(gone <= 4, "{gone}");
    let evicting = cache.evictor.lock().unwrap();
    let (digest, bytes) = frame(100, 20_000);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::No);
    drop(evicting);
    cache.scan().unwrap();
    assert!(used(root.path()) <= 400_000);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::Yes);
}
