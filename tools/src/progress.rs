//! Progress bars: on a terminal only, silent in a pipe.

use std::sync::{Arc, Mutex, PoisonError};

use imgstore::build::options::{Phase, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that shows bytes, rate and time left under a changing title. Hidden when standard error is no terminal.
pub(crate) fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(
        "{msg:<10} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta} left",
    );
    bar.set_style(
        style
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar
}

/// Shows a build's phases on `bar`.
pub(crate) fn build(bar: &ProgressBar) -> Progress {
    let bar = bar.clone();
    let current = Mutex::new(None);
    Arc::new(move |phase, done, total| {
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if *current != Some(phase) {
            *current = Some(phase);
            bar.reset();
            bar.set_message(match phase {
                Phase::Scan => "reading",
                Phase::Store => "storing",
                Phase::ReadBack => "checking",
            });
        }
        bar.set_length(total);
        bar.set_position(done);
    })
}
