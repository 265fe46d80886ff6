//! GET over unencrypted HTTP/1.1 with as few threads and copies as there can be.
//!
//! A general blocking client hands every request to a runtime thread and back, which costs 0.2 ms (measured): much, when the
//! server is in the next rack and a reader waits. Here the calling thread drives the connection itself: a *lane* is
//! one connection with a runtime of its own that runs only during a request. Idle lanes are kept; a lane whose server has
//! closed it meanwhile is noticed by the failing request, which is then sent once more on a new one.
//! No redirects, no proxies, no encryption: the caller falls back to a general client where those are needed.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use hyper::header::{ACCEPT_ENCODING, HOST, RANGE, USER_AGENT};
use hyper::http::response::Parts;
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;

/// Lanes kept open while nobody uses them.
const IDLE_LANES_MAX: usize = 16;

/// Most memory taken because a server announces a long body; more comes with the bytes.
const FIRST_BYTES_MAX: usize = 4 << 20;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Longest waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// For a connection.
    pub(super) connect: Duration,
    /// For a whole request.
    pub(super) request: Duration,
}

/// One connection and what drives it.
#[derive(Debug)]
struct Lane {
    runtime: Runtime,
    sender: SendRequest<Empty<Bytes>>,
}

/// A web server without encryption.
#[derive(Debug)]
pub(super) struct PlainHttp {
    host: String,
    port: u16,
    authority: String,
    prefix: String,
    timeouts: Timeouts,
    idle: Mutex<Vec<Lane>>,
}

/// Status and headers, and at most so many bytes of the body as were asked for, plus one.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) parts: Parts,
    pub(super) body: Vec<u8>,
}

impl PlainHttp {
    /// The server of `url`; `None` where only a general client can speak to it.
    pub(super) fn new(url: &str, timeouts: Timeouts) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        if uri.scheme_str() != Some("http") || authority.as_str().contains('@') {
            return None;
        }
        let host = authority.host().trim_matches(['[', ']']);
        Some(Self {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            timeouts,
            idle: Mutex::new(Vec::new()),
        })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// GET of an object, or of the bytes that `range` (the header's value) names.
    ///
    /// # Errors
    /// What went wrong below HTTP.
    pub(super) fn get(
        &self,
        object: &str,
        range: Option<&str>,
        body_max: u64,
    ) -> Result<Reply, Failure> {
        if let Some(lane) = self.take_idle() {
            match self.exchange(lane, object, range, body_max) {
                Ok(reply) => return Ok(reply),
                Err(error) => tracing::debug!(object, %error, "an idle connection was closed"),
            }
        }
        let lane = self.connect()?;
        self.exchange(lane, object, range, body_max)
    }

    fn take_idle(&self) -> Option<Lane> {
        self.idle().pop()
    }

    fn connect(&self) -> Result<Lane, Failure> {
        let mut last: Failure = "the name has no address".into();
        for address in (&*self.host, self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.timeouts.connect) {
                Ok(stream) => return self.open_lane(stream),
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    fn open_lane(&self, stream: TcpStream) -> Result<Lane, Failure> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let sender = runtime.block_on(async {
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let (sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            // Ends with the lane; a failure is the request's to report.
            drop(tokio::spawn(connection));
            Ok::<_, Failure>(sender)
        })?;
        Ok(Lane { runtime, sender })
    }

    fn exchange(
        &self,
        lane: Lane,
        object: &str,
        range: Option<&str>,
        body_max: u64,
    ) -> Result<Reply, Failure> {
        let Lane {
            runtime,
            mut sender,
        } = lane;
        let mut request = Request::get(format!("{}/{object}", self.prefix))
            .header(HOST, &self.authority)
            .header(ACCEPT_ENCODING, "identity")
            .header(USER_AGENT, concat!("dsec/", env!("CARGO_PKG_VERSION")));
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        let request = request.body(Empty::new())?;
        let talk = async {
            sender.ready().await?;
            let reply = sender.send_request(request).await?;
            read(reply, body_max).await
        };
        let (reply, whole) = runtime
            .block_on(async { tokio::time::timeout(self.timeouts.request, talk).await })
            .map_err(|_elapsed| {
                format!("no answer within {} s", self.timeouts.request.as_secs())
            })??;
        let mut idle = self.idle();
        if whole && idle.len() < IDLE_LANES_MAX {
            idle.push(Lane { runtime, sender });
        }
        drop(idle);
        Ok(reply)
    }
}

/// Collects the body up to one byte more than `body_max`; whether that was all of it.
async fn read(
    reply: hyper::Response<hyper::body::Incoming>,
    body_max: u64,
) -> Result<(Reply, bool), Failure> {
    let (parts, mut incoming) = reply.into_parts();
    let limit = usize::try_from(body_max.saturating_add(1)).unwrap_or(usize::MAX);
    let announced = parts
        .headers
        .get(hyper::header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let expected = announced.unwrap_or(0).min(limit).min(FIRST_BYTES_MAX);
    let mut body = Vec::with_capacity(expected);
    while let Some(frame) = incoming.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        let room = limit - body.len();
        body.extend_from_slice(data.get(..room).unwrap_or(&data));
        if body.len() == limit {
            return Ok((Reply { parts, body }, false));
        }
    }
    Ok((Reply { parts, body }, true))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        connect: Duration::from_secs(5),
        request: Duration::from_secs(5),
    };

    /// Serves connections one after another; each gets these answers, one a request, and is then closed.
    fn server(
        connections: Vec<Vec<&'static str>>,
    ) -> (PlainHttp, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/base/", listener.local_addr().unwrap());
        let run = move || {
            let mut seen = Vec::new();
            for answers in connections {
                let (mut stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                for answer in answers {
                    let mut head = String::new();
                    while !head.ends_with("\r\n\r\n") {
                        assert!(reader.read_line(&mut head).unwrap() > 0);
                    }
                    seen.push(head);
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            }
            seen
        };
        let http = PlainHttp::new(&url, TIMEOUTS).unwrap();
        (http, std::thread::Builder::new().spawn(run).unwrap())
    }

    const HELLO: &str = "HTTP/1.1 206 P\r\nContent-Length: 5\r\n\r\nhello";

    #[test]
    fn requests_share_a_connection_and_survive_its_end() {
        let (http, server) = server(vec![vec![HELLO, HELLO], vec![HELLO]]);
        for _ in 0..3 {
            let reply = http.get("a/b", Some("bytes=1-5"), 5).unwrap();
            assert_eq!(
                (reply.parts.status.as_u16(), &*reply.body),
                (206, &b"hello"[..])
            );
        }
        let seen = server.join().unwrap();
        assert_eq!(seen.len(), 3);
        assert!(
            seen[0].starts_with("GET /base/a/b HTTP/1.1\r\n"),
            "{}",
            seen[0]
        );
        assert!(seen[0].contains("range: bytes=1-5\r\n"), "{}", seen[0]);
    }

    #[test]
    fn a_longer_body_is_cut_one_byte_behind_the_limit() {
        let (http, server) = server(vec![vec![HELLO]]);
        assert_eq!(http.get("a", None, 3).unwrap().body, b"hell");
        assert!(
            http.take_idle().is_none(),
            "the connection is not used again"
        );
        server.join().unwrap();
    }

    #[test]
    fn a_body_that_breaks_off_is_an_error() {
        let short = "HTTP/1.1 206 P\r\nContent-Length: 50\r\n\r\nhello";
        let (http, server) = server(vec![vec![short]]);
        assert!(http.get("a", None, 50).is_err());
        server.join().unwrap();
    }

    #[test]
    fn only_plain_addresses_are_taken() {
        for (url, taken) in [
            ("http://host/x", true),
            ("http://[::1]:80", true),
            ("https://host", false),
            ("http://user:word@host/", false),
            ("nonsense", false),
        ] {
            assert_eq!(PlainHttp::new(url, TIMEOUTS).is_some(), taken, "{url}");
        }
    }
}
