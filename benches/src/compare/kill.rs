//! `kill`: SIGKILL under a reader. A reader of random blocks goes on for some seconds after a process of the store was killed
//! a moment into its reads; what it got is counted: right bytes, zeros, other wrong bytes, errors.
//!
//! The file has no block of zeros, so a block of zeros is one that nobody filled in. The reader drops the page cache of the file now and
//! then, or most reads would not reach the store. A store that returns zeros or wrong bytes is an error of this program.

use std::fmt::Write;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::Common;
use crate::error::{Context, Error, Result};
use crate::origin::OriginProcess;
use crate::store::{Binaries, Layerd};
use crate::units;
use crate::workdir::WorkDir;

const BLOCK: usize = 4_096;
/// The page cache of the file is dropped after so many reads.
const DROP_EVERY: u64 = 64;
const LAYER: &str = "base/kill:1";

/// Kills a process of the store under a reader and counts what the reader gets.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench kill --json kill.json")]
pub(crate) struct KillArgs {
    #[command(flatten)]
    common: Common,
    /// When the process is killed, counted from the first read.
    #[arg(long, default_value = "30ms", value_parser = units::parse_delay)]
    after: Duration,
    /// How long the reader goes on.
    #[arg(long, default_value = "3s", value_parser = units::parse_delay)]
    reads: Duration,
    /// Length of the file in MiB.
    #[arg(long, default_value_t = 64)]
    mib: u32,
}

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Victim {
    /// The process that serves reads. Nothing may be read any more.
    DataPlane,
    /// The process that fetches; another one is started at once.
    ControlProcess,
}

/// What the reader got after the kill, over all runs.
#[derive(Debug, Clone, Serialize)]
struct Row {
    killed: Victim,
    runs: usize,
    /// Right reads before the kill.
    right_before: u64,
    right: u64,
    zeros: u64,
    wrong: u64,
    errors: u64,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Report {
    file_bytes: u64,
    killed_after_ms: u128,
    read_for_ms: u128,
    rows: Vec<Row>,
}

/// Counts of one reader.
#[derive(Debug, Default)]
struct Counts {
    right: AtomicU64,
    zeros: AtomicU64,
    wrong: AtomicU64,
    errors: AtomicU64,
}

/// Runs the kills.
///
/// # Errors
/// Where a mount fails, and where the store returned zeros or wrong bytes.
pub(crate) fn run(args: &KillArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    let data = blocks(args.mib);
    let store = publish(&work, &binaries, &data)?;
    let served = OriginProcess::start(&store)?;
    served.set(args.common.delay, 0)?;
    let mut rows = Vec::new();
    for killed in [Victim::DataPlane, Victim::ControlProcess] {
        let mut row = Row {
            killed,
            runs: args.common.runs,
            right_before: 0,
            right: 0,
            zeros: 0,
            wrong: 0,
            errors: 0,
        };
        for _ in 0..args.common.runs {
            one_run(args, &work, (&binaries, served.url()), &data, &mut row)?;
        }
        rows.push(row);
    }
    drop(served);
    work.empty_folder("scratch")?;
    let report = Report {
        file_bytes: u64::try_from(data.len()).during("counting")?,
        killed_after_ms: args.after.as_millis(),
        read_for_ms: args.reads.as_millis(),
        rows,
    };
    args.common.publish(&table(&report), &report)?;
    match report.rows.iter().map(|row| row.zeros + row.wrong).sum() {
        0 => Ok(()),
        bad => Err(Error::Unexpected(format!(
            "{bad} reads gave bytes that are not the file's"
        ))),
    }
}

/// Noise, every block with its number in front.
fn blocks(mib: u32) -> Vec<u8> {
    let mut data = Vec::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for number in 0..mib * 256 {
        data.extend_from_slice(&(number | 1 << 31).to_le_bytes());
        while !data.len().is_multiple_of(BLOCK) {
            state = next(state);
            data.extend(state.to_le_bytes().into_iter().take(4));
        }
    }
    data
}

/// xorshift64.
fn next(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ state << 17
}

fn publish(work: &WorkDir, binaries: &Binaries, data: &[u8]) -> Result<std::path::PathBuf> {
    let (tree, store) = (work.folder("scratch/tree")?, work.folder("scratch/store")?);
    let path = tree.join("data");
    let mut file = File::create(&path).on("make", &path)?;
    file.write_all(data).on("write", &path)?;
    binaries.build(&tree, LAYER, &store)?;
    Ok(store)
}

fn one_run(
    args: &KillArgs,
    work: &WorkDir,
    store: (&Binaries, &str),
    data: &[u8],
    row: &mut Row,
) -> Result<()> {
    let (binaries, origin) = store;
    let cache = work.empty_folder("scratch/cache")?;
    let at = work.folder("scratch/at")?;
    let mut daemon = Layerd::start(binaries, origin, &cache)?;
    daemon.mount(&[LAYER.to_owned()], &at, false)?;
    let pids = daemon.stats()?;
    let pid = match row.killed {
        Victim::DataPlane => pids.data_plane_pid,
        Victim::ControlProcess => pids.control_pid,
    };
    let pid = pid
        .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
        .ok_or_else(|| Error::Unexpected("`layerd` does not say its process ids".to_owned()))?;
    let path = at.join("data");
    let file = File::open(&path).on("open", &path)?;
    let (counts, stop) = (Counts::default(), AtomicBool::new(false));
    let daemon = std::thread::scope(|scope| {
        scope.spawn(|| counts.read(&file, data, &stop));
        std::thread::sleep(args.after);
        let killed = kill_process(pid, Signal::KILL).during("killing");
        let before = counts.right.load(Ordering::Relaxed);
        let until = Instant::now() + args.reads;
        let daemon = killed.and_then(|()| match row.killed {
            Victim::DataPlane => Ok(daemon),
            Victim::ControlProcess => daemon.restart(origin, &cache),
        });
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        stop.store(true, Ordering::Relaxed);
        daemon.map(|daemon| (daemon, before))
    });
    let (daemon, before) = daemon?;
    row.right_before += before;
    drop(file);
    counts.add_to(row);
    row.right -= before;
    daemon.stop()
}

impl Counts {
    /// Reads random blocks until told to stop.
    fn read(&self, file: &File, data: &[u8], stop: &AtomicBool) {
        let all = data.chunks_exact(BLOCK).len();
        let mut state = 1;
        let mut reads = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            state = next(state);
            let number = usize::try_from(state % (all as u64)).unwrap_or(0);
            let expected = data.chunks_exact(BLOCK).nth(number).unwrap_or_default();
            let mut block = [0; BLOCK];
            let counter = match file.read_exact_at(&mut block, (number * BLOCK) as u64) {
                Err(_) => &self.errors,
                Ok(()) if block == expected => &self.right,
                Ok(()) if block == [0; BLOCK] => &self.zeros,
                Ok(()) => &self.wrong,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            reads += 1;
            if reads.is_multiple_of(DROP_EVERY) {
                // Advice: where it is refused, fewer reads reach the store.
                fadvise(file, 0, None, Advice::DontNeed).unwrap_or_default();
            }
        }
    }

    /// Adds what was counted.
    fn add_to(&self, row: &mut Row) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        row.right += count(&self.right);
        row.zeros += count(&self.zeros);
        row.wrong += count(&self.wrong);
        row.errors += count(&self.errors);
    }
}

fn table(report: &Report) -> String {
    let mut out = format!(
        "SIGKILL {} ms into random 4 KiB reads of {} MiB, the reader goes on for {} ms\n\n{:<16} {:>5} {:>13} {:>9} {:>9} {:>9} {:>9}\n",
        report.killed_after_ms,
        report.file_bytes >> 20,
        report.read_for_ms,
        "killed",
        "runs",
        "right before",
        "right",
        "zeros",
        "wrong",
        "errors"
    );
    for row in &report.rows {
        let name = match row.killed {
            Victim::DataPlane => "data plane",
            Victim::ControlProcess => "control process",
        };
        writeln!(
            out,
            "{name:<16} {:>5} {:>13} {:>9} {:>9} {:>9} {:>9}",
            row.runs, row.right_before, row.right, row.zeros, row.wrong, row.errors
        )
        .unwrap_or_default();
    }
    out
}
