//! What is read is right, costs what it should, and nothing more.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Duration;

use imgstore::format::bundle::{Bundle, encode};
use imgstore::format::names;
use imgstore::ids::Digest;

use crate::daemon::{Daemon, read_cold, read_whole, until};
use crate::fixture::{World, noise};
use crate::web::Web;

/// A tree with files of many sizes, links, folders.
fn varied(root: &Path) {
    let bytes = noise(3 << 20);
    for (n, len) in [0, 1, 4095, 4096, 4097, 70_000, 300_000, 3 << 20]
        .iter()
        .enumerate()
    {
        let folder = root.join(format!("d{}", n % 3));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("f{n}")), &bytes[..*len]).unwrap();
        std::os::unix::fs::symlink("target", folder.join(format!("s{n}"))).unwrap();
    }
    let text = "all work and no play\n".repeat(20_000);
    fs::write(root.join("text"), text).unwrap();
    fs::hard_link(root.join("text"), root.join("text2")).unwrap();
}

fn diff(a: &Path, b: &Path) {
    let out = Command::new("diff")
        .arg("-r")
        .arg("--no-dereference")
        .args([a, b])
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stdout)
    );
}

#[test]
fn a_mounted_layer_is_equal_to_its_source_cold_cached_and_remounted() {
    let world = World::new();
    let tree = world.folder("tree");
    varied(&tree);
    let layer = world.publish(&tree, "base/t:1");
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    let mounted = daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(mounted.layers, [layer.digest.to_hex()]);
    diff(&tree, &mnt);
    let cold = daemon.total();
    assert_eq!(cold.verify_failures, 0);
    assert_eq!(cold.fetched_plain_bytes, layer.manifest.segment_bytes());
    daemon.client().umount(&mnt).unwrap();
    daemon.mount(&["base/t:1"], &mnt, false);
    diff(&tree, &mnt);
    let warm = daemon.total();
    // The tag is the one thing that may have changed.
    assert_eq!(warm.remote_requests, cold.remote_requests + 1);
    assert_eq!(warm.fetched_plain_bytes, cold.fetched_plain_bytes);
}

#[test]
fn looking_at_all_inodes_costs_no_request() {
    let world = World::new();
    let tree = world.folder("tree");
    for d in 0..40 {
        let folder = tree.join(format!("folder-{d}"));
        fs::create_dir(&folder).unwrap();
        for f in 0..250 {
            fs::write(folder.join(format!("a-file-with-a-longer-name-{f}")), b"x").unwrap();
        }
    }
    world.publish(&tree, "base/t:1");
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let before = web.requests();
    let out = Command::new("find")
        .arg(&mnt)
        .args(["-printf", "%s\n"])
        .output()
        .unwrap();
    assert_eq!(out.stdout.iter().filter(|b| **b == b'\n').count(), 10_041);
    assert_eq!(web.requests(), before);
    assert_eq!(daemon.stats().mounts[0].counters.remote_requests, 0);
}

/// Tag and bundle, then data.
#[test]
fn a_cold_mount_costs_two_requests() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(web.requests(), 2);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert_eq!(web.requests(), 2 + web.pack_requests());
    daemon.client().umount(&mnt).unwrap();
    daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(web.requests(), 3 + web.pack_requests(), "the tag again");
    // A bundle that is damaged: its parts.
    drop(daemon);
    let bundle = world.origin().join(names::bundle(&layer.digest));
    fs::write(&bundle, b"damaged").unwrap();
    let before = web.requests();
    let other = world.folder("other");
    let daemon = Daemon::start(&other, &[web.url()], &[]);
    daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(web.requests() - before, 5);
    assert_eq!(daemon.log().matches("no good bundle").count(), 1);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
}

/// A bundle that names packs which are gone, as after a crash between placement and bundle: the placement is read, and readers
/// notice nothing. Turned red by: `refuse` that does not push what has moved (EIO).
#[test]
fn a_bundle_that_is_behind_costs_requests_and_no_reader_an_error() {
    let world = World::new();
    let (layer, data) = world.publish_data(1);
    let path = world.origin().join(names::bundle(&layer.digest));
    let mut behind = Bundle::parse(&fs::read(&path).unwrap(), &layer.digest).unwrap();
    for pack in &mut behind.placement.packs {
        pack.digest = Digest::of(b"gone");
    }
    let meta = world
        .origin()
        .join(names::meta(&behind.manifest.meta.digest));
    let meta = fs::read(meta).unwrap();
    let size = behind.manifest.meta.size;
    let bytes = encode(&behind.manifest_bytes, &behind.placement, &meta, size).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert_eq!(web.requests(), 2);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(daemon.log().contains("packs have moved"));
    assert_eq!(daemon.total().failed_reads, 0);
}

#[test]
fn sixty_four_readers_of_one_missing_segment_make_one_request() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::from_millis(20));
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let start = Barrier::new(64);
    web.hang(true);
    std::thread::scope(|scope| {
        for n in 0..64_u64 {
            let (start, data, path) = (&start, &data, mnt.join("data"));
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
                let offset = n % 16 * 4096;
                let mut block = [0; 4096];
                start.wait();
                file.read_exact_at(&mut block, offset).unwrap();
                let at = usize::try_from(offset).unwrap();
                assert!(block == data[at..at + 4096]);
            });
        }
        web.wait_for_pack_requests(1);
        web.hang(false);
    });
    assert_eq!(web.pack_requests(), 1);
    let counters = daemon.stats().mounts[0].counters;
    assert_eq!(counters.remote_requests, 1);
    assert_eq!(counters.needed_bytes, 16 * 4096);
}

#[test]
fn a_sequential_reader_gets_few_requests_and_a_random_one_no_prefetch() {
    let world = World::new();
    let (layer, data) = world.publish_data(16);
    let segments = u64::try_from(layer.manifest.segments.len()).unwrap();
    let web = Web::serve(&world.origin(), Duration::from_millis(1));
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let far = [11, 3, 14, 7, 1].map(|mib: u64| mib << 20);
    for offset in far {
        let at = usize::try_from(offset).unwrap();
        assert!(read_cold(&mnt.join("data"), offset, 4096).unwrap() == data[at..at + 4096]);
    }
    let counters = daemon.total();
    assert_eq!(counters.prefetched_segments, 0);
    assert_eq!(web.pack_requests(), 5);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    let requests = web.pack_requests();
    assert!(
        requests < segments * 3 / 4,
        "{requests} requests for {segments} segments"
    );
    let counters = daemon.total();
    // A prefetched segment that a reader asks for before it is there counts as demanded, so this depends on the pace.
    assert!(counters.prefetched_segments > segments / 5, "{counters:?}");
    assert_eq!(counters.fetched_plain_bytes, layer.manifest.segment_bytes());
}

#[test]
fn a_failing_origin_is_retried_and_the_next_one_is_asked() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let empty = world.folder("empty");
    let nothing = Web::serve(&empty, Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[nothing.url(), web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    web.faults().refuse.store(2, Ordering::SeqCst);
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
    let counters = daemon.stats().mounts[0].counters;
    // Three rounds over two origins.
    assert_eq!((counters.remote_requests, counters.retries), (6, 5));
    assert_eq!(counters.failed_reads, 0);
}

#[test]
fn a_hanging_origin_blocks_neither_cached_reads_nor_metadata_nor_unmounting() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let args = ["--read-deadline", "2s"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let (mnt, other) = (world.folder("mnt"), world.folder("other"));
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
    web.hang(true);
    std::thread::scope(|scope| {
        let stuck: Vec<_> = (1..4)
            .map(|mib| {
                let path = mnt.join("data");
                scope.spawn(move || read_cold(&path, mib << 20, 4096))
            })
            .collect();
        web.wait_for_pack_requests(4);
        let started = std::time::Instant::now();
        assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
        assert_eq!(fs::read_dir(&mnt).unwrap().count(), 2);
        daemon.mount(&["base/t:1"], &other, false);
        daemon.client().umount(&other).unwrap();
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
        for reader in stuck {
            let error = reader.join().unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5));
        }
    });
    web.hang(false);
    assert!(daemon.log().contains("no answer for a segment in time"));
    let path = mnt.join("data");
    let right =
        |()| read_cold(&path, 1 << 20, 4096).is_ok_and(|b| b == data[1 << 20..(1 << 20) + 4096]);
    assert!(right(()), "reads work again when the origin does");
}

/// Bytes of a file that are in the page cache.
fn resident(path: &Path) -> u64 {
    let out = Command::new("fincore")
        .args(["-b", "-n", "-o", "RES"])
        .arg(path)
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

#[test]
fn through_the_page_cache_small_files_need_few_requests_and_the_second_copy_is_short() {
    const FILES: usize = 4000;
    let world = World::new();
    let tree = world.folder("tree");
    let bytes = noise(64 << 20);
    for (n, part) in bytes.chunks(bytes.len() / FILES).enumerate() {
        fs::write(tree.join(format!("file-{n:05}")), part).unwrap();
    }
    let layer = world.publish(&tree, "base/t:1");
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &["--buffered"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    diff(&tree, &mnt);
    let image = daemon.cache().join("run/fuse").join(layer.digest.to_hex());
    until("the second copy is short", || {
        resident(&image) <= (25 << 20) + layer.manifest.meta.size
    });
    let reads = daemon.total().fuse_reads;
    assert!(reads < 2000, "{reads} requests for {FILES} files");
}
