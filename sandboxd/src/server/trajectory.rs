//! Trajectories over HTTP: what was asked of a sandbox and what it did, in order; and what its files are now.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State};
use serde::Deserialize;

use super::openapi::Failures;
use super::{App, Project, Told, find};
use crate::error::{ApiError, ErrorKind};
use crate::sandboxes::{Changes, blocking};
use crate::trajectory::event::TrajectoryReply;

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    #[serde(default)]
    #[param(format = "uint64")]
    from: u64,
    #[serde(default)]
    limit: Option<usize>,
}

/// What was asked of a sandbox, and what became of it, in order.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/trajectory",
    tag = "trajectory",
    params(("id" = String, Path, description = "The sandbox"), Which),
    responses((status = 200, description = "Done", body = TrajectoryReply), Failures)
)]
pub(super) async fn events(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(which)): Told<Query<Which>>,
) -> Result<Json<TrajectoryReply>, ApiError> {
    let id = find(&app, &project, &id)?.info().id;
    let limit = which.limit.unwrap_or(usize::MAX).max(1);
    let service = Arc::clone(&app.service);
    let found = blocking(move || Ok(service.trajectory().events(&id, which.from, limit)?));
    let (events, next) = found.await?;
    Ok(Json(TrajectoryReply { events, next }))
}

/// The bytes that request `seq` came with.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/trajectory/{seq}/body",
    tag = "trajectory",
    params(("id" = String, Path, description = "The sandbox"), ("seq" = u64, Path, description = "The request's number")),
    responses((status = 200, description = "Bytes", body = Vec<u8>, content_type = "application/octet-stream"), Failures)
)]
pub(super) async fn body(
    State(app): State<App>,
    project: Project,
    Told(Path((id, seq))): Told<Path<(String, u64)>>,
) -> Result<Vec<u8>, ApiError> {
    let id = find(&app, &project, &id)?.info().id;
    let service = Arc::clone(&app.service);
    let found = blocking(move || Ok(service.trajectory().body(&id, seq)?));
    found.await?.ok_or_else(|| {
        let message = format!("no bytes are kept of request {seq}");
        ApiError::new(ErrorKind::NotFound, message)
    })
}

/// What the sandbox's files differ by from its layers, as one digest.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/changes",
    tag = "trajectory",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = Changes), Failures)
)]
pub(super) async fn changes(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<Changes>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.changes(&sandbox).await?))
}
