//! Servers that are killed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use ublk_driver::{Content, Driver, Options, Recovery, State, UblkError};

use crate::SERVE;
use crate::contents::{FileDisk, pattern};
use crate::disks::fio;
use crate::shell::{nodes, read_direct, sh, until, write_direct};

const MIB: u64 = 1 << 20;

fn options(recovery: Recovery) -> Options {
    Options {
        recovery,
        owner: 42,
        ..Options::default()
    }
}

/// A process that serves a file until it is killed: `wait:PATH` or `fail:PATH`.
pub(crate) fn serve(what: &str) {
    let (recovery, path) = what.split_once(':').unwrap();
    let recovery = match recovery {
        "wait" => Recovery::Wait,
        _ => Recovery::Fail,
    };
    let disk = FileDisk::open(Path::new(path), 16 * MIB);
    let driver = Driver::start(0).unwrap();
    let device = driver.add(Content::Disk(disk), &options(recovery)).unwrap();
    println!("\nserving {}", device.id());
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

/// Starts such a process; it and the device's number.
fn server(recovery: &str, path: &str) -> (Child, u32) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["devices_in_the_vm", "--exact", "--nocapture"])
        .env(SERVE, format!("{recovery}:{path}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let id = lines
        .map(Result::unwrap)
        .find_map(|l| l.strip_prefix("serving ")?.parse().ok());
    (child, id.unwrap())
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn state(id: u32) -> State {
    let devices = ublk_driver::devices().unwrap();
    devices.iter().find(|d| d.id == id).unwrap().state
}

/// Mutation seen red: without `USER_RECOVERY_REISSUE` the requests in flight fail.
pub(crate) fn a_killed_server_is_replaced_under_load() {
    let path = "/run/tmp/recovery.disk";
    let (child, id) = server("wait", path);
    let load = fio(&format!("/dev/ublkb{id}"), "16m");
    let fio = std::thread::spawn(move || sh(&load));
    let written = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
    until("there is load", || written() > 2048);
    kill(child);
    until("the kernel has seen it", || state(id) == State::Waiting);
    let driver = Driver::start(0).unwrap();
    let disk = |bytes| Content::Disk(FileDisk::open(Path::new(path), bytes));
    let other = FileDisk::open(Path::new("/run/tmp/other.disk"), 15 * MIB);
    let refused = driver.recover(id, Content::Disk(other), &options(Recovery::Wait));
    assert!(
        matches!(refused, Err(UblkError::Differs { .. })),
        "{refused:?}"
    );
    let stranger = Options {
        owner: 43,
        ..options(Recovery::Wait)
    };
    let refused = driver.recover(id, disk(16 * MIB), &stranger);
    assert!(matches!(refused, Err(UblkError::NotOurs(_))), "{refused:?}");
    assert!(!fio.is_finished(), "requests wait");
    let device = driver
        .recover(id, disk(16 * MIB), &options(Recovery::Wait))
        .unwrap();
    assert_eq!(state(id), State::Live);
    fio.join().unwrap();
    device.remove().unwrap();
    assert_eq!(nodes(), [""; 0]);
}

pub(crate) fn without_recovery_a_killed_server_is_an_error_at_once() {
    let (child, id) = server("fail", "/run/tmp/failing.disk");
    let path = format!("/dev/ublkb{id}");
    write_direct(Path::new(&path), 0, &pattern(4096, 6), 0).unwrap();
    let open = std::fs::File::open(&path).unwrap();
    kill(child);
    until("the kernel has seen it", || state(id) == State::Dead);
    let mut bytes = [0; 4096];
    std::os::unix::fs::FileExt::read_exact_at(&open, &mut bytes, MIB).unwrap_err();
    drop(open);
    ublk_driver::delete(id).unwrap();
    until("the nodes are gone", || nodes().is_empty());
}

pub(crate) fn what_a_dead_server_leaves_is_found_and_deleted() {
    let (child, id) = server("wait", "/run/tmp/left.disk");
    let path = std::path::PathBuf::from(format!("/dev/ublkb{id}"));
    let found = ublk_driver::devices().unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].id, found[0].owner, found[0].state),
        (id, 42, State::Live)
    );
    assert_eq!(found[0].server_pid, i32::try_from(child.id()).unwrap());
    assert!(matches!(ublk_driver::delete(id), Err(UblkError::InUse(_))));
    kill(child);
    until("the kernel has seen it", || state(id) == State::Waiting);
    let at = path.clone();
    let reader = std::thread::spawn(move || read_direct(&at, 0, 4096));
    let started = Instant::now();
    ublk_driver::delete(id).unwrap();
    // Either it was waiting, or it came too late.
    reader.join().unwrap().unwrap_err();
    assert!(started.elapsed() < crate::SOON);
    until("the nodes are gone", || nodes().is_empty());
    assert!(matches!(
        ublk_driver::delete(id),
        Err(UblkError::NoDevice(_))
    ));
}
