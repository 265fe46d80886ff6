//! An origin that stops, stalls, refuses or asks for patience: readers wait and then succeed, or get EIO at the deadline;
//! everything that needs no origin goes on meanwhile.
//!
//! "Meanwhile" is decided by order, not by time: what must not wait is done while the server still holds a request and
//! the reader of it is still blocked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::bad_web::{Act, BadWeb, Request};
use crate::daemon::{Daemon, mounts_below, processes_of, read_cold, read_whole, until};
use crate::fixture::{World, noise};

/// A misbehaving server of a world's origin.
pub(crate) fn serve(world: &World) -> BadWeb {
    let root = world.origin();
    BadWeb::serve(move |path| fs::read(root.join(path)).ok())
}

fn is_pack(request: &Request) -> bool {
    request.path.starts_with("packs/")
}

/// Holds requests for packs, answers the others.
fn hold_packs(web: &BadWeb) {
    web.tell(|request| {
        if is_pack(request) {
            Act::Hold
        } else {
            Act::Right
        }
    });
}

fn packs_seen(web: &BadWeb) -> usize {
    web.seen().iter().filter(|r| is_pack(r)).count()
}

/// How long an outage is kept up after everything was checked: 30 s in `tools/soak`.
fn outage() -> Duration {
    Duration::from_secs(if std::env::var("DSEC_CASES").is_ok() {
        30
    } else {
        0
    })
}

/// Tasks of a process that are in uninterruptible sleep.
fn stuck_tasks(pid: u32) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let stats = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
    // The state is the word behind the name, which is in brackets and may have anything in it.
    stats
        .filter(|stat| {
            let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
            state.is_some_and(|rest| rest.starts_with('D'))
        })
        .collect()
}

fn nobody_is_stuck(daemon: &Daemon) {
    let stats = daemon.stats();
    let ours = [
        std::process::id(),
        stats.control_pid,
        stats.data_plane_pid.unwrap(),
    ];
    until("no task is in uninterruptible sleep", || {
        ours.iter().all(|pid| stuck_tasks(*pid).is_empty())
    });
}

/// Runs something that must not wait; how long it took is only printed.
fn now<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = run();
    println!("{what}: {:.1} ms", start.elapsed().as_secs_f64() * 1000.0);
    out
}

/// Everything that needs no origin, done while it is held.
fn life_goes_on(daemon: &Daemon, web: &BadWeb, mnt: &Path, other: &Path, warm: &[u8], layer: &str) {
    now("a warm read", || {
        assert!(read_cold(&mnt.join("data"), 0, warm.len()).unwrap() == warm);
    });
    now("all metadata", || {
        assert_eq!(fs::read_dir(mnt).unwrap().count(), 2);
        assert_eq!(fs::metadata(mnt.join("small")).unwrap().len(), 6);
    });
    // By its digest: a tag would have to be looked up.
    now("a mount", || drop(daemon.mount(&[layer], other, true)));
    now("statistics", || assert_eq!(daemon.stats().mounts.len(), 2));
    now("an umount", || daemon.client().umount(other).unwrap());
    assert!(web.held() > 0, "the origin still holds what it held");
}

fn unfinished<T>(readers: &[ScopedJoinHandle<'_, T>]) -> bool {
    readers.iter().all(|reader| !reader.is_finished())
}

/// The requests that the outage broke are repeated: without that these readers would get EIO.
/// Mutation: the deadline of a range is a thousandth of the patience.
#[test]
fn an_origin_that_stops_and_comes_back_costs_readers_time_and_nothing_else() {
    let world = World::new();
    let (layer, data) = world.publish_data(8);
    let web = serve(&world);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &["--read-deadline", "90s"]);
    let (mnt, other) = (world.folder("mnt"), world.folder("other"));
    daemon.mount(&["base/t:1"], &mnt, false);
    read_cold(&mnt.join("data"), 0, 4096).unwrap();
    web.tell(|request| {
        if is_pack(request) {
            Act::HoldThenReset
        } else {
            Act::Right
        }
    });
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..8)
            .map(|mib| {
                let path = mnt.join("data");
                scope.spawn(move || (mib, read_cold(&path, mib << 20, 4096)))
            })
            .collect();
        web.wait_for_held(7);
        let hex = layer.digest.to_hex();
        life_goes_on(&daemon, &web, &mnt, &other, &data[..4096], &hex);
        std::thread::sleep(outage());
        assert!(unfinished(&readers));
        // It comes back with its connections broken.
        web.always(Act::Right);
        web.release();
        for reader in readers {
            let (mib, read) = reader.join().unwrap();
            let at = usize::try_from(mib << 20).unwrap();
            assert!(read.unwrap() == data[at..at + 4096]);
        }
    });
    assert_eq!(daemon.total().failed_reads, 0);
    nobody_is_stuck(&daemon);
}

#[test]
fn an_origin_that_stays_away_is_eio_at_the_deadline_and_leaves_nobody_stuck() {
    let world = World::new();
    let (layer, data) = world.publish_data(4);
    let web = serve(&world);
    let args = ["--read-deadline", "1500ms"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let (mnt, other) = (world.folder("mnt"), world.folder("other"));
    daemon.mount(&["base/t:1"], &mnt, false);
    read_cold(&mnt.join("data"), 0, 4096).unwrap();
    hold_packs(&web);
    std::thread::scope(|scope| {
        let start = Instant::now();
        let readers: Vec<_> = (1..4)
            .map(|mib| {
                let path = mnt.join("data");
                scope.spawn(move || read_cold(&path, mib << 20, 4096))
            })
            .collect();
        web.wait_for_held(3);
        let hex = layer.digest.to_hex();
        life_goes_on(&daemon, &web, &mnt, &other, &data[..4096], &hex);
        for reader in readers {
            let error = reader.join().unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(5));
        }
        let took = start.elapsed();
        // The kernel itself may read a block up to three times.
        assert!(took >= Duration::from_millis(1500), "{took:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    });
    nobody_is_stuck(&daemon);
    web.always(Act::Right);
    web.release();
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
}

/// Whoever comes while a request is on its way has a deadline of his own: the refusal of the first reader's request must not
/// fail the second reader too, long before its time.
#[test]
fn a_reader_who_comes_late_waits_as_long_as_the_first() {
    let world = World::new();
    let (_, data) = world.publish_data(1);
    let web = serve(&world);
    let args = ["--read-deadline", "2s"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    hold_packs(&web);
    let path = mnt.join("data");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| read_cold(&path, 0, 4096));
        web.wait_for_held(1);
        std::thread::sleep(Duration::from_millis(1500));
        // Another block of the same segment.
        let second = scope.spawn(|| read_cold(&path, 8192, 4096));
        until("the first request is given up", || packs_seen(&web) >= 2);
        // Turned red by: `Entry::has_new_reader` that always says no. (The read itself passes then: the kernel asks again.)
        assert!(!daemon.log().contains("a segment cannot be had"));
        web.always(Act::Right);
        web.release();
        assert!(second.join().unwrap().unwrap() == data[8192..12_288]);
        drop(first.join().unwrap());
    });
}

#[test]
fn shutting_down_does_not_wait_for_the_origin_nor_for_its_readers() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = serve(&world);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &["--read-deadline", "60s"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
    hold_packs(&web);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..4)
            .map(|mib| {
                let path = mnt.join("data");
                scope.spawn(move || read_cold(&path, mib << 20, 4096))
            })
            .collect();
        web.wait_for_held(3);
        let start = Instant::now();
        assert!(now("shutting down", || daemon.end(Signal::TERM)));
        // A data plane that had to be killed would have cost seconds.
        assert!(start.elapsed() < Duration::from_secs(2));
        for reader in readers {
            reader.join().unwrap().unwrap_err();
        }
        assert!(web.held() > 0, "the origin still holds what it held");
    });
    assert_eq!(mounts_below(world.dir.path()), [""; 0]);
    assert_eq!(processes_of(world.dir.path()), [0; 0]);
    assert!(stuck_tasks(std::process::id()).is_empty());
    web.release();
}

/// Publishes a second layer with one file `data` of 1 MiB, as `base/u:1`.
fn publish_other(world: &World) -> (imgstore::store::layer::Layer, Vec<u8>) {
    let tree = world.folder("tree2");
    let data: Vec<u8> = noise(1 << 20).into_iter().map(|b| b ^ 0x5A).collect();
    fs::write(tree.join("data"), &data).unwrap();
    (world.publish(&tree, "base/u:1"), data)
}

/// Mutation that was seen red: the damaged file is fetched again under the lock.
#[test]
fn a_mount_that_waits_for_the_origin_holds_up_no_other_mount_umount_or_question() {
    let world = World::new();
    let (layer, _) = world.publish_data(1);
    let (slow, data) = publish_other(&world);
    let web = serve(&world);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let (mnt, other) = (world.folder("mnt"), world.folder("other"));
    // Known here, and damaged since.
    daemon.mount(&["base/u:1"], &other, false);
    daemon.client().umount(&other).unwrap();
    let kept = daemon.cache().join("layers").join(slow.digest.to_hex());
    let path = kept.join("meta.erofs");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    // So that its mount by digest needs no name.
    let (hex, slow_hex) = (layer.digest.to_hex(), slow.digest.to_hex());
    daemon.mount(&[&hex], &mnt, false);
    daemon.client().umount(&mnt).unwrap();
    web.always(Act::Hold);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| daemon.try_mount(&[&slow_hex], &other, false).map(drop));
        web.wait_for_held(1);
        now("a mount", || daemon.mount(&[&hex], &mnt, false));
        now("statistics", || assert_eq!(daemon.stats().mounts.len(), 1));
        now("an umount", || daemon.client().umount(&mnt).unwrap());
        assert!(!waits.is_finished());
        assert!(web.held() > 0);
        web.release();
        waits.join().unwrap().unwrap();
    });
    assert!(read_whole(&other.join("data")).unwrap() == data);
    bytes[middle] ^= 1;
    assert!(
        fs::read(&path).unwrap() == bytes,
        "what was damaged is whole"
    );
}

/// More mounts wait for the origin than there are threads for requests. Mutation that was seen red: mounts are not
/// limited (`MOUNTS_AT_ONCE`), and the umount never comes to its turn.
#[test]
fn a_hundred_mounts_that_wait_leave_room_for_everything_else() {
    let world = World::new();
    let (layer, _) = world.publish_data(1);
    let web = serve(&world);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&[&layer.digest.to_hex()], &mnt, false);
    web.tell(|request| {
        if request.path.starts_with("tags/") {
            Act::Hold
        } else {
            Act::Right
        }
    });
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..100)
            .map(|n| {
                let mountpoint = world.folder(&format!("m{n}"));
                let daemon = &daemon;
                scope.spawn(move || {
                    daemon
                        .try_mount(&["base/t:1"], &mountpoint, false)
                        .map(drop)
                })
            })
            .collect();
        web.wait_for_held(64);
        assert_eq!(now("statistics", || daemon.stats()).mounts.len(), 1);
        now("an umount", || daemon.client().umount(&mnt).unwrap());
        assert!(unfinished(&waiting));
        web.release();
        for mount in waiting {
            mount.join().unwrap().unwrap();
        }
    });
    assert_eq!(daemon.stats().mounts.len(), 100);
}

/// S76 through the kernel: sequential readers of a layer whose pack is held have filled what read-ahead has; another layer is mounted
/// and read meanwhile.
#[test]
fn s76_a_new_mount_and_its_reads_do_not_wait_for_hanging_read_ahead() {
    let world = World::new();
    let (layer, data) = world.publish_data(16);
    let (_, other_data) = publish_other(&world);
    let held = layer.placement.packs[0].digest.to_hex();
    let web = serve(&world);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &["--read-deadline", "60s"]);
    let (mnt, other) = (world.folder("mnt"), world.folder("other"));
    daemon.mount(&["base/t:1"], &mnt, false);
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    web.tell(move |request| {
        // The first few are answered: a reader that gets on is one that read-ahead works for.
        if request.path.contains(&held) && count.fetch_add(1, Ordering::SeqCst) >= 3 {
            Act::Hold
        } else {
            Act::Right
        }
    });
    std::thread::scope(|scope| {
        let path = mnt.join("data");
        let reader = scope.spawn(move || read_whole(&path));
        web.wait_for_held(2);
        now("a mount", || daemon.mount(&["base/u:1"], &other, false));
        now("its reads", || {
            assert!(read_whole(&other.join("data")).unwrap() == other_data);
        });
        assert!(!reader.is_finished());
        assert!(web.held() > 0);
        web.release();
        assert!(reader.join().unwrap().unwrap() == data);
    });
}

/// Mutation that was seen red: no circuit, and the hanging origin costs its share of the deadline every time.
#[test]
fn a_first_origin_that_hangs_costs_its_share_once() {
    let world = World::new();
    let (_, data) = world.publish_data(8);
    let (first, second) = (serve(&world), serve(&world));
    let args = ["--read-deadline", "4s"];
    let origins = [first.url(), second.url()];
    let daemon = Daemon::start(world.dir.path(), &origins, &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    hold_packs(&first);
    let start = Instant::now();
    for mib in 0..8 {
        let at = usize::try_from(mib << 20).unwrap();
        let read = read_cold(&mnt.join("data"), mib << 20, 4096).unwrap();
        assert!(read == data[at..at + 4096]);
    }
    let took = start.elapsed();
    assert_eq!(packs_seen(&second), 8);
    // Once, and perhaps a probe or two.
    assert!(
        packs_seen(&first) <= 3,
        "{} after {took:?}",
        packs_seen(&first)
    );
    assert_eq!(daemon.total().failed_reads, 0);
    // It comes back.
    first.always(Act::Right);
    first.release();
}

fn read_result(path: &Path, mib: u64) -> Option<i32> {
    read_cold(path, mib << 20, 4096)
        .err()
        .map(|error| error.raw_os_error().unwrap())
}

/// For the first requests for packs these, then right ones.
fn packs_get(web: &BadWeb, acts: &[Act]) {
    let mut acts = acts.to_vec();
    acts.reverse();
    web.forget();
    web.tell(move |request| {
        if is_pack(request) {
            acts.pop().unwrap_or(Act::Right)
        } else {
            Act::Right
        }
    });
}

fn status(code: u16, line: &str) -> Act {
    Act::Status(code, vec![line.to_owned()])
}

#[test]
fn broken_and_busy_answers_are_retried_and_refusals_told() {
    let world = World::new();
    let (_, data) = world.publish_data(16);
    let web = serve(&world);
    let args = ["--read-deadline", "20s"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    let mut mib = 0;
    for acts in [
        vec![Act::Reset, Act::Close],
        vec![Act::ResetAfter(1000), Act::CutOff(70_000)],
        vec![status(503, "Retry-After: 1"), status(429, "Retry-After: 0")],
        vec![
            status(500, "X: y"),
            status(502, "X: y"),
            status(504, "X: y"),
        ],
        vec![Act::Html, Act::Whole, Act::Gzip, Act::Garbage],
        vec![Act::OtherOffset(1), Act::Shorter(1), Act::Longer(1)],
    ] {
        packs_get(&web, &acts);
        let at = mib << 20;
        let read = read_cold(&path, u64::try_from(at).unwrap(), 4096);
        assert!(read.unwrap() == data[at..at + 4096], "{acts:?}");
        assert_eq!(packs_seen(&web), acts.len() + 1, "{acts:?}");
        mib += 1;
    }
    assert_eq!(daemon.total().failed_reads, 0);
    assert_eq!(daemon.total().verify_failures, 0);
    let mib = u64::try_from(mib).unwrap();
    // Refused credentials: told at once, asked for once a read (the kernel tries up to three times), right later.
    web.forget();
    web.always(status(401, "WWW-Authenticate: Bearer realm=\"x\""));
    assert_eq!(read_result(&path, mib), Some(5));
    assert!((1..=3).contains(&packs_seen(&web)), "{}", packs_seen(&web));
    let log = daemon.log();
    for part in ["refused `packs/", "HTTP status 401", "Bearer"] {
        assert!(log.contains(part), "{part}");
    }
    web.always(Act::Right);
    assert_eq!(read_result(&path, mib), None);
    // Longer than the deadline: EIO now, and nobody asks before the time is over.
    web.forget();
    web.always(status(429, "Retry-After: 3600"));
    let start = Instant::now();
    assert_eq!(read_result(&path, mib + 1), Some(5));
    assert_eq!(read_result(&path, mib + 2), Some(5));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(packs_seen(&web), 1);
}

/// A body that trickles has the reader's deadline, and the next read is none the worse for it.
#[test]
fn slow_loris_answers_end_at_the_deadline() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let web = serve(&world);
    let args = ["--read-deadline", "700ms"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path: PathBuf = mnt.join("data");
    for act in [
        Act::Slow(100, Duration::from_millis(20)),
        Act::SlowHead(Duration::from_millis(100)),
    ] {
        web.always(act);
        assert_eq!(read_result(&path, 1), Some(5));
    }
    web.always(Act::Right);
    assert!(read_cold(&path, 1 << 20, 4096).unwrap() == data[1 << 20..(1 << 20) + 4096]);
    nobody_is_stuck(&daemon);
}
