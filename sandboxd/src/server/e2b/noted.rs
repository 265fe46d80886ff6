//! E2B's requests in the trajectory: written down as the native requests that do the same, so that a replay can send them.
//!
//! These clients name no requests, so none of them is ever answered from there.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::super::recorded::{self, Seen};
use super::Refused;
use super::connect::RpcError;
use crate::error::{ApiError, ErrorKind};
use crate::ids;
use crate::sandboxes::{Service, blocking};
use crate::trajectory::event::{Asked, Outcome, Upload};
use crate::trajectory::{Begun, Came, Ticket};

/// How E2B's clients are refused.
pub(super) trait Refusal: From<ApiError> {
    /// The status, and why.
    fn told(&self) -> (StatusCode, String);
}

impl Refusal for RpcError {
    fn told(&self) -> (StatusCode, String) {
        (self.status(), self.to_string())
    }
}

impl Refusal for Refused {
    fn told(&self) -> (StatusCode, String) {
        (self.status, self.message.clone())
    }
}

/// A native request below a sandbox: its method, its path, and its body if that is JSON.
pub(super) fn native(method: &str, path: &str, body: Value) -> Asked {
    Asked {
        method: method.to_owned(),
        path: path.to_owned(),
        body: Some(body).filter(|body| !body.is_null()),
    }
}

/// A native request about a file.
pub(super) fn of_file(method: &str, below: &str, path: &str, user: &str) -> Asked {
    let at = format!("{below}?path={}&user={}", quoted(path), quoted(user));
    native(method, &at, Value::Null)
}

/// As a value of a query.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// A request that is being carried out. Dropped before its end (the client went away), what became of it is not known.
pub(super) struct Noted {
    service: Arc<Service>,
    ticket: Option<Ticket>,
    /// It replaces a file at a stroke: refused, it has done nothing, and its bytes need not be kept.
    puts: bool,
}

impl Noted {
    /// Writes it down.
    pub(super) async fn begin(
        service: &Arc<Service>,
        sandbox: &str,
        asked: Asked,
    ) -> Result<Self, ApiError> {
        let puts = asked.method == "PUT";
        let (writer, id) = (Arc::clone(service), sandbox.to_owned());
        let begun =
            blocking(move || Ok(writer.trajectory().begin(&id, &ids::random(), asked)?)).await?;
        let Begun::New(ticket) = begun else {
            let message = "a name that was made up just now is known already";
            return Err(ApiError::new(ErrorKind::InfraFailed, message));
        };
        Ok(Self {
            service: Arc::clone(service),
            ticket: Some(ticket),
            puts,
        })
    }

    /// Writes down what became of it.
    pub(super) async fn end<T, E: Refusal>(
        mut self,
        result: &Result<T, E>,
        upload: Option<(Upload, Came)>,
    ) {
        let Some(ticket) = self.ticket.take() else {
            return;
        };
        let (outcome, status, reply) = match result {
            Ok(_) => (Outcome::Done, StatusCode::OK, Value::Null),
            Err(error) => {
                let (status, message) = error.told();
                let outcome = match status {
                    StatusCode::SERVICE_UNAVAILABLE => Outcome::NotDone,
                    _ if self.puts => Outcome::NotDone,
                    _ => Outcome::Done,
                };
                (outcome, status, json!({"error": message}))
            }
        };
        let result = (outcome, status.as_u16(), reply);
        recorded::finish(&self.service, &ticket, result, upload).await;
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(ticket) = &self.ticket {
            self.service.trajectory().leave_open(ticket);
        }
    }
}

/// Writes a request down, carries it out, and writes down what became of it.
pub(super) async fn noted<T, E: Refusal>(
    service: &Arc<Service>,
    sandbox: &str,
    asked: Asked,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let noted = Noted::begin(service, sandbox, asked).await?;
    let result = work.await;
    noted.end(&result, None).await;
    result
}

/// The same for a request that comes with bytes.
pub(super) async fn noted_with<T, E: Refusal>(
    service: &Arc<Service>,
    sandbox: &str,
    (asked, bytes): (Asked, Bytes),
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let noted = Noted::begin(service, sandbox, asked).await?;
    let mut seen = Seen::new(service, sandbox);
    seen.see(&bytes);
    let result = work.await;
    noted.end(&result, Some(seen.upload())).await;
    result
}
