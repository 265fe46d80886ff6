//! A page of metrics in Prometheus' text format (version 0.0.4).
//!
//! A metric is one call: name, help, labels, value. Samples of one name are written together whatever the order of calls,
//! as the format wants it, and a name has one type and one help text. Names get the prefix `dsec_layerd_`.

use std::fmt::Write;

use crate::histogram::{BOUNDS_US, Observed};

/// Prefix of every name.
const PREFIX: &str = "dsec_layerd_";

/// Labels of a sample: name and value.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

#[derive(Debug)]
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: String,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Page {
    families: Vec<Family>,
}

/// Backslash, quote and line break in a label's value.
fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn labelled(labels: Labels<'_>, last: Option<(&str, &str)>) -> String {
    let pairs = labels.iter().copied().chain(last);
    let pairs: Vec<String> = pairs
        .map(|(name, value)| format!("{name}=\"{}\"", escape(value)))
        .collect();
    if pairs.is_empty() {
        String::new()
    } else {
        format!("{{{}}}", pairs.join(","))
    }
}

/// Microseconds as seconds.
fn seconds(us: u64) -> String {
    std::time::Duration::from_micros(us)
        .as_secs_f64()
        .to_string()
}

impl Page {
    fn family(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
    ) -> &mut String {
        let at = self.families.iter().position(|f| f.name == name);
        let at = at.unwrap_or_else(|| {
            self.families.push(Family {
                name,
                kind,
                help,
                samples: String::new(),
            });
            self.families.len() - 1
        });
        let family = self.families.get_mut(at);
        &mut family.expect("it was found or added").samples
    }

    fn sample(out: &mut String, name: &str, labels: &str, value: &str) {
        writeln!(out, "{PREFIX}{name}{labels} {value}").expect("a String takes all text");
    }

    /// Something that only grows until its process ends. The name ends with `_total`.
    pub(crate) fn counter(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        value: u64,
    ) {
        let out = self.family(name, "counter", help);
        Self::sample(out, name, &labelled(labels, None), &value.to_string());
    }

    /// Something that goes up and down.
    pub(crate) fn gauge(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        value: u64,
    ) {
        let out = self.family(name, "gauge", help);
        Self::sample(out, name, &labelled(labels, None), &value.to_string());
    }

    /// One duration, in microseconds. The name ends with `_seconds`.
    pub(crate) fn seconds(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        us: u64,
    ) {
        let out = self.family(name, "gauge", help);
        Self::sample(out, name, &labelled(labels, None), &seconds(us));
    }

    /// Durations. The name ends with `_seconds`.
    pub(crate) fn durations(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        seen: &Observed,
    ) {
        self.buckets(name, help, labels, (&BOUNDS_US, &seen.buckets, seen.sum_us));
    }

    /// Durations with buckets of their own: bounds, counts by bucket and of the rest, and sum, all in microseconds.
    pub(crate) fn buckets(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: Labels<'_>,
        (bounds, counts, sum_us): (&[u64], &[u64], u64),
    ) {
        let out = self.family(name, "histogram", help);
        let mut count = 0;
        for (at, bound) in bounds.iter().enumerate() {
            count += counts.get(at).copied().unwrap_or(0);
            let labels = labelled(labels, Some(("le", &seconds(*bound))));
            Self::sample(out, &format!("{name}_bucket"), &labels, &count.to_string());
        }
        count += counts.get(bounds.len()).copied().unwrap_or(0);
        let infinite = labelled(labels, Some(("le", "+Inf")));
        Self::sample(
            out,
            &format!("{name}_bucket"),
            &infinite,
            &count.to_string(),
        );
        let labels = labelled(labels, None);
        Self::sample(out, &format!("{name}_sum"), &labels, &seconds(sum_us));
        Self::sample(out, &format!("{name}_count"), &labels, &count.to_string());
    }

    /// The text.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        for Family {
            name,
            kind,
            help,
            samples,
        } in &self.families
        {
            write!(
                out,
                "# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}\n{samples}"
            )
            .expect("a String takes all text");
        }
        out
    }

    /// Name (with its prefix), type and help of each metric.
    #[cfg(test)]
    pub(crate) fn list(&self) -> Vec<(String, &'static str, &'static str)> {
        let all = self.families.iter();
        all.map(|f| (format!("{PREFIX}{}", f.name), f.kind, f.help))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::Histogram;

    /// Mutation: without `escape`, the label's quote ends the value early.
    #[test]
    fn samples_of_a_name_are_together_and_labels_are_escaped() {
        let mut page = Page::default();
        page.counter("a_total", "As.", &[("origin", "dir:/a\"b\\c\nd")], 1);
        page.gauge("b", "Bs.", &[], 2);
        page.counter("a_total", "As.", &[("origin", "x"), ("kind", "y")], 3);
        let expected = "# HELP dsec_layerd_a_total As.\n# TYPE dsec_layerd_a_total counter\n\
            dsec_layerd_a_total{origin=\"dir:/a\\\"b\\\\c\\nd\"} 1\ndsec_layerd_a_total{origin=\"x\",kind=\"y\"} 3\n\
            # HELP dsec_layerd_b Bs.\n# TYPE dsec_layerd_b gauge\ndsec_layerd_b 2\n";
        assert_eq!(page.text(), expected);
    }

    /// Mutation: without adding the counts up, the last bucket is not the count.
    #[test]
    fn buckets_add_up() {
        let histogram = Histogram::default();
        for us in [5, 20, 40_000_000] {
            histogram.observe(std::time::Duration::from_micros(us));
        }
        let mut page = Page::default();
        page.durations(
            "t_seconds",
            "Ts.",
            &[("result", "hit")],
            &histogram.observed(),
        );
        let text = page.text();
        for line in [
            "dsec_layerd_t_seconds_bucket{result=\"hit\",le=\"0.00001\"} 1\n",
            "dsec_layerd_t_seconds_bucket{result=\"hit\",le=\"0.000025\"} 2\n",
            "dsec_layerd_t_seconds_bucket{result=\"hit\",le=\"30\"} 2\n",
            "dsec_layerd_t_seconds_bucket{result=\"hit\",le=\"+Inf\"} 3\n",
            "dsec_layerd_t_seconds_sum{result=\"hit\"} 40.000025\n",
            "dsec_layerd_t_seconds_count{result=\"hit\"} 3\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
    }
}
