//! `dsec repair`.

use std::process::ExitCode;

use clap::Args;
use imgstore::ids::LayerRef;
use imgstore::origin::url::OriginUrl;
use imgstore::store::repair;

use super::Failure;
use crate::{output, progress};

/// `dsec repair`.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    /// Layer: `axis/name:version` or a digest.
    #[arg(value_name = "REF")]
    layer: LayerRef,
    /// Where a good copy is.
    #[arg(long, value_name = "ORIGIN")]
    from: OriginUrl,
    /// Where the damage is.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Mends; status 1 when something is still damaged.
pub(crate) fn run(args: &RepairArgs) -> Result<ExitCode, Failure> {
    if args.from == args.origin {
        return Err(
            "`--from` and `--origin` are the same; a good copy must come from elsewhere".into(),
        );
    }
    let from = args.from.open()?;
    let origin = args.origin.open()?;
    let bar = progress::bar();
    bar.set_message("checking");
    let report = repair::repair(origin.as_ref(), Some(from), &args.layer, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    let clean = report.left.is_empty();
    if args.json {
        output::json(&report);
    } else {
        for object in &report.objects_written {
            output::line(&format!("written: {object}"));
        }
        for layer in &report.layers_healed {
            output::line(&format!("also mended: layer {layer}"));
        }
        for damage in &report.left {
            output::line(&format!(
                "still damaged: {}: {}",
                damage.object, damage.what
            ));
        }
        output::line(&summary(args, &report));
    }
    if !report.other_layers_checked {
        output::note(&format!(
            "dsec: origin `{}` cannot list its layers: others that share the damaged packs were not looked at; repair each by its name",
            args.origin
        ));
    }
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn summary(args: &RepairArgs, report: &repair::RepairReport) -> String {
    let RepairArgs { layer, origin, .. } = args;
    if report.objects_written.is_empty() && report.left.is_empty() {
        return format!(
            "{layer}: nothing to mend ({} segments are right)",
            report.segments_checked
        );
    }
    let counts = format!(
        "{} of {} damaged segments mended, {} packs rebuilt, {} new, {} read from {}",
        report.segments_mended,
        report.segments_damaged,
        report.packs_rebuilt,
        report.packs_new,
        output::bytes(report.bytes_read),
        args.from,
    );
    if report.left.is_empty() {
        format!("{layer}: mended on {origin}: {counts}")
    } else {
        format!(
            "{layer}: still damaged on {origin}: {counts}; try another `--from`, or publish the layer again from its source"
        )
    }
}
