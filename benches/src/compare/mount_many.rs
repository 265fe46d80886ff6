//! `mounts`: a thousand layers mounted one by one, beside the same mounts of local EROFS images.

use std::process::Command;
use std::time::Instant;

use serde::Serialize;

use super::{Common, make_erofs};
use crate::cold_start::{middle, percentile};
use crate::command;
use crate::error::{Context, Result};
use crate::mounts::Mounted;
use crate::native::own_program;
use crate::say::progress;
use crate::store::Layerd;
use crate::workdir::WorkDir;
use crate::{host, units};

/// Mounts many layers and compares `dsec mount` with native mounts.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench mounts --count 1000 --json mounts.json")]
pub(crate) struct MountsArgs {
    #[command(flatten)]
    common: Common,
    /// How many layers.
    #[arg(long, default_value_t = 1_000)]
    count: usize,
}

/// Latencies in milliseconds.
#[derive(Debug, Serialize)]
struct Report {
    count: usize,
    /// `dsec mount`, metadata not yet local.
    first: Latency,
    /// `dsec mount` again, metadata local.
    again: Latency,
    /// A process that mounts a local EROFS image.
    native: Latency,
    /// Median of the second minus the median of the third.
    over_native_ms: f64,
    umount: Latency,
    daemon_pss_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Latency {
    p50_ms: f64,
    p99_ms: f64,
    total_s: f64,
}

impl Latency {
    fn of(times_ms: &[f64]) -> Self {
        let total_s = times_ms.iter().sum::<f64>() / 1e3;
        Self {
            p50_ms: middle(times_ms.to_vec()),
            p99_ms: percentile(times_ms, 0.99),
            total_s,
        }
    }

    fn line(&self, what: &str) -> String {
        format!(
            "{what:<34}{:>10.2}{:>10.2}{:>10.2}\n",
            self.p50_ms, self.p99_ms, self.total_s
        )
    }
}

/// Runs the comparison.
///
/// # Errors
/// Where a layer cannot be built or mounted.
pub(crate) fn run(args: &MountsArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    let origin = work.folder("scratch/origin")?;
    progress!("publishing {} layers …", args.count);
    for index in 0..args.count {
        let tree = work.empty_folder("scratch/tree")?;
        let file = tree.join("number");
        std::fs::write(&file, format!("layer {index}\n")).on("write", &file)?;
        binaries.build(&tree, &layer(index), &origin)?;
        make_erofs(
            &tree,
            &work
                .folder("scratch/images")?
                .join(format!("{index}.erofs")),
        )?;
    }
    let native = mount_native(&work, args.count)?;
    let cache = work.folder("scratch/cache")?;
    let mut daemon = Layerd::start(&binaries, &format!("dir:{}", origin.display()), &cache)?;
    let first = mount_all(&work, &mut daemon, args.count)?;
    let mut pss = 0;
    for pid in daemon.processes()? {
        pss += host::pss_bytes(&pid)?;
    }
    let umount = umount_all(&work, &mut daemon, args.count)?;
    let again = mount_all(&work, &mut daemon, args.count)?;
    umount_all(&work, &mut daemon, args.count)?;
    daemon.stop()?;
    work.empty_folder("scratch")?;
    let report = Report {
        count: args.count,
        over_native_ms: again.p50_ms - native.p50_ms,
        first,
        again,
        native,
        umount,
        daemon_pss_bytes: pss,
    };
    args.common.publish(&table(&report), &report)
}

fn layer(index: usize) -> String {
    format!("toolkit/number-{index}:1")
}

fn mount_all(work: &WorkDir, daemon: &mut Layerd, count: usize) -> Result<Latency> {
    let mut times = Vec::with_capacity(count);
    for index in 0..count {
        let at = work.folder(&format!("scratch/at/{index}"))?;
        let began = Instant::now();
        daemon.mount(&[layer(index)], &at, false)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        let file = at.join("number");
        let text = std::fs::read_to_string(&file).on("read", &file)?;
        assert_eq!(
            text,
            format!("layer {index}\n"),
            "layer {index} shows another layer's file"
        );
    }
    Ok(Latency::of(&times))
}

fn umount_all(work: &WorkDir, daemon: &mut Layerd, count: usize) -> Result<Latency> {
    let mut times = Vec::with_capacity(count);
    for index in 0..count {
        let at = work.folder(&format!("scratch/at/{index}"))?;
        let began = Instant::now();
        daemon.umount(&at)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Latency::of(&times))
}

fn mount_native(work: &WorkDir, count: usize) -> Result<Latency> {
    let mut times = Vec::with_capacity(count);
    let mut mounted = Vec::with_capacity(count);
    for index in 0..count {
        let at = work.folder(&format!("scratch/at/{index}"))?;
        let image = work.root().join(format!("scratch/images/{index}.erofs"));
        let mut mount = Command::new(own_program()?);
        mount.arg("native-mount").arg(image).arg("--at").arg(&at);
        let began = Instant::now();
        command::run(&mut mount)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        mounted.push(Mounted::adopt(&at));
    }
    Ok(Latency::of(&times))
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{:<34}{:>10}{:>10}{:>10}\n",
        format!("{} layers", report.count),
        "p50 ms",
        "p99 ms",
        "all s"
    );
    text += &report.native.line("native mount of an EROFS file");
    text += &report.first.line("dsec mount, metadata fetched");
    text += &report.again.line("dsec mount, metadata local");
    text += &report.umount.line("dsec umount");
    let met = if report.over_native_ms <= 5.0 {
        "met"
    } else {
        "NOT MET"
    };
    text + &format!(
        "dsec mount over native, metadata local: {:.2} ms ({met}: at most 5); daemon PSS with all mounted: {:.1} MB\n",
        report.over_native_ms,
        units::megabytes(report.daemon_pss_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_takes_the_median_and_the_99th_percentile() {
        let latency = Latency::of(&(1..=200).map(f64::from).collect::<Vec<_>>());
        assert!((latency.p50_ms - 100.5).abs() < 1e-9);
        assert!((latency.p99_ms - 198.0).abs() < 1e-9);
    }
}
