//! Bytes of files: `GET` and `POST /files` of envd.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest as _, Multipart, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::{Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::execs::PIECE_BYTES;
use super::super::files::download_from;
use super::super::recorded::Seen;
use super::access::{self, Envd, Signature};
use super::filesystem::stat;
use super::noted::{Noted, of_file};
use super::{App, Refused};
use crate::container::files::{EntryKind, FileReply, FileRequest};
use crate::container::link::Link;
use crate::container::protocol::{self, Answer, kind};
use crate::error::ApiError;

/// Files of one upload.
const FILES_MAX: usize = 1000;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::server) struct Place {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<u64>,
}

impl Place {
    fn admit(&self, app: &App, headers: &HeaderMap, operation: &str) -> Result<Envd, Refused> {
        let signature = Signature {
            path: self.path.as_deref().unwrap_or_default(),
            operation,
            user: self.username.as_deref().unwrap_or_default(),
            signature: self.signature.as_deref(),
            expiration: self.signature_expiration,
        };
        let mut envd = access::admit(app, headers, &signature)?;
        if let Some(name) = self.username.as_ref().filter(|name| !name.is_empty()) {
            envd.user = Some(name.clone());
        }
        Ok(envd)
    }
}

/// `GET /files?path=&username=`.
pub(in crate::server) async fn read(
    State(app): State<App>,
    headers: HeaderMap,
    Query(place): Query<Place>,
) -> Result<Response, Refused> {
    let envd = place.admit(&app, &headers, "read")?;
    let path = place.path.filter(|path| !path.is_empty());
    let path = path.ok_or_else(|| Refused::new(StatusCode::BAD_REQUEST, "`path` is expected"))?;
    let request = protocol::Request::Files {
        request: FileRequest::Read {
            path,
            offset: 0,
            len: None,
        },
        user: Some(envd.user()),
    };
    let socket = app.service.use_it(&envd.sandbox).await?;
    Ok(download_from(&socket, &request, "application/octet-stream").await?)
}

/// `POST /files?path=&username=`: one file as it is, or several as a form.
pub(in crate::server) async fn write(
    State(app): State<App>,
    headers: HeaderMap,
    Query(place): Query<Place>,
    request: Request,
) -> Result<Json<Vec<Value>>, Refused> {
    let envd = place.admit(&app, &headers, "write")?;
    let bad = |message: String| Refused::new(StatusCode::BAD_REQUEST, message);
    if let Some(coding) = access::header(&headers, "content-encoding").filter(|c| *c != "identity")
    {
        return Err(bad(format!(
            "`Content-Encoding: {coding}` is not taken: send the bytes as they are"
        )));
    }
    if headers
        .keys()
        .any(|name| name.as_str().starts_with("x-metadata-"))
    {
        return Err(bad("metadata of files is not kept here".to_owned()));
    }
    let kind = access::header(&headers, "content-type").unwrap_or_default();
    let mut written = Vec::new();
    if !kind.starts_with("multipart/form-data") {
        let path = place
            .path
            .ok_or_else(|| bad("`path` is expected".to_owned()))?;
        let body = request.into_body().into_data_stream();
        written.push(put(&app, &envd, path, body).await?);
        return Ok(Json(written));
    }
    let mut form = Multipart::from_request(request, &app)
        .await
        .map_err(|e| bad(e.body_text()))?;
    while let Some(field) = form.next_field().await.map_err(|e| bad(e.body_text()))? {
        if field.name() != Some("file") {
            continue;
        }
        let named = field.file_name().map(str::to_owned);
        let path = place.path.clone().filter(|path| !path.is_empty()).or(named);
        let path = path.ok_or_else(|| bad("a file without a name".to_owned()))?;
        if written.len() == FILES_MAX || (place.path.is_some() && !written.is_empty()) {
            return Err(bad(format!(
                "more files than one for a `path`, or than {FILES_MAX}"
            )));
        }
        written.push(put(&app, &envd, path, field).await?);
    }
    if written.is_empty() {
        return Err(bad("a form part `file` is expected".to_owned()));
    }
    Ok(Json(written))
}

/// Writes a file, and that into the trajectory.
async fn put<E: std::fmt::Display>(
    app: &App,
    envd: &Envd,
    path: String,
    pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<Value, Refused> {
    let id = envd.sandbox.info().id;
    let native = of_file("PUT", "/files", &path, &envd.user());
    let noted = Noted::begin(&app.service, &id, native).await?;
    let mut seen = Seen::new(&app.service, &id);
    let written = send(app, envd, path, pieces, &mut seen).await;
    let upload = written.is_ok().then(|| seen.upload());
    noted.end(&written, upload).await;
    written
}

async fn send<E: std::fmt::Display>(
    app: &App,
    envd: &Envd,
    path: String,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    seen: &mut Seen,
) -> Result<Value, Refused> {
    let request = protocol::Request::Files {
        request: FileRequest::Write {
            path: path.clone(),
            mode: None,
        },
        user: Some(envd.user()),
    };
    let mut link = Link::connect(&app.service.use_it(&envd.sandbox).await?)
        .await
        .map_err(ApiError::from)?;
    let sent = async {
        let payload = serde_json::to_vec(&request).map_err(|e| e.to_string())?;
        link.send(kind::REQUEST, &payload)
            .await
            .map_err(|e| e.to_string())?;
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|e| format!("the request broke off: {e}"))?;
            seen.see(&piece);
            for part in piece.chunks(PIECE_BYTES) {
                link.send(kind::DATA, part)
                    .await
                    .map_err(|e| e.to_string())?;
            }
        }
        link.send(kind::END, &[]).await.map_err(|e| e.to_string())
    };
    let broken: Result<(), String> = sent.await;
    if let Err(message) = &broken
        && message.starts_with("the request broke off")
    {
        // Without an end nothing is put in place.
        return Err(Refused::new(StatusCode::BAD_REQUEST, message.clone()));
    }
    // It may have refused while it was being sent to: its own words are better than a broken connection.
    match link.answer().await.map_err(ApiError::from)? {
        Answer::Files {
            reply: FileReply::Done(_),
        } if broken.is_ok() => {}
        other => {
            let message = format!("the agent answered {other:?} ({broken:?})");
            return Err(Refused::new(StatusCode::INTERNAL_SERVER_ERROR, message));
        }
    }
    let entry = stat(app, envd, path)
        .await
        .map_err(|e| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?;
    let kind = if entry.kind == EntryKind::Directory {
        "dir"
    } else {
        "file"
    };
    Ok(json!({"path": entry.path, "name": entry.name, "type": kind}))
}
