//! `dsec gc`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use imgstore::origin::url::OriginUrl;
use imgstore::store::gc::{self, GcOptions, settle};

use super::Failure;
use crate::{duration, output, progress};

/// Arguments of `dsec gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Where layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// List what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// Keep what is younger than this, and layers that lost their last tag more recently: hosts that cannot write leases to
    /// the origin rely on it.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration::parse)]
    grace: Duration,
    /// How long to wait between announcing and removing, where hosts may see an old state of the origin [default: 65s on a
    /// 3FS mount, else 0s].
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    settle: Option<Duration>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Removes what nobody needs; status 1 when some of it was left.
pub(crate) fn run(args: &GcArgs) -> Result<ExitCode, Failure> {
    let origin = args.origin.open()?;
    let bar = progress::bar();
    bar.set_message("removing");
    let options = GcOptions {
        grace: args.grace,
        dry_run: args.dry_run,
        settle: args.settle.unwrap_or_else(|| match &args.origin {
            OriginUrl::Dir(path) => settle::of_dir(path),
            _ => Duration::ZERO,
        }),
        progress: &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_prefix(format!("{done}/{total} objects"));
        },
        ..GcOptions::default()
    };
    let report = gc::collect(origin.as_ref(), &options)?;
    bar.finish_and_clear();
    if args.json {
        output::json(&report);
    } else {
        for doomed in &report.removed {
            output::line(&format!("{}  {}", doomed.object, doomed.bytes));
        }
        output::line(&summary(&report));
    }
    if report.complete {
        return Ok(ExitCode::SUCCESS);
    }
    output::note("dsec: not everything that nobody needs was removed in time; run it again");
    Ok(ExitCode::FAILURE)
}

fn summary(report: &gc::GcReport) -> String {
    let kept = &report.kept;
    let mut text = format!(
        "{} {} objects, {}; kept {}, {} ({} layers, {} tags, {} leases)",
        if report.dry_run {
            "would remove"
        } else {
            "removed"
        },
        report.removed.len(),
        output::bytes(report.bytes_removed),
        kept.objects,
        output::bytes(kept.bytes),
        kept.layers,
        kept.tags,
        kept.leases,
    );
    if kept.young_objects > 0 {
        text += &format!(
            "; {} of these, {}, only because they are young",
            kept.young_objects,
            output::bytes(kept.young_bytes)
        );
    }
    if kept.packs_partly_dead > 0 {
        text += &format!(
            "; {} in {} packs that are partly needed",
            output::bytes(kept.dead_bytes),
            kept.packs_partly_dead
        );
    }
    text
}
