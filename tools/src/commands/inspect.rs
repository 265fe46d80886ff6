//! `dsec inspect`.

use std::process::ExitCode;

use imgstore::ids::LayerRef;
use imgstore::store::layer;

use super::Failure;
use crate::cli::OnOrigin;
use crate::output;

/// Shows manifest, placement and tag.
pub(crate) fn run(on: &OnOrigin) -> Result<ExitCode, Failure> {
    let origin = on.origin.open()?;
    let tag = match &on.layer {
        LayerRef::Tag(name) => Some(layer::read_tag(origin.as_ref(), name)?),
        LayerRef::Layer(_) => None,
    };
    let digest = match (&tag, &on.layer) {
        (Some(tag), _) => tag.layer,
        (None, reference) => layer::resolve(origin.as_ref(), reference)?,
    };
    let layer = layer::open(origin.as_ref(), &digest)?;
    let stored: u64 = layer
        .placement
        .segments
        .iter()
        .map(|spot| u64::from(spot.2))
        .sum();
    if on.json {
        let manifest = &layer.manifest;
        let segments: Vec<_> = manifest
            .segments
            .iter()
            .zip(&layer.placement.segments)
            .map(|(s, spot)| {
                serde_json::json!({"digest": s.digest(), "len": s.len(), "pack": spot.0, "offset": spot.1, "stored": spot.2})
            })
            .collect();
        output::json(&serde_json::json!({
            "layer": digest,
            "tag": tag,
            "format": manifest.format,
            "meta": manifest.meta,
            "chunks": manifest.chunks,
            "totals": manifest.totals,
            "bytes_segments": manifest.segment_bytes(),
            "bytes_stored": stored,
            "segments": segments,
            "packs": layer.placement.packs,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let m = &layer.manifest;
    output::line(&format!("layer     {digest}"));
    if let Some(tag) = &tag {
        output::line(&format!("tag       {}", tag.tag));
        for (key, value) in tag
            .build
            .iter()
            .chain(&tag.labels)
            .filter(|(_, v)| !v.is_empty())
        {
            output::line(&format!("  {key}: {value}"));
        }
    }
    output::line(&format!(
        "tree      {} inodes, {} files, {}",
        m.totals.inodes,
        m.totals.files,
        output::bytes(m.totals.file_bytes)
    ));
    output::line(&format!(
        "metadata  {} ({})",
        output::bytes(m.meta.size),
        m.meta.digest
    ));
    output::line(&format!(
        "segments  {}: {} plain, {} stored",
        m.segments.len(),
        output::bytes(m.segment_bytes()),
        output::bytes(stored)
    ));
    for pack in &layer.placement.packs {
        output::line(&format!(
            "pack      {} {}",
            pack.digest,
            output::bytes(pack.size)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
