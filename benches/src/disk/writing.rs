//! Snapshots under writers, and bytes written for bytes written.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use imgstore::disk::device::BlockDevice;
use imgstore::disk::folder::DiskFolder;
use imgstore::ids::to_u64;

use super::{BLOCK, Random, Rows, as_f64, timed};
use crate::error::{Context, Result};

/// Bytes of the disk.
const DISK_BYTES: u64 = 2 << 30;
/// Bytes that are dirty when a snapshot is taken.
const DIRTY_BYTES: u64 = 100 << 20;
/// Snapshots.
const SNAPSHOTS: usize = 21;
/// Threads that write meanwhile.
const WRITERS: u64 = 2;
/// Longest pause of the writers between two writes: about 4,000 writes/s each.
const PAUSE: Duration = Duration::from_micros(250);
/// Writes between two flushes where amplification is measured.
const WRITES_A_FLUSH: u64 = 64;

fn millis(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort_unstable();
    let of = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    (of(times.get(times.len() / 2)), of(times.last()))
}

fn open(folder: &Path) -> Result<DiskFolder> {
    DiskFolder::create(folder, Vec::new(), Some(DISK_BYTES)).during("making a disk")?;
    DiskFolder::open(folder).during("opening a disk")
}

fn write_random(disk: &dyn BlockDevice, random: &mut Random, bytes: u64) -> Result<()> {
    let blocks = DISK_BYTES / to_u64(BLOCK);
    let block = random.block();
    for _ in 0..bytes / to_u64(BLOCK) {
        let at = random.below(blocks) * to_u64(BLOCK);
        disk.write(&block, at).during("writing")?;
    }
    Ok(())
}

/// Snapshots while others write; how long each held them, took in all, and the longest write meanwhile.
fn snapshots(rows: &mut Rows, folder: &Path, scale: u64) -> Result<()> {
    let open = open(folder)?;
    let disk = open.disk();
    let stop = AtomicBool::new(false);
    let slowest = AtomicU64::new(0);
    let (mut held, mut took, mut waits) = (Vec::new(), Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let done = (|| {
            for number in 0..WRITERS {
                let (disk, stop, slowest) = (&disk, &stop, &slowest);
                let write = move || {
                    let mut random = Random::new(number + 10);
                    while !stop.load(Ordering::Relaxed) {
                        let begun = Instant::now();
                        if write_random(&**disk, &mut random, to_u64(BLOCK)).is_err() {
                            return;
                        }
                        let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
                        slowest.fetch_max(took, Ordering::Relaxed);
                        std::thread::sleep(PAUSE);
                    }
                };
                let named = std::thread::Builder::new().name("writer".to_owned());
                named
                    .spawn_scoped(scope, write)
                    .during("starting a thread")?;
            }
            let mut random = Random::new(3);
            for _ in 0..SNAPSHOTS {
                write_random(&*disk, &mut random, DIRTY_BYTES / scale)?;
                slowest.store(0, Ordering::Relaxed);
                let begun = Instant::now();
                let snapshot = open.snapshot().during("taking a snapshot")?;
                took.push(begun.elapsed());
                held.push(snapshot.held);
                waits.push(Duration::from_micros(slowest.load(Ordering::Relaxed)));
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        done
    })?;
    for (what, times) in [
        ("writes held by a snapshot", held),
        ("slowest write during a snapshot", waits),
        ("a snapshot in all, sync and seal included", took),
    ] {
        let (p50, most) = millis(times);
        rows.add(format!("{what}, 100 MiB dirty, p50"), p50, "ms");
        rows.add(format!("{what}, 100 MiB dirty, longest of 21"), most, "ms");
    }
    Ok(())
}

fn bytes_below(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(folder).on("list", folder)? {
        let entry = entry.on("list", folder)?;
        sum += entry.metadata().on("look at", &entry.path())?.len();
    }
    Ok(sum)
}

fn amplification(rows: &mut Rows, folder: &Path, scale: u64) -> Result<()> {
    let open = open(folder)?;
    let disk = open.disk();
    let mut random = Random::new(4);
    let chunk = WRITES_A_FLUSH * to_u64(BLOCK);
    let total = DIRTY_BYTES / scale / chunk * chunk;
    let ((), spent) = timed(|| {
        for _ in 0..total / chunk {
            write_random(&*disk, &mut random, chunk)?;
            disk.flush().during("flushing")?;
        }
        Ok(())
    })?;
    let written = bytes_below(folder)?;
    rows.add(
        "write amplification, random 4 KiB, a flush every 64",
        as_f64(written) / as_f64(total),
        "",
    );
    rows.add(
        "the same, rate with flushes",
        as_f64(total) / spent.wall.as_secs_f64() / 1e6,
        "MB/s",
    );
    let ((), spent) = timed(|| open.snapshot().map(drop).during("sealing"))?;
    rows.add(
        "sealing that (100 MiB, flushed)",
        spent.wall.as_secs_f64() * 1e3,
        "ms",
    );
    rows.add(
        "write amplification with the seal",
        as_f64(bytes_below(folder)?) / as_f64(total),
        "",
    );
    Ok(())
}

pub(crate) fn measure(rows: &mut Rows, scratch: &Path, scale: u64) -> Result<()> {
    let folder = scratch.join("amplification");
    amplification(rows, &folder, scale)?;
    std::fs::remove_dir_all(&folder).on("remove", &folder)?;
    let folder = scratch.join("snapshots");
    snapshots(rows, &folder, scale)?;
    std::fs::remove_dir_all(&folder).on("remove", &folder)
}
