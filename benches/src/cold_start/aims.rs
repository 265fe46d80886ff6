//! The aims of the design beside what was measured, as ratios within one run.

use serde::Serialize;

use crate::cold_start::report::{BUILDS, Report, TOTAL, share};
use crate::cold_start::ways::Way;
use crate::units::{bandwidth_name, megabytes};

/// The origin's bandwidth of the capped aims.
const SLOW: u64 = 25_000_000;
/// Fewest bytes on the wire that another system needed for W1, in MB.
const PEER_WIRE_MB: f64 = 28.2;

/// One aim. Whether it is met changes nothing but the report.
#[derive(Debug, Serialize)]
pub(super) struct Aim {
    aim: String,
    /// The limit, with its direction.
    at_most: Option<f64>,
    at_least: Option<f64>,
    /// `None` where the run did not measure it.
    measured: Option<f64>,
    met: Option<bool>,
}

impl Aim {
    fn at_most(aim: impl Into<String>, limit: f64, measured: Option<f64>) -> Self {
        let met = measured.map(|measured| measured <= limit);
        Self {
            aim: aim.into(),
            at_most: Some(limit),
            at_least: None,
            measured,
            met,
        }
    }

    fn at_least(aim: impl Into<String>, limit: f64, measured: Option<f64>) -> Self {
        let met = measured.map(|measured| measured >= limit);
        Self {
            aim: aim.into(),
            at_most: None,
            at_least: Some(limit),
            measured,
            met,
        }
    }

    /// As it stands below the table.
    pub(super) fn line(&self) -> String {
        let (sign, limit) = match (self.at_most, self.at_least) {
            (Some(limit), _) => ("<=", limit),
            (None, limit) => (">=", limit.unwrap_or(0.0)),
        };
        let measured = self
            .measured
            .map_or_else(|| "-".to_owned(), |measured| format!("{measured:.2}"));
        let verdict = match self.met {
            Some(true) => "met",
            Some(false) => "NOT MET",
            None => "not measured",
        };
        format!(
            "  {:<76}{sign} {limit:<6}{measured:>8}  {verdict}\n",
            self.aim
        )
    }
}

/// Compares a finished report with the aims.
pub(super) fn judge(report: &Report) -> Vec<Aim> {
    let first = |workload, way, bandwidth| {
        report
            .row(workload, way, bandwidth)
            .map(|r| r.median.first_output_s)
    };
    let ratio = |of: Option<f64>, to: Option<f64>| of.zip(to).map(|(of, to)| of / to);
    let w1 = |way| report.row("W1", way, 0).map(|row| &row.median);
    let own = w1(Way::OnDemand);
    let mut aims = vec![
        Aim::at_most(
            "W1 on demand, first output, no cap: multiple of native",
            2.4,
            ratio(first("W1", Way::OnDemand, 0), first("W1", Way::Native, 0)),
        ),
        Aim::at_most(
            "W1 on demand, first output, 25 MB/s: multiple of native",
            5.7,
            ratio(
                first("W1", Way::OnDemand, SLOW),
                first("W1", Way::Native, SLOW),
            ),
        ),
        Aim::at_least(
            "W1 on demand, first output, no cap: times faster than eager tar.gz",
            3.0,
            ratio(first("W1", Way::EagerGz, 0), first("W1", Way::OnDemand, 0)),
        ),
        Aim::at_most(
            "W1 on demand: MB on the wire (the least of the peers)",
            PEER_WIRE_MB,
            own.map(|sample| megabytes(sample.wire_bytes)),
        ),
        Aim::at_most(
            "W1 on demand: PSS of both processes, MB",
            40.0,
            own.map(|sample| megabytes(sample.daemon_pss_bytes)),
        ),
        Aim::at_most(
            "W1: `dsec mount` with local metadata over the native mount, ms",
            5.0,
            w1(Way::Cached)
                .zip(w1(Way::Native))
                .map(|(own, native)| (own.mount_s - native.mount_s) * 1e3),
        ),
    ];
    for (bandwidth, name, limit) in [(0, "no cap", 1.5), (SLOW, "25 MB/s", 4.0)] {
        aims.push(Aim::at_most(
            format!("W1 traced, first output, {name}: multiple of native"),
            limit,
            ratio(
                first("W1", Way::Traced, bandwidth),
                first("W1", Way::Native, bandwidth),
            ),
        ));
    }
    per_workload(report, &mut aims);
    per_traced(report, &mut aims);
    let written = |way| {
        let group = if report.row(TOTAL, way, 0).is_some() {
            TOTAL
        } else {
            "W1"
        };
        report
            .row(group, way, 0)
            .map(|row| row.median.distribution_written_bytes)
    };
    let less = written(Way::OnDemand)
        .zip(written(Way::EagerZst))
        .and_then(|(own, eager)| share(own, eager));
    aims.push(Aim::at_least(
        "all workloads: % less written to disk for distribution than eager tar.zst",
        90.0,
        less.map(|share| (1.0 - share) * 100.0),
    ));
    aims
}

/// The aims of a second start, for each workload on its own.
fn per_traced(report: &Report, aims: &mut Vec<Aim>) {
    for workload in report.groups() {
        let of = |way| report.row(workload, way, 0).map(|row| &row.median);
        let own = of(Way::OnDemand);
        if ![BUILDS, TOTAL].contains(&workload)
            && let Some(traced) = of(Way::Traced)
        {
            aims.push(Aim::at_most(
                format!("{workload} traced: requests, as a part of those on demand"),
                0.2,
                own.and_then(|own| share(traced.requests, own.requests)),
            ));
            aims.push(Aim::at_most(
                format!("{workload} traced: plain bytes fetched / blocks read"),
                1.2,
                share(traced.plain_bytes, traced.daemon_needed_bytes),
            ));
            aims.push(Aim::at_most(
                format!("{workload} traced, to completion, no cap: multiple of cached"),
                1.15,
                of(Way::Cached).map(|cached| traced.done_s / cached.done_s),
            ));
        }
        // A twentieth is noise.
        if ["W2", "W3"].contains(&workload) {
            for bandwidth in report.bandwidths() {
                let done = |way| {
                    report
                        .row(workload, way, bandwidth)
                        .map(|r| r.median.done_s)
                };
                for (way, how) in [
                    (Way::ForeignTrace, "optimised"),
                    (Way::ForeignApplied, "applied"),
                ] {
                    if let Some(foreign) = done(way) {
                        aims.push(Aim::at_most(
                            format!(
                                "{workload} with the trace of another ({how}), {}: multiple of on demand",
                                bandwidth_name(bandwidth)
                            ),
                            1.05,
                            done(Way::OnDemand).map(|own| foreign / own),
                        ));
                    }
                }
            }
        }
    }
}

/// The aims that hold for each workload on its own.
fn per_workload(report: &Report, aims: &mut Vec<Aim>) {
    for workload in report.groups() {
        let Some(own) = report
            .row(workload, Way::OnDemand, 0)
            .map(|row| &row.median)
        else {
            continue;
        };
        let needed = report.needed(workload).needed_bytes;
        // W2 reads no file data beyond a few libraries: its ratio says nothing.
        if ![BUILDS, TOTAL, "W2"].contains(&workload) {
            let plain = share(own.plain_bytes, needed);
            aims.push(Aim::at_most(
                format!("{workload} on demand: plain bytes fetched / needed"),
                2.2,
                plain,
            ));
            let wire = share(own.wire_bytes, needed);
            aims.push(Aim::at_most(
                format!("{workload} on demand: bytes on the wire / needed"),
                1.0,
                wire,
            ));
        }
        if !["W1", "W2", "W3", TOTAL].contains(&workload) {
            let cached = report
                .row(workload, Way::Cached, 0)
                .map(|row| row.median.done_s);
            aims.push(Aim::at_most(
                format!("{workload} on demand, to completion, no cap: multiple of cached"),
                1.1,
                cached.map(|cached| own.done_s / cached),
            ));
        }
    }
}
