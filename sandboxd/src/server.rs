//! The HTTP API: who asks, what for, and the answer. No decisions are made here.

mod e2b;
mod ended;
mod execs;
mod files;
mod openapi;
mod recorded;
mod steps;
mod trajectory;

pub(crate) use ended::take_over;

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRef, FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::{
    CreateRequest, ForkReply, ForkRequest, PackReply, PackRequest, SandboxInfo, Sandboxes,
    TimeoutRequest, UsageReply,
};
use crate::backend::Door;
use crate::error::{ApiError, ErrorKind};
use crate::keys::Keys;
use crate::sandboxes::{Sandbox, Service};
use openapi::Failures;

/// Bodies of this many bytes are read before they are looked at.
const SMALL_BYTES_MAX: usize = 64 << 10;

/// What every handler needs.
#[derive(Debug, Clone)]
pub(crate) struct App {
    service: Arc<Service>,
    keys: Arc<Keys>,
    e2b: Arc<e2b::Settings>,
}

impl FromRef<App> for Arc<Service> {
    fn from_ref(app: &App) -> Self {
        Arc::clone(&app.service)
    }
}

/// The project that the request's key stands for.
#[derive(Debug)]
pub(crate) struct Project(pub(crate) String);

impl FromRequestParts<App> for Project {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        app.keys.project_of(&parts.headers).map(Self)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status());
        let mut response = (
            status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            Json(&self),
        )
            .into_response();
        let told = match self.kind {
            ErrorKind::Unavailable => Some(("retry-after", "1")),
            ErrorKind::Unauthenticated => Some(("www-authenticate", "Bearer")),
            _ => None,
        };
        if let Some((name, value)) = told {
            let value = axum::http::HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// A body of JSON; what is wrong with it is told as every other error.
#[derive(Debug)]
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned> axum::extract::FromRequest<App> for Asked<T> {
    type Rejection = ApiError;

    async fn from_request(request: axum::extract::Request, app: &App) -> Result<Self, ApiError> {
        let bytes = bytes::Bytes::from_request(request, app)
            .await
            .map_err(|e| ApiError::new(ErrorKind::Invalid, e.body_text()))?;
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let parsed = serde_json::from_slice(text);
        parsed
            .map(Self)
            .map_err(|e| ApiError::new(ErrorKind::Invalid, format!("the request's body: {e}")))
    }
}

/// A path or query; what is wrong with it is told as every other error.
#[derive(Debug)]
pub(crate) struct Told<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for Told<Path<T>> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let told = Path::from_request_parts(parts, app).await;
        told.map(Self)
            .map_err(|e| ApiError::new(ErrorKind::Invalid, e.body_text()))
    }
}

impl<T: DeserializeOwned> FromRequestParts<App> for Told<Query<T>> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let told = Query::from_request_parts(parts, app).await;
        told.map(Self)
            .map_err(|e| ApiError::new(ErrorKind::Invalid, e.body_text()))
    }
}

async fn not_allowed() -> (StatusCode, Json<ApiError>) {
    let message = "this path has other methods: see the header `Allow`";
    let error = ApiError::new(ErrorKind::Invalid, message);
    (StatusCode::METHOD_NOT_ALLOWED, Json(error))
}

/// What is told to clients of E2B.
#[derive(Debug, Clone, Default)]
pub struct ForE2b {
    /// What host names of ports end with: `PORT-ID.DOMAIN`.
    pub domain: Option<String>,
    /// What the template `base` stands for.
    pub template: Option<String>,
}

/// All routes; `state` is the folder for what must be the same after a restart.
///
/// # Errors
/// When the secret of the state folder cannot be read or made.
pub fn router(
    service: Arc<Service>,
    keys: Keys,
    state: &std::path::Path,
    e2b: ForE2b,
) -> std::io::Result<Router> {
    let app = App {
        service,
        keys: Arc::new(keys),
        e2b: Arc::new(e2b::Settings::open(state, e2b.domain, e2b.template)?),
    };
    let (native, document) = native(&app).split_for_parts();
    let document = openapi::bytes(document)?;
    let document = move || async move { ([("content-type", "application/json")], document) };
    Ok(native
        .route("/openapi.json", get(document))
        .route("/metrics", get(metrics))
        .merge(e2b::router())
        .fallback(|| async { ApiError::new(ErrorKind::NotFound, "no such path in this API") })
        .method_not_allowed_fallback(not_allowed)
        .layer(axum::middleware::from_fn_with_state(
            app.clone(),
            e2b::by_host,
        ))
        .layer(axum::middleware::from_fn(read_small))
        .with_state(app))
}

/// Reads small bodies before anything is answered: a client that is told something earlier, such as that its sandbox is gone, may see a
/// broken connection in place of the answer, or break its next request on it.
async fn read_small(request: axum::extract::Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let len = parts.headers.get(header::CONTENT_LENGTH);
    let len = len.and_then(|len| len.to_str().ok()?.parse::<usize>().ok());
    let body = match len {
        Some(len) if len <= SMALL_BYTES_MAX => match to_bytes(body, len).await {
            Ok(bytes) => Body::from(bytes),
            Err(e) => {
                let message = format!("the request broke off: {e}");
                return ApiError::new(ErrorKind::Invalid, message).into_response();
            }
        },
        _ => body,
    };
    next.run(axum::extract::Request::from_parts(parts, body))
        .await
}

fn native(app: &App) -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(openapi::head())
        .routes(routes!(create, list))
        .routes(routes!(show, kill))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(set_timeout))
        .routes(routes!(usage))
        .routes(routes!(fork))
        .routes(routes!(pack_diff))
        .routes(routes!(steps::list, steps::snapshot))
        .routes(routes!(steps::forget))
        .routes(routes!(execs::start, execs::list))
        .routes(routes!(execs::wait))
        .routes(routes!(execs::attach))
        .routes(routes!(execs::stdin))
        .routes(routes!(execs::signal))
        .routes(routes!(execs::resize))
        .routes(routes!(files::read, files::write, files::remove))
        .routes(routes!(files::list))
        .routes(routes!(files::stat))
        .routes(routes!(files::make_dir))
        .routes(routes!(files::rename))
        .routes(routes!(files::watch))
        .routes(routes!(files::pack, files::unpack))
        .routes(routes!(trajectory::changes))
        .routes(routes!(trajectory::events))
        .routes(routes!(trajectory::body))
        .route_layer(axum::middleware::from_fn_with_state(
            app.clone(),
            recorded::layer,
        ))
}

/// The sandbox of a path, if it is the caller's.
pub(crate) fn find(app: &App, project: &Project, id: &str) -> Result<Arc<Sandbox>, ApiError> {
    app.service.find(&project.0, id)
}

/// A sandbox's agent; a paused sandbox goes on.
pub(crate) async fn agent(
    app: &App,
    project: &Project,
    id: &str,
) -> Result<(Arc<Sandbox>, Door), ApiError> {
    let sandbox = find(app, project, id)?;
    let socket = app.service.use_it(&sandbox).await?;
    Ok((sandbox, socket))
}

/// Make a sandbox.
#[utoipa::path(
    post,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    request_body = CreateRequest,
    responses((status = 201, description = "It runs", body = SandboxInfo), Failures)
)]
async fn create(
    State(app): State<App>,
    project: Project,
    Asked(request): Asked<CreateRequest>,
) -> Result<(StatusCode, Json<SandboxInfo>), ApiError> {
    let info = app.service.create(&project.0, request).await?;
    Ok((StatusCode::CREATED, Json(info)))
}

/// All sandboxes of the key's project, ended ones too.
#[utoipa::path(
    get,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    responses((status = 200, description = "Done", body = Sandboxes), Failures)
)]
async fn list(State(app): State<App>, project: Project) -> Json<Sandboxes> {
    Json(Sandboxes {
        sandboxes: app.service.list(&project.0),
    })
}

/// One sandbox, also after its end.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = SandboxInfo), Failures)
)]
async fn show(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<SandboxInfo>, ApiError> {
    Ok(Json(find(&app, &project, &id)?.info()))
}

/// End a sandbox, whatever it is doing.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = SandboxInfo), Failures)
)]
async fn kill(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.kill(sandbox).await?))
}

/// Let it stand still and give its memory back.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/pause",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = SandboxInfo), Failures)
)]
async fn pause(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.pause(&sandbox).await?))
}

/// Let it go on.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/resume",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = SandboxInfo), Failures)
)]
async fn resume(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.resume(&sandbox).await?))
}

/// Set when it is killed.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/timeout",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = TimeoutRequest,
    responses((status = 200, description = "Done", body = SandboxInfo), Failures)
)]
async fn set_timeout(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(request): Asked<TimeoutRequest>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(
        app.service.set_timeout(&sandbox, request.timeout).await?,
    ))
}

/// What it uses.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/usage",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = UsageReply), Failures)
)]
async fn usage(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<UsageReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    let usage = app.service.usage(&sandbox)?;
    Ok(Json(UsageReply { usage }))
}

/// Make children with the files that it has now.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/fork",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = ForkRequest,
    responses((status = 200, description = "Done", body = ForkReply), Failures)
)]
async fn fork(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(request): Asked<ForkRequest>,
) -> Result<Json<ForkReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.fork(sandbox, request).await?))
}

/// Publish what it changed as a layer.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/pack_diff",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = PackRequest,
    responses((status = 200, description = "Done", body = PackReply), Failures)
)]
async fn pack_diff(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(request): Asked<PackRequest>,
) -> Result<Json<PackReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.pack_diff(sandbox, request).await?))
}

/// Prometheus text. Open to whoever can connect: it holds counts only.
async fn metrics(State(app): State<App>) -> ([(&'static str, &'static str); 1], String) {
    let page = app.service.metrics.page(app.service.counts());
    ([("content-type", "text/plain; version=0.0.4")], page)
}
