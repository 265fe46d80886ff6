//! Files over HTTP: bodies are bytes, everything else is JSON.

use std::io;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};

use super::execs::{FRAMES, KEEPALIVE, framed, send_body};
use super::openapi::Failures;
use super::{App, Asked, Project, Told, agent};
use crate::container::files::{FileEntry, FileReply, FileRequest};
use crate::container::link::{Event, Link};
use crate::container::protocol::{Answer, Request, kind};
use crate::error::{ApiError, ErrorKind};

/// A path. An empty one would mean the root to some calls and nothing to others.
fn named<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let path = String::deserialize(deserializer)?;
    if path.is_empty() {
        return Err(serde::de::Error::custom("`path` is empty"));
    }
    Ok(path)
}

/// A place in the sandbox.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct OfPath {
    #[serde(deserialize_with = "named")]
    #[param(min_length = 1)]
    path: String,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    #[param(required = false)]
    user: Option<String>,
}

/// A folder, and how far down.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Listing {
    #[serde(deserialize_with = "named")]
    #[param(min_length = 1)]
    path: String,
    /// 1: its own entries (also without it), 2: theirs too, and so on.
    #[serde(default)]
    #[param(required = false)]
    depth: Option<u32>,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    #[param(required = false)]
    user: Option<String>,
}

/// Part of a file.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    #[serde(deserialize_with = "named")]
    #[param(min_length = 1)]
    path: String,
    /// From which byte on.
    #[serde(default)]
    #[param(format = "uint64")]
    offset: u64,
    /// How many bytes at most.
    #[serde(default)]
    #[param(format = "uint64")]
    len: Option<u64>,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    #[param(required = false)]
    user: Option<String>,
}

/// A place, and its permissions.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct WithMode {
    #[serde(deserialize_with = "named")]
    #[param(min_length = 1)]
    path: String,
    /// Octal.
    #[serde(default)]
    #[param(pattern = "^[0-7]{1,4}$")]
    mode: Option<String>,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    #[param(required = false)]
    user: Option<String>,
}

impl WithMode {
    fn mode(&self) -> Result<Option<u32>, ApiError> {
        let Some(text) = &self.mode else {
            return Ok(None);
        };
        // Digits alone: a sign would be taken by the parser.
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        match u32::from_str_radix(text, 8) {
            Ok(mode) if digits && mode <= 0o7777 => Ok(Some(mode)),
            _ => {
                let message = format!("`mode` of `{text}`: octal up to 7777 is expected");
                Err(ApiError::new(ErrorKind::Invalid, message))
            }
        }
    }
}

/// What is watched.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Watched {
    #[serde(deserialize_with = "named")]
    #[param(min_length = 1)]
    path: String,
    /// Folders below it too.
    #[serde(default)]
    recursive: bool,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    #[param(required = false)]
    user: Option<String>,
}

/// Entries that were asked for.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Entries {
    entries: Vec<FileEntry>,
}

/// What was written.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Written {
    bytes: u64,
}

fn unexpected(answer: &impl std::fmt::Debug) -> ApiError {
    ApiError::new(
        ErrorKind::InfraFailed,
        format!("the agent answered {answer:?}"),
    )
}

async fn ask(
    app: &App,
    project: &Project,
    id: &str,
    request: Request,
) -> Result<FileReply, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    let mut link = Link::connect(&socket).await?;
    match link.request(&request).await? {
        Answer::Files { reply } => Ok(reply),
        other => Err(unexpected(&other)),
    }
}

async fn entries(
    app: &App,
    project: &Project,
    id: &str,
    request: Request,
) -> Result<Json<Entries>, ApiError> {
    match ask(app, project, id, request).await? {
        FileReply::Entries(entries) => Ok(Json(Entries { entries })),
        FileReply::Done(_) => Ok(Json(Entries {
            entries: Vec::new(),
        })),
    }
}

/// A folder's entries.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/list",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), Listing),
    responses((status = 200, description = "Done", body = Entries), Failures)
)]
pub(super) async fn list(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<Listing>>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::List {
        path: place.path,
        depth: place.depth.unwrap_or(1),
    };
    let request = Request::files_as(request, place.user);
    entries(&app, &project, &id, request).await
}

/// One entry; a link itself.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/stat",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), OfPath),
    responses((status = 200, description = "Done", body = Entries), Failures)
)]
pub(super) async fn stat(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<OfPath>>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::Stat { path: place.path };
    let request = Request::files_as(request, place.user);
    entries(&app, &project, &id, request).await
}

/// Make a folder, and those above it.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/files/mkdir",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), WithMode),
    responses((status = 200, description = "Done", body = Entries), Failures)
)]
pub(super) async fn make_dir(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<WithMode>>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::MakeDir {
        mode: place.mode()?,
        path: place.path,
    };
    let request = Request::files_as(request, place.user);
    entries(&app, &project, &id, request).await
}

/// Remove a file, a link, or a folder with all in it.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), OfPath),
    responses((status = 200, description = "Done", body = Entries), Failures)
)]
pub(super) async fn remove(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<OfPath>>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::Remove { path: place.path };
    let request = Request::files_as(request, place.user);
    entries(&app, &project, &id, request).await
}

/// Body of `POST …/files/rename`.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rename {
    from: String,
    to: String,
    /// As this user of the sandbox; without it as its root.
    #[serde(default)]
    user: Option<String>,
}

/// Rename; what is there is replaced.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/files/rename",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = Rename,
    responses((status = 200, description = "Done", body = Entries), Failures)
)]
pub(super) async fn rename(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(names): Asked<Rename>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::Rename {
        from: names.from,
        to: names.to,
    };
    let request = Request::files_as(request, names.user);
    entries(&app, &project, &id, request).await
}

/// Sends what a request answers with as the body. An answer that breaks off breaks the body off: it never looks whole.
async fn download(
    app: &App,
    project: &Project,
    id: &str,
    request: Request,
    kind: &'static str,
) -> Result<Response, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    download_from(&socket, &request, kind).await
}

/// The same of an agent.
pub(super) async fn download_from(
    socket: &crate::backend::Door,
    request: &Request,
    kind: &'static str,
) -> Result<Response, ApiError> {
    let mut link = Link::connect(socket).await?;
    match link.request(request).await? {
        Answer::Ok | Answer::Files { .. } => {}
        other => return Err(unexpected(&other)),
    }
    let pieces = futures_util::stream::unfold(Some(link), |link| async move {
        let mut link = link?;
        match link.next().await {
            Ok(Event::Data(bytes)) => Some((Ok(Bytes::from(bytes)), Some(link))),
            Ok(Event::End) => None,
            Ok(other) => {
                let message = format!("the agent sent {other:?}");
                Some((Err(io::Error::other(message)), None))
            }
            Err(error) => Some((Err(io::Error::other(error)), None)),
        }
    });
    Ok(([("content-type", kind)], Body::from_stream(pieces)).into_response())
}

/// A file's bytes.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), Part),
    responses((status = 200, description = "Bytes", body = Vec<u8>, content_type = "application/octet-stream"), Failures)
)]
pub(super) async fn read(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<Part>>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Read {
        path: place.path,
        offset: place.offset,
        len: place.len,
    };
    let request = Request::files_as(request, place.user);
    download(&app, &project, &id, request, "application/octet-stream").await
}

/// A folder as a tar stream.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/tree",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), OfPath),
    responses((status = 200, description = "A tar stream", body = Vec<u8>, content_type = "application/x-tar"), Failures)
)]
pub(super) async fn pack(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<OfPath>>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Pack { path: place.path };
    let request = Request::files_as(request, place.user);
    download(&app, &project, &id, request, "application/x-tar").await
}

async fn upload(
    app: &App,
    project: &Project,
    id: &str,
    request: Request,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    let mut link = Link::connect(&socket).await?;
    let payload = serde_json::to_vec(&request)
        .map_err(|e| ApiError::new(ErrorKind::InfraFailed, e.to_string()))?;
    link.send(kind::REQUEST, &payload).await?;
    // If it breaks off, the link goes without its end frame, and nothing is put in place.
    let sent = send_body(&mut link, body).await;
    let ended = match sent {
        Ok(()) => link.send(kind::END, &[]).await.map_err(ApiError::from),
        Err(error) => Err(error),
    };
    // It may have refused while it was being sent to: its own words are better than a broken connection.
    match link.answer().await {
        Ok(Answer::Files {
            reply: FileReply::Done(bytes),
        }) if ended.is_ok() => Ok(Json(Written { bytes })),
        Ok(other) => {
            ended?;
            Err(unexpected(&other))
        }
        Err(error) => Err(error.into()),
    }
}

/// Replace a file's contents at a stroke.
#[utoipa::path(
    put,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), WithMode),
    request_body(content = Option<Vec<u8>>, content_type = "application/octet-stream"),
    responses((status = 200, description = "Done", body = Written), Failures)
)]
pub(super) async fn write(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<WithMode>>,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    let request = FileRequest::Write {
        mode: place.mode()?,
        path: place.path,
    };
    let request = Request::files_as(request, place.user);
    upload(&app, &project, &id, request, body).await
}

/// Unpack a tar stream into a folder.
#[utoipa::path(
    put,
    path = "/v1/sandboxes/{id}/tree",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), OfPath),
    request_body(content = Option<Vec<u8>>, content_type = "application/octet-stream"),
    responses((status = 200, description = "Done", body = Written), Failures)
)]
pub(super) async fn unpack(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(place)): Told<Query<OfPath>>,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    let request = FileRequest::Unpack { path: place.path };
    let request = Request::files_as(request, place.user);
    upload(&app, &project, &id, request, body).await
}

/// Follow what changes in a folder: frames `A` (it is watched from now on), `D` (a change, JSON), `K` (nothing happened), `X` (the end).
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/watch",
    tag = "files",
    params(("id" = String, Path, description = "The sandbox"), Watched),
    responses((status = 200, description = "Frames", body = Vec<u8>, content_type = "application/vnd.dsec.frames"), Failures)
)]
pub(super) async fn watch(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Told(Query(watched)): Told<Query<Watched>>,
) -> Result<Response, ApiError> {
    let (_, socket) = agent(&app, &project, &id).await?;
    let mut link = Link::connect(&socket).await?;
    let request = FileRequest::Watch {
        path: watched.path,
        recursive: watched.recursive,
    };
    let request = Request::files_as(request, watched.user);
    match link.request(&request).await? {
        Answer::Ok => {}
        other => return Err(unexpected(&other)),
    }
    let pieces = futures_util::stream::unfold(Some(link), |link| async move {
        let mut link = link?;
        let ended = |error: ApiError| {
            let said = serde_json::to_vec(&error).unwrap_or_default();
            Some((framed(kind::EXIT, &[&said]), None))
        };
        match tokio::time::timeout(KEEPALIVE, link.next()).await {
            Err(_) => Some((framed(kind::KEEPALIVE, &[]), Some(link))),
            Ok(Ok(Event::Data(change))) => Some((framed(kind::DATA, &[&change]), Some(link))),
            Ok(Ok(other)) => ended(unexpected(&other)),
            Ok(Err(error)) => ended(error.into()),
        }
    });
    let begun = futures_util::stream::once(async { framed(kind::ANSWER, &[b"{}"]) });
    let all = begun.chain(pieces).map(Ok::<_, std::convert::Infallible>);
    Ok(([("content-type", FRAMES)], Body::from_stream(all)).into_response())
}
