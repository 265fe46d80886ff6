//! File systems on a disk's block device, in the VM: the machine loses its power under load, the disk's server is killed under load.
//! What was synced is there, and the file systems' own checkers find nothing.
//!
//! The machine's drive is served from here, by a disk that notes what was written and flushed ([`crate::power_disk`]); the disk under
//! test lies on it, in an ext4 of the guest. Each thing that the guest knows to be synced it says by a number written to another drive,
//! which goes into the same journal. So one run under load gives any number of moments at which the power could have
//! failed, with what must be there. A second machine gets what the drive would hold then.
#![expect(
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use disk_server::nbd::Export;
use disk_server::nbd::server::NbdServer;
use imgstore::disk::bytewise::Bytewise;
use imgstore::disk::device::BlockDevice;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::disk_vm::{amount, chance};
use crate::power_disk::{Journal, MarkDisk, PowerDisk, after, marks, save};
use crate::world::{World, dsec, json, noise, ok, sh};

/// What a process in the VM is to do.
const ROLE: &str = "DSEC_POWER_ROLE";
/// Bytes of the machine's drive.
const DRIVE: usize = 256 << 20;
/// Synced things after which the power is cut.
const MARKS: u64 = 120;
const SLOTS: u64 = 32;
const SLOT_BYTES: usize = 4096;

/// A number says what is synced under it: every second one a file of its own, the others a slot of a file that is written over.
fn is_file(number: u64) -> bool {
    (number / 2).is_multiple_of(2)
}

fn file(root: &Path, number: u64) -> PathBuf {
    root.join(format!("d{}", number % 7))
        .join(format!("f{number}"))
}

fn file_content(number: u64) -> Vec<u8> {
    let len = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    noise(number, usize::try_from(len % 90_000).unwrap())
}

/// The file of slots and the slot; of one writer, so that numbers in it grow.
fn slot(number: u64) -> (String, u64) {
    (format!("slots{}", number % 2), number / 4 % SLOTS)
}

fn slot_content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(SLOT_BYTES / 8)
}

/// Makes one thing and syncs it.
fn make(root: &Path, number: u64) -> std::io::Result<()> {
    if is_file(number) {
        let mut file = File::create(file(root, number))?;
        file.write_all(&file_content(number))?;
        return file.sync_all();
    }
    let (name, slot) = slot(number);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(root.join(name))?;
    file.write_all_at(&slot_content(number), slot * SLOT_BYTES as u64)?;
    file.sync_data()
}

/// All that these numbers promise is there; slots may be newer.
fn check(root: &Path, numbers: &BTreeSet<u64>) {
    for number in numbers.iter().filter(|n| is_file(**n)) {
        let found = fs::read(file(root, *number)).unwrap_or_else(|e| panic!("file {number}: {e}"));
        assert!(found == file_content(*number), "file {number} differs");
    }
    for number in numbers.iter().filter(|n| !is_file(**n)) {
        let (name, slot) = slot(*number);
        let mut found = [0; SLOT_BYTES];
        let file = File::open(root.join(name)).unwrap();
        file.read_exact_at(&mut found, slot * SLOT_BYTES as u64)
            .unwrap();
        for word in found.as_chunks::<8>().0 {
            let word = u64::from_le_bytes(*word);
            assert!(word >= *number, "slot {slot}: {word} for {number}");
        }
    }
}

/// Two writers that sync, and one that only makes and renames, until told to stop. `synced` is told each number.
fn work(root: &Path, next: &AtomicU64, stop: &AtomicBool, synced: &(dyn Fn(u64) + Sync)) {
    for number in 0..7 {
        fs::create_dir_all(root.join(format!("d{number}"))).unwrap();
    }
    std::thread::scope(|scope| {
        for writer in 0..2 {
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    // Numbers of one writer have its parity.
                    let number = next.fetch_add(2, Ordering::SeqCst) / 2 * 2 + writer;
                    make(root, number).unwrap();
                    synced(number);
                }
            });
        }
        scope.spawn(move || {
            for number in 0_u64.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let (a, b) = (
                    root.join("unsynced"),
                    root.join(format!("r{}", number % 30)),
                );
                fs::write(&a, noise(number, 9000)).unwrap();
                fs::rename(a, &b).unwrap();
                if number % 3 == 0 {
                    fs::remove_file(b).unwrap();
                }
            }
        });
    });
}

fn disk(folder: &str, command: &str, more: &[&str]) -> String {
    let world = World::new();
    ok(dsec(&world, &[&["disk", command, folder], more].concat()))
}

fn attach(folder: &str) -> (String, i32) {
    let status = json(&disk(folder, "attach", &["--ublk", "--json"]));
    let pid = status.get("pid").unwrap().as_i64().unwrap();
    let path = status.get("path").unwrap().as_str().unwrap();
    (path.to_owned(), pid.try_into().unwrap())
}

/// The file system's commands: how to make it, how to check it, how large the disk is.
fn kind(name: &str) -> (&'static str, &'static str, &'static str) {
    match name {
        "ext4" => ("mkfs.ext4 -q", "e2fsck -fn", "64MiB"),
        _ => ("mkfs.xfs -q", "xfs_repair -n", "320MiB"),
    }
}

fn here(script: &str) -> String {
    sh(Path::new("/run/tmp"), script)
}

/// In the first machine, until the power fails.
fn load(name: &str) {
    let (make, _, size) = kind(name);
    here("mkfs.ext4 -q -E lazy_itable_init=0 /dev/vda; mkdir drive inner; mount /dev/vda drive");
    disk("/run/tmp/drive/d", "create", &["--size", size]);
    let (device, _) = attach("/run/tmp/drive/d");
    here(&format!("{make} {device}; mount {device} inner; sync"));
    let marks = File::options()
        .write(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open("/dev/vdb")
        .unwrap();
    let mark = |number: u64| {
        let mut buffer = vec![0; 4096 + 512];
        let from = buffer.as_ptr().align_offset(4096);
        let sector = buffer.get_mut(from..from + 512).unwrap();
        sector[..8].copy_from_slice(&number.to_le_bytes());
        marks.write_all_at(sector, 0).unwrap();
    };
    mark(0);
    let count = AtomicU64::new(0);
    let synced = |number| {
        mark(number);
        match count.fetch_add(1, Ordering::SeqCst) {
            n if n == MARKS => println!("cut the power"),
            n if n % 40 == 30 => {
                disk("/run/tmp/drive/d", "snapshot", &[]);
            }
            80 => {
                disk("/run/tmp/drive/d", "merge", &[]);
            }
            _ => {}
        }
    };
    work(
        Path::new("/run/tmp/inner"),
        &AtomicU64::new(4),
        &AtomicBool::new(false),
        &synced,
    );
}

/// In the second machine: drives, and for each a file of the numbers that must be there.
fn find(name: &str, folder: &Path) {
    let (_, checker, _) = kind(name);
    here("mkdir drive inner");
    for number in 0_u8.. {
        let Ok(text) = fs::read_to_string(folder.join(format!("{number}.synced"))) else {
            break;
        };
        let synced = text.lines().map(|line| line.parse().unwrap()).collect();
        let drive = format!("/dev/vd{}", char::from(b'a' + number));
        println!("{name}, point {number}: {} synced", text.lines().count());
        here(&format!("mount {drive} drive"));
        let (device, _) = attach("/run/tmp/drive/d");
        here(&format!("mount {device} inner"));
        check(Path::new("/run/tmp/inner"), &synced);
        here(&format!("umount inner; {checker} {device} >&2"));
        disk("/run/tmp/drive/d", "detach", &[]);
        here(&format!("umount drive; e2fsck -fn {drive}"));
        println!("{name}, point {number}: fine");
    }
}

fn serve(folder: &Path, name: &str, disk: Arc<dyn BlockDevice>) -> (NbdServer, String) {
    let socket = folder.join(name);
    let export = Export {
        name: name.to_owned(),
        disk: Arc::new(Bytewise::new(disk)),
    };
    let server = NbdServer::start(&socket, export).unwrap();
    let drive = format!(
        "-drive file=nbd:unix:{},format=raw,if=none,cache=none,id={name} -device virtio-blk-pci,drive={name}",
        socket.display()
    );
    (server, drive)
}

fn in_vm(options: &[&str], role: &str, test: &str) -> String {
    let program = std::env::current_exe().unwrap();
    let role = format!("{ROLE}={role}");
    let job = ["--", "env", &role, program.to_str().unwrap()];
    let test = [test, "--exact", "--nocapture"];
    let out = test_vm::run(&[options, &job[..], &test[..]].concat());
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}{error}");
    said
}

/// Cuts the power under load on this file system at so many moments.
///
/// Red when the pair's data is not synced before its index, when the index is not synced, and when a flush of the device is answered at
/// once.
fn power_fails(name: &str, test: &str) {
    if let Ok(role) = std::env::var(ROLE) {
        return match role.split_once(':').unwrap() {
            ("load", name) => load(name),
            (folder, name) => find(name, Path::new(folder)),
        };
    }
    let scratch = tempfile::tempdir().unwrap();
    let journal = Journal::default();
    let disk = Arc::new(PowerDisk::new(&journal, DRIVE));
    let (drive, drive_option) = serve(scratch.path(), "drive", disk);
    let (mark, mark_option) = serve(
        scratch.path(),
        "marks",
        Arc::new(MarkDisk(Arc::clone(&journal))),
    );
    let options = ["--qemu", &drive_option, "--qemu", &mark_option];
    let cut = ["-t", "200", "--cut-at", "cut the power"];
    in_vm(
        &[&options[..], &cut[..]].concat(),
        &format!("load:{name}"),
        test,
    );
    drop((drive, mark));
    let events = journal.lock().unwrap();
    let begun = events
        .iter()
        .position(|event| matches!(event, crate::power_disk::Event::Mark(0)))
        .unwrap();
    let seed = amount("DSEC_POWER_SEED", chance() >> 40);
    println!(
        "power failures under {name}: seed {seed}, {} events",
        events.len()
    );
    let mut state = seed | 1;
    let mut random = |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(state >> 33).unwrap() % n
    };
    let points = amount("DSEC_POWER_POINTS", 5);
    // A machine takes so many drives.
    for first in (0..points).step_by(10) {
        let count = (points - first).min(10);
        let mut options = vec!["-t".to_owned(), "250".to_owned()];
        for number in 0..count {
            let at = begun + random(events.len() - begun) + 1;
            let path = scratch.path().join(format!("{number}.raw"));
            save(&after(&events[..at], DRIVE, &mut random), &path);
            options.extend(["--disk".to_owned(), path.display().to_string()]);
            let synced = marks(&events[begun + 1..at]);
            let text: String = synced.iter().map(|n| format!("{n}\n")).collect();
            fs::write(scratch.path().join(format!("{number}.synced")), text).unwrap();
        }
        let options: Vec<&str> = options.iter().map(|o| &**o).collect();
        let role = format!("{}:{name}", scratch.path().display());
        let said = in_vm(&options, &role, test);
        for number in 0..count {
            let fine = format!("{name}, point {number}: fine");
            assert!(said.lines().any(|line| line == fine), "{said}");
            fs::remove_file(scratch.path().join(format!("{number}.synced"))).unwrap();
        }
    }
}

#[test]
fn what_ext4_synced_survives_a_power_failure_in_the_vm() {
    power_fails(
        "ext4",
        "disk_power::what_ext4_synced_survives_a_power_failure_in_the_vm",
    );
}

#[test]
fn what_xfs_synced_survives_a_power_failure_in_the_vm() {
    power_fails(
        "xfs",
        "disk_power::what_xfs_synced_survives_a_power_failure_in_the_vm",
    );
}

/// Ten times in the suite of the VM, each time somewhere else in the work: the server is killed and comes back while the work goes on, and
/// the work never sees an error.
///
/// Red without the side files of what is not flushed.
pub(crate) fn killed_servers_lose_nothing() {
    here("mkdir inner; rm -rf kd");
    disk("/run/tmp/kd", "create", &["--size", "64MiB"]);
    let (device, mut pid) = attach("/run/tmp/kd");
    here(&format!("mkfs.ext4 -q {device}"));
    let root = Path::new("/run/tmp/inner");
    let next = AtomicU64::new(4);
    let synced = std::sync::Mutex::new(BTreeSet::new());
    for round in 0..10_u64 {
        here(&format!("mount {device} inner"));
        let stop = AtomicBool::new(false);
        let note = |number| {
            synced.lock().unwrap().insert(number);
        };
        std::thread::scope(|scope| {
            let (next, stop, note) = (&next, &stop, &note);
            scope.spawn(move || work(root, next, stop, note));
            let wait = |more: usize| {
                let wanted = synced.lock().unwrap().len() + more;
                let deadline = Instant::now() + Duration::from_secs(60);
                while synced.lock().unwrap().len() < wanted {
                    assert!(Instant::now() < deadline, "the work does not go on");
                    std::thread::yield_now();
                }
            };
            wait(3 + usize::try_from(round * 3 % 7).unwrap());
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
            here("flock kd/lock true");
            let again = attach("/run/tmp/kd");
            assert_eq!(again.0, device);
            pid = again.1;
            wait(3);
            stop.store(true, Ordering::SeqCst);
        });
        here("umount inner");
        here(&format!("e2fsck -fn {device}"));
        here(&format!("mount {device} inner"));
        check(root, &synced.lock().unwrap());
        here("rm -rf inner/r*; umount inner");
        println!("killed {} times", round + 1);
    }
    disk("/run/tmp/kd", "detach", &[]);
}
