//! Requests that change a sandbox go through its trajectory: written down before, answered from it when they come again.
//!
//! All but execs (see `ended`), which the agent remembers too. Whoever sends such a request may name it
//! (`?request_id=`); one without a name is written down all the same.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequestParts as _, Query, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde_json::Value;

use super::{App, Project, find};
use crate::error::{ApiError, ErrorKind};
use crate::ids;
use crate::sandboxes::{Service, blocking, on_disk};
use crate::trajectory::event::{Asked, Finished, Outcome, Upload};
use crate::trajectory::{BODY_BYTES_MAX, Begun, Came, Ticket};

/// Most bytes of a request that is JSON.
const REQUEST_BYTES_MAX: usize = 2 << 20;
/// Most bytes of an answer.
const REPLY_BYTES_MAX: usize = 64 << 20;
/// Tells that an answer was given before.
const AGAIN: &str = "dsec-again";

/// A request that is to be written down.
#[derive(Debug)]
struct Target {
    sandbox: String,
    request_id: String,
    /// Below the sandbox, with the query but for `request_id`.
    path: String,
    bytes: bool,
    method: Method,
}

impl Target {
    /// `None` for what changes nothing, or is written down elsewhere.
    fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let below = uri.path().strip_prefix("/v1/sandboxes/")?;
        let (sandbox, rest) = match below.split_once('/') {
            Some((id, _)) => (id, below.get(id.len()..).unwrap_or_default()),
            None => (below, ""),
        };
        let reads = method == Method::GET || method == Method::HEAD;
        if reads || rest == "/execs" || rest.ends_with("/resize") {
            return None;
        }
        let pairs = Query::<Vec<(String, String)>>::try_from_uri(uri).ok()?;
        let named = pairs.0.into_iter().find(|(name, _)| name == "request_id");
        let query = uri.query().unwrap_or_default().split('&');
        let query: Vec<&str> = query
            .filter(|part| !part.is_empty() && !part.starts_with("request_id="))
            .collect();
        let mark = if query.is_empty() { "" } else { "?" };
        Some(Self {
            sandbox: sandbox.to_owned(),
            request_id: named.map_or_else(ids::random, |(_, value)| value),
            path: format!("{rest}{mark}{}", query.join("&")),
            bytes: method == Method::PUT || rest.ends_with("/stdin"),
            method: method.clone(),
        })
    }
}

/// What was seen of a body of bytes that went by.
#[derive(Debug)]
pub(super) struct Seen {
    hasher: blake3::Hasher,
    bytes: u64,
    came: Came,
    ended: bool,
    broke: bool,
    service: Arc<Service>,
    sandbox: String,
}

type Shared = Arc<Mutex<Seen>>;

impl Seen {
    pub(super) fn new(service: &Arc<Service>, sandbox: &str) -> Self {
        Self {
            hasher: blake3::Hasher::new(),
            bytes: 0,
            came: Came::Bytes(Vec::new()),
            ended: false,
            broke: false,
            service: Arc::clone(service),
            sandbox: sandbox.to_owned(),
        }
    }

    pub(super) fn see(&mut self, piece: &Bytes) {
        self.hasher.update(piece);
        self.bytes += piece.len() as u64;
        let kept = match &mut self.came {
            Came::Bytes(bytes) if self.bytes <= BODY_BYTES_MAX as u64 => {
                bytes.extend_from_slice(piece);
                return;
            }
            Came::Bytes(bytes) => {
                let incoming = self.service.trajectory().incoming(&self.sandbox);
                incoming.map_err(ApiError::from).and_then(|mut incoming| {
                    let all = incoming.add(bytes).and_then(|_| incoming.add(piece));
                    Ok(all.map_err(on_disk)?.then_some(incoming))
                })
            }
            Came::File(incoming) => match incoming.add(piece) {
                Ok(true) => return,
                Ok(false) => Ok(None),
                Err(error) => Err(on_disk(error)),
            },
            Came::Nothing => return,
        };
        self.came = match kept {
            Ok(Some(incoming)) => Came::File(incoming),
            Ok(None) => Came::Nothing,
            // The request itself can be carried out: it is the replay that cannot, and says so.
            Err(error) => {
                tracing::warn!(id = self.sandbox, %error, "an upload is not kept for replays");
                Came::Nothing
            }
        };
    }

    pub(super) fn upload(&mut self) -> (Upload, Came) {
        let told = Upload {
            bytes: self.bytes,
            digest: self.hasher.finalize().to_hex().to_string(),
            kept: false,
        };
        (told, std::mem::replace(&mut self.came, Came::Nothing))
    }
}

fn watched(body: Body, seen: &Shared) -> Body {
    let at_end = Arc::clone(seen);
    let seen = Arc::clone(seen);
    let pieces = body.into_data_stream().map(move |piece| {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        match &piece {
            Ok(bytes) => seen.see(bytes),
            Err(_) => seen.broke = true,
        }
        piece
    });
    let end = futures_util::stream::poll_fn(move |_| {
        at_end.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        std::task::Poll::Ready(None)
    });
    Body::from_stream(pieces.chain(end))
}

/// See the head of this file.
pub(super) async fn layer(State(app): State<App>, request: Request, next: Next) -> Response {
    let Some(target) = Target::of(request.method(), request.uri()) else {
        return next.run(request).await;
    };
    let answered = answered(&app, target, request, next).await;
    answered.unwrap_or_else(IntoResponse::into_response)
}

async fn answered(
    app: &App,
    target: Target,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let project = Project::from_request_parts(&mut parts, app).await?;
    let id = find(app, &project, &target.sandbox)?.info().id;
    let (body, json) = if target.bytes {
        (body, None)
    } else {
        let all = to_bytes(body, REQUEST_BYTES_MAX).await;
        let all = all.map_err(|e| ApiError::new(ErrorKind::Invalid, e.to_string()))?;
        // What is no JSON is refused by whoever wants it.
        let json = serde_json::from_slice::<Value>(&all).ok();
        (Body::from(all), json)
    };
    let path = format!("/v1/sandboxes/{}{}", target.sandbox, target.path);
    parts.uri =
        Uri::try_from(path).map_err(|e| ApiError::new(ErrorKind::Invalid, e.to_string()))?;
    let asked = Asked {
        method: target.method.to_string(),
        path: target.path.clone(),
        body: json,
    };
    loop {
        let (service, id, asked) = (Arc::clone(&app.service), id.clone(), asked.clone());
        let name = target.request_id.clone();
        let begun = blocking(move || Ok(service.trajectory().begin(&id, &name, asked)?));
        match begun.await? {
            // It ends by telling, or by going away.
            Begun::Running(mut over) => drop(over.changed().await),
            Begun::Done(finished) => {
                same_body(&target, body, &finished).await?;
                return Ok(given_before(&finished));
            }
            Begun::Open(ticket) => {
                return Err(unknown(&app.service, &ticket, &asked_text(&target)).await);
            }
            Begun::New(ticket) => {
                let request = Request::from_parts(parts, body);
                return carry_out(&app.service, ticket, (target, request), next).await;
            }
        }
    }
}

fn asked_text(target: &Target) -> String {
    format!("{} {}", target.method, target.path)
}

/// Bytes that come again must be the same; they are read to the end, so that whoever sends them gets the answer.
async fn same_body(target: &Target, body: Body, finished: &Finished) -> Result<(), ApiError> {
    let Some(upload) = finished.upload.as_ref().filter(|_| target.bytes) else {
        return Ok(());
    };
    let mut hasher = blake3::Hasher::new();
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|e| {
            ApiError::new(ErrorKind::Invalid, format!("the request broke off: {e}"))
        })?;
        hasher.update(&piece);
    }
    if hasher.finalize().to_hex().as_str() == upload.digest {
        return Ok(());
    }
    let message = format!(
        "request `{}` had other bytes: use another id",
        target.request_id
    );
    Err(ApiError::new(ErrorKind::Conflict, message))
}

fn given_before(finished: &Finished) -> Response {
    let status = StatusCode::from_u16(finished.status);
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = if finished.reply.is_null() {
        status.into_response()
    } else {
        (status, axum::Json(&finished.reply)).into_response()
    };
    let again = header::HeaderValue::from_static("true");
    response.headers_mut().insert(AGAIN, again);
    response
}

/// A request that was begun by a daemon that is gone.
async fn unknown(service: &Arc<Service>, ticket: &Ticket, asked: &str) -> ApiError {
    let message = format!(
        "what became of request `{}` ({asked}) is not known: the daemon ended while it was carried out. Look at the sandbox, then use another `request_id`",
        ticket.request_id
    );
    let error = ApiError::new(ErrorKind::UnknownOutcome, message);
    let reply = serde_json::to_value(&error).unwrap_or_default();
    finish(
        service,
        ticket,
        (Outcome::Unknown, error.status(), reply),
        None,
    )
    .await;
    error
}

pub(super) async fn finish(
    service: &Arc<Service>,
    ticket: &Ticket,
    result: (Outcome, u16, Value),
    body: Option<(Upload, Came)>,
) {
    let (service, written) = (Arc::clone(service), ticket.clone());
    let written = blocking(move || Ok(service.trajectory().finish(&written, result, body)?));
    if let Err(error) = written.await {
        tracing::error!(id = ticket.sandbox, request = ticket.request_id, %error, "a result was not written down");
    }
}

/// Carries a request out, whether or not its client stays, and writes down what became of it.
async fn carry_out(
    service: &Arc<Service>,
    ticket: Ticket,
    (target, request): (Target, Request),
    next: Next,
) -> Result<Response, ApiError> {
    let seen = Arc::new(Mutex::new(Seen::new(service, &ticket.sandbox)));
    let (parts, body) = request.into_parts();
    let body = if target.bytes {
        watched(body, &seen)
    } else {
        body
    };
    let request = Request::from_parts(parts, body);
    let (service, kept) = (Arc::clone(service), ticket.clone());
    let done = tokio::spawn(async move {
        let (mut parts, body) = next.run(request).await.into_parts();
        let reply = to_bytes(body, REPLY_BYTES_MAX).await.unwrap_or_default();
        let status = parts.status.as_u16();
        let (outcome, upload) = {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let upload = (target.bytes && seen.ended).then(|| seen.upload());
            (outcome(&target, status, seen.broke), upload)
        };
        let told = serde_json::from_slice(&reply).unwrap_or_default();
        finish(&service, &ticket, (outcome, status, told), upload).await;
        parts.headers.remove(header::CONTENT_LENGTH);
        Response::from_parts(parts, Body::from(reply))
    });
    match done.await {
        Ok(response) => Ok(response),
        Err(error) => {
            let message = format!("request `{}` was lost: {error}", kept.request_id);
            Err(ApiError::new(ErrorKind::InfraFailed, message))
        }
    }
}

fn outcome(target: &Target, status: u16, broke: bool) -> Outcome {
    let input = target.path.contains("/stdin");
    match status {
        _ if broke && input => Outcome::Unknown,
        // Nothing was put in place.
        400.. if broke => Outcome::NotDone,
        503 => Outcome::NotDone,
        _ => Outcome::Done,
    }
}
