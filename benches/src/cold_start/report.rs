//! The results: per workload and in total, as a table for people and as JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use crate::cold_start::aims::{self, Aim};
use crate::cold_start::needed::Needed;
use crate::cold_start::sample::Sample;
use crate::cold_start::ways::Way;
use crate::cold_start::workload::Workload;
use crate::units::{bandwidth_name, megabytes};

/// Name of the row group that sums the workloads that build something.
pub(super) const BUILDS: &str = "builds";
/// Name of the row group that sums all workloads.
pub(super) const TOTAL: &str = "total";

/// Everything that one call of the benchmark found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    kernel: String,
    cpus: usize,
    delay_us: u128,
    runs: usize,
    pub(super) workloads: Vec<Described>,
    pub(super) rows: Vec<Row>,
    aims: Vec<Aim>,
    peers: &'static [&'static str],
}

/// A workload and the size of what it needs.
#[derive(Debug, Serialize)]
pub(super) struct Described {
    pub(super) name: &'static str,
    what: &'static str,
    layers: Vec<&'static str>,
    builds: bool,
    #[serde(flatten)]
    pub(super) needed: Needed,
}

/// One workload in one way at one bandwidth.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) workload: &'static str,
    pub(super) way: &'static str,
    /// Bytes per second; 0 = no cap.
    pub(super) bandwidth: u64,
    pub(super) median: Sample,
    pub(super) ratios: Ratios,
    /// Why runs failed; the numbers are then those of the others.
    pub(super) failure: Option<String>,
    samples: Vec<Sample>,
}

/// A row beside others of the same workload and bandwidth.
#[derive(Debug, Default, Clone, Copy, Serialize)]
pub(super) struct Ratios {
    /// Time to first output as a multiple of native.
    first_output_to_native: Option<f64>,
    /// Time to completion as a multiple of native.
    done_to_native: Option<f64>,
    /// How many times faster than eager tar.gz to first output.
    first_output_speedup_over_tar_gz: Option<f64>,
    /// How many times faster than eager tar.gz to completion.
    done_speedup_over_tar_gz: Option<f64>,
    /// Plain bytes that arrived, as a share of the image.
    fetched_share: Option<f64>,
    /// Bytes needed, as a share of the image.
    needed_share: Option<f64>,
}

/// What this was compared with elsewhere.
const REFERENCES: [&str; 3] = [
    "DSec paper: 4.2-13.3 % of image bytes accessed, 1.71 x faster than eager, 57 % fewer bytes written",
    "peers, W1 to first output, no cap: whole 3.5 x native, nydus v3 3.2 x; at 25 MB/s: 14 x and 10 x",
    "peers, W1 bytes on the wire: mount.erofs 28.2 MB (655 requests), nydus v2 35.9 (48), nydus v3 38.6 (32)",
];

impl Report {
    pub(super) fn new(delay: Duration, runs: usize) -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            kernel: kernel.trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            delay_us: delay.as_micros(),
            runs,
            workloads: Vec::new(),
            rows: Vec::new(),
            aims: Vec::new(),
            peers: &REFERENCES,
        }
    }

    pub(super) fn add_workload(&mut self, workload: &Workload, needed: Needed) {
        self.workloads.push(Described {
            name: workload.name,
            what: workload.what,
            layers: workload.trees.to_vec(),
            builds: workload.writes,
            needed,
        });
    }

    /// The row of a workload (or total) in a way.
    pub(super) fn row(&self, workload: &str, way: Way, bandwidth: u64) -> Option<&Row> {
        let same = |row: &&Row| {
            row.workload == workload && row.way == way.name() && row.bandwidth == bandwidth
        };
        self.rows.iter().find(same)
    }

    /// Sizes of a workload, or of a total.
    pub(super) fn needed(&self, workload: &str) -> Needed {
        let mut sum = Needed::default();
        let part = |described: &&Described| match workload {
            TOTAL => true,
            BUILDS => described.builds,
            name => described.name == name,
        };
        for described in self.workloads.iter().filter(part) {
            sum.image_bytes += described.needed.image_bytes;
            sum.needed_bytes += described.needed.needed_bytes;
        }
        sum
    }

    /// Bandwidths in the order in which they were run.
    pub(super) fn bandwidths(&self) -> Vec<u64> {
        let mut bandwidths = Vec::new();
        for row in &self.rows {
            if !bandwidths.contains(&row.bandwidth) {
                bandwidths.push(row.bandwidth);
            }
        }
        bandwidths
    }

    /// Names of workloads and totals, in order.
    pub(super) fn groups(&self) -> Vec<&'static str> {
        let mut groups: Vec<_> = self
            .workloads
            .iter()
            .map(|described| described.name)
            .collect();
        let totals = [BUILDS, TOTAL].into_iter();
        groups.extend(totals.filter(|total| self.rows.iter().any(|row| row.workload == *total)));
        groups
    }

    /// Adds totals, ratios and aims when all rows are there.
    pub(super) fn finish(&mut self) {
        let builds: Vec<_> = self
            .workloads
            .iter()
            .filter(|d| d.builds)
            .map(|d| d.name)
            .collect();
        let all: Vec<_> = self.workloads.iter().map(|d| d.name).collect();
        if builds.len() > 1 && builds.len() < all.len() {
            self.add_total(BUILDS, &builds);
        }
        if all.len() > 1 {
            self.add_total(TOTAL, &all);
        }
        let ratios: Vec<_> = self.rows.iter().map(|row| self.ratios(row)).collect();
        for (row, ratios) in self.rows.iter_mut().zip(ratios) {
            row.ratios = ratios;
        }
        self.aims = aims::judge(self);
    }

    fn add_total(&mut self, name: &'static str, of: &[&str]) {
        for bandwidth in self.bandwidths() {
            for way in Way::ALL {
                let parts: Vec<_> = of
                    .iter()
                    .filter_map(|workload| self.row(workload, way, bandwidth))
                    .collect();
                // A total that leaves a workload out would look better than it is.
                if parts.len() == of.len() && parts.iter().all(|row| row.failure.is_none()) {
                    let mut sum = Sample::default();
                    parts.iter().for_each(|row| sum.add(&row.median));
                    self.rows
                        .push(Row::new(name, way, bandwidth, vec![sum], None));
                }
            }
        }
    }

    fn ratios(&self, row: &Row) -> Ratios {
        let beside = |way| {
            self.row(row.workload, way, row.bandwidth)
                .filter(|row| row.failure.is_none())
        };
        let (native, eager) = (beside(Way::Native), beside(Way::EagerGz));
        let needed = self.needed(row.workload);
        let own = &row.median;
        if row.failure.is_some() {
            return Ratios::default();
        }
        Ratios {
            first_output_to_native: native.map(|of| own.first_output_s / of.median.first_output_s),
            done_to_native: native.map(|of| own.done_s / of.median.done_s),
            first_output_speedup_over_tar_gz: eager
                .map(|of| of.median.first_output_s / own.first_output_s),
            done_speedup_over_tar_gz: eager.map(|of| of.median.done_s / own.done_s),
            fetched_share: share(own.plain_bytes, needed.image_bytes),
            needed_share: share(needed.needed_bytes, needed.image_bytes),
        }
    }

    /// All of it for people.
    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "cold start: kernel {}, {} CPUs, origin delay {} us, medians of {} runs\n\
             first, done: seconds from the mount or download request to the first output byte and to the end; \
             x: multiples of native; MB of 10^6\n",
            self.kernel, self.cpus, self.delay_us, self.runs
        );
        for group in self.groups() {
            for bandwidth in self.bandwidths() {
                self.table_group(&mut text, group, bandwidth);
            }
        }
        text.push_str("\naims\n");
        for aim in &self.aims {
            text.push_str(&aim.line());
        }
        text.push_str("\nreferences\n");
        for reference in REFERENCES {
            text.push_str(&format!("  {reference}\n"));
        }
        text
    }

    fn table_group(&self, text: &mut String, group: &str, bandwidth: u64) {
        let needed = self.needed(group);
        let what = self
            .workloads
            .iter()
            .find(|d| d.name == group)
            .map_or("sum", |d| d.what);
        let percent = share(needed.needed_bytes, needed.image_bytes).unwrap_or(0.0) * 100.0;
        // Writing to a string cannot fail.
        writeln!(
            text,
            "\n{group}, {}: {what}; needs {:.1} of {:.1} MB ({percent:.1} %)\n{:<14}{:>8}{:>8}{:>8}{:>7}{:>7}{:>9}{:>9}\
             {:>8}{:>7}{:>9}{:>9}{:>7}{:>7}{:>7}",
            bandwidth_name(bandwidth),
            megabytes(needed.needed_bytes),
            megabytes(needed.image_bytes),
            "way", "mount", "first", "done", "x", "x", "wire MB", "plain MB", "% image", "reqs", "disk MB", "own MB", "CPU s",
            "dmn s", "PSS MB",
        )
        .unwrap_or_default();
        let rows = self
            .rows
            .iter()
            .filter(|row| row.workload == group && row.bandwidth == bandwidth);
        for row in rows {
            writeln!(text, "{}", row.line()).unwrap_or_default();
        }
    }
}

impl Row {
    pub(super) fn new(
        workload: &'static str,
        way: Way,
        bandwidth: u64,
        samples: Vec<Sample>,
        failure: Option<String>,
    ) -> Self {
        let median = Sample::median(&samples);
        Self {
            workload,
            way: way.name(),
            bandwidth,
            median,
            ratios: Ratios::default(),
            failure,
            samples,
        }
    }

    /// The row as it stands in the table.
    pub(super) fn line(&self) -> String {
        if let Some(failure) = &self.failure {
            return format!("{:<14}failed: {failure}", self.way);
        }
        let own = &self.median;
        let multiple = |ratio: Option<f64>| {
            ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
        };
        let percent = self
            .ratios
            .fetched_share
            .map_or_else(|| "-".to_owned(), |s| format!("{:.1}", s * 100.0));
        format!(
            "{:<14}{:>8.3}{:>8.3}{:>8.3}{:>7}{:>7}{:>9.1}{:>9.1}{:>8}{:>7}{:>9.1}{:>9.1}{:>7.2}{:>7.2}{:>7.1}",
            self.way,
            own.mount_s,
            own.first_output_s,
            own.done_s,
            multiple(self.ratios.first_output_to_native),
            multiple(self.ratios.done_to_native),
            megabytes(own.wire_bytes),
            megabytes(own.plain_bytes),
            percent,
            own.requests,
            megabytes(own.distribution_written_bytes),
            megabytes(own.workload_written_bytes),
            own.distribution_cpu_s,
            own.daemon_cpu_s,
            megabytes(own.daemon_pss_bytes),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share, shown to one decimal")]
pub(super) fn share(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold_start::workload;

    #[test]
    fn totals_sum_whole_columns_only_and_ratios_are_within_a_group() {
        let mut report = Report::new(Duration::from_millis(1), 1);
        for (name, native_s) in [("W1", 1.0), ("gcc", 3.0)] {
            let workload = workload::select(&[name.to_owned()], false).unwrap()[0];
            report.add_workload(
                workload,
                Needed {
                    image_bytes: 1000,
                    needed_bytes: 100,
                },
            );
            for (way, factor) in [(Way::Native, 1.0), (Way::OnDemand, 2.0), (Way::Whole, 5.0)] {
                let sample = Sample {
                    first_output_s: native_s * factor,
                    done_s: native_s * factor,
                    plain_bytes: 500,
                    ..Sample::default()
                };
                let failure = (name == "gcc" && way == Way::Whole).then(|| "broken".to_owned());
                report
                    .rows
                    .push(Row::new(workload.name, way, 0, vec![sample], failure));
            }
        }
        report.finish();
        assert_eq!(report.groups(), ["W1", "gcc", TOTAL]);
        assert!(
            report.row(TOTAL, Way::Whole, 0).is_none(),
            "a total without gcc would look too good"
        );
        let total = report.row(TOTAL, Way::OnDemand, 0).unwrap();
        assert!((total.median.first_output_s - 8.0).abs() < 1e-9);
        assert_eq!(total.ratios.first_output_to_native, Some(2.0));
        assert_eq!(total.ratios.fetched_share, Some(0.5));
        assert_eq!(total.ratios.needed_share, Some(0.1));
        let failed = report.row("gcc", Way::Whole, 0).unwrap();
        assert_eq!(failed.ratios.done_to_native, None);
        assert!(report.table().contains("failed: broken"));
    }
}
