//! A registry of a few objects with a token server beside it, on one loopback port, that does what a test wants: it counts,
//! refuses, redirects and lies. It understands reads only.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use imgstore::credentials::environment::Environment;
use imgstore::origin::oci::OciOrigin;
use imgstore::registry::reference::Repository;

use crate::s3::server::{Canned, Seen, Twist};

/// How the registry wants to know who asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Auth {
    #[default]
    Nobody,
    /// This `Authorization`.
    Exactly(String),
    /// A token of its token server.
    Token,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) auth: Auth,
    /// `WWW-Authenticate` headers in place of the usual one.
    pub(crate) challenges: Vec<String>,
    /// `Authorization` that the token server wants; empty for none.
    pub(crate) token_login: String,
    pub(crate) token_life: Duration,
    /// The token server refuses everybody.
    pub(crate) token_refused: bool,
    /// The token server takes requests and never answers.
    pub(crate) token_hangs: bool,
    /// Requests to the token server: query or form.
    pub(crate) token_calls: Vec<String>,
    valid: HashMap<String, Instant>,
    /// Blobs are at this server.
    pub(crate) blobs_at: Option<String>,
    files: HashMap<String, (String, Vec<u8>)>,
    pub(crate) seen: Vec<Seen>,
    pub(crate) script: VecDeque<Canned>,
    /// Answers to those who are allowed in, before all others.
    pub(crate) twist: Twist,
}

/// A running mock.
pub(crate) struct Mock {
    pub(crate) port: u16,
    state: Arc<Mutex<State>>,
    _runtime: tokio::runtime::Runtime,
}

type Reply = Response<Full<Bytes>>;

fn reply(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::copy_from_slice(body)));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in headers {
        let name: hyper::header::HeaderName = name.parse().unwrap();
        reply.headers_mut().append(name, value.parse().unwrap());
    }
    reply
}

fn authorization(headers: &HeaderMap) -> String {
    let value = headers.get("authorization");
    value.map_or(String::new(), |v| v.to_str().unwrap().to_owned())
}

impl State {
    fn token(&mut self, headers: &HeaderMap, asked: String) -> Reply {
        self.token_calls.push(asked);
        if self.token_refused || authorization(headers) != self.token_login {
            return reply(
                401,
                &[],
                br#"{"errors":[{"code":"UNAUTHORIZED","message":"who?"}]}"#,
            );
        }
        let token = format!("tok-{}", self.token_calls.len());
        self.valid
            .insert(token.clone(), Instant::now() + self.token_life);
        let life = self.token_life.as_secs();
        let body = format!(r#"{{"token":"{token}","expires_in":{life}}}"#);
        reply(200, &[], body.as_bytes())
    }

    /// The answer; none where the client is to wait.
    fn answer(&mut self, port: u16, parts: &Parts, body: &[u8]) -> Option<Reply> {
        let path = parts.uri.path().to_owned();
        if path == "/token" {
            let query = parts.uri.query().unwrap_or_default();
            let form = String::from_utf8_lossy(body);
            let asked = format!("{} {query}{form}", parts.method);
            let hangs = self.token_hangs;
            let reply = self.token(&parts.headers, asked);
            return (!hangs).then_some(reply);
        }
        self.seen.push(Seen {
            method: parts.method.to_string(),
            uri: parts.uri.to_string(),
            headers: parts.headers.clone(),
        });
        if !self.is_allowed(&parts.headers) {
            let realm = format!("http://127.0.0.1:{port}/token");
            let usual = format!(r#"Bearer realm="{realm}",service="mock",scope="x""#);
            let mut challenges = self.challenges.clone();
            if challenges.is_empty() {
                challenges.push(usual);
            }
            let named = |c| ("www-authenticate", c);
            let headers: Vec<(&str, &str)> =
                challenges.iter().map(String::as_str).map(named).collect();
            return Some(reply(401, &headers, b"{}"));
        }
        let twisted = self.twist.answer(&path, &parts.headers);
        let Some(canned) = twisted.or_else(|| self.script.pop_front()) else {
            return Some(self.file(&path, &parts.headers));
        };
        let own = canned.headers.iter();
        let headers: Vec<(&str, &str)> = own.map(|(n, v)| (*n, v.as_str())).collect();
        (!canned.hang).then(|| reply(canned.status, &headers, &canned.body))
    }

    fn is_allowed(&self, headers: &HeaderMap) -> bool {
        let shown = authorization(headers);
        match &self.auth {
            Auth::Nobody => true,
            Auth::Exactly(wanted) => shown == *wanted,
            Auth::Token => shown
                .strip_prefix("Bearer ")
                .and_then(|token| self.valid.get(token))
                .is_some_and(|until| Instant::now() < *until),
        }
    }

    fn file(&self, path: &str, headers: &HeaderMap) -> Reply {
        let Some((media_type, bytes)) = self.files.get(path) else {
            return reply(404, &[], b"{}");
        };
        if let (Some(place), true) = (&self.blobs_at, path.contains("/blobs/")) {
            return reply(
                307,
                &[("location", &format!("{place}{path}?sig=s1gnature"))],
                b"",
            );
        }
        let range = headers.get("range").map(|v| v.to_str().unwrap().to_owned());
        match range
            .as_deref()
            .and_then(|r| r.strip_prefix("bytes=")?.split_once('-'))
        {
            None => reply(200, &[("content-type", media_type)], bytes),
            Some((from, to)) => {
                let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
                if from >= bytes.len() {
                    return reply(416, &[], b"{}");
                }
                let to = to.min(bytes.len() - 1);
                let range = format!("bytes {from}-{to}/{}", bytes.len());
                reply(206, &[("content-range", &range)], &bytes[from..=to])
            }
        }
    }
}

async fn answer(
    port: u16,
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Reply, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body
        .collect()
        .await
        .map(|b| b.to_bytes())
        .unwrap_or_default();
    let answer = state.lock().unwrap().answer(port, &parts, &body);
    match answer {
        Some(reply) => Ok(reply),
        None => std::future::pending().await,
    }
}

impl Mock {
    pub(crate) fn start() -> Self {
        let state = Arc::new(Mutex::new(State {
            token_life: Duration::from_secs(600),
            ..State::default()
        }));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).unwrap();
                let state = Arc::clone(&shared);
                let serve = service_fn(move |request| answer(port, Arc::clone(&state), request));
                tokio::spawn(async move {
                    // A client may go away at any time.
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), serve)
                        .await
                        .ok();
                });
            }
        });
        Self {
            port,
            state,
            _runtime: runtime,
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn origin<const N: usize>(&self, env: [(&str, &str); N]) -> OciOrigin {
        let at = format!("127.0.0.1:{}/a/b", self.port);
        let repository = Repository::parse(&at, false).unwrap();
        OciOrigin::open(&repository, &Environment::of(env)).unwrap()
    }

    /// No token is good any more.
    pub(crate) fn revoke(&self) {
        self.state().valid.clear();
    }

    /// Serves `body` at `/v2/a/b/…`.
    pub(crate) fn put(&self, path: &str, media_type: &str, body: &[u8]) {
        let file = (media_type.to_owned(), body.to_vec());
        self.state().files.insert(format!("/v2/a/b/{path}"), file);
    }

    /// Serves nothing there any more.
    pub(crate) fn take(&self, path: &str) {
        self.state().files.remove(&format!("/v2/a/b/{path}"));
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state().seen)
    }
}
