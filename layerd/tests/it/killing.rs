//! SIGKILL under readers while the cache is being filled and evicted: right bytes or an error, and never zeros.
//!
//! The published form of this (`dsec-bench kill`) counts for three seconds; here the readers go on for a number of reads.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use layerd_client::api::MountState;
use rustix::fs::Advice;
use rustix::process::Signal;

use crate::daemon::{Daemon, read_whole, signal, until};
use crate::fixture::World;
use crate::space::cache_bytes;

const BLOCK: usize = 4096;
/// Half a MiB of slack beside a limit of 3 MiB would hide a cache that is not bounded; this is 5 %.
const LIMIT: u64 = 3 << 20;

/// Rounds: as given, or as many as `DSEC_CASES` says (`tools/soak`).
fn rounds(usual: u64) -> u64 {
    let wanted = std::env::var("DSEC_CASES").ok();
    wanted.and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// What random reads of 4 KiB gave.
#[derive(Debug, Default)]
struct Tally {
    right: AtomicU64,
    zeros: AtomicU64,
    wrong: AtomicU64,
    errors: AtomicU64,
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Tally {
    fn reads(&self) -> u64 {
        load(&self.right) + load(&self.zeros) + load(&self.wrong) + load(&self.errors)
    }

    /// Reads at random offsets until told to stop.
    fn read(&self, file: &File, data: &[u8], seed: u64, stop: &AtomicBool) {
        let blocks = u64::try_from(data.len() / BLOCK).unwrap();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut n = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let offset = state % blocks * 4096;
            let at = usize::try_from(offset).unwrap();
            let mut block = [0; BLOCK];
            let counter = match file.read_exact_at(&mut block, offset) {
                Err(_) => &self.errors,
                Ok(()) if block == data[at..at + BLOCK] => &self.right,
                Ok(()) if block == [0; BLOCK] => &self.zeros,
                Ok(()) => &self.wrong,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            n += 1;
            if n.is_multiple_of(32) {
                rustix::fs::fadvise(file, 0, None, Advice::DontNeed).unwrap();
            }
        }
    }
}

/// One daemon on a cache that is a quarter of what is read.
fn start(world: &World, mnt: &Path) -> Daemon {
    let args = [
        "--cache-size",
        "3MiB",
        "--cache-reserve",
        "0",
        "--memory",
        "0",
        "--read-deadline",
        "10s",
    ];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    daemon.mount(&["base/t:1"], mnt, false);
    daemon
}

/// After a kill and a restart: counted, bounded, nothing half written, and every byte right.
fn check(daemon: &Daemon, mnt: &Path, data: &[u8]) {
    until("the cache is counted", || daemon.stats().cache.counted);
    let bounded = || cache_bytes(&daemon.cache()) <= LIMIT + LIMIT / 20;
    until("the limit holds", bounded);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    until("nothing is being written", || {
        let stats = daemon.stats().cache;
        let tmp = fs::read_dir(daemon.cache().join("tmp")).unwrap().count();
        tmp == 0 && stats.bytes_used == cache_bytes(&daemon.cache())
    });
    assert!(bounded());
    assert_eq!(daemon.total().verify_failures, 0, "SIGKILL damages nothing");
}

/// Runs readers, waits until they did `before` reads, does `kill`, and lets them read `after` more.
fn under_readers(file: &File, data: &[u8], reads: (u64, u64), kill: impl FnOnce()) -> Tally {
    let tally = Tally::default();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..=2 {
            let (tally, stop) = (&tally, &stop);
            scope.spawn(move || tally.read(file, data, seed + reads.0, stop));
        }
        until("readers read", || tally.reads() >= reads.0);
        kill();
        let killed = tally.reads();
        until("readers go on", || tally.reads() >= killed + reads.1);
        stop.store(true, Ordering::Relaxed);
    });
    tally
}

/// The count itself: it tells zeros and other wrong bytes from right ones.
#[test]
fn the_count_tells_zeros_and_wrong_bytes_from_right_ones() {
    let world = World::new();
    let data = crate::fixture::noise(3 * BLOCK);
    let mut other = data.clone();
    other[BLOCK..2 * BLOCK].fill(0);
    other[2 * BLOCK] ^= 1;
    fs::write(world.path("other"), other).unwrap();
    let file = File::open(world.path("other")).unwrap();
    let tally = under_readers(&file, &data, (100, 1), || {});
    assert!(load(&tally.right) > 0 && load(&tally.zeros) > 0 && load(&tally.wrong) > 0);
    assert_eq!(load(&tally.errors), 0);
}

/// That zeros would be seen is the test above; a reader that hangs is one of `until`.
#[test]
fn s2_s3_a_killed_data_plane_gives_right_bytes_or_errors_and_no_zeros() {
    let world = World::new();
    let (_, data) = world.publish_data(12);
    let mnt = world.folder("mnt");
    let daemon = start(&world, &mnt);
    let mut errors = 0;
    for round in 0..rounds(6) {
        let file = File::open(mnt.join("data")).unwrap();
        // From the first read, when nothing is cached, to the middle of evicting.
        let before = 1 + round * 97 % 400;
        let tally = under_readers(&file, &data, (before, 500), || daemon.kill_plane());
        assert_eq!(
            (load(&tally.zeros), load(&tally.wrong)),
            (0, 0),
            "{tally:?}"
        );
        assert!(load(&tally.right) > 0, "{tally:?}");
        errors += load(&tally.errors);
        let mounts = daemon.client().mounts().unwrap().mounts;
        assert_eq!(mounts[0].state, MountState::Dead);
        drop(file);
        daemon.mount(&["base/t:1"], &mnt, false);
        check(&daemon, &mnt, &data);
    }
    assert!(errors > 100, "{errors}");
}

/// Meant to turn red (not tried): a data plane that ends when its connection to the control process does.
#[test]
fn s3_s50_a_killed_control_process_costs_no_reader_a_byte() {
    let world = World::new();
    let (_, data) = world.publish_data(12);
    let mnt = world.folder("mnt");
    let mut daemon = start(&world, &mnt);
    let file = File::open(mnt.join("data")).unwrap();
    for round in 0..rounds(6) {
        let before = 1 + round * 89 % 300;
        let tally = under_readers(&file, &data, (before, 300), || {
            daemon.kill_control();
            daemon.restart();
        });
        let bad = (load(&tally.zeros), load(&tally.wrong), load(&tally.errors));
        assert_eq!(bad, (0, 0, 0), "{tally:?}");
        check(&daemon, &mnt, &data);
    }
    // Interrupted politely, it takes its mounts along and keeps the cache.
    drop(file);
    let used = daemon.stats().cache.bytes_used;
    assert!(used > LIMIT / 2);
    assert!(daemon.end(Signal::INT));
    daemon.restart();
    daemon.mount(&["base/t:1"], &mnt, false);
    until("the cache is adopted", || {
        daemon.stats().cache.bytes_used >= used / 2
    });
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
}

/// Both at once, which is what a host's out-of-memory killer does.
#[test]
fn s50_both_killed_during_fills_leave_one_bounded_cache() {
    let world = World::new();
    let (_, data) = world.publish_data(12);
    let mnt = world.folder("mnt");
    let mut daemon = start(&world, &mnt);
    for round in 0..rounds(4) {
        let file = File::open(mnt.join("data")).unwrap();
        let before = 1 + round * 61 % 200;
        let tally = under_readers(&file, &data, (before, 100), || {
            signal(daemon.stats().data_plane_pid.unwrap(), Signal::KILL);
            daemon.kill_control();
        });
        assert_eq!(
            (load(&tally.zeros), load(&tally.wrong)),
            (0, 0),
            "{tally:?}"
        );
        drop(file);
        daemon.restart();
        daemon.mount(&["base/t:1"], &mnt, false);
        check(&daemon, &mnt, &data);
    }
}
