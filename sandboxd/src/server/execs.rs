//! Execs over HTTP: run to the end, in the background, or as a stream of frames.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use serde::Deserialize;

use super::openapi::Failures;
use super::{App, Asked, Project, Told, agent, ended, find};
use crate::api::{ExecReply, ExecRequest, SignalRequest};
use crate::container::link::{Event, Link, LinkError};
use crate::container::protocol::{
    Answer, ExecInfo, ExecSpec, Exit, Outcome, Request, TerminalSize, frame, kind,
};
use crate::error::{ApiError, ErrorKind};
use crate::ids;
use crate::sandboxes::{InUse, Sandbox, Service};
use crate::trajectory::{Begun, Ticket};

/// What a stream of frames is called.
pub(super) const FRAMES: &str = "application/vnd.dsec.frames";
/// A stream in which nothing happens says so this often.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(15);
/// Most bytes of one frame of input.
pub(super) const PIECE_BYTES: usize = 128 << 10;

/// How often, and after which time each, it is looked whether a sandbox ends that does not answer.
const LOOKS_MAX: u32 = 50;
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Most bytes of a body that are read for nothing, so that its sender sees why.
const DRAIN_BYTES_MAX: usize = 256 << 20;

/// What an exec is in the agent's words.
fn spec_of(sandbox: &Sandbox, request: ExecRequest) -> Result<ExecSpec, ApiError> {
    let record = sandbox.record();
    let argv = match (request.cmd, request.args) {
        (Some(cmd), args) if args.is_empty() => vec!["/bin/sh".to_owned(), "-c".to_owned(), cmd],
        (None, args) if !args.is_empty() => args,
        _ => {
            let message = "an exec has either `cmd` or `args`";
            return Err(ApiError::new(ErrorKind::Invalid, message));
        }
    };
    let timeout_ms = match request.timeout {
        None => 0,
        Some(seconds) if seconds.is_finite() && seconds > 0.0 && seconds < 1e9 => {
            let millis = Duration::from_secs_f64(seconds).as_millis();
            u64::try_from(millis).unwrap_or(u64::MAX).max(1)
        }
        Some(seconds) => {
            let message = format!("`timeout` of {seconds}: seconds above 0 are expected");
            return Err(ApiError::new(ErrorKind::Invalid, message));
        }
    };
    let mut env = record.envs;
    env.extend(request.envs);
    Ok(ExecSpec {
        exec_id: request.request_id.unwrap_or_else(ids::random),
        argv,
        env,
        cwd: request.cwd.unwrap_or(record.cwd),
        user: request.user.unwrap_or(record.user),
        timeout_ms,
        stdin: request.stdin,
        pty: request.pty,
        open_files: 0,
    })
}

/// Run a command.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = ExecRequest,
    responses((status = 200, description = "How it ended, or (`stream`) frames as it runs", content((ExecReply = "application/json"), (Vec<u8> = "application/vnd.dsec.frames"))), Failures)
)]
pub(super) async fn start(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
    Asked(request): Asked<ExecRequest>,
) -> Result<Response, ApiError> {
    let sandbox = find(&app, &project, &id)?;
    let how = (request.stream, request.background);
    let mut spec = spec_of(&sandbox, request.clone())?;
    let begun = ended::begin(&app.service, &sandbox, &mut spec, request).await?;
    let (ticket, resumed) = match begun {
        Begun::Done(finished) => return ended::answer(&finished, how.0),
        Begun::New(ticket) => (Some(ticket), false),
        Begun::Open(ticket) => (Some(ticket), true),
        Begun::Running(_) => (None, true),
    };
    // On its own: a client that goes away must not leave a request that was begun and is not followed.
    let (service, exec) = (Arc::clone(&app.service), spec.exec_id.clone());
    let launched = tokio::spawn(async move {
        let launched = launch(&service, &sandbox, spec, (how.0, resumed)).await;
        if let (Err(error), Some(ticket)) = (&launched, &ticket) {
            return Err(ended::not_launched(&service, ticket, error, resumed).await);
        }
        let (link, answer) = launched?;
        let (link, pid) = (link, started(answer)?);
        Ok((sandbox, link, pid, ticket))
    });
    let launched = launched.await.unwrap_or_else(|e| {
        let message = format!("starting an exec broke off: {e}");
        Err(ApiError::new(ErrorKind::InfraFailed, message))
    });
    let (sandbox, link, pid, ticket) = launched?;
    follow(&app, sandbox, link, (exec, pid, ticket), how).await
}

/// Starts an exec in a sandbox; the connection to it and the agent's answer.
pub(super) async fn launch(
    service: &Arc<Service>,
    sandbox: &Arc<Sandbox>,
    spec: ExecSpec,
    (stream, resumed): (bool, bool),
) -> Result<(Link, Answer), ApiError> {
    let began = std::time::Instant::now();
    let socket = service.use_it(sandbox).await?;
    let failed = |e| gone(service, sandbox, e);
    let mut link = Link::connect(&socket).await.map_err(failed)?;
    let request = Request::Exec {
        spec: Box::new(spec),
        stream,
        resumed,
    };
    let answer = link.request(&request).await.map_err(failed)?;
    service.metrics.exec_started(began.elapsed());
    Ok((link, answer))
}

fn started(answer: Answer) -> Result<(i32, bool), ApiError> {
    let Answer::Started { pid, again } = answer else {
        let message = format!("the agent answered {answer:?}");
        return Err(ApiError::new(ErrorKind::InfraFailed, message));
    };
    Ok((pid, again))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct From {
    #[serde(default)]
    #[param(format = "uint64")]
    pub(super) stdout_from: u64,
    #[serde(default)]
    #[param(format = "uint64")]
    pub(super) stderr_from: u64,
}

/// Follow a command, as frames.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}/stream",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command, by its `request_id`"), From),
    responses((status = 200, description = "Frames", body = Vec<u8>, content_type = "application/vnd.dsec.frames"), Failures)
)]
pub(super) async fn attach(
    State(app): State<App>,
    project: Project,
    Told(Path((id, exec_id))): Told<Path<(String, String)>>,
    Told(Query(from)): Told<Query<From>>,
) -> Result<Response, ApiError> {
    attach_to(&app, find(&app, &project, &id)?, exec_id, from, true).await
}

/// Wait for a command's end.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command, by its `request_id`")),
    responses((status = 200, description = "Done", body = ExecReply), Failures)
)]
pub(super) async fn wait(
    State(app): State<App>,
    project: Project,
    Told(Path((id, exec_id))): Told<Path<(String, String)>>,
) -> Result<Response, ApiError> {
    let from = From {
        stdout_from: 0,
        stderr_from: 0,
    };
    attach_to(&app, find(&app, &project, &id)?, exec_id, from, false).await
}

/// An exec that the agent does not know any more may be written down.
async fn attach_to(
    app: &App,
    sandbox: Arc<Sandbox>,
    exec_id: String,
    from: From,
    stream: bool,
) -> Result<Response, ApiError> {
    match join(&app.service, &sandbox, &exec_id, (from, stream)).await {
        Ok((link, began)) => {
            follow(app, sandbox, link, (exec_id, began, None), (stream, false)).await
        }
        Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::SandboxGone) => {
            match ended::known(&app.service, &sandbox, &exec_id).await? {
                Some(finished) => ended::answer(&finished, stream),
                None => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

/// A connection to an exec that runs or is remembered; its process, and whether it was started before.
pub(super) async fn join(
    service: &Arc<Service>,
    sandbox: &Arc<Sandbox>,
    exec_id: &str,
    (from, stream): (From, bool),
) -> Result<(Link, (i32, bool)), ApiError> {
    service.use_it(sandbox).await?;
    join_quietly(service, sandbox, exec_id, (from, stream)).await
}

/// As [`join`], and a sandbox that is paused stays so: its agent answers all the same.
pub(super) async fn join_quietly(
    service: &Arc<Service>,
    sandbox: &Arc<Sandbox>,
    exec_id: &str,
    (from, stream): (From, bool),
) -> Result<(Link, (i32, bool)), ApiError> {
    let socket = service.door(sandbox)?;
    let failed = |e| gone(service, sandbox, e);
    let mut link = Link::connect(&socket).await.map_err(failed)?;
    let request = Request::Attach {
        exec_id: exec_id.to_owned(),
        stdout_from: from.stdout_from,
        stderr_from: from.stderr_from,
        stream,
    };
    let answer = link.request(&request).await.map_err(failed)?;
    Ok((link, started(answer)?))
}

async fn follow(
    app: &App,
    sandbox: Arc<Sandbox>,
    link: Link,
    (exec_id, (pid, again), ticket): (String, (i32, bool), Option<Ticket>),
    (stream, background): (bool, bool),
) -> Result<Response, ApiError> {
    let mut reply = ExecReply {
        exec_id,
        pid,
        again,
        exit: None,
        stdout: String::new(),
        stderr: String::new(),
        truncated: false,
    };
    if let Some(ticket) = &ticket
        && (stream || background)
    {
        ended::record(&app.service, &sandbox, ticket);
    }
    if stream {
        return Ok(frames(&app.service, sandbox, link, &reply));
    }
    if !background {
        let service = Arc::clone(&app.service);
        // On its own: what it did is written down, whether its client waits or not.
        let done = tokio::spawn(async move {
            let _used = InUse::of(&sandbox);
            finish(&service, &sandbox, link, &mut reply).await;
            match &ticket {
                Some(ticket) => ended::write_down(&service, ticket, &reply).await,
                None => ended::written_down(&service, &sandbox, &reply.exec_id).await,
            }
            reply
        });
        reply = done
            .await
            .map_err(|e| ApiError::new(ErrorKind::InfraFailed, format!("an exec was lost: {e}")))?;
    }
    Ok(Json(reply).into_response())
}

/// Waits for the end and takes what is kept of the output.
pub(super) async fn finish(
    service: &Service,
    sandbox: &Sandbox,
    mut link: Link,
    reply: &mut ExecReply,
) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let exit = loop {
        match link.next().await {
            Ok(Event::Stdout(_, bytes)) => stdout.extend(bytes),
            Ok(Event::Stderr(_, bytes)) => stderr.extend(bytes),
            Ok(Event::Exit(exit)) => break *exit,
            Ok(other) => {
                break lost(service, sandbox, &format!("the agent sent {other:?}")).await;
            }
            Err(error) => break lost(service, sandbox, &error.to_string()).await,
        }
    };
    let kept = (stdout.len() as u64, stderr.len() as u64);
    reply.truncated = kept.0 < exit.stdout_bytes || kept.1 < exit.stderr_bytes;
    reply.stdout = STANDARD.encode(&stdout);
    reply.stderr = STANDARD.encode(&stderr);
    reply.exit = Some(exit);
}

/// The end of an exec whose agent does not speak any more.
///
/// A sandbox whose first process is ending breaks connections before it has ended: so look again for a moment.
pub(super) async fn lost(service: &Service, sandbox: &Sandbox, error: &str) -> Exit {
    let mut reason = service.reason(sandbox);
    for _ in 0..LOOKS_MAX {
        if reason.is_some() {
            break;
        }
        tokio::time::sleep(LOOK_AGAIN).await;
        reason = service.reason(sandbox);
    }
    let (outcome, message) = match reason {
        Some(reason) => (Outcome::SandboxGone, reason),
        None => (Outcome::InfraFailed, error.to_owned()),
    };
    Exit {
        outcome,
        exit_code: -1,
        signal: None,
        stdout_bytes: 0,
        stderr_bytes: 0,
        open_streams: false,
        message: Some(message),
        duration_ms: 0,
    }
}

fn gone(service: &Service, sandbox: &Sandbox, error: LinkError) -> ApiError {
    match (&error, service.reason(sandbox)) {
        (LinkError::Gone(_), Some(reason)) => {
            let id = sandbox.info().id;
            ApiError::new(
                ErrorKind::SandboxGone,
                format!("sandbox `{id}` is gone: {reason}"),
            )
        }
        (LinkError::Gone(_), None) => ApiError::new(ErrorKind::InfraFailed, error.to_string()),
        _ => error.into(),
    }
}

pub(super) fn framed(kind: u8, parts: &[&[u8]]) -> Bytes {
    let mut bytes = Vec::new();
    frame(kind, parts, &mut bytes);
    bytes.into()
}

/// The rest of an exec as frames: the answer, output as it comes, its end.
fn frames(
    service: &Arc<Service>,
    sandbox: Arc<Sandbox>,
    link: Link,
    reply: &ExecReply,
) -> Response {
    let head = serde_json::json!({
        "exec_id": reply.exec_id, "pid": reply.pid, "again": reply.again,
    });
    let head = framed(kind::ANSWER, &[head.to_string().as_bytes()]);
    let (service, exec_id) = (Arc::clone(service), reply.exec_id.clone());
    let used = InUse::of(&sandbox);
    let rest = futures_util::stream::unfold(Some(link), move |link| {
        let _in_use = &used;
        let (service, sandbox) = (Arc::clone(&service), Arc::clone(&sandbox));
        let exec_id = exec_id.clone();
        async move {
            let mut link = link?;
            let event = tokio::time::timeout(KEEPALIVE, link.next()).await;
            let exit = match event {
                Err(_) => return Some((framed(kind::KEEPALIVE, &[]), Some(link))),
                Ok(Ok(Event::Stdout(at, bytes))) => {
                    let frame = framed(kind::STDOUT, &[&at.to_le_bytes(), &bytes]);
                    return Some((frame, Some(link)));
                }
                Ok(Ok(Event::Stderr(at, bytes))) => {
                    let frame = framed(kind::STDERR, &[&at.to_le_bytes(), &bytes]);
                    return Some((frame, Some(link)));
                }
                Ok(Ok(Event::Exit(exit))) => *exit,
                Ok(Ok(other)) => {
                    lost(&service, &sandbox, &format!("the agent sent {other:?}")).await
                }
                Ok(Err(error)) => lost(&service, &sandbox, &error.to_string()).await,
            };
            ended::written_down(&service, &sandbox, &exec_id).await;
            let exit = serde_json::to_vec(&exit).unwrap_or_default();
            Some((framed(kind::EXIT, &[&exit]), None))
        }
    });
    let head = futures_util::stream::once(async { head });
    let all = head.chain(rest).map(Ok::<_, Infallible>);
    ([("content-type", FRAMES)], Body::from_stream(all)).into_response()
}

/// All commands that are remembered.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "Done", body = Vec<ExecInfo>), Failures)
)]
pub(super) async fn list(
    State(app): State<App>,
    project: Project,
    Told(Path(id)): Told<Path<String>>,
) -> Result<Json<Vec<ExecInfo>>, ApiError> {
    let (_, socket) = agent(&app, &project, &id).await?;
    match Link::connect(&socket)
        .await?
        .request(&Request::List)
        .await?
    {
        Answer::Execs { execs } => Ok(Json(execs)),
        other => Err(ApiError::new(
            ErrorKind::InfraFailed,
            format!("the agent answered {other:?}"),
        )),
    }
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Input {
    /// Nothing follows.
    #[serde(default)]
    eof: bool,
}

/// Give a command input.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/stdin",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command, by its `request_id`"), Input),
    request_body(content = Option<Vec<u8>>, content_type = "application/octet-stream"),
    responses((status = 204, description = "Done"), Failures)
)]
pub(super) async fn stdin(
    State(app): State<App>,
    project: Project,
    Told(Path((id, exec_id))): Told<Path<(String, String)>>,
    Told(Query(input)): Told<Query<Input>>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let (_, socket) = agent(&app, &project, &id).await?;
    let mut link = Link::connect(&socket).await?;
    link.request(&Request::Stdin { exec_id }).await?;
    send_body(&mut link, body).await?;
    if input.eof {
        link.send(kind::END, &[]).await?;
    }
    link.finish().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends a request's body as frames of data.
pub(super) async fn send_body(link: &mut Link, body: Body) -> Result<(), ApiError> {
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|e| {
            ApiError::new(ErrorKind::Invalid, format!("the request broke off: {e}"))
        })?;
        for part in piece.chunks(PIECE_BYTES) {
            if let Err(error) = link.send(kind::DATA, part).await {
                drain(pieces).await;
                return Err(error.into());
            }
        }
    }
    Ok(())
}

/// Reads on for a while: a client that still sends does not see an answer, only a broken connection.
async fn drain(mut pieces: axum::body::BodyDataStream) {
    let mut drained = 0;
    while let Some(Ok(piece)) = pieces.next().await {
        drained += piece.len();
        if drained > DRAIN_BYTES_MAX {
            return;
        }
    }
}

/// Send a command a signal.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/signal",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command, by its `request_id`")),
    request_body = SignalRequest,
    responses((status = 204, description = "Done"), Failures)
)]
pub(super) async fn signal(
    State(app): State<App>,
    project: Project,
    Told(Path((id, exec_id))): Told<Path<(String, String)>>,
    Asked(request): Asked<SignalRequest>,
) -> Result<StatusCode, ApiError> {
    if !(1..=64).contains(&request.signal) {
        let message = format!("`signal` of {}: 1 to 64 are expected", request.signal);
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    let (_, socket) = agent(&app, &project, &id).await?;
    let request = Request::Signal {
        exec_id,
        signal: request.signal,
        tree: request.tree,
    };
    Link::connect(&socket).await?.request(&request).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Change a terminal's size.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/resize",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox"), ("exec" = String, Path, description = "The command, by its `request_id`")),
    request_body = TerminalSize,
    responses((status = 204, description = "Done"), Failures)
)]
pub(super) async fn resize(
    State(app): State<App>,
    project: Project,
    Told(Path((id, exec_id))): Told<Path<(String, String)>>,
    Asked(size): Asked<TerminalSize>,
) -> Result<StatusCode, ApiError> {
    let (_, socket) = agent(&app, &project, &id).await?;
    let request = Request::Resize { exec_id, size };
    Link::connect(&socket).await?.request(&request).await?;
    Ok(StatusCode::NO_CONTENT)
}
