//! Processes that are killed at the worst moment.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use layerd_client::api::MountState;
use rustix::process::Signal;

use crate::daemon::{
    Daemon, detach, drop_pages, mounts_below, processes_of, read_cold, read_whole, until,
};
use crate::fixture::World;
use crate::web::Web;

#[test]
fn without_a_control_process_cached_reads_go_on_and_a_miss_waits_for_its_return() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &["--memory", "0"]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    assert!(read_cold(&path, 0, 4096).unwrap() == data[..4096]);
    let plane = daemon.stats().data_plane_pid;
    until("the segment is cached", || {
        daemon.total().cache_write_bytes > 0
    });
    daemon.kill_control();
    assert!(read_cold(&path, 0, 4096).unwrap() == data[..4096]);
    std::thread::scope(|scope| {
        let path = &path;
        let miss = scope.spawn(move || read_cold(path, 3 << 20, 4096));
        assert!(read_cold(path, 4096, 4096).unwrap() == data[4096..8192]);
        assert!(!miss.is_finished());
        daemon.restart();
        assert!(miss.join().unwrap().unwrap() == data[3 << 20..(3 << 20) + 4096]);
    });
    assert_eq!(daemon.stats().data_plane_pid, plane);
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!(mounts.len(), 1);
    assert_eq!(
        (mounts[0].state, &mounts[0].mountpoint),
        (MountState::Alive, &mnt)
    );
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(
        mounts_below(&daemon.cache()).len(),
        1,
        "only the FUSE mount"
    );
}

#[test]
fn without_a_control_process_a_miss_is_eio_at_the_deadline() {
    let world = World::new();
    world.publish_data(4);
    let args = ["--read-deadline", "700ms"];
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    daemon.kill_control();
    let started = Instant::now();
    let error = read_cold(&mnt.join("data"), 2 << 20, 4096).unwrap_err();
    let waited = started.elapsed();
    assert_eq!(error.raw_os_error(), Some(5));
    assert!(
        waited >= Duration::from_millis(700) && waited < Duration::from_secs(5),
        "{waited:?}"
    );
    daemon.restart();
}

#[test]
fn a_dead_data_plane_is_eio_at_once_and_mounting_again_fetches_nothing_again() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let path = mnt.join("data");
    assert!(read_whole(&path).unwrap() == data);
    until("everything is cached", || {
        daemon.total().cache_write_bytes >= 4 << 20
    });
    let open = File::open(&path).unwrap();
    drop_pages(&path).unwrap();
    daemon.kill_plane();
    let started = Instant::now();
    let mut block = [0; 4096];
    let error = open.read_exact_at(&mut block, 1 << 20).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    assert!(started.elapsed() < Duration::from_secs(1));
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!(mounts[0].state, MountState::Dead);
    let packs = web.pack_requests();
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&path).unwrap() == data);
    assert_eq!(web.pack_requests(), packs);
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!((mounts.len(), mounts[0].state), (1, MountState::Alive));
    assert!(
        open.read_exact_at(&mut block, 1 << 20).is_err(),
        "the old mount stays dead"
    );
}

#[test]
fn a_reader_in_the_middle_of_a_miss_gets_an_error_when_the_data_plane_dies() {
    let world = World::new();
    world.publish_data(1);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    web.hang(true);
    std::thread::scope(|scope| {
        let path = mnt.join("data");
        let reader = scope.spawn(move || read_cold(&path, 0, 4096));
        web.wait_for_pack_requests(1);
        daemon.kill_plane();
        let error = reader.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5));
    });
    web.hang(false);
    daemon.client().umount(&mnt).unwrap();
}

#[test]
fn both_killed_and_started_again_serve_from_the_same_cache() {
    let world = World::new();
    let (_, data) = world.publish_data(4);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let mut daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    until("everything is cached", || {
        daemon.total().cache_write_bytes >= 4 << 20
    });
    let plane = daemon.stats().data_plane_pid.unwrap();
    daemon.kill_control();
    let pid = rustix::process::Pid::from_raw(i32::try_from(plane).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    until("the data plane is gone", || {
        processes_of(&daemon.cache()).is_empty()
    });
    daemon.restart();
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!((mounts.len(), mounts[0].state), (1, MountState::Dead));
    let packs = web.pack_requests();
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert_eq!(web.pack_requests(), packs);
}

#[test]
fn a_stopped_control_process_is_connected_to_again() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let plane = daemon.stats().data_plane_pid;
    assert!(daemon.end(Signal::USR1));
    assert!(mounts_below(&mnt).len() == 1, "the mount is left");
    daemon.restart();
    assert_eq!(daemon.stats().data_plane_pid, plane);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(daemon.end(Signal::TERM));
    assert!(mounts_below(world.dir.path()).is_empty());
}

/// Reads pieces of a file until it fails; how many bytes were right.
fn read_until_error(file: &File, data: &[u8], seed: usize) -> usize {
    let mut right = 0;
    for n in 0.. {
        let (len, offset) = if seed.is_multiple_of(2) {
            (128 << 10, (seed * 7 + n) * (128 << 10))
        } else {
            (4096, (seed * 1_000_003 + n * 69_997) * 4096)
        };
        let offset = offset % (data.len() - len);
        let mut bytes = vec![0; len];
        // A read that meets the death half way is short: the bytes it has are right all the same.
        match file.read_at(&mut bytes, u64::try_from(offset).unwrap()) {
            Ok(read) => {
                assert!(bytes[..read] == data[offset..offset + read], "at {offset}");
                right += read;
            }
            Err(_) => return right,
        }
        if n % 50 == 0 {
            rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
    right
}

#[test]
fn killed_under_load_readers_get_right_bytes_or_errors_and_nobody_hangs() {
    let world = World::new();
    let (_, data) = world.publish_data(40);
    let mnt = world.folder("mnt");
    // The second way has more that can hang: pages are dropped while others are read.
    for round in 0..6 {
        let extra: &[&str] = if round < 3 { &[] } else { &["--buffered"] };
        let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], extra);
        daemon.mount(&["base/t:1"], &mnt, false);
        let file = File::open(mnt.join("data")).unwrap();
        let right = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..8)
                .map(|seed| {
                    let (file, data) = (&file, &data);
                    scope.spawn(move || read_until_error(file, data, seed))
                })
                .collect();
            until("there is load", || daemon.total().fuse_reads > 500);
            daemon.kill_plane();
            readers
                .into_iter()
                .map(|r| r.join().unwrap())
                .sum::<usize>()
        });
        assert!(right > 1 << 20);
    }
}

#[test]
fn a_lost_connection_is_made_again_while_the_data_plane_lives_on() {
    let world = World::new();
    let (_, data) = world.publish_data(16);
    let web = Web::serve(&world.origin(), Duration::from_millis(5));
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let plane = daemon.stats().data_plane_pid;
    let socket = daemon.cache().join("run/data-plane.sock");
    std::thread::scope(|scope| {
        let path = mnt.join("data");
        let reader = scope.spawn(move || read_whole(&path));
        for round in 1..=8 {
            web.wait_for_pack_requests(round);
            // The newest connection wins, so this ends the control process's.
            drop(UnixStream::connect(&socket).unwrap());
            until("there is a connection again", || {
                daemon
                    .log()
                    .matches("connected to the data plane again")
                    .count() as u64
                    >= round
            });
        }
        assert!(reader.join().unwrap().unwrap() == data);
    });
    assert_eq!(daemon.stats().data_plane_pid, plane);
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!(mounts[0].state, MountState::Alive);
}

#[test]
fn somebody_elses_overlay_at_a_recorded_place_is_left_alone() {
    let world = World::new();
    world.publish_data(1);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, true);
    assert!(daemon.end(Signal::USR1));
    detach(&mnt);
    let (a, b) = (world.folder("a"), world.folder("b"));
    let lowers = format!("lowerdir={}:{}", a.display(), b.display());
    let mounted = Command::new("mount")
        .args(["-t", "overlay", "dsec-0123456789abcdef", "-o", &lowers])
        .arg(&mnt)
        .status()
        .unwrap();
    assert!(mounted.success());
    daemon.restart();
    assert_eq!(daemon.client().mounts().unwrap().mounts, []);
    assert_eq!(mounts_below(&mnt).len(), 1);
}
