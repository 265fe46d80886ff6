//! `dsec tag`, `dsec untag`, `dsec rm`.

use std::process::ExitCode;

use clap::Args;
use imgstore::ids::{LayerRef, TagName};
use imgstore::origin::url::OriginUrl;
use imgstore::store::lease::hold::PATIENCE;
use imgstore::store::tags;

use super::Failure;
use crate::cli::OnOrigin;
use crate::output;

/// Arguments of `dsec tag`.
#[derive(Debug, Args)]
pub(crate) struct TagArgs {
    /// Layer: `axis/name:version` or a digest.
    #[arg(value_name = "REF")]
    layer: LayerRef,
    /// The new tag: `axis/name:version`. If it exists, it points to the layer afterwards.
    #[arg(value_name = "NEWREF")]
    tag: TagName,
    /// Where layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `dsec untag`.
#[derive(Debug, Args)]
pub(crate) struct UntagArgs {
    /// The tag: `axis/name:version`.
    #[arg(value_name = "REF")]
    tag: TagName,
    /// Where layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Gives a layer another name.
pub(crate) fn tag(args: &TagArgs) -> Result<ExitCode, Failure> {
    let origin = args.origin.open()?;
    let layer = tags::tag(origin.as_ref(), &args.layer, &args.tag, PATIENCE)?;
    if args.json {
        output::json(&serde_json::json!({"tag": args.tag.to_string(), "layer": layer}));
    } else {
        output::line(&format!("{} = {layer}", args.tag));
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes a name away.
pub(crate) fn untag(args: &UntagArgs) -> Result<ExitCode, Failure> {
    let origin = args.origin.open()?;
    let layer = tags::untag(origin.as_ref(), &args.tag)?;
    if args.json {
        output::json(&serde_json::json!({"tag": args.tag.to_string(), "layer": layer}));
    } else {
        let was = layer.map_or_else(|| "damaged".to_owned(), |l| l.to_hex());
        output::line(&format!("{} is gone; it was {was}", args.tag));
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes all names of a layer away.
pub(crate) fn remove(on: &OnOrigin) -> Result<ExitCode, Failure> {
    let origin = on.origin.open()?;
    let removed = tags::remove(origin.as_ref(), &on.layer)?;
    if on.json {
        output::json(&removed);
    } else {
        for tag in &removed.tags {
            output::line(&format!("{tag} is gone"));
        }
        output::line(&format!(
            "{} has no tag now; `dsec gc --origin {}` removes it when the grace period is over",
            removed.layer, on.origin
        ));
    }
    Ok(ExitCode::SUCCESS)
}
