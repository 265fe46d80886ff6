//! Files over HTTP: bodies are bytes, everything else is JSON.

use std::io;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::execs::send_body;
use super::{App, Asked, Project, agent};
use crate::container::files::{FileEntry, FileReply, FileRequest};
use crate::container::link::{Event, Link};
use crate::container::protocol::{Answer, Request, kind};
use crate::error::{ApiError, ErrorKind};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Place {
    path: String,
    #[serde(default)]
    depth: Option<u32>,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    len: Option<u64>,
    /// Octal.
    #[serde(default)]
    mode: Option<String>,
}

impl Place {
    fn mode(&self) -> Result<Option<u32>, ApiError> {
        let Some(text) = &self.mode else {
            return Ok(None);
        };
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o7777 => Ok(Some(mode)),
            _ => {
                let message = format!("`mode` of `{text}`: octal up to 7777 is expected");
                Err(ApiError::new(ErrorKind::Invalid, message))
            }
        }
    }
}

/// Entries that were asked for.
#[derive(Debug, Serialize)]
pub(super) struct Entries {
    entries: Vec<FileEntry>,
}

/// What was written.
#[derive(Debug, Serialize)]
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
    request: FileRequest,
) -> Result<FileReply, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    let mut link = Link::connect(&socket).await?;
    match link.request(&Request::files(request)).await? {
        Answer::Files { reply } => Ok(reply),
        other => Err(unexpected(&other)),
    }
}

async fn entries(
    app: &App,
    project: &Project,
    id: &str,
    request: FileRequest,
) -> Result<Json<Entries>, ApiError> {
    match ask(app, project, id, request).await? {
        FileReply::Entries(entries) => Ok(Json(Entries { entries })),
        FileReply::Done(_) => Ok(Json(Entries {
            entries: Vec::new(),
        })),
    }
}

/// `GET …/files/list?path=&depth=`.
pub(super) async fn list(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::List {
        path: place.path,
        depth: place.depth.unwrap_or(1),
    };
    entries(&app, &project, &id, request).await
}

/// `GET …/files/stat?path=`.
pub(super) async fn stat(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Json<Entries>, ApiError> {
    entries(&app, &project, &id, FileRequest::Stat { path: place.path }).await
}

/// `POST …/files/mkdir?path=&mode=`.
pub(super) async fn make_dir(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::MakeDir {
        mode: place.mode()?,
        path: place.path,
    };
    entries(&app, &project, &id, request).await
}

/// `DELETE …/files?path=`.
pub(super) async fn remove(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Json<Entries>, ApiError> {
    entries(
        &app,
        &project,
        &id,
        FileRequest::Remove { path: place.path },
    )
    .await
}

/// Body of `POST …/files/rename`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rename {
    from: String,
    to: String,
}

/// `POST …/files/rename`.
pub(super) async fn rename(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Asked(names): Asked<Rename>,
) -> Result<Json<Entries>, ApiError> {
    let request = FileRequest::Rename {
        from: names.from,
        to: names.to,
    };
    entries(&app, &project, &id, request).await
}

/// Sends what a request answers with as the body. An answer that breaks off breaks the body off: it never looks whole.
async fn download(
    app: &App,
    project: &Project,
    id: &str,
    request: FileRequest,
    kind: &'static str,
) -> Result<Response, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    download_from(&socket, &Request::files(request), kind).await
}

/// The same of an agent.
pub(super) async fn download_from(
    socket: &std::path::Path,
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

/// `GET …/files?path=&offset=&len=`.
pub(super) async fn read(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Read {
        path: place.path,
        offset: place.offset,
        len: place.len,
    };
    download(&app, &project, &id, request, "application/octet-stream").await
}

/// `GET …/tree?path=`: a tar stream.
pub(super) async fn pack(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
) -> Result<Response, ApiError> {
    let request = FileRequest::Pack { path: place.path };
    download(&app, &project, &id, request, "application/x-tar").await
}

async fn upload(
    app: &App,
    project: &Project,
    id: &str,
    request: FileRequest,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    let (_, socket) = agent(app, project, id).await?;
    let mut link = Link::connect(&socket).await?;
    let payload = serde_json::to_vec(&Request::files(request))
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

/// `PUT …/files?path=&mode=`.
pub(super) async fn write(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    let request = FileRequest::Write {
        mode: place.mode()?,
        path: place.path,
    };
    upload(&app, &project, &id, request, body).await
}

/// `PUT …/tree?path=`: a tar stream.
pub(super) async fn unpack(
    State(app): State<App>,
    project: Project,
    Path(id): Path<String>,
    Query(place): Query<Place>,
    body: Body,
) -> Result<Json<Written>, ApiError> {
    upload(
        &app,
        &project,
        &id,
        FileRequest::Unpack { path: place.path },
        body,
    )
    .await
}
