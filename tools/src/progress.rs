//! Progress bars: on a terminal only, silent in a pipe.

use std::sync::{Arc, Mutex, PoisonError};

use imgstore::build::options::{Phase, Progress};
use imgstore::source::ProgressFn;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that shows bytes, files, rate and time left under a changing title. Hidden when standard error is no terminal.
pub(crate) fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(
        "{msg:<10} [{bar:16}] {bytes}/{total_bytes} {prefix} {bytes_per_sec} {eta} left",
    );
    bar.set_style(
        style
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar
}

/// A bar that counts `what`. Hidden when standard error is no terminal.
pub(crate) fn count(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("checking   [{bar:16}] {pos}/{len} {msg} {eta} left");
    bar.set_style(
        style
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar.set_message(what);
    bar
}

/// Shows a build's phases on `bar`.
pub(crate) fn build(bar: &ProgressBar) -> Progress {
    let bar = bar.clone();
    let current = Mutex::new(None);
    Arc::new(move |step| {
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if *current != Some(step.phase) {
            *current = Some(step.phase);
            bar.reset();
            bar.set_message(match step.phase {
                Phase::Scan => "reading",
                Phase::Store => "storing",
                Phase::ReadBack => "checking",
            });
        }
        let what = if step.phase == Phase::Store {
            "segments"
        } else {
            "files"
        };
        bar.set_prefix(format!("{}/{} {what}", step.items.0, step.items.1));
        bar.set_length(step.bytes.1);
        bar.set_position(step.bytes.0);
    })
}

/// Shows how far a source is on `bar`; how much there is in all is not known then.
pub(crate) fn source(bar: &ProgressBar) -> ProgressFn {
    let bar = bar.clone();
    bar.set_message("source");
    Arc::new(move |progress| {
        bar.set_prefix(format!("{} names", progress.entries));
        bar.set_length(progress.bytes);
        bar.set_position(progress.bytes);
    })
}
