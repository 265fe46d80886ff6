//! `GET /metrics`: everything that layerd counts and measures, for Prometheus. `docs/metrics.md` lists it.
//!
//! To add a metric, add a line to one of the functions here (or a field to `Counters` and a line to [`COUNTERS`]) and a row
//! to the document; a test compares the two. Counters live in the data plane, so they survive a restart of the control
//! process; what the control process measures itself ([`ControlMetrics`]) starts anew with it.

mod page;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use imgstore::fetch::health::HealthSnapshot;
use imgstore::fetch::latency;
use imgstore::fetch::queue::QueueDepth;
use imgstore::ids::to_u64;
use layerd_client::api::{CacheDisk, CacheStats, MountState, Stats};

use crate::histogram::Histogram;
use crate::memory::resident_bytes;
use crate::protocol::PlaneNow;
use page::{Labels, Page};

/// What the control process measures.
#[derive(Debug, Default)]
pub(crate) struct ControlMetrics {
    /// Mount requests that were granted, and others.
    pub(crate) mounted: Histogram,
    pub(crate) not_mounted: Histogram,
    /// Compositions taken away on request.
    pub(crate) unmounted: AtomicU64,
    /// Data planes that were started, adopted, and found dead.
    pub(crate) planes_started: AtomicU64,
    pub(crate) planes_adopted: AtomicU64,
    pub(crate) planes_died: AtomicU64,
    /// How the self-test ended: microseconds it took, 0 when it did not run.
    pub(crate) self_test_us: AtomicU64,
    /// Seconds since 1970.
    pub(crate) started_seconds: u64,
}

impl ControlMetrics {
    /// Metrics of a process that starts now.
    pub(crate) fn new() -> Self {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
        Self {
            started_seconds: since.unwrap_or(Duration::ZERO).as_secs(),
            ..Self::default()
        }
    }

    /// One more.
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One look at everything.
#[derive(Debug)]
pub(crate) struct Sample<'a> {
    pub(crate) stats: &'a Stats,
    pub(crate) states: &'a [MountState],
    pub(crate) now: &'a PlaneNow,
    pub(crate) depth: QueueDepth,
    pub(crate) origins: &'a [HealthSnapshot],
    /// Layers that leases shall name, and leases that failed.
    pub(crate) leases: (u64, u64),
    pub(crate) control: &'a ControlMetrics,
}

/// Counters of the data plane: field of `Counters`, name, help. What also goes down is a gauge: no `_total` in its name.
const COUNTERS: &[(&str, &str, &str)] = &[
    (
        "remote_requests",
        "remote_requests_total",
        "Requests to origins, failed ones and retries included.",
    ),
    (
        "remote_bytes",
        "remote_bytes_total",
        "Body bytes of accepted answers of origins.",
    ),
    (
        "retries",
        "retries_total",
        "Requests to origins that followed a failed one.",
    ),
    (
        "served_bytes",
        "served_bytes_total",
        "Bytes of file data handed to the kernel.",
    ),
    (
        "meta_bytes",
        "meta_bytes_total",
        "Bytes of metadata handed to the kernel.",
    ),
    (
        "fuse_reads",
        "fuse_reads_total",
        "Reads that reached the FUSE server.",
    ),
    (
        "failed_reads",
        "failed_reads_total",
        "Reads that ended in EIO.",
    ),
    (
        "cache_hits",
        "cache_hits_total",
        "Pieces of reads answered from memory or from the cache on disk.",
    ),
    (
        "cache_misses",
        "cache_misses_total",
        "Pieces of reads that had to wait for an origin.",
    ),
    (
        "verify_failures",
        "verify_failures_total",
        "Segments whose bytes did not have their digest; none of those bytes was served.",
    ),
    (
        "fetched_plain_bytes",
        "fetched_plain_bytes_total",
        "Plain bytes of the segments that came from origins.",
    ),
    (
        "needed_bytes",
        "needed_bytes_total",
        "Distinct 4 KiB blocks of file data that the kernel asked for, in bytes.",
    ),
    (
        "prefetched_segments",
        "prefetched_segments_total",
        "Segments loaded before anybody read them.",
    ),
    (
        "traced_segments",
        "traced_segments_total",
        "Segments that were fetched because a trace foresaw them.",
    ),
    (
        "traced_bytes",
        "traced_bytes_total",
        "Bytes of segments that were fetched because a trace foresaw them.",
    ),
    (
        "traced_unused_segments",
        "traced_unused_segments",
        "Segments that a trace foresaw and nobody has read yet.",
    ),
    (
        "cache_write_bytes",
        "cache_write_bytes_total",
        "Bytes written to the cache on disk.",
    ),
    (
        "cache_write_failures",
        "cache_write_failures_total",
        "Segments that were served and could not be written to the cache.",
    ),
];

fn counters(page: &mut Page, stats: &Stats) {
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(stats.total) else {
        return;
    };
    for (field, name, help) in COUNTERS {
        let value = fields.get(*field).and_then(serde_json::Value::as_u64);
        let value = value.unwrap_or(0);
        if name.ends_with("_total") {
            page.counter(name, help, &[], value);
        } else {
            page.gauge(name, help, &[], value);
        }
    }
}

fn cache(page: &mut Page, stats: &Stats) {
    let CacheStats {
        bytes_used,
        bytes_max,
        evicted,
        segments,
        layer_bytes,
        not_kept,
        disk_errors,
        counted,
        disk,
    } = stats.cache;
    page.gauge(
        "cache_bytes",
        "Bytes of disk that the cache takes.",
        &[],
        bytes_used,
    );
    page.gauge(
        "cache_max_bytes",
        "The limit of the cache on disk.",
        &[],
        bytes_max,
    );
    page.gauge("cache_segments", "Segments in the cache.", &[], segments);
    page.gauge(
        "cache_layer_bytes",
        "Of the cache's bytes, descriptions of layers.",
        &[],
        layer_bytes,
    );
    page.gauge(
        "cache_counted",
        "Whether what earlier runs left is counted; the limit holds from then on.",
        &[],
        u64::from(counted),
    );
    page.counter(
        "cache_evictions_total",
        "Segments evicted since the control process started.",
        &[],
        evicted,
    );
    page.counter(
        "cache_not_kept_total",
        "Segments that were served and not kept.",
        &[],
        not_kept,
    );
    page.counter(
        "cache_disk_errors_total",
        "Errors of the cache's disk.",
        &[],
        disk_errors,
    );
    let help = "Whether the cache's disk is left alone for a while, and why.";
    for (state, label) in [(CacheDisk::Full, "full"), (CacheDisk::Failing, "failing")] {
        page.gauge(
            "cache_disk_avoided",
            help,
            &[("reason", label)],
            u64::from(disk == state),
        );
    }
}

/// The address without a password that may be in it.
fn without_password(address: &str) -> String {
    let Some((scheme, rest)) = address.split_once("://") else {
        return address.to_owned();
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit('@').next().unwrap_or(host);
    format!("{scheme}://{host}{path}")
}

fn origins(page: &mut Page, origins: &[HealthSnapshot]) {
    for origin in origins {
        let address = without_password(&origin.address);
        let labels: Labels<'_> = &[("origin", &address)];
        page.counter(
            "origin_requests_total",
            "Requests to an origin, failed ones included.",
            labels,
            origin.requests,
        );
        page.counter(
            "origin_retries_total",
            "Of those, requests for what had just failed.",
            labels,
            origin.retries,
        );
        page.counter(
            "origin_bytes_total",
            "Body bytes of an origin's answers.",
            labels,
            origin.bytes,
        );
        page.gauge(
            "origin_in_flight",
            "Requests to an origin that are not answered yet.",
            labels,
            origin.in_flight,
        );
        page.gauge(
            "origin_failing",
            "Whether an origin fails now: others are asked before it.",
            labels,
            u64::from(origin.failing),
        );
        let took = (
            &latency::BOUNDS_US[..],
            &origin.latency.counts[..],
            origin.latency.sum_us,
        );
        page.buckets(
            "origin_seconds",
            "How long an origin's answers took, failures left out.",
            labels,
            took,
        );
        for (kind, count) in origin.failures {
            let labels: Labels<'_> = &[("origin", &address), ("kind", kind.name())];
            page.counter(
                "origin_failures_total",
                "Failures of an origin by kind.",
                labels,
                count,
            );
        }
    }
}

fn mounts(page: &mut Page, states: &[MountState], control: &ControlMetrics) {
    let of = |wanted| to_u64(states.iter().filter(|state| **state == wanted).count());
    let help = "Compositions; dead ones lost their data plane and give EIO.";
    page.gauge("mounts", help, &[("state", "alive")], of(MountState::Alive));
    page.gauge("mounts", help, &[("state", "dead")], of(MountState::Dead));
    let help = "How long mount requests took, names and descriptions from origins included.";
    page.durations(
        "mount_seconds",
        help,
        &[("result", "ok")],
        &control.mounted.observed(),
    );
    page.durations(
        "mount_seconds",
        help,
        &[("result", "failed")],
        &control.not_mounted.observed(),
    );
    page.counter(
        "unmounts_total",
        "Compositions taken away on request.",
        &[],
        control.unmounted.load(Ordering::Relaxed),
    );
}

fn leases(page: &mut Page, (leased, failures): (u64, u64)) {
    let help = "Layers that leases shall name.";
    page.gauge("leased_layers", help, &[], leased);
    let help = "Leases on mounted layers that could not be written or came late.";
    page.counter("lease_failures_total", help, &[], failures);
}

fn reading(page: &mut Page, now: &PlaneNow, depth: QueueDepth) {
    let help = "How long pieces of reads took, from the request's arrival to its answer.";
    page.durations("read_seconds", help, &[("result", "hit")], &now.hit);
    page.durations("read_seconds", help, &[("result", "miss")], &now.miss);
    page.durations("read_seconds", help, &[("result", "failed")], &now.failed);
    page.gauge(
        "waiting_reads",
        "Pieces of reads that wait now.",
        &[],
        now.waiting_reads,
    );
    page.gauge(
        "pending_segments",
        "Segments that readers or read-ahead wait for.",
        &[],
        now.pending_segments,
    );
    page.gauge(
        "queued_tasks",
        "Tasks waiting for the data plane's workers.",
        &[],
        now.queued_tasks,
    );
    page.gauge(
        "memory_segments_bytes",
        "Plain bytes of verified segments kept in memory.",
        &[],
        now.memory_bytes,
    );
    let help = "Ranges to be fetched from origins: waiting for a thread by kind, and in flight.";
    page.gauge(
        "fetch_ranges",
        help,
        &[("state", "demand")],
        to_u64(depth.demand),
    );
    page.gauge(
        "fetch_ranges",
        help,
        &[("state", "prefetch")],
        to_u64(depth.prefetch),
    );
    page.gauge(
        "fetch_ranges",
        help,
        &[("state", "traced")],
        to_u64(depth.traced),
    );
    page.gauge(
        "fetch_ranges",
        help,
        &[("state", "in_flight")],
        to_u64(depth.running),
    );
}

fn processes(page: &mut Page, sample: &Sample<'_>) {
    let control = sample.control;
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    page.gauge(
        "data_plane_up",
        "Whether there is a data plane.",
        &[],
        u64::from(sample.stats.data_plane_pid.is_some()),
    );
    page.counter(
        "data_plane_starts_total",
        "Data planes started by this control process.",
        &[],
        load(&control.planes_started),
    );
    page.counter(
        "data_plane_adoptions_total",
        "Data planes that lived already and were taken over.",
        &[],
        load(&control.planes_adopted),
    );
    page.counter(
        "data_plane_deaths_total",
        "Data planes that died; their mounts give EIO.",
        &[],
        load(&control.planes_died),
    );
    let help = "Resident memory of a process.";
    page.gauge(
        "resident_bytes",
        help,
        &[("process", "control")],
        resident_bytes(),
    );
    page.gauge(
        "resident_bytes",
        help,
        &[("process", "data_plane")],
        sample.now.resident_bytes,
    );
    page.gauge(
        "start_time_seconds",
        "When the control process started, in seconds since 1970.",
        &[],
        control.started_seconds,
    );
    page.gauge(
        "build_info",
        "Always 1; the label tells the version.",
        &[("version", env!("CARGO_PKG_VERSION"))],
        1,
    );
    let us = load(&control.self_test_us);
    page.gauge(
        "self_test_passed",
        "Whether the kernel read the built-in image right at start; 0 while that is not known.",
        &[],
        u64::from(us > 0),
    );
    page.seconds("self_test_seconds", "How long the self-test took.", &[], us);
}

fn page(sample: &Sample<'_>) -> Page {
    let mut page = Page::default();
    counters(&mut page, sample.stats);
    cache(&mut page, sample.stats);
    origins(&mut page, sample.origins);
    mounts(&mut page, sample.states, sample.control);
    leases(&mut page, sample.leases);
    reading(&mut page, sample.now, sample.depth);
    processes(&mut page, sample);
    page
}

/// The text of all metrics.
pub(crate) fn render(sample: &Sample<'_>) -> String {
    page(sample).text()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use imgstore::fetch::health::OriginHealth;
    use layerd_client::api::Counters;

    use super::*;

    fn with_page<T>(then: impl FnOnce(&Page) -> T) -> T {
        let stats = Stats {
            mounts: Vec::new(),
            total: Counters {
                cache_hits: 7,
                ..Counters::default()
            },
            cache: CacheStats::default(),
            data_plane_pid: Some(1),
            control_pid: 2,
            driver: String::new(),
            driver_reason: String::new(),
        };
        then(&page(&Sample {
            stats: &stats,
            states: &[MountState::Alive, MountState::Dead, MountState::Alive],
            now: &PlaneNow::default(),
            depth: QueueDepth::default(),
            origins: &[OriginHealth::new("https://me:secret@host/x".to_owned()).snapshot()],
            leases: (1, 0),
            control: &ControlMetrics::new(),
        }))
    }

    fn doc(name: &str) -> String {
        let path = format!("{}/../docs/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn counters_and_gauges_have_their_values() {
        let text = with_page(Page::text);
        for expected in [
            "# TYPE dsec_layerd_cache_hits_total counter\ndsec_layerd_cache_hits_total 7\n",
            "dsec_layerd_mounts{state=\"alive\"} 2\ndsec_layerd_mounts{state=\"dead\"} 1\n",
            "dsec_layerd_data_plane_up 1\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }

    /// Mutation: with the address as it is, the password is on the page.
    #[test]
    fn passwords_in_addresses_are_left_out() {
        let text = with_page(Page::text);
        assert!(text.contains("dsec_layerd_origin_requests_total{origin=\"https://host/x\"} 0\n"));
        assert!(!text.contains("secret"));
        for same in ["dir:/a@b", "http://host", "s3://bucket/a@b"] {
            assert_eq!(without_password(same), same);
        }
    }

    /// Mutation: a field of `Counters` without a line in `COUNTERS`, or the other way round, is named here.
    #[test]
    fn every_counter_is_on_the_page() {
        let fields = serde_json::to_value(Counters::default()).unwrap();
        let fields: BTreeSet<String> = fields.as_object().unwrap().keys().cloned().collect();
        let listed: BTreeSet<String> = COUNTERS.iter().map(|c| c.0.to_owned()).collect();
        assert_eq!(listed, fields);
    }

    #[test]
    fn names_follow_the_conventions() {
        for (name, kind, help) in with_page(Page::list) {
            let ending = match kind {
                "counter" => name.ends_with("_total"),
                "histogram" => name.ends_with("_seconds"),
                _ => !name.ends_with("_total") && !name.ends_with("_count"),
            };
            assert!(ending, "{name} is a {kind}");
            assert!(
                help.ends_with('.') && !help.contains('\n'),
                "{name}: {help}"
            );
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{name}"
            );
        }
    }

    /// Mutation: a metric that is left out of the document, or described otherwise there, is named here.
    #[test]
    fn the_document_lists_exactly_these_metrics() {
        let row = |(name, kind, help)| format!("| `{name}` | {kind} | {help} |");
        let expected: BTreeSet<String> = with_page(Page::list).into_iter().map(row).collect();
        let found = doc("metrics.md");
        // The others are sandboxd's, which has a test of its own.
        let own = |l: &&str| l.starts_with("| `dsec_") && !l.starts_with("| `dsec_sandboxd_");
        let found = found.lines().filter(own);
        assert_eq!(found.map(str::to_owned).collect::<BTreeSet<_>>(), expected);
    }

    /// Mutation: a misspelt name in a panel is named here.
    #[test]
    fn the_dashboard_asks_for_metrics_that_exist() {
        let known: BTreeSet<String> = with_page(Page::list)
            .into_iter()
            .flat_map(|(name, kind, _)| match kind {
                "histogram" => ["_bucket", "_sum", "_count"]
                    .map(|s| format!("{name}{s}"))
                    .to_vec(),
                _ => vec![name],
            })
            .collect();
        let board: serde_json::Value = serde_json::from_str(&doc("dashboard.json")).unwrap();
        let mut asked = BTreeSet::new();
        for panel in board["panels"].as_array().unwrap() {
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{panel}");
            for target in targets {
                let text = target["expr"].as_str().unwrap();
                let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let before = asked.len();
                asked.extend(words.filter(|w| w.starts_with("dsec_")).map(str::to_owned));
                assert!(asked.len() > before || text.contains("dsec_"), "{text}");
            }
        }
        let unknown: Vec<_> = asked.difference(&known).collect();
        assert!(unknown.is_empty() && asked.len() >= 20, "{unknown:?}");
    }
}
