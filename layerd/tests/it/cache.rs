//! The cache of a running layerd: its limit with everything in it, pins, foreign files, damage, and a disk that fills up.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use imgstore::ids::Digest;
use imgstore::store::cache::{fsck, marker};
use imgstore::store::layer::Layer;
use layerd_client::api::{CacheDisk, ErrorKind};
use layerd_client::cache::{CachedLayer, PinRequest};
use layerd_client::client::ClientError;

use crate::daemon::{Daemon, read_cold, read_whole, until};
use crate::fixture::{World, cached, noise};
use crate::space::{Tmpfs, cache_bytes};
use crate::web::Web;

/// Publishes `base/N:1` with a file `data` of its own.
fn publish(world: &World, n: usize, len: usize) -> (Layer, Vec<u8>) {
    let tree = world.folder(&format!("tree{n}"));
    let mut data = noise(len);
    for block in data.chunks_mut(4096) {
        block[0] = u8::try_from(n).unwrap();
    }
    fs::write(tree.join("data"), &data).unwrap();
    (world.publish(&tree, &format!("base/n{n}:1")), data)
}

fn pin_request(reference: &str) -> PinRequest {
    PinRequest {
        reference: reference.to_owned(),
    }
}

fn of_layer(daemon: &Daemon, layer: &Layer) -> Option<CachedLayer> {
    let contents = daemon.client().cache().unwrap();
    let mut layers = contents.layers.into_iter();
    layers.find(|l| l.layer == layer.digest.to_hex())
}

fn segment_files(daemon: &Daemon, layer: &Layer) -> Vec<PathBuf> {
    let segments = layer.manifest.segments.iter();
    segments
        .map(|s| cached(&daemon.cache(), &s.digest()))
        .collect()
}

/// Three times as much as fits, read by several at once, with one layer pinned and others mounted and unmounted: what `du` says
/// never passes the limit by 5 %, and the use of each layer can be seen.
///
/// Mutations that turned the unit tests of the same name red, not tried here: `make_room` that does nothing; `may_go` without pins; `put_layer_file` that does not count.
#[test]
fn s61_limit_and_pins_hold_under_three_times_as_much_while_readers_run() {
    const LIMIT: u64 = 4 << 20;
    let world = World::new();
    let layers: Vec<_> = (0..4).map(|n| publish(&world, n, 3 << 20)).collect();
    let args = [
        "--cache-size",
        "4MiB",
        "--cache-reserve",
        "0",
        "--memory",
        "0",
    ];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mounts: Vec<_> = (0..4).map(|n| world.folder(&format!("mnt{n}"))).collect();
    for (n, mnt) in mounts.iter().enumerate() {
        daemon.mount(&[&format!("base/n{n}:1")], mnt, false);
    }
    // A third of a layer is read and pinned.
    let small = publish(&world, 9, 1 << 20);
    let pinned_at = world.folder("mnt9");
    daemon.mount(&["base/n9:1"], &pinned_at, false);
    daemon.client().pin(&pin_request("base/n9:1")).unwrap();
    assert!(read_whole(&pinned_at.join("data")).unwrap() == small.1);
    let pinned = segment_files(&daemon, &small.0);
    until("the pinned layer is cached", || {
        pinned.iter().all(|f| f.exists())
    });
    let done = AtomicBool::new(false);
    let cache = daemon.cache();
    let peak = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut peak = 0;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(cache_bytes(&cache));
            }
            peak
        });
        let readers: Vec<_> = layers
            .iter()
            .zip(&mounts)
            .map(|((_, data), mnt)| {
                scope.spawn(move || {
                    for _ in 0..2 {
                        assert!(read_whole(&mnt.join("data")).unwrap() == *data);
                    }
                })
            })
            .collect();
        let results: Vec<_> = readers.into_iter().map(|r| r.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
        watcher.join().unwrap()
    });
    assert!(peak <= LIMIT + LIMIT / 20 && peak > LIMIT / 2, "{peak}");
    assert!(pinned.iter().all(|f| f.exists()), "pinned segments stay");
    let stats = daemon.stats();
    assert!(stats.cache.evicted > 20, "{stats:?}");
    assert_eq!(
        (stats.total.failed_reads, stats.total.verify_failures),
        (0, 0)
    );
    let seen = of_layer(&daemon, &small.0).unwrap();
    assert!(
        seen.pinned && seen.mounted && seen.refs == ["base/n9:1"],
        "{seen:?}"
    );
    assert_eq!(seen.segments_cached, seen.segments);
}

#[test]
fn pins_survive_a_restart_and_too_much_is_a_clear_error() {
    let world = World::new();
    let (small, data) = publish(&world, 1, 1 << 20);
    publish(&world, 2, 4 << 20);
    let args = [
        "--cache-size",
        "3MiB",
        "--cache-reserve",
        "0",
        "--memory",
        "0",
    ];
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let pinned = daemon.client().pin(&pin_request("base/n1:1")).unwrap();
    assert_eq!(pinned.layer, small.digest.to_hex());
    let Err(ClientError::Refused(error)) = daemon.client().pin(&pin_request("base/n2:1")) else {
        panic!("a pin above the limit is accepted");
    };
    assert_eq!(error.kind, ErrorKind::Conflict);
    assert!(
        error.message.contains("unpin something or use a larger"),
        "{error}"
    );
    daemon.kill_control();
    daemon.restart();
    let (one, two) = (world.folder("one"), world.folder("two"));
    daemon.mount(&["base/n1:1"], &one, false);
    daemon.mount(&["base/n2:1"], &two, false);
    assert!(read_whole(&one.join("data")).unwrap() == data);
    let files = segment_files(&daemon, &small);
    until("the pinned layer is cached", || {
        files.iter().all(|f| f.exists())
    });
    daemon.client().umount(&one).unwrap();
    for _ in 0..2 {
        read_whole(&two.join("data")).unwrap();
    }
    // Frames are kept behind the readers.
    until("others are evicted", || daemon.stats().cache.evicted > 5);
    assert!(files.iter().all(|f| f.exists()));
    let description = daemon.cache().join("layers").join(small.digest.to_hex());
    assert!(description.join("meta.erofs").exists());
    // By digest, and without an origin.
    fs::rename(world.origin(), world.path("gone")).unwrap();
    daemon.client().unpin(&pin_request("base/n1:1")).unwrap();
    fs::rename(world.path("gone"), world.origin()).unwrap();
    let Err(ClientError::Refused(error)) = daemon.client().unpin(&pin_request("base/n1:1")) else {
        panic!("unpinned twice");
    };
    assert_eq!(error.kind, ErrorKind::NotFound);
    read_whole(&two.join("data")).unwrap();
    assert!(!files.iter().all(|f| f.exists()), "no longer pinned");
}

/// Mutation tried in the unit tests only: `layer_may_go` that ignores holds.
#[test]
fn descriptions_of_unmounted_layers_are_evicted_and_of_mounted_ones_not() {
    let world = World::new();
    let tree = world.folder("many");
    for n in 0..3000 {
        fs::write(
            tree.join(format!("a-name-that-takes-some-room-{n:05}")),
            b"",
        )
        .unwrap();
    }
    fs::write(tree.join("data"), noise(1 << 20)).unwrap();
    let described = world.publish(&tree, "base/many:1");
    let (_, data) = world.publish_data(4);
    let args = [
        "--cache-size",
        "2MiB",
        "--cache-reserve",
        "0",
        "--memory",
        "0",
    ];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let (many, mnt) = (world.folder("mnt-many"), world.folder("mnt"));
    daemon.mount(&["base/many:1"], &many, false);
    daemon.mount(&["base/t:1"], &mnt, false);
    let meta = daemon
        .cache()
        .join("layers")
        .join(described.digest.to_hex())
        .join("meta.erofs");
    let bytes = fs::metadata(&meta).unwrap().len();
    assert!(bytes > 200 << 10, "{bytes}");
    assert!(daemon.stats().cache.layer_bytes >= bytes);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(meta.exists(), "mounted");
    daemon.client().umount(&many).unwrap();
    // The data of the other layer alone is more than fits.
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    until("the description goes", || !meta.exists());
    assert!(cache_bytes(&daemon.cache()) <= (2 << 20) * 105 / 100);
    daemon.mount(&["base/many:1"], &many, false);
    assert_eq!(fs::read_dir(&many).unwrap().count(), 3001);
}

/// Eight readers of one damaged block: it is removed once and fetched once. The memory holds what was mended until the cache
/// has it again, and not the whole file.
#[test]
fn s62_one_damaged_segment_is_fetched_once_for_many_readers() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::from_millis(20));
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &["--memory", "1MiB"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    assert!(read_whole(&path).unwrap() == data);
    let files = segment_files(&daemon, &layer);
    until("everything is cached", || files.iter().all(|f| f.exists()));
    let file = files
        .iter()
        .max_by_key(|f| fs::metadata(f).unwrap().len())
        .unwrap();
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(file, &bytes).unwrap();
    let before = (web.pack_requests(), daemon.total().verify_failures);
    let digest: Digest = file.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let index = layer
        .manifest
        .segments
        .iter()
        .position(|s| s.digest() == digest)
        .unwrap();
    let lens = layer.manifest.segments.iter().map(|s| s.len());
    let start: u64 = lens.take(index).sum();
    assert!(start < 1 << 20);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(read_whole(&path).unwrap() == data));
        }
    });
    assert_eq!(daemon.total().verify_failures, before.1 + 1);
    assert_eq!(web.pack_requests(), before.0 + 1);
    until("it is whole again", || {
        bytes[middle] ^= 4;
        let whole = fs::read(file).is_ok_and(|b| b == bytes);
        bytes[middle] ^= 4;
        whole
    });
}

/// Any bit of any file in the cache: the reads are right, and what was damaged is fetched again.
#[test]
fn s6_a_flipped_bit_anywhere_in_the_cache_is_found_and_mended() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &["--memory", "0"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    daemon.client().pin(&pin_request("base/t:1")).unwrap();
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    until("everything is cached", || {
        daemon.total().cache_write_bytes > 1 << 20
    });
    daemon.client().umount(&mnt).unwrap();
    assert!(daemon.end(rustix::process::Signal::TERM));
    let cases = std::env::var("DSEC_CASES").ok();
    let cases: usize = cases.and_then(|n| n.parse().ok()).unwrap_or(12);
    let mut hit = BTreeSet::new();
    for case in 0..cases {
        let files = files_of(&daemon.cache());
        // Each kind of file in turn.
        let file = &files[case * 7 % files.len()];
        hit.insert(
            file.strip_prefix(daemon.cache())
                .unwrap()
                .iter()
                .next()
                .unwrap()
                .to_owned(),
        );
        let mut bytes = fs::read(file).unwrap();
        let bit = (case * 7_368_787) % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(file, &bytes).unwrap();
        daemon.restart();
        daemon.mount(&["base/t:1"], &mnt, false);
        assert!(
            read_whole(&mnt.join("data")).unwrap() == data,
            "{} bit {bit}",
            file.display()
        );
        assert_eq!(daemon.total().failed_reads, 0);
        daemon.client().umount(&mnt).unwrap();
        assert!(daemon.end(rustix::process::Signal::TERM));
        let report = fsck::check(&daemon.cache(), true, &|_, _| {}).unwrap();
        // Only a pin is nothing that a reader meets.
        let met = report
            .damage
            .iter()
            .filter(|d| !d.path.starts_with(daemon.cache().join("pins")));
        assert_eq!(
            met.count(),
            0,
            "{} bit {bit}: {:?}",
            file.display(),
            report.damage
        );
    }
    assert!(hit.len() >= 3, "{hit:?}");
    daemon.restart();
}

/// The files of the cache proper that have something in them, sorted.
fn files_of(cache: &Path) -> Vec<PathBuf> {
    let mut files = vec![cache.join("cache.json")];
    let mut folders: Vec<PathBuf> = ["segments", "layers", "pins"].map(|n| cache.join(n)).into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if fs::metadata(&path).unwrap().len() > 0 {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

#[test]
fn a_cache_of_another_format_is_refused_and_left_as_it_is() {
    let world = World::new();
    world.publish_data(1);
    let cache = world.folder("cache");
    fs::write(cache.join("cache.json"), marker::bytes(7)).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_layerd"));
    command.args(["--origin", &world.origin_url()]);
    command.arg("--cache").arg(&cache);
    command.arg("--socket").arg(world.path("socket"));
    let out = command.output().unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        text.contains("has format 7, this version knows 1"),
        "{text}"
    );
    let names: BTreeSet<_> = fs::read_dir(&cache)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, BTreeSet::from(["cache.json".into(), "lock".into()]));
    assert!(!world.path("socket").exists());
}

/// Others fill the disk while layerd runs: the cache gives way by itself, then is served around; the API answers all the time.
#[test]
fn s59_s60_others_fill_the_disk_and_the_cache_gives_way() {
    let world = World::new();
    let (_, data) = world.publish_data(8);
    let disk = Tmpfs::new(&world.path("cache"), "12M");
    let args = [
        "--cache-size",
        "1GiB",
        "--cache-reserve",
        "2MiB",
        "--memory",
        "0",
    ];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    until("the data is cached", || {
        daemon.stats().cache.bytes_used > 7 << 20
    });
    assert!(free(&daemon.cache()) >= 2 << 20);
    // A MiB more than what is free above the reserve: given back although nobody reads.
    let more = usize::try_from(free(&daemon.cache()) - (1 << 20)).unwrap();
    fs::write(world.path("cache/other"), vec![1; more]).unwrap();
    until("the reserve is given back", || {
        free(&daemon.cache()) >= 2 << 20
    });
    assert!(daemon.stats().cache.segments > 10, "not more than needed");
    // Now all of it, as fast as the cache gives way.
    let mut other = fs::File::create(world.path("cache/other2")).unwrap();
    let piece = vec![1; 512 << 10];
    until("others have everything", || {
        let full = other.write_all(&piece).is_err();
        full && daemon.stats().cache.segments == 0
    });
    while other.write_all(&piece).is_ok() {}
    let asked = Instant::now();
    for _ in 0..2 {
        assert!(read_whole(&mnt.join("data")).unwrap() == data);
        daemon.stats();
    }
    assert!(asked.elapsed() < Duration::from_secs(20));
    let stats = daemon.stats();
    assert_eq!(stats.total.failed_reads, 0);
    assert!(
        stats.cache.not_kept > 0 && stats.cache.disk == CacheDisk::Full,
        "{stats:?}"
    );
    assert_eq!(daemon.log().matches("without being cached").count(), 1);
    assert!(daemon.log().matches("others have filled the disk").count() <= 1);
    drop(other);
    fs::remove_file(world.path("cache/other2")).unwrap();
    until("there is room again", || {
        daemon.stats().cache.disk == CacheDisk::Fine
    });
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
    until("it is kept again", || daemon.stats().cache.segments > 0);
    drop(daemon);
    drop(disk);
}

fn free(path: &Path) -> u64 {
    let stat = rustix::fs::statvfs(path).unwrap();
    stat.f_bavail * stat.f_frsize
}

/// An old cache of very many files: the mount is there at once, and the limit holds when they are counted.
#[test]
fn s63_a_mount_does_not_wait_for_a_big_old_cache_to_be_counted() {
    let files: u32 = std::env::var("DSEC_CACHE_FILES").map_or(5000, |n| n.parse().unwrap());
    let world = World::new();
    let (_, data) = world.publish_data(1);
    for shard in 0..=u8::MAX {
        let folder = world.path("cache/segments").join(format!("{shard:02x}"));
        fs::create_dir_all(folder).unwrap();
    }
    for n in 0..files {
        fs::write(
            cached(&world.path("cache"), &Digest::of(&n.to_le_bytes())),
            b"old",
        )
        .unwrap();
    }
    let args = ["--cache-size", "4MiB", "--cache-reserve", "0"];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    let deadline = Instant::now() + Duration::from_secs(600);
    while !daemon.stats().cache.counted {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
    until("the limit holds", || {
        cache_bytes(&daemon.cache()) <= (4 << 20) * 105 / 100
    });
    assert!(daemon.stats().cache.evicted > u64::from(files) / 2);
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
}
