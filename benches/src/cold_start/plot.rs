//! The times as an SVG: one panel for each workload and bandwidth, one bar for each way. The dark part of a bar
//! ends at the first output, the light part at completion.

use std::fmt::Write;

use crate::cold_start::report::{Report, Row};
use crate::units::{bandwidth_name, megabytes};

const PANEL_WIDTH: f64 = 430.0;
const LABEL_WIDTH: f64 = 92.0;
/// Room for the numbers behind the longest bar.
const NUMBERS_WIDTH: f64 = 145.0;
const BAR_HEIGHT: f64 = 13.0;
const BAR_STEP: f64 = 17.0;
const TITLE_HEIGHT: f64 = 34.0;
const MARGIN: f64 = 14.0;

/// Draws a report.
pub(super) fn svg(report: &Report) -> String {
    let bandwidths = report.bandwidths();
    let mut body = String::new();
    let mut y = MARGIN + TITLE_HEIGHT;
    let mut width = 0.0_f64;
    for group in report.groups() {
        let mut height = 0.0_f64;
        let mut x = MARGIN;
        for &bandwidth in &bandwidths {
            let rows: Vec<_> = report
                .rows
                .iter()
                .filter(|row| row.workload == group && row.bandwidth == bandwidth)
                .collect();
            height = height.max(panel(
                &mut body,
                &rows,
                &format!("{group}, {}", bandwidth_name(bandwidth)),
                (x, y),
            ));
            x += PANEL_WIDTH + MARGIN;
        }
        width = width.max(x);
        y += height + MARGIN;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{y:.0}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{MARGIN}\" y=\"{MARGIN}\" dy=\"6\" font-size=\"15\" font-weight=\"bold\">Cold start: seconds to first \
         output (dark) and to completion (light), and MB on the wire</text>\n{body}</svg>\n"
    )
}

/// Draws one panel with its corner at `(x, y)`, and returns its height.
fn panel(body: &mut String, rows: &[&Row], title: &str, (x, y): (f64, f64)) -> f64 {
    let longest = rows
        .iter()
        .map(|row| row.median.done_s)
        .fold(1e-9, f64::max);
    let scale = (PANEL_WIDTH - LABEL_WIDTH - NUMBERS_WIDTH) / longest;
    // Writing to a string cannot fail.
    writeln!(
        body,
        "<text x=\"{x:.1}\" y=\"{:.1}\" font-weight=\"bold\">{title}</text>",
        y + 11.0
    )
    .unwrap_or_default();
    let mut top = y + BAR_STEP;
    for row in rows {
        let (first, done) = (row.median.first_output_s, row.median.done_s);
        let (dark, light) = colours(row.way);
        let wire_mb = megabytes(row.median.wire_bytes);
        let numbers = match row.failure {
            Some(_) => "failed".to_owned(),
            None => format!("{first:.2} / {done:.2} s, {wire_mb:.1} MB"),
        };
        let text_y = top + BAR_HEIGHT - 3.0;
        let left = x + LABEL_WIDTH;
        writeln!(
            body,
            "<text x=\"{:.1}\" y=\"{text_y:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\" fill=\"{light}\"/>\n\
             <rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\" fill=\"{dark}\"/>\n\
             <text x=\"{:.1}\" y=\"{text_y:.1}\" fill=\"#444444\">{numbers}</text>",
            left - 6.0,
            row.way,
            done * scale,
            first * scale,
            left + done * scale + 5.0,
        )
        .unwrap_or_default();
        top += BAR_STEP;
    }
    top - y
}

/// A dark and a light colour for a way: the store under test stands out.
fn colours(way: &str) -> (&'static str, &'static str) {
    match way {
        "on demand" => ("#b5460f", "#f2b58f"),
        "traced" => ("#8c2d6b", "#e3b4d2"),
        "cached" => ("#d98a2b", "#f5d9b0"),
        "native" => ("#3f6b3f", "#b9d3b9"),
        _ => ("#46607c", "#bccbdb"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold_start::needed::Needed;
    use crate::cold_start::sample::Sample;
    use crate::cold_start::ways::Way;
    use crate::cold_start::workload;

    #[test]
    fn each_way_has_a_bar_whose_length_is_its_time() {
        let mut report = Report::new(std::time::Duration::from_millis(1), 1);
        let workload = workload::select(&["W1".to_owned()], false).unwrap()[0];
        report.add_workload(
            workload,
            Needed {
                image_bytes: 1000,
                needed_bytes: 100,
            },
        );
        for (way, done_s) in [(Way::Native, 1.0), (Way::EagerGz, 4.0)] {
            let sample = Sample {
                first_output_s: done_s / 2.0,
                done_s,
                ..Sample::default()
            };
            report
                .rows
                .push(Row::new(workload.name, way, 25_000_000, vec![sample], None));
        }
        let svg = svg(&report);
        assert!(svg.contains("W1, 25 MB/s</text>"), "{svg}");
        let bar = |width: f64, colour: &str| {
            svg.contains(&format!(
                "width=\"{width:.1}\" height=\"13\" fill=\"{colour}\""
            ))
        };
        let longest = PANEL_WIDTH - LABEL_WIDTH - NUMBERS_WIDTH;
        assert!(
            bar(longest, "#bccbdb") && bar(longest / 2.0, "#46607c"),
            "{svg}"
        );
        assert!(
            bar(longest / 4.0, "#b9d3b9") && bar(longest / 8.0, "#3f6b3f"),
            "{svg}"
        );
    }
}
