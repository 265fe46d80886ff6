//! `dsec push` and `dsec pull`: one copy, seen from its two ends.

use std::process::ExitCode;

use clap::Args;
use imgstore::ids::LayerRef;
use imgstore::origin::url::OriginUrl;
use imgstore::store::copy;

use super::Failure;
use crate::{output, progress};

/// `dsec push`.
#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// Layers: `axis/name:version` or digests.
    #[arg(required = true, value_name = "REF")]
    refs: Vec<LayerRef>,
    /// Where the layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Where they go; a directory is made if it is missing.
    #[arg(long, value_name = "ORIGIN")]
    to: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `dsec pull`.
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Layers: `axis/name:version` or digests.
    #[arg(required = true, value_name = "REF")]
    refs: Vec<LayerRef>,
    /// Where the layers are.
    #[arg(long, value_name = "ORIGIN")]
    from: OriginUrl,
    /// Where they go; a directory is made if it is missing.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Copies away from `--origin`.
pub(crate) fn push(args: &PushArgs) -> Result<ExitCode, Failure> {
    run(&args.refs, (&args.origin, &args.to), args.json)
}

/// Copies to `--origin`.
pub(crate) fn pull(args: &PullArgs) -> Result<ExitCode, Failure> {
    run(&args.refs, (&args.from, &args.origin), args.json)
}

fn run(
    refs: &[LayerRef],
    (from, to): (&OriginUrl, &OriginUrl),
    json: bool,
) -> Result<ExitCode, Failure> {
    if from == to {
        return Err(copy::CopyError::SameOrigin(to.to_string()).into());
    }
    let source = from.open()?;
    let target = to.open_or_create()?;
    let bar = progress::bar();
    bar.set_message("copying");
    let report = copy::copy(source, target.as_ref(), refs, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    if json {
        output::json(&report);
        return Ok(ExitCode::SUCCESS);
    }
    for layer in &report.layers {
        let state = if layer.changed { "" } else { "  (was there)" };
        output::line(&format!("{} = {}{state}", layer.reference, layer.layer));
    }
    if report.traces_lost > 0 {
        output::note(&format!(
            "dsec: {} traces that tags name are missing or damaged on {from}: the layers were copied without",
            report.traces_lost
        ));
    }
    output::line(&format!(
        "{} written to {to}: {} segments copied, {} were there; {} read from {from} in {} requests",
        output::bytes(report.bytes_copied),
        report.segments_copied,
        report.segments_present,
        output::bytes(report.bytes_read),
        report.requests,
    ));
    Ok(ExitCode::SUCCESS)
}
