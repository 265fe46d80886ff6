//! Steps of a sandbox over HTTP: what it can be forked from.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;

use super::openapi::Failures;
use super::{App, Asked, Project, Told, find};
use crate::api::{SnapshotReply, SnapshotRequest, Steps};
use crate::error::ApiError;
use crate::sandboxes::Service;

/// Its snapshots, and the layers that were made of it.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/steps",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = Steps), Failures)
)]
pub(super) async fn list(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<Steps>, ApiError> {
    Ok(Json(Service::steps(&*find(&app, &project, &id)?)))
}

/// Keep its files as they are now, to fork from.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/steps",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = SnapshotRequest,
    responses((status = 201, description = "Kept", body = SnapshotReply), Failures)
)]
pub(super) async fn snapshot(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(request): Asked<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotReply>), ApiError> {
    let sandbox = find(&app, &project, &id)?;
    let kept = app.service.snapshot(&sandbox, request).await?;
    Ok((StatusCode::CREATED, Json(kept)))
}

/// Forget a step. A layer stays published.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}/steps/{name}",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox"), ("name" = String, Path, description = "The step")),
    responses((status = 204, description = "Done"), Failures)
)]
pub(super) async fn forget(
    State(app): State<App>,
    project: Project,
    Told(Path((id, name))): Told<Path<(String, String)>>,
) -> Result<StatusCode, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    app.service.forget_step(&sandbox, name).await?;
    Ok(StatusCode::NO_CONTENT)
}
