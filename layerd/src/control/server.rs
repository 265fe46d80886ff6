//! The HTTP side: decode, call, encode. Whoever is neither root nor of layerd's user or group is refused.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use layerd_client::api::{
    ApiError, ErrorKind, Mount, MountRequest, Mounts, RecordedTrace, Stats, UmountRequest,
};
use layerd_client::cache::{CacheContents, PinRequest, Pinned};
use serde::Deserialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::cache;
use super::service::Service;

/// Mounts that are being made at a time. They may wait for an origin, each on a thread; the other threads of
/// [`BLOCKING_THREADS`] are for requests that do not.
const MOUNTS_AT_ONCE: usize = 64;
/// Threads for requests.
pub(super) const BLOCKING_THREADS: usize = 96;
static MOUNTING: Semaphore = Semaphore::const_new(MOUNTS_AT_ONCE);
/// Longest body of a request: a mount with the longest trace, each of whose quotes is written as two characters.
const BODY_BYTES_MAX: usize = 20 << 20;

/// An error with its HTTP status.
struct Refusal(ApiError);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self.0.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(self.0)).into_response()
    }
}

fn refuse(kind: ErrorKind, message: String) -> Refusal {
    Refusal(ApiError { kind, message })
}

/// Who is on the other end.
#[derive(Debug, Clone, Copy)]
struct Peer {
    uid: u32,
    gid: u32,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        // Nobody has the largest id, so that an unknown peer is refused.
        let nobody = Self {
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let cred = stream.io().peer_cred();
        cred.map_or(nobody, |cred| Self {
            uid: cred.uid(),
            gid: cred.gid(),
        })
    }
}

async fn check_peer(
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    if peer.uid == 0 || peer.uid == uid || peer.gid == gid {
        return next.run(request).await;
    }
    let message = format!(
        "user {} may not use layerd: expected root, user {uid} or group {gid}",
        peer.uid
    );
    refuse(ErrorKind::Forbidden, message).into_response()
}

/// Runs something that mounts or waits on its own thread.
async fn blocking<T: Send + 'static>(
    what: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(what).await {
        Ok(result) => result.map_err(Refusal),
        Err(error) => Err(refuse(
            ErrorKind::Internal,
            format!("a request failed inside layerd: {error}"),
        )),
    }
}

fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|e| {
        refuse(
            ErrorKind::Invalid,
            format!("the request's JSON is wrong: {e}"),
        )
    })
}

async fn mount(State(service): State<Arc<Service>>, body: Bytes) -> Result<Json<Mount>, Refusal> {
    let request: MountRequest = parse(&body)?;
    // It is never closed.
    let _place = MOUNTING.acquire().await.ok();
    blocking(move || service.mount(&request)).await.map(Json)
}

#[derive(Debug, Deserialize)]
struct UmountQuery {
    mountpoint: Option<PathBuf>,
}

async fn umount(
    State(service): State<Arc<Service>>,
    Query(query): Query<UmountQuery>,
    body: Bytes,
) -> Result<Json<Mount>, Refusal> {
    let mountpoint = match query.mountpoint {
        Some(mountpoint) => mountpoint,
        None => parse::<UmountRequest>(&body)?.mountpoint,
    };
    blocking(move || service.umount(&mountpoint))
        .await
        .map(Json)
}

async fn mounts(State(service): State<Arc<Service>>) -> Result<Json<Mounts>, Refusal> {
    blocking(move || {
        Ok(Mounts {
            mounts: service.mounts(),
        })
    })
    .await
    .map(Json)
}

async fn trace(
    State(service): State<Arc<Service>>,
    body: Bytes,
) -> Result<Json<RecordedTrace>, Refusal> {
    let request: UmountRequest = parse(&body)?;
    blocking(move || service.trace(&request.mountpoint))
        .await
        .map(Json)
}

async fn stats(State(service): State<Arc<Service>>) -> Result<Json<Stats>, Refusal> {
    blocking(move || Ok(service.stats())).await.map(Json)
}

async fn metrics(State(service): State<Arc<Service>>) -> Result<Response, Refusal> {
    let text = blocking(move || Ok(service.metrics())).await?;
    let kind = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, text).into_response())
}

async fn cache_contents(
    State(service): State<Arc<Service>>,
) -> Result<Json<CacheContents>, Refusal> {
    blocking(move || Ok(cache::contents(&service)))
        .await
        .map(Json)
}

async fn pin(State(service): State<Arc<Service>>, body: Bytes) -> Result<Json<Pinned>, Refusal> {
    let request: PinRequest = parse(&body)?;
    blocking(move || cache::pin(&service, &request))
        .await
        .map(Json)
}

async fn unpin(State(service): State<Arc<Service>>, body: Bytes) -> Result<Json<Pinned>, Refusal> {
    let request: PinRequest = parse(&body)?;
    blocking(move || cache::unpin(&service, &request))
        .await
        .map(Json)
}

async fn health() -> &'static str {
    "ok\n"
}

/// Serves metrics, and nothing else, to whoever can connect, until the process ends.
///
/// # Errors
/// What the socket said.
pub(crate) async fn serve_metrics(
    listener: TcpListener,
    service: Arc<Service>,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .with_state(service);
    axum::serve(listener, router).await
}

/// Serves until `stop` resolves, and then the requests that have come.
///
/// # Errors
/// What the socket said.
pub(crate) async fn serve(
    listener: UnixListener,
    service: Arc<Service>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/v1/mounts", post(mount))
        .route("/v1/mounts", delete(umount))
        .route("/v1/mounts", get(mounts))
        .route("/v1/trace", post(trace))
        .route("/v1/stats", get(stats))
        .route("/v1/cache", get(cache_contents))
        .route("/v1/cache/pins", post(pin).delete(unpin))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .with_state(service)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn(check_peer));
    let router = router.into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, router)
        .with_graceful_shutdown(stop)
        .await
}
