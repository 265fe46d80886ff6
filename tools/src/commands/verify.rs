//! `dsec verify`.

use std::process::ExitCode;

use imgstore::store::verify;

use super::Failure;
use crate::cli::OnOrigin;
use crate::{output, progress};

/// Checks everything; status 1 when something is damaged.
pub(crate) fn run(on: &OnOrigin) -> Result<ExitCode, Failure> {
    let origin = on.origin.open()?;
    let bar = progress::bar();
    bar.set_message("verifying");
    let report = verify::verify_ref(origin.as_ref(), &on.layer, &|done, total| {
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
                "{0}: {1} parts damaged on origin `{2}`, the rest is right ({right}); `dsec repair {0} --from ANOTHER_ORIGIN --origin {2}` mends it, or publish the layer again from its source",
                on.layer,
                report.damage.len(),
                on.origin
            )
        });
    }
    Ok(if report.damage.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
