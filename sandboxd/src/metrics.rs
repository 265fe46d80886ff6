//! What the daemon counts, as Prometheus' text. Names are told in `docs/metrics.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::container::protocol::{Exit, Outcome};
use crate::error::{ApiError, ErrorKind};

/// Upper ends of the buckets, in microseconds: from a warm exec to a create that waits for its turn.
const BUCKETS_US: [u64; 14] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    5_000_000,
    30_000_000,
    300_000_000,
    3_600_000_000,
];

/// Durations.
#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS_US.len()],
    count: AtomicU64,
    sum_us: AtomicU64,
}

impl Histogram {
    fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        for (bucket, end) in self.buckets.iter().zip(BUCKETS_US) {
            if us <= end {
                bucket.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    creates: Mutex<BTreeMap<String, u64>>,
    create: Histogram,
    creating: AtomicU64,
    execs: Mutex<BTreeMap<String, u64>>,
    exec_start: Histogram,
    exec: Histogram,
}

/// A create that is not over: it waits for its turn, or is being made.
#[derive(Debug)]
pub(crate) struct Creating<'a>(&'a Metrics, std::time::Instant);

impl Creating<'_> {
    /// What became of it.
    pub(crate) fn ended<T>(&self, made: &Result<T, ApiError>) {
        let result = match made {
            Ok(_) => "ok".to_owned(),
            Err(error) => word(error.kind),
        };
        *locked(&self.0.creates).entry(result).or_default() += 1;
        if made.is_ok() {
            self.0.create.observe(self.1.elapsed());
        }
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        self.0.creating.fetch_sub(1, Ordering::Relaxed);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As it is in JSON.
fn word(kind: ErrorKind) -> String {
    let named = serde_json::to_value(kind).ok();
    named
        .and_then(|v| v.as_str().map(str::to_owned))
        .unwrap_or_default()
}

impl Metrics {
    /// A create begins.
    pub(crate) fn creating(&self) -> Creating<'_> {
        self.creating.fetch_add(1, Ordering::Relaxed);
        Creating(self, std::time::Instant::now())
    }

    /// An exec was asked for, and runs now.
    pub(crate) fn exec_started(&self, took: Duration) {
        self.exec_start.observe(took);
    }

    /// An exec ended.
    pub(crate) fn exec_ended(&self, exit: &Exit) {
        let outcome = serde_json::to_value(exit.outcome).ok();
        let outcome = outcome.and_then(|v| v.as_str().map(str::to_owned));
        *locked(&self.execs)
            .entry(outcome.unwrap_or_default())
            .or_default() += 1;
        // Of one that was lost, nothing is known.
        if !matches!(exit.outcome, Outcome::InfraFailed | Outcome::SandboxGone) {
            self.exec.observe(Duration::from_millis(exit.duration_ms));
        }
    }

    /// The page.
    pub(crate) fn page(&self, (running, paused): (usize, usize)) -> String {
        let mut page = Page::default();
        page.head(
            "dsec_sandboxd_build_info",
            "gauge",
            "Always 1; the label tells the version.",
        );
        page.line(&format!(
            "dsec_sandboxd_build_info{{version=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION")
        ));
        page.head(
            "dsec_sandboxd_sandboxes",
            "gauge",
            "Living sandboxes by state.",
        );
        for (state, count) in [("running", running), ("paused", paused)] {
            page.line(&format!(
                "dsec_sandboxd_sandboxes{{state=\"{state}\"}} {count}"
            ));
        }
        page.head(
            "dsec_sandboxd_creating",
            "gauge",
            "Creates that wait for their turn or are being made.",
        );
        let creating = self.creating.load(Ordering::Relaxed);
        page.line(&format!("dsec_sandboxd_creating {creating}"));
        page.head(
            "dsec_sandboxd_creates_total",
            "counter",
            "Creates by what became of them: ok, or a kind of error.",
        );
        page.by(
            "dsec_sandboxd_creates_total",
            "result",
            &locked(&self.creates),
        );
        page.histogram(
            "dsec_sandboxd_create_seconds",
            "How long creates took that did well, waiting included.",
            &self.create,
        );
        page.head(
            "dsec_sandboxd_execs_total",
            "counter",
            "Execs that ended, by outcome.",
        );
        page.by("dsec_sandboxd_execs_total", "outcome", &locked(&self.execs));
        page.histogram(
            "dsec_sandboxd_exec_start_seconds",
            "From an exec's request to its process.",
            &self.exec_start,
        );
        page.histogram(
            "dsec_sandboxd_exec_seconds",
            "How long execs ran.",
            &self.exec,
        );
        page.0
    }
}

#[derive(Debug, Default)]
struct Page(String);

impl Page {
    fn line(&mut self, text: &str) {
        writeln!(self.0, "{text}").expect("a string takes everything");
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(&format!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    fn by(&mut self, name: &str, label: &str, counts: &BTreeMap<String, u64>) {
        for (value, count) in counts {
            self.line(&format!("{name}{{{label}=\"{value}\"}} {count}"));
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        // The whole first: what comes in meanwhile must not make a bucket larger than it.
        let count = histogram.count.load(Ordering::Acquire);
        for (bucket, end) in histogram.buckets.iter().zip(BUCKETS_US) {
            let seen = bucket.load(Ordering::Relaxed).min(count);
            let seconds = Duration::from_micros(end).as_secs_f64();
            self.line(&format!("{name}_bucket{{le=\"{seconds}\"}} {seen}"));
        }
        let sum = Duration::from_micros(histogram.sum_us.load(Ordering::Relaxed)).as_secs_f64();
        self.line(&format!(
            "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum}\n{name}_count {count}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: a bucket's end left out of `observe` (`<`) moves the create of 5 ms.
    #[test]
    fn counts_come_back_and_every_name_is_documented() {
        let metrics = Metrics::default();
        let first = metrics.creating();
        first.ended(&Ok(()));
        first.ended::<()>(&Err(ApiError::new(ErrorKind::SandboxGone, "")));
        metrics.exec_started(Duration::from_millis(5));
        let page = metrics.page((2, 1));
        for line in [
            "dsec_sandboxd_sandboxes{state=\"running\"} 2",
            "dsec_sandboxd_creating 1",
            "dsec_sandboxd_creates_total{result=\"ok\"} 1",
            "dsec_sandboxd_creates_total{result=\"sandbox_gone\"} 1",
            "dsec_sandboxd_create_seconds_count 1",
            "dsec_sandboxd_exec_start_seconds_bucket{le=\"0.0025\"} 0",
            "dsec_sandboxd_exec_start_seconds_bucket{le=\"0.005\"} 1",
            "dsec_sandboxd_exec_start_seconds_sum 0.005",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} in {page}");
        }
        drop(first);
        assert!(metrics.page((0, 0)).contains("dsec_sandboxd_creating 0\n"));
        let doc = include_str!("../../docs/metrics.md");
        for line in page.lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            assert!(
                doc.contains(&format!("| `{name}` | {kind} |")),
                "{name} is not in docs/metrics.md"
            );
        }
    }
}
