//! `dsec fsck --origin`.

use std::process::ExitCode;

use imgstore::origin::url::OriginUrl;
use imgstore::store::fsck_origin::{self, FsckReport};

use super::Failure;
use super::fsck::FsckArgs;
use crate::{output, progress};

/// Checks an origin; status 1 when something is damaged, with `--repair` when something still is.
pub(crate) fn run(url: &OriginUrl, args: &FsckArgs) -> Result<ExitCode, Failure> {
    let origin = url.open()?;
    let bar = progress::bar();
    bar.set_message("checking");
    let check = || {
        fsck_origin::fsck(origin.as_ref(), args.deep, &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })
    };
    let mut report = check()?;
    let mut mended = Vec::new();
    if args.repair && !report.damage.is_empty() {
        mended = fsck_origin::mend(origin.as_ref(), &report)?;
        report = check()?;
    }
    bar.finish_and_clear();
    let clean = report.damage.is_empty();
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        if let Some(fields) = value.as_object_mut() {
            fields.insert("mended".to_owned(), serde_json::to_value(&mended)?);
        }
        output::json(&value);
    } else {
        tell(url, &report, &mended);
    }
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn tell(url: &OriginUrl, report: &FsckReport, mended: &[String]) {
    for object in mended {
        output::line(&format!("mended: {object}"));
    }
    for damage in &report.damage {
        output::line(&format!("damaged: {}: {}", damage.object, damage.what));
    }
    for layer in &report.damaged_layers {
        output::line(&format!("damaged layer: {layer}"));
    }
    for object in &report.orphans {
        output::line(&format!("orphan: {object}"));
    }
    for object in &report.stale_temporaries {
        output::line(&format!("stale temporary file: {object}"));
    }
    let seen = format!(
        "{} tags, {} layers, {} packs, {} segments read; {} orphans, {} stale temporary files",
        report.tags,
        report.layers,
        report.packs,
        report.segments_right,
        report.orphans.len(),
        report.stale_temporaries.len()
    );
    output::line(&if report.damage.is_empty() {
        format!("{url}: all right ({seen})")
    } else {
        format!(
            "{url}: {} parts damaged ({seen}); `dsec fsck --repair` mends what the origin itself can, `dsec repair LAYER --from ANOTHER_ORIGIN --origin {url}` the rest",
            report.damage.len()
        )
    });
    if !report.listed {
        output::note(&format!(
            "dsec: origin `{url}` cannot list its objects: only layers with a tag in its index were checked, orphans cannot be told"
        ));
    }
}
