//! `dsec build`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use imgstore::build::options::FileOrder;
use imgstore::build::{self, BuildOptions, Input, Naming};
use imgstore::ids::TagName;
use imgstore::source::{self, SourceOptions};
use imgstore::store::layer;
use indicatif::ProgressBar;

use super::Failure;
use crate::cli::Build;
use crate::{output, progress};

/// Builds and publishes.
pub(crate) fn run(args: &Build) -> Result<ExitCode, Failure> {
    run_from(
        args,
        &[("source", args.source.to_string())],
        &progress::bar(),
    )
}

/// Builds and publishes; `from` is what the tag says about where the layer comes from.
pub(crate) fn run_from(
    args: &Build,
    from: &[(&str, String)],
    bar: &ProgressBar,
) -> Result<ExitCode, Failure> {
    let tag = TagName::new(args.axis, &args.name, &args.layer_version)?;
    let origin = args.origin.open_or_create()?;
    let dict = args
        .dict
        .iter()
        .map(|d| layer::resolve(origin.as_ref(), d))
        .collect::<Result<Vec<_>, _>>()?;
    let defaults = BuildOptions::default();
    let options = BuildOptions {
        segment_bytes: args.segment_kib << 10,
        chunk_bytes: args.chunk_kib << 10,
        level: args.level,
        order: if args.path_order {
            FileOrder::Path
        } else {
            FileOrder::Kind
        },
        dict,
        threads: args.threads.unwrap_or(defaults.threads),
        progress: Some(progress::build(bar)),
        ..defaults
    };
    options.check()?;
    let source_options = SourceOptions {
        spool_dir: args.tmp.clone(),
        keep_xattrs: args.keep_xattr.clone(),
        progress: Some(progress::source(bar)),
    };
    let loaded = source::load(&args.source, &source_options)?;
    let mut labels = loaded.labels.clone();
    labels.extend(args.label.iter().cloned());
    let mut info = BTreeMap::from([
        (
            "tool".to_owned(),
            concat!("dsec ", env!("CARGO_PKG_VERSION")).to_owned(),
        ),
        (
            "dict".to_owned(),
            args.dict
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" "),
        ),
    ]);
    let from = from.iter();
    info.extend(from.map(|(key, value)| ((*key).to_owned(), value.clone())));
    let report = build::build(
        Input::new(&loaded.tree, &|| loaded.check_unchanged()),
        Naming {
            tag: tag.clone(),
            info,
            labels,
        },
        origin.as_ref(),
        &options,
    )?;
    bar.finish_and_clear();
    if args.json {
        output::json(&report);
    } else {
        output::line(&format!("{tag} = {}", report.layer));
        output::line(&format!(
            "{} inodes, {} in files; {} new on the origin ({} segments stored, {} reused; {} of metadata)",
            report.inodes,
            output::bytes(report.bytes_in),
            output::bytes(report.bytes_stored),
            report.segments_new,
            report.segments_reused,
            output::bytes(report.bytes_meta),
        ));
    }
    Ok(ExitCode::SUCCESS)
}
