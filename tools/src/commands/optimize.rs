//! `dsec optimize`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use imgstore::build::optimize::{
    self, HOT_LEVEL, OptimizeError, OptimizeOptions, OptimizeReport, Target,
};
use imgstore::format::tag::Tag;
use imgstore::format::trace::Trace;
use imgstore::ids::{Digest, TagName};
use imgstore::origin::Origin;
use imgstore::origin::url::OriginUrl;
use imgstore::store::layer;
use imgstore::store::tags;

use super::{Failure, trace};
use crate::{output, progress};

/// `dsec optimize`.
#[derive(Debug, Args)]
pub(crate) struct Optimize {
    /// Tags whose layers the trace is of, as `axis/name:version`.
    #[arg(required = true, value_name = "REF")]
    tags: Vec<TagName>,
    /// The trace file; several are joined in this order.
    #[arg(long, required = true, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Where the layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Name of the new tag [default: that of REF].
    #[arg(long)]
    name: Option<String>,
    /// Version of the new tag [default: that of REF, which then means the new layer].
    #[arg(long = "version", value_name = "V")]
    layer_version: Option<String>,
    /// Zstd level of the traced data, 1 to 19.
    #[arg(long, value_name = "LEVEL", default_value_t = HOT_LEVEL, value_parser = clap::value_parser!(i32).range(1..=19))]
    level: i32,
    /// Worker threads; never changes the result.
    #[arg(long)]
    threads: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Optimises each layer.
pub(crate) fn run(args: &Optimize) -> Result<ExitCode, Failure> {
    if args.name.is_some() && args.tags.len() > 1 {
        return Err("`--name` is for one REF: two layers cannot have one tag".into());
    }
    let trace = trace::read_all(&args.trace)?;
    let origin = args.origin.open()?;
    let mut reports = Vec::new();
    for tag in &args.tags {
        let (tag, report) = one(args, origin.as_ref(), tag, &trace)?;
        if let (Some(report), false) = (&report, args.json) {
            show(&tag, report);
        }
        reports.push(serde_json::json!({"tag": tag.to_string(), "report": report}));
    }
    if args.json {
        output::json(&reports);
    }
    Ok(ExitCode::SUCCESS)
}

fn one(
    args: &Optimize,
    origin: &dyn Origin,
    tag: &TagName,
    trace: &Trace,
) -> Result<(TagName, Option<OptimizeReport>), Failure> {
    let old = layer::read_tag(origin, tag)?;
    let new = TagName::new(
        tag.axis(),
        args.name.as_deref().unwrap_or(tag.name()),
        args.layer_version.as_deref().unwrap_or(tag.version()),
    )?;
    let from = source(&old, trace);
    let bar = progress::bar();
    let defaults = OptimizeOptions::default();
    let options = OptimizeOptions {
        level: args.level,
        threads: args.threads.unwrap_or(defaults.threads),
        progress: Some(progress::build(&bar)),
    };
    let target = Target {
        tag: new.clone(),
        old: old.clone(),
    };
    let optimized = optimize::optimize(origin, &from, trace, target, &options);
    bar.finish_and_clear();
    match optimized {
        Ok(report) => Ok((new, Some(report))),
        // One of several: a start may read nothing of it, and the others need it under the new version.
        Err(OptimizeError::OtherLayers { .. }) if args.tags.len() > 1 => {
            output::note(&format!(
                "the trace has nothing of `{tag}`: `{new}` is the same layer"
            ));
            let record = Tag {
                tag: new.to_string(),
                ..old
            };
            tags::write(origin, &new, &record)?;
            Ok((new, None))
        }
        Err(e) => Err(format!("`{tag}`: {e}").into()),
    }
}

/// The tag's layer, or the one it was optimised from where the trace is of that.
fn source(tag: &Tag, trace: &Trace) -> Digest {
    let before = tag.build.get(optimize::FROM).and_then(|d| d.parse().ok());
    let traced = |layer: &Digest| trace.layers.contains(layer);
    match before {
        Some(before) if traced(&before) && !traced(&tag.layer) => before,
        _ => tag.layer,
    }
}

fn show(tag: &TagName, report: &OptimizeReport) {
    output::line(&format!("{tag} = {}", report.layer));
    output::line(&format!(
        "{} traced, {} in {} segments in front ({} as fetched); {} new on the origin, {} segments reused",
        output::bytes(report.bytes_traced),
        output::bytes(report.bytes_hot),
        report.segments_hot,
        output::bytes(report.bytes_hot_stored),
        output::bytes(report.bytes_stored),
        report.segments_reused,
    ));
}
