//! GET over unencrypted HTTP/1.1 with as few threads and copies as there can be.
//!
//! A general blocking client hands every request to a runtime thread and back, which costs 0.2 ms (measured): much, when the
//! server is in the next rack and a reader waits. Here the calling thread drives the connection itself: a *lane* is
//! one connection with a runtime of its own that runs only during a request. Idle lanes are kept, for a bounded time; a
//! lane whose server has closed it meanwhile is noticed by the failing request, which is then sent at once on a new one.
//! No redirects, no proxies, no encryption: the caller falls back to a general client where those are needed.

use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{ACCEPT_ENCODING, HOST, RANGE, USER_AGENT};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;

use super::Failure;
use super::general::no_answer;
use super::limits::HttpLimits;
use super::reply::{Ask, Reply, receive};
use super::resolve::Resolver;

/// Lanes kept open while nobody uses them.
const IDLE_LANES_MAX: usize = 16;

/// One connection and what drives it.
#[derive(Debug)]
struct Lane {
    runtime: Runtime,
    sender: SendRequest<Empty<Bytes>>,
    born: Instant,
    /// When its last reply was complete.
    used: Instant,
}

/// A web server without encryption.
#[derive(Debug)]
pub(super) struct PlainHttp {
    host: String,
    port: u16,
    authority: String,
    prefix: String,
    limits: HttpLimits,
    resolver: Resolver,
    idle: Mutex<Vec<Lane>>,
}

/// Why there is no reply.
enum ExchangeError {
    /// The connection ended before a reply began.
    Closed(Failure),
    Failed(Failure),
}

impl From<ExchangeError> for Failure {
    fn from(error: ExchangeError) -> Self {
        match error {
            ExchangeError::Closed(error) | ExchangeError::Failed(error) => error,
        }
    }
}

impl PlainHttp {
    /// The server of `url`; `None` where only a general client can speak to it.
    pub(super) fn new(url: &str, limits: HttpLimits, resolver: Resolver) -> Option<Self> {
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
            limits,
            resolver,
            idle: Mutex::new(Vec::new()),
        })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// What went wrong below HTTP.
    pub(super) fn send(&self, ask: &Ask<'_>) -> Result<Reply, Failure> {
        if let Some(lane) = self.take_idle() {
            match self.exchange(lane, ask) {
                Err(ExchangeError::Closed(error)) => {
                    tracing::debug!(object = ask.object, %error, "an idle connection was closed");
                    // The others are as old: the server has probably been restarted.
                    self.idle().clear();
                }
                reply => return reply.map_err(Failure::from),
            }
        }
        let lane = self.connect(ask)?;
        self.exchange(lane, ask).map_err(Failure::from)
    }

    /// The lane that was used last; those that are too old are closed.
    fn take_idle(&self) -> Option<Lane> {
        let mut idle = self.idle();
        idle.retain(|lane| {
            lane.used.elapsed() < self.limits.idle_max && lane.born.elapsed() < self.limits.age_max
        });
        idle.pop()
    }

    fn connect(&self, ask: &Ask<'_>) -> Result<Lane, Failure> {
        let end = Instant::now() + ask.until.cut(self.limits.connect)?;
        let left = |others: usize| {
            let left = end.saturating_duration_since(Instant::now());
            left / u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1)
        };
        let addresses = self.resolver.resolve(&self.host, self.port, left(0))?;
        let mut last: Failure = "the name has no address".into();
        for (n, address) in addresses.iter().enumerate() {
            // An address that does not answer leaves time for the others.
            let limit = left(addresses.len() - n - 1);
            if limit.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(address, limit) {
                Ok(stream) => {
                    if n > 0 {
                        self.resolver.worked(*address);
                    }
                    return open_lane(stream);
                }
                Err(error) => last = cannot_connect(*address, &error),
            }
        }
        Err(last)
    }

    fn request(&self, ask: &Ask<'_>) -> Result<Request<Empty<Bytes>>, Failure> {
        let mut request = Request::builder()
            .method(ask.method.clone())
            .uri(format!("{}/{}", self.prefix, ask.object))
            .header(HOST, &self.authority)
            .header(ACCEPT_ENCODING, "identity")
            .header(USER_AGENT, concat!("dsec/", env!("CARGO_PKG_VERSION")));
        if let Some(range) = ask.range {
            request = request.header(RANGE, range);
        }
        Ok(request.body(Empty::new())?)
    }

    fn exchange(&self, mut lane: Lane, ask: &Ask<'_>) -> Result<Reply, ExchangeError> {
        let request = self.request(ask).map_err(ExchangeError::Failed)?;
        let limit = ask
            .until
            .cut(self.limits.first_byte)
            .map_err(ExchangeError::Failed)?;
        let sender = &mut lane.sender;
        let head = async {
            let send = async {
                sender.ready().await?;
                sender.send_request(request).await
            };
            let sent: Result<Response<Incoming>, _> = tokio::time::timeout(limit, send)
                .await
                .map_err(|_elapsed| ExchangeError::Failed(no_answer(limit)))?;
            sent.map_err(|error| ExchangeError::Closed(error.into()))
        };
        let reply = lane.runtime.block_on(async {
            let reply = head.await?;
            receive(reply, ask, &self.limits)
                .await
                .map_err(ExchangeError::Failed)
        })?;
        lane.used = Instant::now();
        let mut idle = self.idle();
        if reply.whole && idle.len() < IDLE_LANES_MAX {
            idle.push(lane);
        }
        drop(idle);
        Ok(reply)
    }
}

fn cannot_connect(address: SocketAddr, error: &std::io::Error) -> Failure {
    format!("cannot connect to {address}: {error}").into()
}

fn open_lane(stream: TcpStream) -> Result<Lane, Failure> {
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
    let now = Instant::now();
    Ok(Lane {
        runtime,
        sender,
        born: now,
        used: now,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_addresses_are_taken() {
        for (url, taken) in [
            ("http://host/x", true),
            ("http://[::1]:80", true),
            ("https://host", false),
            ("http://user:word@host/", false),
            ("nonsense", false),
        ] {
            let made = PlainHttp::new(url, HttpLimits::default(), Resolver::system());
            assert_eq!(made.is_some(), taken, "{url}");
        }
    }
}
