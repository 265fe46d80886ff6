//! `memory`: how often the page cache holds the same data when a whole tree is read, and how many reads that
//! takes.
//!
//! The page cache holds whole pages, so a copy is the sum of all files' lengths rounded up to 4 KiB each; folders
//! and metadata come on top and are part of the growth. The growth of the whole page cache also holds what other
//! programs did meanwhile; `resident` counts only the mounted files and what lies below them (the image, or the
//! daemon's FUSE files and its cache), page by page.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Common, make_erofs};
use crate::cold_start::{distinct_files, middle, read_all, resident_bytes};
use crate::command;
use crate::corpus;
use crate::error::Result;
use crate::host;
use crate::mounts::{self, Backing};
use crate::origin::OriginProcess;
use crate::store::{Binaries, Layerd};
use crate::units::megabytes;

/// Bytes of a page.
const PAGE: u64 = 4_096;
/// Largest growth of the page cache aimed at, in copies of the data.
const COPIES_MAX: f64 = 1.15;

/// Reads a whole tree and compares the growth of the page cache.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench memory --json memory.json")]
pub(crate) struct MemoryArgs {
    #[command(flatten)]
    common: Common,
    /// Tree of the corpus.
    #[arg(long, default_value = "base-small")]
    tree: String,
}

/// One way to read the tree.
#[derive(Debug, Default, Serialize)]
struct Row {
    way: &'static str,
    /// All files, in whole pages.
    data_bytes: u64,
    growth_bytes: u64,
    /// Growth as a multiple of the data.
    copies: f64,
    /// What the page cache holds of the mounted files and of what lies below them.
    resident_bytes: u64,
    /// The same as a multiple of the data.
    resident_copies: f64,
    seconds: f64,
    /// Reads that reached the daemon through FUSE.
    fuse_reads: u64,
    /// Requests that the origin answered.
    remote_requests: u64,
    daemon_pss_bytes: u64,
}

/// Runs the comparison.
///
/// # Errors
/// Where a mount fails.
pub(crate) fn run(args: &MemoryArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    let tree = corpus::ensure_tree(&work, &args.tree)?;
    let data_bytes = distinct_files(&tree)?
        .iter()
        .map(|(_, len)| len.next_multiple_of(PAGE))
        .sum();
    let image = work.folder("scratch")?.join("image.erofs");
    make_erofs(&tree, &image)?;
    let store = binaries.ensure_layers(&work, &[&args.tree])?;
    // From memory that is taken before: the origin's own page cache must not grow with the reads.
    let memory = work.folder("scratch/origin")?;
    let memory_mount = mounts::tmpfs(&memory)?;
    command::shell(
        "cp -a \"$1/.\" \"$2\"",
        &[store.as_os_str(), memory.as_os_str()],
    )?;
    let served = OriginProcess::start(&memory)?;
    served.set(args.common.delay, 0)?;
    let at = work.folder("scratch/at")?;
    let mut rows: [Vec<Row>; 4] = Default::default();
    let [direct, buffered, on_demand, cached] = &mut rows;
    let layer = [Binaries::layer_name(&args.tree)];
    for _ in 0..args.common.runs {
        for (rows, way, backing) in [
            (&mut *direct, "native, directio", Backing::Direct),
            (&mut *buffered, "native, buffered", Backing::Buffered),
        ] {
            let _mounted = mounts::erofs(&image, &at, backing)?;
            rows.push(measure(way, &at, data_bytes, std::slice::from_ref(&image))?);
        }
        // On demand first: it leaves everything in the cache for the second.
        let cache = work.empty_folder("scratch/cache")?;
        for (rows, way) in [(&mut *on_demand, "on demand"), (&mut *cached, "cached")] {
            let mut daemon = Layerd::start(&binaries, served.url(), &cache)?;
            daemon.mount(&layer, &at, false)?;
            served.set(args.common.delay, 0)?;
            let before = daemon.stats()?.total;
            let below = ["segments", "layers", "run/fuse"].map(|folder| cache.join(folder));
            let mut row = measure(way, &at, data_bytes, &below)?;
            row.fuse_reads = daemon
                .stats()?
                .total
                .fuse_reads
                .saturating_sub(before.fuse_reads);
            row.remote_requests = served.served()?.requests;
            for pid in daemon.processes()? {
                row.daemon_pss_bytes += host::pss_bytes(&pid)?;
            }
            rows.push(row);
            daemon.stop()?;
        }
    }
    drop((served, memory_mount));
    work.empty_folder("scratch")?;
    let rows: Vec<Row> = rows.into_iter().map(median).collect();
    args.common.publish(&table(&rows), &rows)
}

/// Drops the caches, reads everything at `at`, and looks at what the page cache has gained. `below` are the files
/// and folders that the mount reads from.
fn measure(way: &'static str, at: &Path, data_bytes: u64, below: &[PathBuf]) -> Result<Row> {
    // The walk itself, and the programs it needs, are not what is measured.
    read_all(&at.join("etc"))?;
    host::drop_caches()?;
    let before = host::page_cache_bytes()?;
    let began = std::time::Instant::now();
    read_all(at)?;
    let seconds = began.elapsed().as_secs_f64();
    let growth_bytes = host::page_cache_bytes()?.saturating_sub(before);
    let mut files = distinct_files(at)?;
    for path in below.iter().filter(|path| path.exists()) {
        if path.is_dir() {
            files.extend(distinct_files(path)?);
        } else {
            files.push((path.clone(), corpus::file_len(path)?));
        }
    }
    let resident_bytes = resident_bytes(&files)?;
    Ok(Row {
        way,
        data_bytes,
        growth_bytes,
        resident_bytes,
        resident_copies: megabytes(resident_bytes) / megabytes(data_bytes),
        copies: megabytes(growth_bytes) / megabytes(data_bytes),
        seconds,
        ..Row::default()
    })
}

/// The run with the median of resident bytes, with the median time of all.
fn median(mut rows: Vec<Row>) -> Row {
    let seconds = middle(rows.iter().map(|row| row.seconds).collect());
    rows.sort_by_key(|row| row.resident_bytes);
    let index = rows.len() / 2;
    let row = rows.into_iter().nth(index).unwrap_or_default();
    Row { seconds, ..row }
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<20}{:>10}{:>12}{:>8}{:>13}{:>8}{:>9}{:>12}{:>10}{:>9}\n",
        "way",
        "data MB",
        "growth MB",
        "copies",
        "resident MB",
        "copies",
        "s",
        "FUSE reads",
        "requests",
        "PSS MB"
    );
    for row in rows {
        // Writing to a string cannot fail.
        writeln!(
            text,
            "{:<20}{:>10.1}{:>12.1}{:>8.2}{:>13.1}{:>8.2}{:>9.2}{:>12}{:>10}{:>9.1}",
            row.way,
            megabytes(row.data_bytes),
            megabytes(row.growth_bytes),
            row.copies,
            megabytes(row.resident_bytes),
            row.resident_copies,
            row.seconds,
            row.fuse_reads,
            row.remote_requests,
            megabytes(row.daemon_pss_bytes),
        )
        .unwrap_or_default();
    }
    let own = rows.iter().filter(|row| row.fuse_reads > 0);
    let worst = own.map(|row| row.resident_copies).fold(0.0, f64::max);
    let met = if worst <= COPIES_MAX {
        "met"
    } else {
        "NOT MET"
    };
    text + &format!(
        "resident copies through the daemon: at most {worst:.2} ({met}: at most {COPIES_MAX})\n"
    )
}
