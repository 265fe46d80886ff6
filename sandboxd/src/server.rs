//! The HTTP API: who asks, what for, and the answer. No decisions are made here.

mod e2b;
mod ended;
mod execs;
mod files;
mod recorded;
mod trajectory;

pub(crate) use ended::take_over;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};

use crate::api::{
    CreateRequest, ForkReply, ForkRequest, PackReply, PackRequest, SandboxInfo, Sandboxes,
    TimeoutRequest, UsageReply,
};
use crate::error::{ApiError, ErrorKind};
use crate::keys::Keys;
use crate::sandboxes::{Sandbox, Service};

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

impl<T: serde::de::DeserializeOwned> axum::extract::FromRequest<App> for Asked<T> {
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
    Ok(native(&app)
        .merge(e2b::router())
        .fallback(|| async { ApiError::new(ErrorKind::NotFound, "no such path in this API") })
        .layer(axum::middleware::from_fn_with_state(
            app.clone(),
            e2b::by_host,
        ))
        .with_state(app))
}

fn native(app: &App) -> Router<App> {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/v1/sandboxes", post(create).get(list))
        .route("/v1/sandboxes/{id}", get(show).delete(kill))
        .route("/v1/sandboxes/{id}/pause", post(pause))
        .route("/v1/sandboxes/{id}/resume", post(resume))
        .route("/v1/sandboxes/{id}/timeout", post(set_timeout))
        .route("/v1/sandboxes/{id}/usage", get(usage))
        .route("/v1/sandboxes/{id}/fork", post(fork))
        .route("/v1/sandboxes/{id}/pack_diff", post(pack_diff))
        .route(
            "/v1/sandboxes/{id}/execs",
            post(execs::start).get(execs::list),
        )
        .route("/v1/sandboxes/{id}/execs/{exec}", get(execs::wait))
        .route("/v1/sandboxes/{id}/execs/{exec}/stream", get(execs::attach))
        .route("/v1/sandboxes/{id}/execs/{exec}/stdin", post(execs::stdin))
        .route(
            "/v1/sandboxes/{id}/execs/{exec}/signal",
            post(execs::signal),
        )
        .route(
            "/v1/sandboxes/{id}/execs/{exec}/resize",
            post(execs::resize),
        )
        .route(
            "/v1/sandboxes/{id}/files",
            get(files::read).put(files::write),
        )
        .route("/v1/sandboxes/{id}/files", delete(files::remove))
        .route("/v1/sandboxes/{id}/files/list", get(files::list))
        .route("/v1/sandboxes/{id}/files/stat", get(files::stat))
        .route("/v1/sandboxes/{id}/files/mkdir", post(files::make_dir))
        .route("/v1/sandboxes/{id}/files/rename", post(files::rename))
        .route(
            "/v1/sandboxes/{id}/tree",
            get(files::pack).put(files::unpack),
        )
        .route("/v1/sandboxes/{id}/changes", get(trajectory::changes))
        .route("/v1/sandboxes/{id}/trajectory", get(trajectory::events))
        .route(
            "/v1/sandboxes/{id}/trajectory/{seq}/body",
            get(trajectory::body),
        )
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
) -> Result<(Arc<Sandbox>, PathBuf), ApiError> {
    let sandbox = find(app, project, id)?;
    let socket = app.service.use_it(&sandbox).await?;
    Ok((sandbox, socket))
}

async fn create(
    State(app): State<App>,
    project: Project,
    Asked(request): Asked<CreateRequest>,
) -> Result<(StatusCode, Json<SandboxInfo>), ApiError> {
    let info = app.service.create(&project.0, request).await?;
    Ok((StatusCode::CREATED, Json(info)))
}

async fn list(State(app): State<App>, project: Project) -> Json<Sandboxes> {
    Json(Sandboxes {
        sandboxes: app.service.list(&project.0),
    })
}

async fn show(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<SandboxInfo>, ApiError> {
    Ok(Json(find(&app, &project, &id)?.info()))
}

async fn kill(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.kill(sandbox).await?))
}

async fn pause(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.pause(&sandbox).await?))
}

async fn resume(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.resume(&sandbox).await?))
}

async fn set_timeout(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Asked(request): Asked<TimeoutRequest>,
) -> Result<Json<SandboxInfo>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(
        app.service.set_timeout(&sandbox, request.timeout).await?,
    ))
}

async fn usage(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
) -> Result<Json<UsageReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    let usage = app.service.usage(&sandbox)?;
    Ok(Json(UsageReply { usage }))
}

async fn fork(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Asked(request): Asked<ForkRequest>,
) -> Result<Json<ForkReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.fork(sandbox, request).await?))
}

async fn pack_diff(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Asked(request): Asked<PackRequest>,
) -> Result<Json<PackReply>, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    Ok(Json(app.service.pack_diff(sandbox, request).await?))
}

/// Prometheus text. Open to whoever can connect: it holds counts only.
async fn metrics(State(app): State<App>) -> String {
    let (running, paused) = app.service.counts();
    let mut page = String::new();
    let head = "# HELP dsec_sandboxes Sandboxes by state.\n# TYPE dsec_sandboxes gauge";
    writeln!(page, "{head}").expect("a string takes everything");
    for (state, count) in [("running", running), ("paused", paused)] {
        writeln!(page, "dsec_sandboxes{{state=\"{state}\"}} {count}")
            .expect("a string takes everything");
    }
    page
}
