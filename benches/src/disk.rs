//! `dsec-bench disk`: what a writable disk costs, without a kernel in between where that is possible.
//!
//! All on files of one folder, made for the run: a stack of sealed layers of random 4 KiB blocks, read at random; the merged
//! index alone; a snapshot under writers; what is written for what a client wrote; the FUSE file; and io_uring beside `pread`.

mod paths;
mod stack;
mod sys;
mod ublk;
mod writing;

use std::path::PathBuf;

use clap::Args;

use crate::error::{Context, Result};
use crate::host;
use crate::rows::Rows;
pub(crate) use crate::rows::{Spent, as_f64};

/// Bytes of a block that is read or written.
pub(crate) const BLOCK: usize = 4096;

/// Measure writable disks: reads through layers, look-ups, snapshots, write amplification, FUSE, io_uring.
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
    /// Folder for the disks; it needs about 3 GiB.
    #[arg(long, value_name = "DIR", env = "TMPDIR", default_value = "/tmp")]
    tmp: PathBuf,
    /// A tenth of everything, for a quick look.
    #[arg(long)]
    small: bool,
    /// Measure ublk beside FUSE and files, and nothing else; in the test VM where this kernel has none.
    #[arg(long)]
    ublk: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs and times, with this process's CPU time.
pub(crate) fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, Spent)> {
    let cpu = host::cpu_s("self")?;
    let begun = std::time::Instant::now();
    let done = run()?;
    let wall = begun.elapsed();
    let cpu_s = host::cpu_s("self")? - cpu;
    Ok((done, Spent { wall, cpu_s }))
}

/// Random numbers from a seed.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % n
    }

    /// A block that does not compress.
    pub(crate) fn block(&mut self) -> Vec<u8> {
        let words = (0..BLOCK / 8).flat_map(|_| self.below(u64::MAX >> 11).to_le_bytes());
        words.collect()
    }
}

/// Measures and prints.
pub(crate) fn run(args: &DiskArgs) -> Result<()> {
    let scale = if args.small { 10 } else { 1 };
    let scratch = tempfile::Builder::new()
        .prefix("dsec-bench-disk-")
        .tempdir_in(&args.tmp)
        .on("make a folder in", &args.tmp)?;
    let mut rows = Rows::default();
    if args.ublk {
        ublk::measure(&mut rows, scratch.path(), scale)?;
    } else {
        stack::measure(&mut rows, scratch.path(), scale)?;
        writing::measure(&mut rows, scratch.path(), scale)?;
        paths::measure(&mut rows, scratch.path(), scale)?;
    }
    rows.print(args.json)
}
