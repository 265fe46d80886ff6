//! Children and steps of a sandbox.

use std::process::ExitCode;

use hyper::Method;
use serde_json::Value;

use super::super::Failure;
use super::http::{Client, quoted};
use super::{path_of, text};
use crate::output;

/// Prints the children of a fork; exit status 1 if one could not be made.
pub(super) fn children(forked: &Value) -> ExitCode {
    let children = forked.get("children").and_then(Value::as_array);
    let mut failed = false;
    for child in children.into_iter().flatten() {
        if child.get("id").is_some() {
            output::line(text(child, "id"));
        } else {
            failed = true;
            let (message, kind) = (text(child, "message"), text(child, "kind"));
            output::note(&format!("dsec: {message} ({kind})"));
        }
    }
    ExitCode::from(u8::from(failed))
}

/// Prints what a sandbox can be forked from.
pub(super) async fn list(client: &Client, id: &str, json: bool) -> Result<(), Failure> {
    let found = client
        .json(Method::GET, &path_of(id, "/steps"), None)
        .await?;
    let steps = found.get("steps").and_then(Value::as_array);
    if json {
        output::json(&steps);
        return Ok(());
    }
    for step in steps.into_iter().flatten() {
        let what = match text(step, "layer") {
            "" => "snapshot",
            digest => digest,
        };
        output::line(&format!("{}  {what}", text(step, "name")));
    }
    Ok(())
}

/// Forgets a step.
pub(super) async fn forget(client: &Client, id: &str, name: &str) -> Result<(), Failure> {
    // A layer's name has a slash; here it is one part of a path.
    let name = quoted(name).replace('/', "%2F");
    let path = path_of(id, &format!("/steps/{name}"));
    client.json(Method::DELETE, &path, None).await.map(drop)
}
