//! Start, stop, and who may use what.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use layerd_client::api::ErrorKind;
use layerd_client::client::ClientError;
use rustix::process::Signal;

use crate::daemon::{Daemon, mounts_below, processes_of, signal};
use crate::fixture::World;

fn refused(error: ClientError) -> (ErrorKind, String) {
    match error {
        ClientError::Refused(error) => (error.kind, error.message),
        other => panic!("{other}"),
    }
}

#[test]
fn ending_leaves_no_mount_no_process_and_no_socket_also_while_files_are_open() {
    for how in [Signal::TERM, Signal::INT] {
        let world = World::new();
        world.publish_data(1);
        let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
        let (mnt, rw) = (world.folder("mnt"), world.folder("rw"));
        daemon.mount(&["base/t:1"], &mnt, false);
        daemon.mount(&["base/t:1"], &rw, true);
        let open = fs::File::open(mnt.join("data")).unwrap();
        let written = fs::File::create(rw.join("new")).unwrap();
        assert!(daemon.end(how));
        assert_eq!(mounts_below(world.dir.path()), [""; 0]);
        assert_eq!(processes_of(world.dir.path()), [0; 0]);
        assert!(!daemon.socket().exists());
        drop((open, written));
    }
}

#[test]
fn unmounting_the_last_composition_leaves_only_the_fuse_mount() {
    let world = World::new();
    world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let (a, b) = (world.folder("a"), world.folder("b"));
    daemon.mount(&["base/t:1"], &a, false);
    daemon.mount(&["base/t:1"], &b, true);
    let layers = daemon.cache().join("run/layers");
    assert_eq!(mounts_below(&layers).len(), 1, "one mount a layer");
    daemon.client().umount(&a).unwrap();
    assert_eq!(mounts_below(&layers).len(), 1, "still used");
    daemon.client().umount(&b).unwrap();
    assert_eq!(mounts_below(world.dir.path()).len(), daemon.own_mounts());
    let offered = ["run/fuse", "run/ublk"].map(|f| fs::read_dir(daemon.cache().join(f)));
    for left in offered.into_iter().flatten() {
        assert_eq!(left.count(), 0);
    }
    assert_eq!(fs::read_dir(daemon.cache().join("rw")).unwrap().count(), 0);
}

#[test]
fn a_busy_composition_stays_whole() {
    let world = World::new();
    world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let open = fs::File::open(mnt.join("small")).unwrap();
    let (kind, message) = refused(daemon.client().umount(&mnt).unwrap_err());
    assert_eq!(kind, ErrorKind::Conflict);
    assert!(message.contains("in use"), "{message}");
    assert_eq!(fs::read(mnt.join("small")).unwrap(), b"hello\n");
    drop(open);
    daemon.client().umount(&mnt).unwrap();
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let world = World::new();
    world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    let cases = [
        ("base/none:1", ErrorKind::NotFound, "base/none:1"),
        ("nonsense", ErrorKind::Invalid, "axis/name:version"),
        (&"0".repeat(64), ErrorKind::NotFound, "dsec layers"),
    ];
    for (reference, kind, part) in cases {
        let (found, message) = refused(daemon.try_mount(&[reference], &mnt, false).unwrap_err());
        assert_eq!(found, kind, "{message}");
        assert!(message.contains(part), "{message}");
    }
    daemon.mount(&["base/t:1"], &mnt, false);
    let (kind, _) = refused(daemon.try_mount(&["base/t:1"], &mnt, false).unwrap_err());
    assert_eq!(kind, ErrorKind::Conflict);
    let (kind, _) = refused(daemon.client().umount(&world.folder("other")).unwrap_err());
    assert_eq!(kind, ErrorKind::NotFound);
}

#[test]
fn a_second_daemon_is_refused_and_a_stale_socket_replaced() {
    let world = World::new();
    world.publish_data(1);
    drop(UnixListener::bind(world.path("socket")).unwrap());
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mode = fs::metadata(daemon.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let run = |mut command: std::process::Command| {
        let out = command.stderr(Stdio::piped()).output().unwrap();
        assert!(!out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    let text = run(daemon.command());
    let holder = format!("in use by layerd, process {}", daemon.stats().control_pid);
    assert!(text.contains(&holder), "{text}");
    let mut other = std::process::Command::new(env!("CARGO_BIN_EXE_layerd"));
    other.args(["--origin", &world.origin_url()]);
    other.arg("--cache").arg(world.path("cache2"));
    other.arg("--socket").arg(daemon.socket());
    let text = run(other);
    assert!(text.contains("another layerd answers"), "{text}");
    daemon.mount(&["base/t:1"], &world.folder("mnt"), false);
}

#[test]
fn only_root_has_a_way_to_what_is_kept_and_written() {
    let world = World::new();
    world.publish_data(1);
    let cache = world.folder("cache");
    // Left by an earlier version.
    fs::create_dir(cache.join("rw")).unwrap();
    fs::set_permissions(cache.join("rw"), fs::Permissions::from_mode(0o755)).unwrap();
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    daemon.mount(&["base/t:1"], &world.folder("mnt"), true);
    let mut folders = Vec::new();
    for entry in fs::read_dir(&cache).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            let mode = entry.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{}", entry.path().display());
            folders.push(entry.file_name().into_string().unwrap());
        }
    }
    folders.sort_unstable();
    assert_eq!(folders, ["layers", "pins", "run", "rw", "segments", "tmp"]);
}

#[test]
fn a_stopped_data_plane_does_not_hold_up_the_end() {
    let world = World::new();
    world.publish_data(1);
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    daemon.mount(&["base/t:1"], &world.folder("mnt"), false);
    signal(daemon.stats().data_plane_pid.unwrap(), Signal::STOP);
    assert!(daemon.end(Signal::TERM));
    assert_eq!(mounts_below(world.dir.path()), [""; 0]);
    assert_eq!(processes_of(world.dir.path()), [0; 0]);
}

#[test]
fn a_client_waits_for_a_daemon_that_is_being_started() {
    let world = World::new();
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    assert!(daemon.end(Signal::USR1));
    let mut next = daemon.command().spawn().unwrap();
    let mounts = daemon.client().mounts();
    signal(next.id(), Signal::TERM);
    next.wait().unwrap();
    assert_eq!(mounts.unwrap().mounts, []);
}

#[test]
fn a_failed_mount_leaves_nothing_behind() {
    let world = World::new();
    world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    // A file where the folder for writes should be.
    let rw = daemon.cache().join("rw");
    fs::remove_dir(&rw).unwrap();
    fs::write(&rw, b"").unwrap();
    daemon
        .try_mount(&["base/t:1"], &world.folder("mnt"), true)
        .unwrap_err();
    let records = daemon.cache().join("run/mounts");
    assert_eq!(fs::read_dir(records).unwrap().count(), 0);
    assert_eq!(
        mounts_below(world.dir.path()).len(),
        daemon.own_mounts(),
        "only the FUSE mount"
    );
}
