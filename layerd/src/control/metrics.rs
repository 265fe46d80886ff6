//! `GET /metrics`: the counters in Prometheus' text format.

use std::fmt::Write;

use layerd_client::api::Stats;

/// One line for every counter of the total, and the gauges of the cache.
pub(crate) fn render(stats: &Stats, mounts: usize) -> String {
    let mut out = String::new();
    let mut line = |name: &str, kind: &str, value: u64| {
        // Writing to a String cannot fail.
        if writeln!(
            out,
            "# TYPE dsec_layerd_{name} {kind}\ndsec_layerd_{name} {value}"
        )
        .is_err()
        {
            tracing::error!("out of memory for metrics");
        }
    };
    if let Ok(serde_json::Value::Object(counters)) = serde_json::to_value(stats.total) {
        for (name, value) in counters {
            line(
                &format!("{name}_total"),
                "counter",
                value.as_u64().unwrap_or(0),
            );
        }
    }
    line("cache_bytes", "gauge", stats.cache.bytes_used);
    line("cache_bytes_max", "gauge", stats.cache.bytes_max);
    line("cache_evicted_total", "counter", stats.cache.evicted);
    line("mounts", "gauge", imgstore::ids::to_u64(mounts));
    line(
        "data_plane_up",
        "gauge",
        u64::from(stats.data_plane_pid.is_some()),
    );
    out
}

#[cfg(test)]
mod tests {
    use layerd_client::api::{CacheStats, Counters};

    use super::*;

    #[test]
    fn counters_and_gauges_are_there_with_their_types() {
        let stats = Stats {
            mounts: Vec::new(),
            total: Counters {
                cache_hits: 7,
                ..Counters::default()
            },
            cache: CacheStats::default(),
            data_plane_pid: Some(1),
            control_pid: 2,
        };
        let text = render(&stats, 3);
        for expected in [
            "# TYPE dsec_layerd_cache_hits_total counter\ndsec_layerd_cache_hits_total 7\n",
            "# TYPE dsec_layerd_mounts gauge\ndsec_layerd_mounts 3\n",
            "dsec_layerd_data_plane_up 1\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
