//! The cold-start benchmark: each workload in each way at each bandwidth, side by side in one run.
//!
//! The runs of one round go through all ways one after the other, and rounds repeat, so that noise of the
//! machine falls on all ways alike. Medians are reported.

mod aims;
mod needed;
mod plot;
mod report;
mod sample;
mod traced;
mod ways;
mod workload;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use needed::{distinct_files, resident_bytes};
pub(crate) use sample::{middle, percentile};
pub(crate) use ways::read_all;

use crate::command;
use crate::corpus::{self, Form};
use crate::error::{Context, Error, Result};
use crate::mounts;
use crate::origin::OriginProcess;
use crate::say::{self, progress};
use crate::store::Binaries;
use crate::units;
use crate::workdir::WorkDir;
use report::{Report, Row};
use sample::Sample;
use ways::Way;
use workload::Workload;

/// Starts real workloads from a simulated origin in several ways and compares them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    dsec-bench cold-start --small --runs 5\n  \
    dsec-bench cold-start --workloads W1,gcc --ways whole,on-demand,native --bandwidth none,25\n  \
    dsec-bench cold-start --json out.json --svg out.svg\n\n\
The corpus is made from Debian, PyPI and npm packages on first use (some minutes, about 5 GB in --work).\n\
Needs root, mmdebstrap, dpkg, pip, npm, mkfs.erofs, tar, gzip, zstd and fincore.")]
pub(crate) struct ColdStartArgs {
    /// Folder for the corpus and everything made from it [default: $XDG_CACHE_HOME/dsec-bench].
    #[arg(long)]
    work: Option<PathBuf>,
    /// Folder with `dsec` and `layerd` [default: where this program is].
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Workloads to run: W1, W2, W3, gcc, go, jdk, node, python [default: all].
    #[arg(long, value_delimiter = ',')]
    workloads: Vec<String>,
    /// Ways to compare [default: all].
    #[arg(long, value_delimiter = ',', value_enum)]
    ways: Vec<Way>,
    /// Bandwidths of the origin, in MB/s, or none.
    #[arg(long, value_delimiter = ',', default_value = "none,125,25", value_parser = units::parse_bandwidth)]
    bandwidth: Vec<u64>,
    /// The origin's delay per request.
    #[arg(long, default_value = "1ms", value_parser = units::parse_delay)]
    delay: Duration,
    /// Runs of each combination; medians are reported.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Only the small root with its workloads W1 to W3.
    #[arg(long)]
    small: bool,
    /// Write all numbers, each run included, to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draw the times to this file.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Only make the corpus and its archives.
    #[arg(long)]
    prepare_only: bool,
}

/// What the runs of one workload at one bandwidth share.
struct Setting<'a> {
    work: &'a WorkDir,
    origin: &'a OriginProcess,
    binaries: Option<Binaries>,
    delay: Duration,
    bandwidth: u64,
}

/// Sizes of a tree that are measured once.
struct Sizes {
    tar_bytes: u64,
}

impl Setting<'_> {
    /// The origin that `layerd` reads.
    fn store_url(&self) -> String {
        format!("{}/store", self.origin.url())
    }

    /// The local EROFS image of a tree.
    fn native_image(&self, tree: &str) -> PathBuf {
        self.work
            .root()
            .join("native")
            .join(format!("{tree}.erofs"))
    }

    fn sizes(&self, tree: &str) -> Result<Sizes> {
        let path = self.work.artifact(&format!("{tree}.tar.bytes"));
        let text = std::fs::read_to_string(&path).on("read", &path)?;
        Ok(Sizes {
            tar_bytes: text
                .trim()
                .parse()
                .during(format!("reading {}", path.display()))?,
        })
    }
}

/// Runs the benchmark.
///
/// # Errors
/// Where the corpus cannot be made or a file cannot be written; a way that fails is shown in the report.
pub(crate) fn run(args: &ColdStartArgs) -> Result<()> {
    let workloads = workload::select(&args.workloads, args.small).map_err(Error::Unexpected)?;
    let work = WorkDir::open(args.work.as_deref())?;
    let binaries = Binaries::find(args.bin_dir.as_deref());
    let mut ways = if args.ways.is_empty() {
        Way::ALL.to_vec()
    } else {
        args.ways.clone()
    };
    if binaries.is_none() && ways.iter().any(|way| way.uses_store()) {
        progress!(
            "`dsec` and `layerd` were not found (--bin-dir): on demand and cached are left out"
        );
        ways.retain(|way| !way.uses_store());
    }
    prepare(&work, &workloads, &ways, binaries.as_ref())?;
    if args.prepare_only {
        return Ok(());
    }

    work.empty_folder("scratch")?;
    let served = work.folder("origin")?;
    let _served_mount = mounts::tmpfs(&served)?;
    let origin = OriginProcess::start(&served)?;
    let mut setting = Setting {
        work: &work,
        origin: &origin,
        binaries,
        delay: args.delay,
        bandwidth: 0,
    };
    let mut report = Report::new(args.delay, args.runs);
    for workload in workloads {
        let of_this = |way: &Way| traced::applies(*way, workload);
        let ways: Vec<Way> = ways.iter().copied().filter(of_this).collect();
        stage(&setting, workload, &ways, &served)?;
        let needed = needed::measure(&setting, workload)?;
        report.add_workload(workload, needed);
        for &bandwidth in &args.bandwidth {
            setting.bandwidth = bandwidth;
            compare(&setting, workload, &ways, args.runs, &mut report);
        }
        ways::forget_cache(&setting, workload)?;
    }
    work.empty_folder("scratch")?;
    work.empty_folder("native")?;
    report.finish();
    publish(&report, args)
}

/// Makes everything that is made once.
fn prepare(
    work: &WorkDir,
    workloads: &[&Workload],
    ways: &[Way],
    binaries: Option<&Binaries>,
) -> Result<()> {
    for tree in workloads.iter().flat_map(|workload| workload.trees) {
        // The native image is always needed: it tells which bytes a workload reads.
        let forms = ways
            .iter()
            .filter_map(|way| way.form())
            .chain([Form::ErofsZst]);
        for form in forms {
            corpus::ensure_artifact(work, tree, form)?;
        }
        corpus::ensure_tar_size(work, tree)?;
    }
    if let Some(binaries) = binaries.filter(|_| ways.iter().any(|way| way.uses_store())) {
        let trees: Vec<_> = workloads
            .iter()
            .flat_map(|workload| workload.trees)
            .copied()
            .collect();
        binaries.ensure_layers(work, &trees)?;
    }
    Ok(())
}

/// Puts what a workload's ways download into the origin's memory, its images on the local disk, and everything
/// of it into the cache of the cached way.
fn stage(
    setting: &Setting<'_>,
    workload: &'static Workload,
    ways: &[Way],
    served: &Path,
) -> Result<()> {
    progress!("{}: {}", workload.name, workload.what);
    command::shell(
        "rm -rf \"$1\"/* && mkdir \"$1/artifacts\"",
        &[served.as_os_str()],
    )?;
    let native = setting.work.empty_folder("native")?;
    for tree in workload.trees {
        for form in ways.iter().filter_map(|way| way.form()) {
            let artifact = corpus::ensure_artifact(setting.work, tree, form)?;
            let copy = served
                .join("artifacts")
                .join(format!("{tree}.{}", form.extension()));
            std::fs::copy(&artifact, &copy).on("copy", &artifact)?;
        }
        let packed = corpus::ensure_artifact(setting.work, tree, Form::ErofsZst)?;
        let image = native.join(format!("{tree}.erofs"));
        command::shell(
            "zstd -dcq \"$1\" >\"$2\"",
            &[packed.as_os_str(), image.as_os_str()],
        )?;
    }
    if ways.iter().any(|way| way.uses_store()) {
        let store = setting.work.folder("store")?;
        command::shell(
            "cp -a \"$1\" \"$2/store\"",
            &[store.as_os_str(), served.as_os_str()],
        )?;
    }
    for way in ways {
        traced::prepare(setting, workload, *way, &served.join("store"))?;
    }
    if ways.contains(&Way::Cached) {
        setting.origin.set(Duration::ZERO, 0)?;
        ways::fill_cache(setting, workload)?;
    }
    Ok(())
}

/// All rounds of one workload at one bandwidth.
fn compare(
    setting: &Setting<'_>,
    workload: &Workload,
    ways: &[Way],
    rounds: usize,
    report: &mut Report,
) {
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); ways.len()];
    let mut failures: Vec<Option<String>> = vec![None; ways.len()];
    let mut expected: Option<Vec<String>> = None;
    for round in 0..rounds {
        // Each round begins with another way, so that none always follows the same one.
        let order = (0..ways.len()).map(|index| (index + round) % ways.len());
        for index in order {
            let (Some(&way), Some(samples), Some(failure)) = (
                ways.get(index),
                samples.get_mut(index),
                failures.get_mut(index),
            ) else {
                continue;
            };
            match ways::run(setting, workload, way) {
                Ok((sample, timed)) => {
                    let expected = expected.get_or_insert_with(|| timed.lines.clone());
                    if *expected != timed.lines {
                        *failure =
                            Some("its output differs from that of the other ways".to_owned());
                    }
                    samples.push(sample);
                }
                Err(error) => *failure = Some(error.to_string()),
            }
        }
    }
    for ((way, samples), failure) in ways.iter().zip(samples).zip(failures) {
        let row = Row::new(workload.name, *way, setting.bandwidth, samples, failure);
        progress!("  {}", row.line());
        report.rows.push(row);
    }
}

fn publish(report: &Report, args: &ColdStartArgs) -> Result<()> {
    say::print(&report.table())?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(report).during("writing JSON")?;
        std::fs::write(path, text + "\n").on("write", path)?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, plot::svg(report)).on("write", path)?;
    }
    Ok(())
}
