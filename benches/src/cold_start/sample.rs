//! What one run measured, and the median of several.

use serde::Serialize;

/// One run of one workload in one way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// From the mount (or download) request to the mounted root, in seconds.
    pub(crate) mount_s: f64,
    /// From the request to the first byte of output.
    pub(crate) first_output_s: f64,
    /// From the request to the end of the workload.
    pub(crate) done_s: f64,
    /// Body bytes that the origin sent.
    pub(crate) wire_bytes: u64,
    /// The same after decompression: file-system bytes that arrived.
    pub(crate) plain_bytes: u64,
    /// Requests that the origin answered.
    pub(crate) requests: u64,
    /// Bytes written to disk to distribute the image (`/proc/PID/io`): by the download, the extraction, the
    /// daemon.
    pub(crate) distribution_written_bytes: u64,
    /// Bytes written to disk by the workload itself.
    pub(crate) workload_written_bytes: u64,
    /// CPU seconds of download, extraction and mounting programs, and of the daemon until the workload ended.
    pub(crate) distribution_cpu_s: f64,
    /// CPU seconds of the daemon's processes alone.
    pub(crate) daemon_cpu_s: f64,
    /// Memory of the daemon's processes after the workload (PSS).
    pub(crate) daemon_pss_bytes: u64,
    /// What the daemon counts as asked for by the kernel, in 4 KiB blocks.
    pub(crate) daemon_needed_bytes: u64,
}

impl Sample {
    /// The median of each value on its own; zeros of no samples.
    pub(crate) fn median(samples: &[Self]) -> Self {
        let real = |value: fn(&Self) -> f64| middle(samples.iter().map(value).collect());
        let whole = |value: fn(&Self) -> u64| middle_whole(samples.iter().map(value).collect());
        Self {
            mount_s: real(|s| s.mount_s),
            first_output_s: real(|s| s.first_output_s),
            done_s: real(|s| s.done_s),
            wire_bytes: whole(|s| s.wire_bytes),
            plain_bytes: whole(|s| s.plain_bytes),
            requests: whole(|s| s.requests),
            distribution_written_bytes: whole(|s| s.distribution_written_bytes),
            workload_written_bytes: whole(|s| s.workload_written_bytes),
            distribution_cpu_s: real(|s| s.distribution_cpu_s),
            daemon_cpu_s: real(|s| s.daemon_cpu_s),
            daemon_pss_bytes: whole(|s| s.daemon_pss_bytes),
            daemon_needed_bytes: whole(|s| s.daemon_needed_bytes),
        }
    }

    /// Adds another workload's values; of the daemon's memory the larger counts.
    pub(crate) fn add(&mut self, other: &Self) {
        self.mount_s += other.mount_s;
        self.first_output_s += other.first_output_s;
        self.done_s += other.done_s;
        self.wire_bytes += other.wire_bytes;
        self.plain_bytes += other.plain_bytes;
        self.requests += other.requests;
        self.distribution_written_bytes += other.distribution_written_bytes;
        self.workload_written_bytes += other.workload_written_bytes;
        self.distribution_cpu_s += other.distribution_cpu_s;
        self.daemon_cpu_s += other.daemon_cpu_s;
        self.daemon_pss_bytes = self.daemon_pss_bytes.max(other.daemon_pss_bytes);
        self.daemon_needed_bytes += other.daemon_needed_bytes;
    }
}

/// The middle value, or the mean of the two in the middle; 0 of none.
pub(crate) fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let upper = values.len() / 2;
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    if values.len() % 2 == 1 {
        at(upper)
    } else {
        (at(upper.saturating_sub(1)) + at(upper)) / 2.0
    }
}

/// The middle value, the lower of the two in the middle; 0 of none.
fn middle_whole(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0)
}

/// The value below which a share of the values lies, by the nearest-rank rule; 0 of none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a rank between 1 and the number of values"
)]
pub(crate) fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_percentiles_of_known_values() {
        assert!((middle(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((middle(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(middle(vec![]).abs() < 1e-9);
        assert_eq!(middle_whole(vec![9, 1, 5]), 5);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert!((percentile(&hundred, 0.99) - 99.0).abs() < 1e-9);
        assert!((percentile(&hundred, 0.5) - 50.0).abs() < 1e-9);
        assert!((percentile(&hundred, 1.0) - 100.0).abs() < 1e-9);
    }
}
