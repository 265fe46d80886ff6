//! Random work on a disk's block device, one operation after the other, and a model in memory: reads and writes through the
//! page cache and past it, zeros, discards, syncs, snapshots, merges, killed servers, detaching. For the test VM.
#![expect(
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use imgstore::disk::folder::Lower;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::world::{World, dsec, json, noise, ok, sh};

/// Bytes of the disk: small, so that operations meet.
const BYTES: usize = 2 << 20;
/// Most bytes of an operation.
const MOST: usize = 160 << 10;
const SECTOR: usize = 512;

/// A disk of one test, attached through ublk.
struct Disk {
    world: World,
    device: PathBuf,
    pid: i32,
    /// Through the page cache.
    cached: File,
    /// Past it.
    direct: File,
}

fn attach(world: &World) -> (PathBuf, i32) {
    let status = json(&ok(dsec(world, &["disk", "attach", "./d", "--json"])));
    let pid = status["pid"].as_i64().unwrap();
    (
        status["path"].as_str().unwrap().into(),
        pid.try_into().unwrap(),
    )
}

fn open(device: &PathBuf) -> (File, File) {
    let mut options = File::options();
    options.read(true).write(true);
    let cached = options.open(device).unwrap();
    let direct = options.custom_flags(nix::libc::O_DIRECT).open(device);
    (cached, direct.unwrap())
}

/// A buffer of `len` bytes that O_DIRECT takes, in a larger one: where it begins.
fn aligned(len: usize) -> (Vec<u8>, usize) {
    let buffer = vec![0; len + 4096];
    let from = buffer.as_ptr().align_offset(4096);
    (buffer, from)
}

impl Disk {
    fn new() -> Self {
        let world = World::new();
        let size = (BYTES >> 20).to_string() + "MiB";
        ok(dsec(&world, &["disk", "create", "./d", "--size", &size]));
        let (device, pid) = attach(&world);
        let (cached, direct) = open(&device);
        Self {
            world,
            device,
            pid,
            cached,
            direct,
        }
    }

    fn command(&self, command: &str, more: &[&str]) -> String {
        ok(dsec(
            &self.world,
            &[&["disk", command, "./d"], more].concat(),
        ))
    }

    fn read(&self, past: bool, at: usize, len: usize) -> Vec<u8> {
        let (mut buffer, from) = aligned(len);
        let file = if past { &self.direct } else { &self.cached };
        file.read_exact_at(&mut buffer[from..from + len], at as u64)
            .unwrap();
        buffer[from..from + len].to_vec()
    }

    fn write(&self, past: bool, at: usize, bytes: &[u8]) {
        let (mut buffer, from) = aligned(bytes.len());
        buffer[from..from + bytes.len()].copy_from_slice(bytes);
        let file = if past { &self.direct } else { &self.cached };
        file.write_all_at(&buffer[from..from + bytes.len()], at as u64)
            .unwrap();
    }

    fn kill(&mut self) {
        kill(Pid::from_raw(self.pid), Signal::SIGKILL).unwrap();
        sh(self.world.root(), "flock d/lock true");
        let (device, pid) = attach(&self.world);
        assert_eq!(device, self.device, "the device is the same one");
        self.pid = pid;
    }

    /// Detaches with what the page cache holds unwritten, compares the files with the model, attaches again.
    fn again(self, model: &[u8]) -> Self {
        let Self {
            world,
            device,
            cached,
            direct,
            ..
        } = self;
        drop((cached, direct));
        ok(dsec(&world, &["disk", "detach", "./d"]));
        assert!(!device.exists());
        ok(dsec(&world, &["disk", "export", "./d", "--to", "raw"]));
        let raw = std::fs::read(world.path("raw")).unwrap();
        assert!(raw == model, "{}", first_difference(&raw, model));
        std::fs::remove_file(world.path("raw")).unwrap();
        let (device, pid) = attach(&world);
        let (cached, direct) = open(&device);
        Self {
            world,
            device,
            pid,
            cached,
            direct,
        }
    }
}

fn first_difference(found: &[u8], expected: &[u8]) -> String {
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    format!(
        "{} and {} bytes, first difference at {at:?}",
        found.len(),
        expected.len()
    )
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let word = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(word).unwrap() % n
    }

    /// A range in whole `unit`s.
    fn range(&mut self, unit: usize) -> (usize, usize) {
        let len = (1 + self.below(MOST / unit)).min(1 + self.below(MOST / unit)) * unit;
        let at = self.below((BYTES - len) / unit + 1) * unit;
        (at, len)
    }
}

fn zero(disk: &Disk, random: &mut Random, model: &mut [u8]) -> String {
    let (at, len) = random.range(SECTOR);
    let how = random.below(3);
    let range = (i64::try_from(at).unwrap(), i64::try_from(len).unwrap());
    let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    match how {
        0 => {
            let flags = keep | FallocateFlags::FALLOC_FL_PUNCH_HOLE;
            fallocate(&disk.cached, flags, range.0, range.1).unwrap();
        }
        1 => {
            let flags = keep | FallocateFlags::FALLOC_FL_ZERO_RANGE;
            fallocate(&disk.direct, flags, range.0, range.1).unwrap();
        }
        _ => {
            let device = disk.device.display();
            sh(
                disk.world.root(),
                &format!("blkdiscard -f -o {at} -l {len} {device}"),
            );
        }
    }
    model[at..at + len].fill(0);
    format!("zeros ({how}) {at}+{len}")
}

/// What may happen between two operations. Such things are rarer.
fn event(
    mut disk: Disk,
    random: &mut Random,
    model: &[u8],
    snapshots: &mut Vec<(String, Vec<u8>)>,
) -> (Disk, String) {
    let what = random.below(6);
    let said = match what {
        0 | 1 => {
            // What is in the page cache only is no part of a snapshot.
            disk.cached.sync_all().unwrap();
            let layer = disk.command("snapshot", &[]);
            snapshots.push((
                layer.trim().rsplit_once('/').unwrap().1.to_owned(),
                model.to_vec(),
            ));
            "snapshot"
        }
        2 if snapshots.len() > 2 => {
            disk.command("merge", &[]);
            "merge"
        }
        3 | 4 => {
            disk.kill();
            "killed"
        }
        _ => {
            disk = disk.again(model);
            "attached again"
        }
    };
    (disk, said.to_owned())
}

fn step(disk: &Disk, random: &mut Random, model: &mut [u8], number: u64) -> String {
    let past = random.below(2) == 1;
    let unit = if past { SECTOR } else { 1 };
    match random.below(10) {
        0..=3 => {
            let (at, len) = random.range(unit);
            let found = disk.read(past, at, len);
            let expected = &model[at..at + len];
            assert!(
                found == expected,
                "read (past the page cache: {past}) {at}+{len}: {}",
                first_difference(&found, expected)
            );
            format!("read {past} {at}+{len}")
        }
        4..=7 => {
            let (at, len) = random.range(unit);
            let bytes = noise(number, len);
            disk.write(past, at, &bytes);
            model[at..at + len].copy_from_slice(&bytes);
            format!("write {past} {at}+{len}")
        }
        8 => zero(disk, random, model),
        _ => {
            let file = if past { &disk.direct } else { &disk.cached };
            file.sync_all().unwrap();
            "sync".to_owned()
        }
    }
}

/// Works for so many operations. Red without the side files that keep what is answered and not flushed: a killed server then takes
/// writes with it that the kernel's page cache has long called clean.
pub(crate) fn works(seed: u64, operations: u64) {
    println!("random work on a disk: seed {seed}, {operations} operations");
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut disk = Disk::new();
    let mut model = vec![0; BYTES];
    let mut snapshots = Vec::new();
    let mut last = std::collections::VecDeque::new();
    for number in 1..=operations {
        let said = if random.below(60) == 0 {
            let (next, said) = event(disk, &mut random, &model, &mut snapshots);
            disk = next;
            said
        } else {
            // What led there is worth knowing where a read is wrong.
            let run = std::panic::AssertUnwindSafe(|| {
                step(&disk, &mut random, &mut model, seed << 32 | number)
            });
            match std::panic::catch_unwind(run) {
                Ok(said) => said,
                Err(why) => {
                    println!("seed {seed}, operation {number}, after {last:#?}");
                    std::panic::resume_unwind(why);
                }
            }
        };
        last.push_back(said);
        if last.len() > 20 {
            last.pop_front();
        }
    }
    let whole = disk.read(true, 0, BYTES);
    assert!(whole == model, "{}", first_difference(&whole, &model));
    let disk = disk.again(&model);
    for (layer, expected) in &snapshots {
        check_snapshot(&disk.world, layer, expected);
    }
    drop((disk.cached, disk.direct));
    ok(dsec(&disk.world, &["disk", "detach", "./d"]));
}

/// A snapshot that is still a file of its own shows, with the layers below it, the disk as it was.
fn check_snapshot(world: &World, layer: &str, expected: &[u8]) {
    let state = imgstore::disk::folder::read_state(&world.path("d")).unwrap();
    let files: Vec<String> = state
        .layers
        .iter()
        .map(|lower| match lower {
            Lower::Lsmt(file) => world.path("d").join(file).display().to_string(),
            other => panic!("not sealed: {other:?}"),
        })
        .collect();
    let Some(at) = files
        .iter()
        .position(|file| Path::new(file).ends_with(layer))
    else {
        return;
    };
    let mut arguments = vec!["disk", "export"];
    arguments.extend(files[..=at].iter().map(|file| &**file));
    arguments.extend(["--to", "snapshot.raw"]);
    ok(dsec(world, &arguments));
    let raw = std::fs::read(world.path("snapshot.raw")).unwrap();
    assert!(
        raw == expected,
        "{layer}: {}",
        first_difference(&raw, expected)
    );
    std::fs::remove_file(world.path("snapshot.raw")).unwrap();
}
