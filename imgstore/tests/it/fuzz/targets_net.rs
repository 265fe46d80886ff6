//! Parsers of what servers say and of who we are there. A server of this process gives the input as the bytes of its answer; it
//! names no other server, and no target tries again.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use imgstore::credentials::environment::Environment;
use imgstore::format::bundle::Bundle;
use imgstore::format::names;
use imgstore::ids::Digest;
use imgstore::origin::oci::OciOrigin;
use imgstore::origin::s3::{S3Address, S3Origin};
use imgstore::origin::{ByteRange, Origin};
use imgstore::registry::reference::Repository;

use super::Target;
use super::targets::{self, told};

/// How long an answer may be waited for: some inputs promise more than comes.
const PATIENCE: Duration = Duration::from_secs(2);

/// A server that says the same to everybody, once, and hangs up.
struct Echo {
    port: u16,
    answer: Arc<Mutex<Vec<u8>>>,
}

impl Echo {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answer = Arc::new(Mutex::new(Vec::new()));
        let says = Arc::clone(&answer);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut head = Vec::new();
                let mut piece = [0; 4096];
                while !head.windows(4).any(|w| w == b"\r\n\r\n") {
                    match stream.read(&mut piece) {
                        Ok(len) if len > 0 => head.extend_from_slice(&piece[..len]),
                        _ => break,
                    }
                }
                let bytes = says.lock().unwrap_or_else(PoisonError::into_inner).clone();
                // A client that has seen enough may be gone.
                stream.write_all(&bytes).ok();
            }
        });
        Self { port, answer }
    }

    fn says(&self, bytes: &[u8]) {
        let mut answer = self.answer.lock().unwrap();
        answer.clear();
        // Nobody is sent elsewhere: a target talks to this process alone.
        let text = bytes.to_ascii_lowercase();
        if !text.windows(8).any(|w| w == b"location") {
            answer.extend_from_slice(bytes);
        }
    }
}

fn http(status: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let mut out = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    for header in headers {
        out.push_str(header);
        out.push_str("\r\n");
    }
    out.push_str("\r\n");
    [out.as_bytes(), body].concat()
}

fn odd_answers() -> Vec<Vec<u8>> {
    vec![
        http("404 Not Found", &[], b"{}"),
        http("503 Slow Down", &["Retry-After: 0"], b"later"),
        http(
            "401 Unauthorized",
            &["WWW-Authenticate: Basic realm=\"x\""],
            b"",
        ),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".to_vec(),
    ]
}

/// A range and a whole object, by the deadline.
fn read(origin: &dyn Origin) -> String {
    let deadline = Instant::now() + PATIENCE;
    let range = ByteRange { start: 2, len: 3 };
    let part = told(origin.fetch_within("packs/ab/x", range, deadline));
    let whole = told(origin.fetch_all_within("index.json", 100, deadline));
    if whole == "ok" { whole } else { part }
}

/// What S3 says: status, headers, XML.
pub(super) fn s3_reply() -> Target {
    let echo = Echo::start();
    let url = format!("http://127.0.0.1:{}", echo.port);
    let address = S3Address::parse("bucket/prefix").unwrap();
    let env = [
        ("AWS_ENDPOINT_URL", url.as_str()),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ];
    let origin = S3Origin::open(&address, &Environment::of(env)).unwrap();
    let modified = "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT";
    let xml = b"<Error><Code>SlowDown</Code><Message>no</Message></Error>";
    let mut corpus = odd_answers();
    corpus.extend([
        http("200 OK", &[modified, "ETag: \"x\""], b"0123456789"),
        http(
            "206 Partial Content",
            &[modified, "ETag: \"x\"", "Content-Range: bytes 2-4/10"],
            b"234",
        ),
        http(
            "403 Forbidden",
            &["Date: Sun, 06 Nov 1994 08:49:37 GMT"],
            xml,
        ),
    ]);
    targets::simple(corpus, move |bytes| {
        echo.says(bytes);
        read(&origin)
    })
}

/// What a registry says to a client that remembers nothing: manifests and blobs are the same bytes, so the blob never fits.
pub(super) fn oci_reply() -> Target {
    let echo = Echo::start();
    let at = format!("127.0.0.1:{}/a/b", echo.port);
    let repository = Repository::parse(&at, false).unwrap();
    let digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
    let record = format!(
        r#"{{"schemaVersion":2,"mediaType":"a/b","config":{{"mediaType":"a/b","digest":"sha256:{digest}","size":2}},"layers":[{{"mediaType":"a/b","digest":"sha256:{digest}","size":10}}],"annotations":{{"dev.dsec.object":"packs/ab/x","org.opencontainers.image.created":"2025-11-24T16:00:00Z"}}}}"#
    );
    let mut corpus = odd_answers();
    corpus.extend([
        http("200 OK", &["Content-Type: a/b"], record.as_bytes()),
        http(
            "206 Partial Content",
            &["Content-Range: bytes 2-4/10"],
            b"234",
        ),
        http(
            "400 Bad Request",
            &[],
            br#"{"errors":[{"code":"X","message":"y"}]}"#,
        ),
    ]);
    let origin = OciOrigin::open(&repository, &Environment::of([])).unwrap();
    targets::simple(corpus, move |bytes| {
        echo.says(bytes);
        let said = read(&origin);
        // A whole object needs two answers: here it is enough that a manifest was understood.
        if said.contains("Content-Range") || said.contains("offset 2") {
            return format!("ok: {said}");
        }
        said
    })
}

/// How a registry wants to know who asks. The token server that is named is this process, or refused.
pub(super) fn auth_challenge() -> Target {
    let echo = Echo::start();
    let port = echo.port;
    let at = format!("127.0.0.1:{port}/a/b");
    let repository = Repository::parse(&at, false).unwrap();
    let corpus = [
        r#"Basic realm="x""#.to_owned(),
        format!(r#"Bearer realm="http://127.0.0.1:{port}/token",service="s",scope="a,b""#),
        r#"Bearer realm="http://elsewhere.invalid/t", error="invalid_token""#.to_owned(),
        r#"Negotiate, Digest qop="auth, auth-int", Basic realm="a\"b""#.to_owned(),
        "Bearer".to_owned(),
    ];
    let corpus = corpus.map(String::into_bytes).to_vec();
    targets::simple(corpus, move |bytes| {
        let text = String::from_utf8_lossy(bytes).replace(['\r', '\n'], " ");
        // An encrypted connection could go to a host that a mutation made up.
        if text.to_ascii_lowercase().contains("https") {
            return "elsewhere".to_owned();
        }
        let header = format!("WWW-Authenticate: {text}");
        echo.says(&http("401 Unauthorized", &[&header], b"{}"));
        // A new one, which knows no way yet.
        let env = Environment::of([
            ("DSEC_REGISTRY_USERNAME", "me"),
            ("DSEC_REGISTRY_PASSWORD", "s3cret"),
        ]);
        let origin = OciOrigin::open(&repository, &env).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let said = told(origin.fetch_all_within("index.json", 100, deadline));
        assert!(!said.contains("s3cret") && said != "ok", "{said}");
        // All of it is refused here; what was understood shows in how.
        format!("ok: {said}")
    })
}

/// `config.json` of Docker. It cannot name a program to run: helpers are looked for in an empty folder.
pub(super) fn docker_config() -> Target {
    let echo = Echo::start();
    let at = format!("127.0.0.1:{}/a/b", echo.port);
    let repository = Repository::parse(&at, false).unwrap();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("config.json");
    let corpus = vec![
        format!(r#"{{"auths":{{"127.0.0.1:{}":{{"auth":"bWU6czNjcmV0"}}}}}}"#, echo.port).into_bytes(),
        format!(
            r#"{{"auths":{{"http://127.0.0.1:{}/v2/":{{"username":"me","password":"s3cret"}},"x":{{"identitytoken":"t"}}}}}}"#,
            echo.port
        )
        .into_bytes(),
        // Not base64. Mutation: its decoding is unwrapped.
        format!(r#"{{"auths":{{"127.0.0.1:{}":{{"auth":"bWU6#"}}}}}}"#, echo.port).into_bytes(),
        br#"{"auths":{},"HttpHeaders":{"a":"b"}}"#.to_vec(),
        b"{}".to_vec(),
    ];
    echo.says(&http(
        "401 Unauthorized",
        &["WWW-Authenticate: Basic realm=\"x\""],
        b"{}",
    ));
    targets::simple(corpus, move |bytes| {
        // Helpers are programs in PATH: a mutation must not find one.
        let text = String::from_utf8_lossy(bytes).to_ascii_lowercase();
        if text.contains("cred") || text.contains("\\u") {
            return "names a program".to_owned();
        }
        std::fs::write(&file, bytes).unwrap();
        let folder = home.path().display().to_string();
        let env = Environment::of([("DOCKER_CONFIG", folder.as_str())]);
        let origin = OciOrigin::open(&repository, &env).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let said = told(origin.fetch_all_within("index.json", 100, deadline));
        assert!(!said.contains("s3cret"), "{said}");
        format!("ok: {said}")
    })
}

/// The bundle of a layer; whether the digest in its head is made right.
pub(super) fn bundle() -> Target {
    let (origin, layer) = targets::origin();
    let bytes = origin.fetch_all(&names::bundle(&layer), 1 << 20).unwrap();
    Target {
        corpus: vec![bytes],
        fix: |bytes| {
            if bytes.len() >= 44 {
                let digest = *Digest::of(&bytes[44..]).as_bytes();
                bytes[12..44].copy_from_slice(&digest);
            }
        },
        run: Box::new(move |bytes| told(Bundle::parse(bytes, &layer))),
    }
}
