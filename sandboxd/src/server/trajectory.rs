//! Trajectories over HTTP: what was asked of a sandbox and what it did, in order; and what its files are now.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use serde::Deserialize;

use super::openapi::Failures;
use super::{App, Project, Told, find};
use crate::error::{ApiError, ErrorKind};
use crate::sandboxes::{Changes, blocking, on_disk};
use crate::trajectory::Kept;
use crate::trajectory::event::TrajectoryReply;

/// Bytes of a kept upload that are read at a time.
const PIECE_BYTES: usize = 256 << 10;

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
) -> Result<Body, ApiError> {
    let id = find(&app, &project, &id)?.info().id;
    let service = Arc::clone(&app.service);
    let found = blocking(move || Ok(service.trajectory().body(&id, seq)?));
    let path = match found.await? {
        Some(Kept::Bytes(bytes)) => return Ok(Body::from(bytes)),
        Some(Kept::File(path)) => path,
        None => {
            let message = format!("no bytes are kept of request {seq}");
            return Err(ApiError::new(ErrorKind::NotFound, message));
        }
    };
    let file = blocking(move || std::fs::File::open(&path).map_err(on_disk)).await?;
    let pieces = futures_util::stream::try_unfold(file, async |mut file| {
        let read = blocking(move || {
            let mut piece = vec![0; PIECE_BYTES];
            let len = std::io::Read::read(&mut file, &mut piece).map_err(on_disk)?;
            piece.truncate(len);
            Ok((piece, file))
        });
        let (piece, file) = read.await?;
        Ok::<_, ApiError>((!piece.is_empty()).then_some((piece, file)))
    });
    Ok(Body::from_stream(pieces))
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
