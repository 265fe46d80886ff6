//! A whole disk's folder when the power fails: creation, writes, flushes, snapshots, merges, restacking and commits, on a mount that
//! notes what was synced and tells what would be found after any of its events.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use imgstore::disk::committed::write_committed;
use imgstore::disk::device::BlockDevice;
use imgstore::disk::folder::{DiskFolder, Lower};
use imgstore::disk::open::open_file;
use imgstore::disk::stack::Stack;
use imgstore::disk::state::is_disk;
use power_folder::PowerFolder;

use crate::rng::Rng;

const SECTORS: u64 = 96;
const BYTES: usize = 96 * 512;

fn written(number: u64, lba: u64, sectors: u64) -> Vec<u8> {
    let content = |lba: u64| {
        [number.to_le_bytes(), lba.to_le_bytes()]
            .concat()
            .repeat(32)
    };
    (lba..lba + sectors).flat_map(content).collect()
}

fn all(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xEE; usize::try_from(device.size()).unwrap()];
    device.read(&mut bytes, 0).unwrap();
    bytes
}

fn amount(name: &str, usual: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(usual, |text| text.parse().unwrap())
}

/// After so many events the disk showed this; what was before is on disk, or not.
struct Moment {
    events: usize,
    shown: Vec<u8>,
    synced: bool,
}

/// A run of random work.
struct Run {
    mount: PowerFolder,
    random: Rng,
    moments: Vec<Moment>,
    /// Committed files: after how many events they are there, and what they hold.
    files: BTreeMap<String, (usize, Vec<u8>)>,
    model: Vec<u8>,
    /// What was done, for messages.
    done: Vec<String>,
}

impl Run {
    fn moment(&mut self, synced: bool, what: String) {
        let events = self.mount.journal().events();
        self.done.push(format!("{what}: until event {events}"));
        self.moments.push(Moment {
            events,
            shown: self.model.clone(),
            synced,
        });
    }

    fn range(&mut self) -> (u64, u64) {
        let lba = self.random.below(SECTORS);
        (lba, 1 + self.random.below((SECTORS - lba).min(24)))
    }

    fn set(&mut self, lba: u64, bytes: &[u8]) {
        let from = usize::try_from(lba * 512).unwrap();
        self.model[from..from + bytes.len()].copy_from_slice(bytes);
    }

    /// A file of the lowest `count` layers, beside the folder.
    fn commit(&mut self, disk: &DiskFolder, count: usize, name: &str) {
        let layers = disk.sealed_layers();
        let layers = &layers[..count];
        let path = self.mount.point().join(name);
        write_committed(layers, &path, None).unwrap();
        let events = self.mount.journal().events();
        let shown = all(&Stack::new(layers).unwrap());
        self.files.insert(name.to_owned(), (events, shown));
    }

    fn step(&mut self, disk: DiskFolder, number: u64) -> DiskFolder {
        let folder = self.mount.point().join("disk");
        let layers = disk.state().layers.len();
        match self.random.below(20) {
            0..=7 => {
                let (lba, n) = self.range();
                let bytes = written(number, lba, n);
                self.set(lba, &bytes);
                disk.disk().write(&bytes, lba * 512).unwrap();
                self.moment(false, format!("write {lba}+{n}"));
            }
            8..=9 => {
                let (lba, n) = self.range();
                self.set(lba, &vec![0; usize::try_from(n * 512).unwrap()]);
                disk.disk().discard(lba * 512, n * 512).unwrap();
                self.moment(false, format!("discard {lba}+{n}"));
            }
            10..=12 => {
                disk.disk().flush().unwrap();
                self.moment(true, "flush".to_owned());
            }
            13..=14 => {
                disk.snapshot().unwrap();
                self.moment(true, "snapshot".to_owned());
            }
            15..=16 if layers > 1 => {
                let from = usize::try_from(self.random.below(2))
                    .unwrap()
                    .min(layers - 2);
                disk.merge(from..layers).unwrap();
                self.moment(false, format!("merge {from}..{layers}"));
            }
            17 if layers > 0 => {
                let name = format!("commit{number}.lsmt");
                self.commit(&disk, layers, &name);
                self.moment(false, name);
            }
            18 if layers > 0 => {
                let name = format!("lower{number}.lsmt");
                self.commit(&disk, 1, &name);
                let lower = Lower::Lsmt(Path::new("..").join(name));
                disk.restack(1, vec![lower]).unwrap();
                self.moment(false, "restack".to_owned());
            }
            _ => {
                drop(disk);
                let disk = DiskFolder::open(&folder).unwrap();
                self.moment(true, "reopen".to_owned());
                return disk;
            }
        }
        assert!(all(&*disk.disk()) == self.model);
        disk
    }

    /// What may be found after so many events: everything from the last thing that was synced then to what was going on.
    fn possible(&self, events: usize) -> &[Moment] {
        let ended = self
            .moments
            .iter()
            .take_while(|m| m.events <= events)
            .count();
        let synced = self.moments[..ended].iter().rposition(|m| m.synced);
        &self.moments[synced.unwrap_or(0)..(ended + 1).min(self.moments.len())]
    }

    fn check(&mut self, created: usize, at: usize) {
        // In memory: a disk that is opened syncs a lot.
        let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
        let journal = self.mount.journal();
        let random = &mut self.random;
        journal.after(at, &mut |n| random.below(n), scratch.path());
        let done = &self.done;
        let why = || format!("power out after event {at}; {done:#?}");
        let folder = scratch.path().join("disk");
        if at >= created {
            let disk = DiskFolder::open(&folder).unwrap_or_else(|e| panic!("{e}: {}", why()));
            let found = all(&*disk.disk());
            let possible = self.possible(at);
            assert!(possible.iter().any(|m| m.shown == found), "{}", why());
            // And it goes on from there.
            disk.snapshot().unwrap();
            drop(disk);
            let disk = DiskFolder::open(&folder).unwrap();
            assert!(all(&*disk.disk()) == found, "{}", why());
        } else if !is_disk(&folder).unwrap() {
            DiskFolder::create(&folder, Vec::new(), Some(SECTORS * 512)).unwrap();
            drop(DiskFolder::open(&folder).unwrap());
        }
        for (name, (events, expected)) in &self.files {
            let path = scratch.path().join(name);
            if *events > at && !path.exists() {
                continue;
            }
            let layer = open_file(&path, None)
                .unwrap_or_else(|e| panic!("{e}: {}", why()))
                .layer;
            assert!(
                all(&Stack::new(&[layer]).unwrap()) == *expected,
                "{}",
                why()
            );
        }
    }
}

fn run(seed: u64) -> usize {
    let scratch = tempfile::tempdir().unwrap();
    let point: PathBuf = scratch.path().join("mount");
    std::fs::create_dir(&point).unwrap();
    let mut run = Run {
        mount: PowerFolder::mount(&point),
        random: Rng::new(seed),
        moments: Vec::new(),
        files: BTreeMap::new(),
        model: vec![0; BYTES],
        done: vec![format!("seed {seed}")],
    };
    let folder = point.join("disk");
    DiskFolder::create(&folder, Vec::new(), Some(SECTORS * 512)).unwrap();
    run.moment(true, "create".to_owned());
    let created = run.mount.journal().events();
    let mut disk = DiskFolder::open(&folder).unwrap();
    for number in 1..=30 {
        disk = run.step(disk, number);
    }
    drop(disk);
    let events = run.mount.journal().events();
    run.moments.push(Moment {
        events,
        shown: run.model.clone(),
        synced: true,
    });
    for at in 0..=events {
        run.check(created, at);
    }
    events
}

/// Every event of so many runs of random work, about 150 a run; `tools/soak` takes more.
///
/// Red when the folder that the disk is made in is not synced, when the new pair's names are not synced before `disk.json` names them, when
/// `disk.json` gets its name before its bytes are synced, and when a merged file's name is not synced.
#[test]
fn a_power_failure_at_any_event_leaves_a_disk_that_opens() {
    let runs = amount("DSEC_CASES", 60).div_ceil(10);
    let first = amount("DSEC_SEED", u64::from(std::process::id()));
    let points: usize = (first..first + runs).map(run).sum();
    assert!(points > 200, "{points} moments");
}
