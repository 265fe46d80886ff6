//! `dsec fsck --cache`.

use std::path::Path;
use std::process::ExitCode;

use imgstore::store::cache::fsck;

use super::Failure;
use crate::{output, progress};

/// Checks a cache folder; status 1 when something is damaged, with `--repair` when something still is.
pub(crate) fn run(cache: &Path, repair: bool, json: bool) -> Result<ExitCode, Failure> {
    let bar = progress::count("folders");
    let report = fsck::check(cache, repair, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let clean = report.damage.iter().all(|damage| damage.mended);
    if json {
        output::json(&report);
    } else {
        for damage in &report.damage {
            let state = if damage.mended { "removed" } else { "damaged" };
            output::line(&format!(
                "{state}: {}: {}",
                damage.path.display(),
                damage.what
            ));
        }
        output::line(&summary(cache, &report, repair));
    }
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn summary(cache: &Path, report: &fsck::CacheReport, repair: bool) -> String {
    let mended = report.damage.iter().filter(|d| d.mended).count();
    let state = match (report.damage.len(), repair) {
        (0, _) => "all right".to_owned(),
        (n, true) if n == mended => {
            format!("{n} damaged files were removed and will be fetched again")
        }
        (n, true) => format!(
            "{mended} damaged files were removed, {} could not be and are still there",
            n - mended
        ),
        (n, false) => format!("{n} damaged files; `--repair` removes them, they are fetched again"),
    };
    let leftovers = if repair { "removed" } else { "left over" };
    format!(
        "{}: {state} ({} segments and {} descriptions right, {}; {} temporary files {leftovers}, {} foreign files)",
        cache.display(),
        report.segments_right,
        report.descriptions_right,
        output::bytes(report.bytes_right),
        report.leftovers,
        report.foreign,
    )
}
