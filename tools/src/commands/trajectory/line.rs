//! A sandbox and its ancestors: what was asked of each until the next was forked from it.

use serde_json::Value;

use super::super::Failure;
use super::super::sandbox::http::Client;
use super::super::sandbox::text;
use super::{events, number};

/// Most ancestors that are followed.
const GENERATIONS_MAX: usize = 200;

/// What counts of one sandbox.
pub(super) struct Life {
    pub(super) sandbox: String,
    pub(super) events: Vec<Value>,
}

/// The ancestors of a sandbox, the oldest first, and it.
///
/// # Errors
/// When the trajectory of an ancestor is gone, or it was forked from a step (whose moment requests do not tell).
pub(super) async fn of(client: &Client, id: &str) -> Result<Vec<Life>, Failure> {
    let mut line = vec![life(client, id).await?];
    while let Some(child) = line.last() {
        let first = child.events.first().ok_or("this trajectory is empty")?;
        if text(first, "method") != "FORK" {
            line.reverse();
            return Ok(line);
        }
        if line.len() > GENERATIONS_MAX {
            return Err(format!("more than {GENERATIONS_MAX} ancestors").into());
        }
        let body = first.get("body").unwrap_or(&Value::Null);
        if !text(body, "from").is_empty() {
            let (child, step) = (&child.sandbox, text(body, "from"));
            let why = "has the files of an earlier moment than its fork: no replay";
            return Err(format!("sandbox `{child}` was forked from step `{step}`, {why}").into());
        }
        let mut parent = life(client, text(body, "parent")).await?;
        parent.cut(&child.sandbox)?;
        line.push(parent);
    }
    Ok(line)
}

async fn life(client: &Client, id: &str) -> Result<Life, Failure> {
    let events = events(client, id)
        .await
        .map_err(|error| format!("the trajectory of `{id}` is needed for a replay: {error}"))?;
    let sandbox = id.to_owned();
    Ok(Life { sandbox, events })
}

impl Life {
    /// Leaves out what came after a child was forked.
    fn cut(&mut self, child: &str) -> Result<(), Failure> {
        let made = self.events.iter().find(|event| {
            let children = event.pointer("/reply/children").and_then(Value::as_array);
            let mut children = children.into_iter().flatten();
            children.any(|one| text(one, "id") == child)
        });
        let Some(made) = made.map(|event| number(event, "of")) else {
            let parent = &self.sandbox;
            return Err(format!("the fork that made `{child}` is not in the trajectory of `{parent}`: its moment is not known").into());
        };
        // What had been asked for before, and had its result later, ran on in the parent only.
        self.events.retain(|event| number(event, "seq") < made);
        Ok(())
    }
}
