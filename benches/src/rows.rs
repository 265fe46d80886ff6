//! Measured numbers, one behind the other, and how they are shown.

use std::time::Duration;

use imgstore::ids::to_u64;

use crate::error::{Context, Result};
use crate::say::{print, progress};

/// One measured number.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    what: String,
    value: f64,
    unit: &'static str,
}

/// Rows, in order.
#[derive(Debug, Default)]
pub(crate) struct Rows(Vec<Row>);

impl Rows {
    pub(crate) fn add(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        let what = what.into();
        progress!("{what}: {value:.3} {unit}");
        self.0.push(Row { what, value, unit });
    }

    /// Rate, and CPU time of each, of `count` things.
    pub(crate) fn rate(&mut self, what: &str, count: usize, spent: Spent) {
        let count = as_f64(to_u64(count));
        self.add(what, count / spent.wall.as_secs_f64(), "/s");
        self.add(format!("{what}: CPU each"), spent.cpu_s * 1e6 / count, "us");
    }

    /// Prints all, as a table or as JSON.
    pub(crate) fn print(&self, json: bool) -> Result<()> {
        if json {
            let text = serde_json::to_string_pretty(&self.0).during("writing JSON")?;
            return print(&format!("{text}\n"));
        }
        let lines = self
            .0
            .iter()
            .map(|row| format!("| {} | {:.2} {} |\n", row.what, row.value, row.unit));
        print(&lines.collect::<String>())
    }
}

/// Time that something took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spent {
    pub(crate) wall: Duration,
    pub(crate) cpu_s: f64,
}

#[expect(clippy::cast_precision_loss, reason = "shown to three decimals")]
pub(crate) fn as_f64(n: u64) -> f64 {
    n as f64
}

/// The time below which this part (0 to 1) of all lies, in milliseconds.
pub(crate) fn percentile_ms(times: &mut [Duration], part: f64) -> f64 {
    times.sort_unstable();
    let last = times.len().saturating_sub(1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and `last`"
    )]
    let at = (as_f64(to_u64(last)) * part).round() as usize;
    times.get(at).map_or(0.0, |t| t.as_secs_f64() * 1e3)
}
