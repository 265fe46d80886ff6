//! Ports of sandboxes from outside: a request that names one goes to what listens there, on the sandbox's own loopback.
//!
//! A port is named by the host (`PORT-ID.DOMAIN`, as `get_host` tells it) or by headers. Where the daemon has keys, so does this:
//! the sandbox's traffic token is needed, and is not passed on. WebSockets (and every other upgrade) go through.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;

use super::access::{self, SANDBOX, TRAFFIC};
use super::{App, ENVD_PORT, Refused};
use crate::api::State as Life;
use crate::container::link;
use crate::error::ApiError;
use crate::keys;
use crate::sandboxes::{InUse, blocking};

/// Headers that name the port and show the right to it: for us, not for what listens.
const OURS: [&str; 4] = [
    SANDBOX,
    "e2b-sandbox-port",
    "e2b-traffic-access-token",
    "x-access-token",
];

/// The sandbox and port that a request names.
fn target(headers: &HeaderMap) -> Option<(String, u16)> {
    if let Some(port) = access::header(headers, "e2b-sandbox-port") {
        let id = access::header(headers, SANDBOX)?;
        return Some((id.to_owned(), port.parse().ok()?));
    }
    let (label, _domain) = access::header(headers, "host")?.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    id.starts_with("sb-")
        .then(|| Some((id.to_owned(), port.parse().ok()?)))?
}

/// Passes a request on to a port if it names one; others go to the API.
pub(crate) async fn by_host(State(app): State<App>, mut request: Request, next: Next) -> Response {
    match target(request.headers()) {
        None => next.run(request).await,
        Some((id, ENVD_PORT)) => {
            if let Ok(id) = HeaderValue::from_str(&id) {
                request
                    .headers_mut()
                    .insert(HeaderName::from_static(SANDBOX), id);
            }
            next.run(request).await
        }
        Some((id, port)) => forward(&app, &id, port, request)
            .await
            .unwrap_or_else(IntoResponse::into_response),
    }
}

async fn forward(
    app: &App,
    id: &str,
    port: u16,
    mut request: Request,
) -> Result<Response, Refused> {
    let shown = access::header(request.headers(), "e2b-traffic-access-token").unwrap_or_default();
    let token = app.e2b.secret.token(TRAFFIC, id);
    if !app.keys.are_open() && !keys::same(shown.as_bytes(), token.as_bytes()) {
        let message = "the sandbox's traffic token is needed: `E2b-Traffic-Access-Token`";
        return Err(Refused::new(StatusCode::UNAUTHORIZED, message));
    }
    let gone = |message: String| Refused::new(StatusCode::BAD_GATEWAY, message);
    let sandbox = app
        .service
        .find_any(id)
        .filter(|s| s.info().state != Life::Gone);
    let sandbox = sandbox.ok_or_else(|| gone(format!("sandbox `{id}` is gone")))?;
    let socket = app.service.use_it(&sandbox).await?;
    let dialed = blocking(move || link::dial(&socket, port).map_err(ApiError::from)).await;
    let stream = dialed.map_err(|e| gone(e.message))?;
    let broken = |e: &dyn std::fmt::Display| gone(format!("port {port} of sandbox `{id}`: {e}"));
    let stream = stream.into_async().map_err(|e| broken(&e))?;
    let (mut sender, connection) = http1::handshake::<_, Body>(TokioIo::new(stream))
        .await
        .map_err(|e| broken(&e))?;
    let used = InUse::of(&sandbox);
    tokio::spawn(async move {
        let _used = used;
        // Its end is told to whoever waits for the answer.
        drop(connection.with_upgrades().await);
    });
    strip(app, request.headers_mut());
    let upgrades = request.headers().contains_key(header::UPGRADE);
    let from = upgrades.then(|| hyper::upgrade::on(&mut request));
    let mut response = sender.send_request(request).await.map_err(|e| broken(&e))?;
    if let Some(from) = from
        && response.status() == StatusCode::SWITCHING_PROTOCOLS
    {
        let to = hyper::upgrade::on(&mut response);
        let used = InUse::of(&sandbox);
        tokio::spawn(async move {
            let _used = used;
            if let (Ok(from), Ok(to)) = (from.await, to.await) {
                let (mut from, mut to) = (TokioIo::new(from), TokioIo::new(to));
                // Either end may break off at any time: then the other one is closed.
                drop(tokio::io::copy_bidirectional(&mut from, &mut to).await);
            }
        });
    }
    Ok(response.map(Body::new))
}

fn strip(app: &App, headers: &mut HeaderMap) {
    for name in OURS {
        headers.remove(name);
    }
    if !headers.contains_key(header::UPGRADE) {
        headers.remove(header::CONNECTION);
    }
    // A key of ours in a place where the sandbox would read it.
    let keys: &Arc<keys::Keys> = &app.keys;
    let known = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        keys.project(text.strip_prefix("Bearer ").unwrap_or(text))
            .is_some()
    };
    for name in ["x-api-key", "authorization"] {
        if headers.get(name).is_some_and(known) {
            headers.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(pairs: &[(&str, &str)]) -> Option<(String, u16)> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                value.parse().unwrap(),
            );
        }
        target(&headers)
    }

    #[test]
    fn hosts_and_headers_name_ports_and_other_requests_do_not() {
        let told = |id: &str, port| Some((id.to_owned(), port));
        assert_eq!(
            named(&[("host", "8000-sb-1f.localhost:7070")]),
            told("sb-1f", 8000)
        );
        assert_eq!(
            named(&[("e2b-sandbox-id", "sb-1"), ("e2b-sandbox-port", "49983")]),
            told("sb-1", 49983)
        );
        assert_eq!(named(&[("e2b-sandbox-id", "sb-1")]), None);
        for host in [
            "127.0.0.1:7070",
            "localhost:7070",
            "70000-sb-1.localhost",
            "x-sb-1.localhost",
            "8000-other.localhost",
            "sandboxd",
        ] {
            assert_eq!(named(&[("host", host)]), None, "{host}");
        }
    }
}
