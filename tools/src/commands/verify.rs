//! `dsec verify`.

use std::process::ExitCode;

use imgstore::store::{layer, verify};

use super::Failure;
use crate::cli::OnOrigin;
use crate::{output, progress};

/// Checks everything; status 1 when something is damaged.
pub(crate) fn run(on: &OnOrigin) -> Result<ExitCode, Failure> {
    let origin = on.origin.open()?;
    let digest = layer::resolve(origin.as_ref(), &on.layer)?;
    let bar = progress::bar();
    bar.set_message("verifying");
    let report = verify::verify(origin.as_ref(), &digest, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    if on.json {
        output::json(&report);
    } else {
        for damage in &report.damage {
            output::line(&format!("damaged: {}: {}", damage.object, damage.what));
        }
        let right = format!(
            "{} segments, {}",
            report.segments_right,
            output::bytes(report.bytes_right)
        );
        output::line(&if report.damage.is_empty() {
            format!("{}: all right ({right})", on.layer)
        } else {
            format!(
                "{}: {} parts damaged, the rest is right ({right}); publish the layer again from its source, or take it from another origin",
                on.layer,
                report.damage.len()
            )
        });
    }
    Ok(if report.damage.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
