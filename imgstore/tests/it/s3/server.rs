//! An S3 server on a loopback port: `s3s-fs` on a folder, with a gate in front that notes every request and can answer in
//! its place.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use imgstore::credentials::environment::Environment;
use imgstore::origin::s3::{S3Address, S3Origin};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;

pub(crate) const KEY: &str = "AKIDEXAMPLE";
pub(crate) const SECRET: &str = "s3cr3t-key-of-the-test";

/// An answer that the gate gives itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Canned {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// No answer at all.
    pub(crate) hang: bool,
}

/// What came in.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) uri: String,
    pub(crate) headers: hyper::HeaderMap,
}

type Says = dyn Fn(&str, Option<&str>) -> Option<Canned> + Send + Sync;

/// Answers that depend on the path and the range that are asked for.
#[derive(Clone, Default)]
pub(crate) struct Twist(Option<Arc<Says>>);

impl Twist {
    pub(crate) fn new(
        says: impl Fn(&str, Option<&str>) -> Option<Canned> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(says)))
    }

    pub(crate) fn answer(&self, path: &str, headers: &hyper::HeaderMap) -> Option<Canned> {
        let range = headers.get("range").map(|value| value.to_str().unwrap());
        self.0.as_ref()?(path, range)
    }
}

impl std::fmt::Debug for Twist {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Twist").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug, Default)]
struct Gate {
    seen: Vec<Seen>,
    script: VecDeque<Canned>,
    twist: Twist,
}

/// A running server.
pub(crate) struct Server {
    pub(crate) port: u16,
    pub(crate) dir: tempfile::TempDir,
    gate: Arc<Mutex<Gate>>,
    // Ends the server with the value.
    _runtime: tokio::runtime::Runtime,
}

fn canned(answer: Canned) -> Response<s3s::Body> {
    let mut reply = Response::new(s3s::Body::from(answer.body));
    *reply.status_mut() = StatusCode::from_u16(answer.status).unwrap();
    for (name, value) in answer.headers {
        reply.headers_mut().insert(name, value.parse().unwrap());
    }
    reply
}

async fn answer(
    gate: Arc<Mutex<Gate>>,
    service: S3Service,
    request: Request<Incoming>,
) -> Result<Response<s3s::Body>, Infallible> {
    let next = {
        let mut gate = gate.lock().unwrap();
        gate.seen.push(Seen {
            method: request.method().to_string(),
            uri: request.uri().to_string(),
            headers: request.headers().clone(),
        });
        let twisted = gate.twist.answer(request.uri().path(), request.headers());
        twisted.or_else(|| gate.script.pop_front())
    };
    Ok(match next {
        Some(answer) if answer.hang => std::future::pending().await,
        Some(answer) => canned(answer),
        None => {
            // `s3s-fs` looks and then writes; S3 does both at once.
            static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
            let conditional = request.headers().contains_key("if-none-match");
            let _guard = match conditional {
                true => Some(ONE_AT_A_TIME.lock().await),
                false => None,
            };
            service.call(request.map(s3s::Body::from)).await.unwrap()
        }
    })
}

impl Server {
    /// A server with an empty bucket `layers` that knows one key.
    pub(crate) fn start() -> Self {
        Self::start_as(true)
    }

    /// A server that knows nobody and lets everybody in.
    pub(crate) fn start_for_all() -> Self {
        Self::start_as(false)
    }

    fn start_as(private: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("layers")).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(dir.path()).unwrap());
        if private {
            builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        }
        let service = builder.build();
        let gate = Arc::new(Mutex::new(Gate::default()));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::clone(&gate);
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).unwrap();
                let (gate, service) = (Arc::clone(&shared), service.clone());
                let serve =
                    service_fn(move |request| answer(Arc::clone(&gate), service.clone(), request));
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
            dir,
            gate,
            _runtime: runtime,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The next requests get these answers.
    pub(crate) fn script(&self, answers: impl IntoIterator<Item = Canned>) {
        self.gate.lock().unwrap().script.extend(answers);
    }

    /// From now on these answers come first.
    pub(crate) fn twist(&self, twist: Twist) {
        self.gate.lock().unwrap().twist = twist;
    }

    /// All requests since the last call.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.gate.lock().unwrap().seen)
    }

    /// `s3://layers/some/prefix` with the right key in the environment.
    pub(crate) fn origin(&self) -> S3Origin {
        self.origin_with([
            ("AWS_ACCESS_KEY_ID", KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ])
    }

    /// The same with these variables (three at most) and the server's address.
    pub(crate) fn origin_with<const N: usize>(&self, env: [(&str, &str); N]) -> S3Origin {
        let url = self.url();
        let mut pairs = [("AWS_ENDPOINT_URL", url.as_str()); 8];
        for (to, from) in pairs.iter_mut().zip(env) {
            *to = from;
        }
        let address = S3Address::parse("layers/some/prefix").unwrap();
        S3Origin::open(&address, &Environment::of(pairs)).unwrap()
    }
}
