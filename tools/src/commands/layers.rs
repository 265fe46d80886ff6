//! `dsec layers`.

use std::process::ExitCode;

use imgstore::origin::url::OriginUrl;
use imgstore::store::layer;

use super::Failure;
use crate::output;

/// Lists tags; status 1 when there are damaged ones, which are named on standard error.
pub(crate) fn run(origin: &OriginUrl, json: bool) -> Result<ExitCode, Failure> {
    let layer::Tags { tags, damaged, .. } = layer::list_tags(origin.open()?.as_ref())?;
    if json {
        let rows: Vec<_> = tags
            .iter()
            .map(|(tag, layer)| serde_json::json!({"tag": tag.to_string(), "layer": layer}))
            .collect();
        output::json(&rows);
    } else {
        for (tag, layer) in &tags {
            output::line(&format!("{tag}  {layer}"));
        }
    }
    for error in &damaged {
        output::note(&format!("dsec: {error}; publish the tag again"));
    }
    Ok(if damaged.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
