//! The HTTP API: who asks, what for, and the answer. No decisions are made here.

mod ended;
mod execs;
mod files;
mod recorded;
mod trajectory;

pub(crate) use ended::take_over;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path as FilePath, PathBuf};
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
use crate::sandboxes::{Sandbox, Service};

/// Who may ask: keys and the project that each stands for.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    projects: HashMap<String, String>,
}

impl Keys {
    /// Reads a file of lines `KEY PROJECT`; empty lines and those that begin with `#` say nothing.
    ///
    /// # Errors
    /// When it cannot be read or a line is not of that form.
    pub fn read(path: &FilePath) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("cannot read `{}`: {e}", path.display()))?;
        let mut projects = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((key, project)) = line.split_once(char::is_whitespace) else {
                let number = number + 1;
                return Err(format!(
                    "`{}` line {number}: `KEY PROJECT` is expected",
                    path.display()
                ));
            };
            projects.insert(key.to_owned(), project.trim().to_owned());
        }
        Ok(Self { projects })
    }

    /// Whether anybody may ask.
    pub fn open_to_all(&self) -> bool {
        self.projects.is_empty()
    }
}

/// What every handler needs.
#[derive(Debug, Clone)]
pub(crate) struct App {
    service: Arc<Service>,
    keys: Arc<Keys>,
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
        if app.keys.open_to_all() {
            return Ok(Self("default".to_owned()));
        }
        let header = |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok());
        let bearer = header("authorization").and_then(|v| v.strip_prefix("Bearer "));
        let key = bearer.or_else(|| header("x-api-key")).unwrap_or_default();
        match app.keys.projects.get(key) {
            Some(project) => Ok(Self(project.clone())),
            None => Err(ApiError::new(
                ErrorKind::Unauthenticated,
                "an API key is needed: `Authorization: Bearer KEY` (clients read DSEC_API_KEY)",
            )),
        }
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
        if self.kind == ErrorKind::Unavailable {
            let headers = response.headers_mut();
            headers.insert("retry-after", axum::http::HeaderValue::from_static("1"));
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

/// All routes.
pub fn router(service: Arc<Service>, keys: Keys) -> Router {
    let app = App {
        service,
        keys: Arc::new(keys),
    };
    Router::new()
        .route("/health", get(|| async { StatusCode::NO_CONTENT }))
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
        .fallback(|| async { ApiError::new(ErrorKind::NotFound, "no such path in this API") })
        .with_state(app)
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
