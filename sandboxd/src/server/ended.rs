//! Execs and the trajectory: each is written down before it starts, and its end whether or not a client waits for it.
//!
//! The agent remembers execs across a crash of the daemon. So one that has no result yet is asked for again there, by its name;
//! only what the agent cannot know any more is told as unknown.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use serde_json::Value;

use super::execs::{self, FRAMES, From, framed};
use crate::api::{ExecReply, ExecRequest};
use crate::container::protocol::{ExecSpec, Exit, Outcome as ExecOutcome, kind};
use crate::container::spool::HEAD_BYTES_MAX;
use crate::error::{ApiError, ErrorKind};
use crate::sandboxes::{Sandbox, Service, blocking};
use crate::trajectory::event::{Asked, Finished, Outcome};
use crate::trajectory::{Begun, Ticket};

/// How long an end waits to be written down before it is told.
const WRITING: Duration = Duration::from_secs(30);
/// Bytes of output in one frame.
const PIECE_BYTES: usize = 128 << 10;

/// Writes an exec down; its name is `spec`'s.
pub(super) async fn begin(
    service: &Arc<Service>,
    sandbox: &Arc<Sandbox>,
    spec: &mut ExecSpec,
    request: ExecRequest,
) -> Result<Begun, ApiError> {
    // How the answer is sent is no part of what is asked.
    let asked = ExecRequest {
        request_id: None,
        stream: false,
        background: false,
        ..request
    };
    let mut body = serde_json::to_value(&asked).unwrap_or_default();
    if let Value::Object(fields) = &mut body {
        for name in ["request_id", "stream", "background"] {
            fields.remove(name);
        }
    }
    let asked = Asked {
        method: "POST".to_owned(),
        path: "/execs".to_owned(),
        body: Some(body),
    };
    let (service, id, name) = (Arc::clone(service), sandbox.info().id, spec.exec_id.clone());
    blocking(move || Ok(service.trajectory().begin(&id, &name, asked)?)).await
}

/// The answer that an exec once got.
pub(super) fn answer(finished: &Finished, stream: bool) -> Result<Response, ApiError> {
    let bad = |e: serde_json::Error| ApiError::new(ErrorKind::InfraFailed, e.to_string());
    if finished.outcome != Outcome::Done || finished.status >= 300 {
        let error = serde_json::from_value(finished.reply.clone());
        return Err(error.map_err(bad)?);
    }
    let mut reply: ExecReply = serde_json::from_value(finished.reply.clone()).map_err(bad)?;
    reply.again = true;
    if !stream {
        return Ok(Json(reply).into_response());
    }
    let head = serde_json::json!({
        "exec_id": reply.exec_id, "pid": reply.pid, "again": true,
    });
    let mut all = vec![framed(kind::ANSWER, &[head.to_string().as_bytes()])];
    if let Some(exit) = &reply.exit {
        output(kind::STDOUT, &reply.stdout, exit.stdout_bytes, &mut all);
        output(kind::STDERR, &reply.stderr, exit.stderr_bytes, &mut all);
        let exit = serde_json::to_vec(exit).unwrap_or_default();
        all.push(framed(kind::EXIT, &[&exit]));
    }
    let all = futures_util::stream::iter(all).map(Ok::<_, std::convert::Infallible>);
    Ok(([("content-type", FRAMES)], Body::from_stream(all)).into_response())
}

/// What is kept of a stream as frames, with the offsets that it had.
fn output(kind: u8, kept: &str, total: u64, frames: &mut Vec<Bytes>) {
    let kept = STANDARD.decode(kept).unwrap_or_default();
    let whole = kept.len() as u64 == total;
    let (head, tail) = kept.split_at(if whole {
        kept.len()
    } else {
        HEAD_BYTES_MAX.min(kept.len())
    });
    for (mut at, bytes) in [(0, head), (total - tail.len() as u64, tail)] {
        for piece in bytes.chunks(PIECE_BYTES) {
            frames.push(framed(kind, &[&at.to_le_bytes(), piece]));
            at += piece.len() as u64;
        }
    }
}

/// What is written down of an exec.
pub(super) async fn known(
    service: &Arc<Service>,
    sandbox: &Arc<Sandbox>,
    exec_id: &str,
) -> Result<Option<Finished>, ApiError> {
    let (service, id, exec_id) = (Arc::clone(service), sandbox.info().id, exec_id.to_owned());
    blocking(move || Ok(service.trajectory().result(&id, &exec_id)?)).await
}

/// An exec that the agent was not brought to start: what that means for its request. The error to answer with.
pub(super) async fn not_launched(
    service: &Arc<Service>,
    ticket: &Ticket,
    error: &ApiError,
    resumed: bool,
) -> ApiError {
    let unknown = |why: &str| {
        let message = format!(
            "what became of request `{}` is not known: {why}. Look at the sandbox, then use another `request_id`",
            ticket.request_id
        );
        (
            Outcome::Unknown,
            ApiError::new(ErrorKind::UnknownOutcome, message),
        )
    };
    let (outcome, error) = match error.kind {
        ErrorKind::UnknownOutcome => unknown(&error.message),
        ErrorKind::SandboxGone if resumed => unknown(&error.message),
        ErrorKind::Exhausted | ErrorKind::Unavailable => (Outcome::NotDone, error.clone()),
        // The agent may have started it: whoever asks again finds out.
        ErrorKind::InfraFailed => {
            service.trajectory().leave_open(ticket);
            return error.clone();
        }
        _ => (Outcome::Done, error.clone()),
    };
    let reply = serde_json::to_value(&error).unwrap_or_default();
    let status = error.status();
    finish(service, ticket, (outcome, status, reply)).await;
    error
}

async fn finish(service: &Arc<Service>, ticket: &Ticket, result: (Outcome, u16, Value)) {
    let (service, written) = (Arc::clone(service), ticket.clone());
    let written = blocking(move || Ok(service.trajectory().finish(&written, result, None)?));
    if let Err(error) = written.await {
        tracing::error!(id = ticket.sandbox, request = ticket.request_id, %error, "a result was not written down");
    }
}

/// Writes an exec's end down. If the agent did not say what it is, it can be asked again.
pub(super) async fn write_down(service: &Arc<Service>, ticket: &Ticket, reply: &ExecReply) {
    // Each exec comes by here once, however many clients follow it.
    if let Some(exit) = &reply.exit {
        service.metrics.exec_ended(exit);
    }
    let outcome = reply.exit.as_ref().map(|exit: &Exit| exit.outcome);
    if outcome.is_none() || outcome == Some(ExecOutcome::InfraFailed) {
        service.trajectory().leave_open(ticket);
        return;
    }
    let reply = serde_json::to_value(reply).unwrap_or_default();
    finish(service, ticket, (Outcome::Done, 200, reply)).await;
}

/// Waits until an exec's end is written down, by whoever does that: an end that was told is known from then on, whatever its client does
/// next (such as ending the sandbox).
pub(super) async fn written_down(service: &Arc<Service>, sandbox: &Sandbox, exec_id: &str) {
    let Some(mut over) = service.trajectory().running(&sandbox.info().id, exec_id) else {
        return;
    };
    // It ends by telling, or by going away.
    if tokio::time::timeout(WRITING, over.changed()).await.is_err() {
        tracing::warn!(
            id = sandbox.info().id,
            exec = exec_id,
            "an exec's end is told and not written down yet"
        );
    }
}

/// Follows an exec to its end, for the trajectory alone.
pub(super) fn record(service: &Arc<Service>, sandbox: &Arc<Sandbox>, ticket: &Ticket) {
    let (service, sandbox, ticket) = (Arc::clone(service), Arc::clone(sandbox), ticket.clone());
    tokio::spawn(async move {
        let from = From {
            stdout_from: 0,
            stderr_from: 0,
        };
        // Not a use of the sandbox: it may be paused, or idle, while something runs in the background.
        let joined = execs::join_quietly(&service, &sandbox, &ticket.request_id, (from, false));
        let mut reply = ExecReply {
            exec_id: ticket.request_id.clone(),
            pid: 0,
            again: false,
            exit: None,
            stdout: String::new(),
            stderr: String::new(),
            truncated: false,
        };
        match joined.await {
            Ok((link, (pid, _))) => {
                reply.pid = pid;
                execs::finish(&service, &sandbox, link, &mut reply).await;
                write_down(&service, &ticket, &reply).await;
            }
            // It had been started, and ended with its sandbox.
            Err(error) if error.kind == ErrorKind::SandboxGone => {
                reply.exit = Some(execs::lost(&service, &sandbox, &error.message).await);
                write_down(&service, &ticket, &reply).await;
            }
            Err(error) => {
                tracing::debug!(id = ticket.sandbox, exec = ticket.request_id, %error, "an exec is not followed");
                service.trajectory().leave_open(&ticket);
            }
        }
    });
}

/// Follows the execs that an earlier daemon left without a result. Needs a runtime.
pub(crate) fn take_over(service: &Arc<Service>) {
    for sandbox in service.living_sandboxes() {
        let id = sandbox.info().id;
        match service.trajectory().open_requests(&id) {
            Ok(open) => {
                for (ticket, asked) in open {
                    if asked.path == "/execs" && service.trajectory().resume(&ticket) {
                        record(service, &sandbox, &ticket);
                    }
                }
            }
            Err(error) => {
                tracing::error!(id, %error, "execs of an earlier daemon are not followed");
            }
        }
    }
}
