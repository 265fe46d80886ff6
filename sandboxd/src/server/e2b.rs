//! E2B's interface, so that its clients work as they are: the REST API that makes sandboxes, and `envd`, which in E2B runs in each
//! sandbox and here is served by the daemon on its behalf.
//!
//! `access` says who may, `rest` has the sandboxes, `connect` the RPC protocol with its JSON coding (decision 0019), `process`,
//! `filesystem`, `watchers` and `files` are envd, `ports` leads to what listens in a sandbox; `noted` writes down what they change. What is
//! covered is told in `docs/sandbox.md`.

mod access;
mod connect;
mod files;
mod filesystem;
mod noted;
mod ports;
mod process;
mod rest;
mod watchers;

use std::io;
use std::path::Path;

use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use serde_json::json;

use super::App;
use crate::error::{ApiError, ErrorKind};
use crate::secret::Secret;
pub(crate) use ports::by_host;

/// The envd whose interface is spoken: clients switch features on by it. Later ones have metadata of files (0.6.2) and entries in
/// events (0.6.3), which are not there.
const ENVD_VERSION: &str = "0.6.1";
/// Where envd listens in E2B's sandboxes. Here it stands for the daemon.
const ENVD_PORT: u16 = 49983;
/// Most bytes of one RPC.
const RPC_BYTES_MAX: usize = 16 << 20;

/// What E2B's clients get that others do not need.
#[derive(Debug)]
pub(crate) struct Settings {
    secret: Secret,
    watchers: watchers::Watchers,
    /// What `get_host` ends with.
    domain: Option<String>,
    /// What the template `base` stands for.
    template: Option<String>,
}

impl Settings {
    /// # Errors
    /// See [`Secret::open`].
    pub(crate) fn open(
        state: &Path,
        domain: Option<String>,
        template: Option<String>,
    ) -> io::Result<Self> {
        Ok(Self {
            secret: Secret::open(state)?,
            watchers: watchers::Watchers::default(),
            domain,
            template,
        })
    }
}

/// An error as E2B's REST interfaces tell it.
#[derive(Debug)]
pub(super) struct Refused {
    status: StatusCode,
    message: String,
}

impl Refused {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }
}

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        let status = match error.kind {
            // To E2B's clients it is simply not there.
            ErrorKind::SandboxGone => StatusCode::NOT_FOUND,
            ErrorKind::Refused => StatusCode::BAD_REQUEST,
            _ => StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        };
        Self::new(status, error.message)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let body = json!({"code": self.status.as_u16(), "message": self.message});
        (self.status, Json(body)).into_response()
    }
}

/// The routes.
pub(super) fn router() -> Router<App> {
    let rpc = Router::new()
        .route("/process.Process/{method}", post(process::call))
        .route("/filesystem.Filesystem/{method}", post(filesystem::call))
        .layer(DefaultBodyLimit::max(RPC_BYTES_MAX));
    let files = Router::new()
        .route("/files", get(files::read).post(files::write))
        .layer(DefaultBodyLimit::disable());
    Router::new()
        .route("/sandboxes", post(rest::create))
        .route("/v2/sandboxes", get(rest::list))
        .route("/sandboxes/{id}", get(rest::show).delete(rest::kill))
        .route("/sandboxes/{id}/pause", post(rest::pause))
        .route("/sandboxes/{id}/resume", post(rest::resume))
        .route("/sandboxes/{id}/connect", post(rest::connect))
        .route("/sandboxes/{id}/timeout", post(rest::timeout))
        .route("/sandboxes/{id}/refreshes", post(rest::refresh))
        .route("/sandboxes/{id}/network", put(rest::network))
        .route("/sandboxes/{id}/metrics", get(rest::metrics))
        .route("/sandboxes/{id}/fork", post(rest::fork))
        .route("/sandboxes/{id}/snapshots", post(rest::snapshot))
        .route("/snapshots", get(rest::snapshots))
        .route("/templates/{id}", delete(rest::forget))
        .route("/health", get(access::health))
        .merge(rpc)
        .merge(files)
}
