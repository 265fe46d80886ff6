//! Layers as block devices, in the test VM: this machine's kernel may have no ublk.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use layerd_client::api::MountState;
use rustix::process::Signal;

use crate::daemon::{Daemon, mounts_below, processes_of, read_cold, read_whole, signal, until};
use crate::fixture::World;

/// Block and character devices of the ublk driver.
fn nodes() -> Vec<String> {
    let names = fs::read_dir("/dev").unwrap();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    names
        .filter(|n| n.starts_with("ublkb") || n.starts_with("ublkc"))
        .collect()
}

/// The core of these tests, which run on FUSE here, on ublk there.
#[test]
fn reading_damage_and_ending_in_the_vm() {
    let filters = [
        "reading::",
        "damage::",
        "lifecycle::ending_leaves",
        "lifecycle::unmounting_the_last",
        "lifecycle::a_busy_composition",
        "lifecycle::a_stopped_data_plane",
        // Of FUSE's second copy.
        "--skip=through_the_page_cache",
    ];
    test_vm::filtered(&["-t", "500"], &[], &filters, 17);
}

#[test]
fn deaths_in_the_vm() {
    test_vm::suite(
        "ublk::deaths_in_the_vm",
        &["-t", "280"],
        &[
            ("plane", readers_of_a_killed_data_plane_wait_and_go_on),
            ("both", both_killed_and_started_again_serve_on),
            ("damaged", a_layer_that_cannot_be_opened_again_is_an_error),
            (
                "left",
                a_data_plane_without_devices_takes_away_what_a_dead_one_left,
            ),
        ],
    );
}

#[test]
fn a_driver_that_cannot_work_is_an_error_and_nothing_else_is_taken() {
    let world = World::new();
    world.publish_data(1);
    let args = ["--driver", "ublk"];
    let mut daemon = Daemon::idle(world.dir.path(), &[world.origin_url()], &args);
    if std::path::Path::new("/dev/ublk-control").exists() {
        daemon.restart();
        assert_eq!(daemon.stats().driver, "ublk");
        return;
    }
    let out = daemon.command().output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("`--driver ublk` cannot work here"), "{text}");
    assert!(text.contains("modprobe ublk_drv"), "{text}");
    let auto = Daemon::start(
        world.dir.path(),
        &[world.origin_url()],
        &["--driver", "auto"],
    );
    let stats = auto.stats();
    assert_eq!(stats.driver, "fuse");
    assert!(
        stats.driver_reason.contains("modprobe ublk_drv"),
        "{stats:?}"
    );
}

/// Mutation seen red: `Recovery::Fail` for layers (the readers get EIO).
fn readers_of_a_killed_data_plane_wait_and_go_on() {
    let world = World::new();
    let (_, data) = world.publish_data(8);
    let daemon = Daemon::start(
        world.dir.path(),
        &[world.origin_url()],
        &["--driver", "ublk"],
    );
    assert_eq!(daemon.stats().driver, "ublk");
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..4_usize {
            let (stop, reads, data, path) = (&stop, &reads, &data, mnt.join("data"));
            scope.spawn(move || {
                for n in 0.. {
                    let at = (seed * 1_000_003 + n * 69_997) % (data.len() / 4096 - 4) * 4096;
                    let bytes = read_cold(&path, u64::try_from(at).unwrap(), 16384).unwrap();
                    assert!(bytes == data[at..at + 16384], "at {at}");
                    reads.fetch_add(1, Ordering::SeqCst);
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                }
            });
        }
        for _ in 0..2 {
            let before = reads.load(Ordering::SeqCst);
            until("there is load", || {
                reads.load(Ordering::SeqCst) > before + 20
            });
            daemon.kill_plane();
        }
        let before = reads.load(Ordering::SeqCst);
        until("reads go on", || reads.load(Ordering::SeqCst) > before + 20);
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(
        daemon.client().mounts().unwrap().mounts[0].state,
        MountState::Alive
    );
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(
        (nodes().len(), mounts_below(world.dir.path()).len()),
        (0, 0)
    );
}

fn both_killed_and_started_again_serve_on() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let mut daemon = Daemon::start(
        world.dir.path(),
        &[world.origin_url()],
        &["--driver", "ublk"],
    );
    let (mnt, rw) = (world.folder("mnt"), world.folder("rw"));
    daemon.mount(&["base/t:1"], &mnt, false);
    daemon.mount(&["base/t:1"], &rw, true);
    let open = fs::File::open(mnt.join("data")).unwrap();
    let plane = daemon.stats().data_plane_pid.unwrap();
    daemon.kill_control();
    signal(plane, Signal::KILL);
    until("the data plane is gone", || {
        processes_of(&daemon.cache()).is_empty()
    });
    daemon.restart();
    let mounts = daemon.client().mounts().unwrap().mounts;
    assert_eq!(mounts.len(), 2);
    assert!(
        mounts.iter().all(|m| m.state == MountState::Alive),
        "{mounts:?}"
    );
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(read_whole(&rw.join("data")).unwrap() == data);
    let mut block = [0; 4096];
    open.read_exact_at(&mut block, 1 << 20).unwrap();
    assert!(block == data[1 << 20..(1 << 20) + 4096]);
    drop(open);
    assert!(daemon.end(Signal::TERM));
    assert_eq!(
        (nodes().len(), mounts_below(world.dir.path()).len()),
        (0, 0)
    );
}

fn a_layer_that_cannot_be_opened_again_is_an_error() {
    let world = World::new();
    let (layer, data) = world.publish_data(2);
    let daemon = Daemon::start(
        world.dir.path(),
        &[world.origin_url()],
        &["--driver", "ublk"],
    );
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let kept = daemon.cache().join("layers").join(layer.digest.to_hex());
    fs::write(kept.join("meta.erofs"), b"damaged").unwrap();
    let open = fs::File::open(mnt.join("data")).unwrap();
    daemon.kill_plane();
    let mut block = [0; 4096];
    let error = open.read_exact_at(&mut block, 1 << 20).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    drop(open);
    assert_eq!(
        daemon.client().mounts().unwrap().mounts[0].state,
        MountState::Dead
    );
    daemon.mount(&["base/t:1"], &mnt, false);
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(nodes().len(), 0);
}

/// Both processes were killed, and the next one serves through FUSE: the devices of the dead one go, and no other. (What this
/// kernel makes of FUSE's mounts afterwards is not looked at.)
///
/// Red without `devices::clear`, and when it does not look at the mark of a device.
fn a_data_plane_without_devices_takes_away_what_a_dead_one_left() {
    let (world, other) = (World::new(), World::new());
    let mut daemons = Vec::new();
    for world in [&world, &other] {
        world.publish_data(1);
        let args = ["--driver", "ublk"];
        let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
        daemon.mount(&["base/t:1"], &world.folder("mnt"), false);
        daemons.push(daemon);
    }
    assert_eq!(nodes().len(), 4);
    let theirs = daemons.pop().unwrap();
    let mut ours = daemons.pop().unwrap();
    let numbers = ours.cache().join("run/ublk");
    let their_numbers = theirs.cache().join("run/ublk");
    let plane = ours.stats().data_plane_pid.unwrap();
    ours.kill_control();
    signal(plane, Signal::KILL);
    until("the data plane is gone", || {
        processes_of(&ours.cache()).is_empty()
    });
    for mount in mounts_below(world.dir.path()).into_iter().rev() {
        rustix::mount::unmount(mount, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
    // A number that speaks of a device that somebody else made.
    for entry in fs::read_dir(&their_numbers).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), numbers.join(entry.file_name())).unwrap();
    }
    let fuse = Daemon::idle(
        world.dir.path(),
        &[world.origin_url()],
        &["--driver", "fuse"],
    );
    let mut child = fuse.command().spawn().unwrap();
    until("our device is gone", || nodes().len() == 2);
    until("the numbers are gone", || {
        fs::read_dir(&numbers).unwrap().count() == 0
    });
    child.kill().unwrap();
    child.wait().unwrap();
    for process in processes_of(&fuse.cache()) {
        signal(process, Signal::KILL);
    }
    let data = read_whole(&other.folder("mnt").join("data")).unwrap();
    assert!(!data.is_empty());
    drop(theirs);
}
