//! Trajectories over HTTP: what was asked of a sandbox and what it did, in order; and what its files are now.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use serde::Deserialize;

use super::{App, Project, find};
use crate::error::{ApiError, ErrorKind};
use crate::sandboxes::{Changes, blocking};
use crate::trajectory::event::TrajectoryReply;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    #[serde(default)]
    from: u64,
    #[serde(default)]
    limit: Option<usize>,
}

/// `GET /v1/sandboxes/{id}/trajectory?from=&limit=`.
pub(super) async fn events(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(which): Query<Which>,
) -> Result<Json<TrajectoryReply>, ApiError> {
    let id = find(&app, &project, &id)?.info().id;
    let limit = which.limit.unwrap_or(usize::MAX).max(1);
    let service = Arc::clone(&app.service);
    let found = blocking(move || Ok(service.trajectory().events(&id, which.from, limit)?));
    let (events, next) = found.await?;
    Ok(Json(TrajectoryReply { events, next }))
}

/// `GET /v1/sandboxes/{id}/trajectory/{seq}/body`: the bytes that request `seq` came with.
pub(super) async fn body(
    State(app): State<App>,
    project: Project,
    Path((id, seq)): Path<(String, u64)>,
) -> Result<Vec<u8>, ApiError> {
    let id = find(&app, &project, &id)?.info().id;
    let service = Arc::clone(&app.service);
    let found = blocking(move || Ok(service.trajectory().body(&id, seq)?));
    found.await?.ok_or_else(|| {
        let message = format!("no bytes are kept of request {seq}");
        ApiError::new(ErrorKind::NotFound, message)
    })
}

/// `GET /v1/sandboxes/{id}/changes`: what the sandbox's files differ by from its layers, as one digest.
pub(super) async fn changes(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<Changes>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.changes(&sandbox).await?))
}
