//! `read`: one large file through the mount, beside a native file-backed EROFS mount of the same file.
//!
//! First sequential read with nothing fetched, the same with everything in the cache, warm from the page cache,
//! 4 KiB random reads with the page cache dropped, and 4 KiB random reads with nothing fetched.

use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use super::{Common, make_erofs};
use crate::cold_start::{middle, percentile};
use crate::command;
use crate::corpus;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::mounts::{self, Backing};
use crate::origin::{OriginProcess, Served};
use crate::store::{Binaries, Layerd};
use crate::units::megabytes;
use crate::workdir::WorkDir;

/// Length of the file, in bytes.
const FILE_LEN: u64 = 208_003_072;
const BLOCK: u64 = 4_096;
/// Random reads with the page cache dropped.
const RANDOM_READS: u64 = 5_000;
/// Random reads with nothing fetched.
const COLD_READS: u64 = 200;
/// Bytes of one sequential read.
const PIECE: usize = 1 << 20;
const TREE: &str = "base-read-file";

/// Reads one large file in several ways and compares with native EROFS.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench read --delay 1ms --json read.json")]
pub(crate) struct ReadArgs {
    #[command(flatten)]
    common: Common,
}

/// What one way does. Zero where it was not measured.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    way: &'static str,
    first_sequential_mb_per_s: f64,
    first_requests: u64,
    first_wire_bytes: u64,
    /// The same with everything local and the page cache dropped.
    cached_sequential_mb_per_s: f64,
    warm_sequential_mb_per_s: f64,
    /// Growth of the page cache in the first read.
    growth_bytes: u64,
    random_iops: f64,
    random_p50_us: f64,
    random_p99_us: f64,
    cold_p50_us: f64,
    cold_p99_us: f64,
    cold_requests: u64,
    cold_wire_bytes: u64,
}

/// All ways, and what is asked of the store.
#[derive(Debug, Serialize)]
struct Report {
    rows: Vec<Row>,
    delay_us: u128,
    /// Aim: at most 1.5.
    cold_p50_to_delay: f64,
    /// Aim: at most 4.
    cold_p99_to_delay: f64,
    /// Aim: at least 0.5.
    first_to_cached_sequential: f64,
}

/// Runs the comparison.
///
/// # Errors
/// Where a mount fails, or a read gives other bytes than the file has.
pub(crate) fn run(args: &ReadArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    let source = ensure_file(&work)?;
    let store = work.folder("scratch/origin")?;
    let _memory = mounts::tmpfs(&store)?;
    binaries.build(&work.tree(TREE), &Binaries::layer_name(TREE), &store)?;
    let image = work.folder("scratch")?.join("image.erofs");
    make_erofs(&work.tree(TREE), &image)?;
    let origin = OriginProcess::start(&store)?;
    let mut rows: [Vec<Row>; 3] = Default::default();
    for _ in 0..args.common.runs {
        let [direct, buffered, own] = &mut rows;
        direct.push(native(&work, &image, "native, directio", Backing::Direct)?);
        buffered.push(native(
            &work,
            &image,
            "native, buffered",
            Backing::Buffered,
        )?);
        let bench = Bench {
            work: &work,
            binaries: &binaries,
            origin: &origin,
            delay: args.common.delay,
        };
        own.push(bench.run(&source)?);
    }
    drop(origin);
    let rows: Vec<_> = rows.iter().map(|rows| median(rows)).collect();
    let own = rows.last().cloned().unwrap_or_default();
    let delay_us = args.common.delay.as_secs_f64() * 1e6;
    let report = Report {
        rows,
        delay_us: args.common.delay.as_micros(),
        cold_p50_to_delay: own.cold_p50_us / delay_us,
        cold_p99_to_delay: own.cold_p99_us / delay_us,
        first_to_cached_sequential: own.first_sequential_mb_per_s / own.cached_sequential_mb_per_s,
    };
    args.common.publish(&table(&report), &report)
}

/// The file: the beginning of the small base as a tar, real data that compresses as such.
fn ensure_file(work: &WorkDir) -> Result<PathBuf> {
    let tree = work.tree(TREE);
    let file = tree.join("data.bin");
    if file.try_exists().on("look for", &file)? {
        return Ok(file);
    }
    let source = corpus::ensure_tree(work, "base-small")?;
    std::fs::create_dir_all(&tree).on("make", &tree)?;
    let line = format!(
        "{{ tar --sort=name -C \"$1\" -cf - . || true; }} 2>/dev/null | head -c {FILE_LEN} >\"$2\""
    );
    command::shell(&line, &[source.as_os_str(), file.as_os_str()])?;
    match corpus::file_len(&file)? {
        FILE_LEN => Ok(file),
        len => Err(Error::Unexpected(format!(
            "`{}` has {len} bytes, expected {FILE_LEN}",
            file.display()
        ))),
    }
}

/// What the runs through the store share.
struct Bench<'a> {
    work: &'a WorkDir,
    binaries: &'a Binaries,
    origin: &'a OriginProcess,
    delay: std::time::Duration,
}

impl Bench<'_> {
    fn run(&self, source: &Path) -> Result<Row> {
        let mut row = Row {
            way: "dsec mount",
            ..Row::default()
        };
        let cache = self.work.empty_folder("scratch/cache")?;
        let (daemon, file) = self.mount(&cache)?;
        let before = host::page_cache_bytes()?;
        row.first_sequential_mb_per_s = sequential(&file)?;
        row.growth_bytes = host::page_cache_bytes()?.saturating_sub(before);
        Served {
            requests: row.first_requests,
            bytes: row.first_wire_bytes,
        } = self.origin.served()?;
        row.warm_sequential_mb_per_s = sequential(&file)?;
        drop(file);
        daemon.stop()?;

        let (daemon, file) = self.mount(&cache)?;
        row.cached_sequential_mb_per_s = sequential(&file)?;
        host::drop_caches()?;
        let times = random(&file, RANDOM_READS, None)?;
        row.set_random(&times);
        drop(file);
        daemon.stop()?;

        let source = File::open(source).on("open", source)?;
        let (daemon, file) = self.mount(&self.work.empty_folder("scratch/cache")?)?;
        let times = random(&file, COLD_READS, Some(&source))?;
        row.cold_p50_us = middle(times.clone());
        row.cold_p99_us = percentile(&times, 0.99);
        Served {
            requests: row.cold_requests,
            bytes: row.cold_wire_bytes,
        } = self.origin.served()?;
        drop(file);
        daemon.stop()?;
        Ok(row)
    }

    /// Mounts the layer with a cache folder and an empty page cache; the origin's counters begin at zero.
    fn mount(&self, cache: &Path) -> Result<(Layerd, File)> {
        let at = self.work.folder("scratch/at")?;
        let mut daemon = Layerd::start(self.binaries, self.origin.url(), cache)?;
        daemon.mount(&[Binaries::layer_name(TREE)], &at, false)?;
        host::drop_caches()?;
        let file = open(&at)?;
        self.origin.set(self.delay, 0)?;
        Ok((daemon, file))
    }
}

impl Row {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand reads")]
    fn set_random(&mut self, times_us: &[f64]) {
        self.random_iops = times_us.len() as f64 / (times_us.iter().sum::<f64>() / 1e6);
        self.random_p50_us = middle(times_us.to_vec());
        self.random_p99_us = percentile(times_us, 0.99);
    }
}

fn native(work: &WorkDir, image: &Path, way: &'static str, backing: Backing) -> Result<Row> {
    let at = work.folder("scratch/at")?;
    let _mounted = mounts::erofs(image, &at, backing)?;
    let mut row = Row {
        way,
        ..Row::default()
    };
    host::drop_caches()?;
    let file = open(&at)?;
    let before = host::page_cache_bytes()?;
    row.first_sequential_mb_per_s = sequential(&file)?;
    row.cached_sequential_mb_per_s = row.first_sequential_mb_per_s;
    row.growth_bytes = host::page_cache_bytes()?.saturating_sub(before);
    row.warm_sequential_mb_per_s = sequential(&file)?;
    host::drop_caches()?;
    row.set_random(&random(&file, RANDOM_READS, None)?);
    Ok(row)
}

fn open(at: &Path) -> Result<File> {
    let path = at.join("data.bin");
    File::open(&path).on("open", &path)
}

/// Reads the whole file in order, and returns MB/s.
fn sequential(file: &File) -> Result<f64> {
    let mut piece = vec![0; PIECE];
    let mut offset = 0;
    let began = Instant::now();
    loop {
        let len = file
            .read_at(&mut piece, offset)
            .during("reading the file in order")?;
        if len == 0 {
            break;
        }
        offset += u64::try_from(len).unwrap_or(0);
    }
    let seconds = began.elapsed().as_secs_f64();
    if offset != FILE_LEN {
        return Err(Error::Unexpected(format!(
            "the file ended after {offset} bytes, expected {FILE_LEN}"
        )));
    }
    Ok(megabytes(offset) / seconds)
}

/// Reads blocks at random places, always the same ones, and returns the times in microseconds. With `source`
/// the bytes are compared, off the clock.
fn random(file: &File, count: u64, source: Option<&File>) -> Result<Vec<f64>> {
    let block_len = usize::try_from(BLOCK).unwrap_or(0);
    let (mut block, mut expected) = (vec![0; block_len], vec![0; block_len]);
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut times = Vec::new();
    for _ in 0..count {
        // xorshift64: good enough to scatter reads, and the same everywhere.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let offset = state % (FILE_LEN / BLOCK) * BLOCK;
        let began = Instant::now();
        file.read_exact_at(&mut block, offset)
            .during(format!("reading 4 KiB at {offset}"))?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
        if let Some(source) = source {
            source
                .read_exact_at(&mut expected, offset)
                .during("reading the source")?;
            if block != expected {
                return Err(Error::Unexpected(format!(
                    "4 KiB at {offset} are not those of the source"
                )));
            }
        }
    }
    Ok(times)
}

fn median(rows: &[Row]) -> Row {
    let real = |value: fn(&Row) -> f64| middle(rows.iter().map(value).collect());
    let last = rows.last().cloned().unwrap_or_default();
    Row {
        first_sequential_mb_per_s: real(|row| row.first_sequential_mb_per_s),
        cached_sequential_mb_per_s: real(|row| row.cached_sequential_mb_per_s),
        warm_sequential_mb_per_s: real(|row| row.warm_sequential_mb_per_s),
        random_iops: real(|row| row.random_iops),
        random_p50_us: real(|row| row.random_p50_us),
        random_p99_us: real(|row| row.random_p99_us),
        cold_p50_us: real(|row| row.cold_p50_us),
        cold_p99_us: real(|row| row.cold_p99_us),
        // Counts hardly differ between runs.
        ..last
    }
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "one file of {:.0} MB; MB/s; random 4 KiB: {RANDOM_READS} with the page cache dropped, {COLD_READS} with nothing fetched\n\
         {:<18}{:>9}{:>7}{:>8}{:>9}{:>9}{:>10}{:>9}{:>9}{:>9}{:>10}{:>10}{:>7}{:>8}\n",
        megabytes(FILE_LEN),
        "way",
        "first",
        "reqs",
        "MB",
        "cached",
        "warm",
        "cache +MB",
        "IOPS",
        "p50 us",
        "p99 us",
        "cold p50",
        "cold p99",
        "reqs",
        "MB"
    );
    for row in &report.rows {
        // Writing to a string cannot fail.
        writeln!(
            text,
            "{:<18}{:>9.0}{:>7}{:>8.1}{:>9.0}{:>9.0}{:>10.1}{:>9.0}{:>9.0}{:>9.0}{:>10.0}{:>10.0}{:>7}{:>8.1}",
            row.way,
            row.first_sequential_mb_per_s,
            row.first_requests,
            megabytes(row.first_wire_bytes),
            row.cached_sequential_mb_per_s,
            row.warm_sequential_mb_per_s,
            megabytes(row.growth_bytes),
            row.random_iops,
            row.random_p50_us,
            row.random_p99_us,
            row.cold_p50_us,
            row.cold_p99_us,
            row.cold_requests,
            megabytes(row.cold_wire_bytes),
        )
        .unwrap_or_default();
    }
    let verdict = |met: bool| if met { "met" } else { "NOT MET" };
    text + &format!(
        "cold 4 KiB, multiple of the delay of {} us: p50 {:.2} ({}: <= 1.5), p99 {:.2} ({}: <= 4)\n\
         first sequential read / all cached: {:.2} ({}: >= 0.5)\n",
        report.delay_us,
        report.cold_p50_to_delay,
        verdict(report.cold_p50_to_delay <= 1.5),
        report.cold_p99_to_delay,
        verdict(report.cold_p99_to_delay <= 4.0),
        report.first_to_cached_sequential,
        verdict(report.first_to_cached_sequential >= 0.5),
    )
}
