//! A blocking client: one connection, one request, one reply.
//!
//! A command-line tool sends one request and ends, so there is nothing to pool. The runtime is the smallest there is
//! (one thread, no timers of its own) and costs a tenth of a millisecond. A socket where nobody listens yet is tried for a
//! moment: `layerd & dsec mount` should work.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::{ApiError, Mount, MountRequest, Mounts, RecordedTrace, Stats, UmountRequest};
use crate::cache::{CacheContents, PinRequest, Pinned};

/// How long a layerd that is being started is waited for.
const START_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two tries.
const START_PAUSE: Duration = Duration::from_millis(20);

/// Why a request came to nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody answers.
    #[error(
        "cannot reach layerd at `{socket}`: {source} (is `layerd` running with `--socket {socket}`?)"
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The conversation broke off.
    #[error("layerd at `{socket}` broke off: {source}")]
    Broken {
        /// The socket.
        socket: PathBuf,
        /// What went wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// layerd refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// Something that is not layerd answers.
    #[error("`{socket}` answered with HTTP status {status} and `{body}`, which is not layerd's")]
    Foreign {
        /// The socket.
        socket: PathBuf,
        /// The status.
        status: u16,
        /// The start of the body.
        body: String,
    },
}

/// A client of one socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the layerd that listens at `socket`; nothing is sent yet.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Mounts a composition.
    ///
    /// # Errors
    /// [`ClientError::Refused`] says why layerd would not; the others say why it was not reached.
    pub fn mount(&self, request: &MountRequest) -> Result<Mount, ClientError> {
        self.send(Method::POST, "/v1/mounts", Some(request))
    }

    /// Takes a composition away; what was mounted there.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn umount(&self, mountpoint: &Path) -> Result<Mount, ClientError> {
        let request = UmountRequest {
            mountpoint: mountpoint.to_owned(),
        };
        self.send(Method::DELETE, "/v1/mounts", Some(&request))
    }

    /// All compositions.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn mounts(&self) -> Result<Mounts, ClientError> {
        self.send(Method::GET, "/v1/mounts", None::<&()>)
    }

    /// What is in the cache.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn cache(&self) -> Result<CacheContents, ClientError> {
        self.send(Method::GET, "/v1/cache", None::<&()>)
    }

    /// Pins a layer in the cache.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn pin(&self, request: &PinRequest) -> Result<Pinned, ClientError> {
        self.send(Method::POST, "/v1/cache/pins", Some(request))
    }

    /// Takes a pin away.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn unpin(&self, request: &PinRequest) -> Result<Pinned, ClientError> {
        self.send(Method::DELETE, "/v1/cache/pins", Some(request))
    }

    /// All counters.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.send(Method::GET, "/v1/stats", None::<&()>)
    }

    /// What was read of a composition since its layers are served.
    ///
    /// # Errors
    /// As for [`Client::mount`].
    pub fn trace(&self, mountpoint: &Path) -> Result<RecordedTrace, ClientError> {
        let request = UmountRequest {
            mountpoint: mountpoint.to_owned(),
        };
        self.send(Method::POST, "/v1/trace", Some(&request))
    }

    fn broken(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ClientError {
        ClientError::Broken {
            socket: self.socket.clone(),
            source: source.into(),
        }
    }

    fn connect(&self) -> Result<UnixStream, ClientError> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let connected = UnixStream::connect(&self.socket)
                .and_then(|stream| stream.set_nonblocking(true).map(|()| stream));
            match connected {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) && Instant::now() < until =>
                {
                    std::thread::sleep(START_PAUSE);
                }
                Err(source) => {
                    return Err(ClientError::Connect {
                        socket: self.socket.clone(),
                        source,
                    });
                }
            }
        }
    }

    fn send<Q: Serialize, A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: Option<&Q>,
    ) -> Result<A, ClientError> {
        let body = match request {
            Some(request) => serde_json::to_vec(request).map_err(|e| self.broken(e))?,
            None => Vec::new(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(|e| self.broken(e))?;
        let stream = self.connect()?;
        let (status, body) = runtime.block_on(self.exchange(stream, method, path, body))?;
        if status.is_success()
            && let Ok(answer) = serde_json::from_slice(&body)
        {
            return Ok(answer);
        }
        if let Ok(error) = serde_json::from_slice::<ApiError>(&body) {
            return Err(error.into());
        }
        Err(ClientError::Foreign {
            socket: self.socket.clone(),
            status: status.as_u16(),
            body: String::from_utf8_lossy(&body).chars().take(200).collect(),
        })
    }

    async fn exchange(
        &self,
        stream: UnixStream,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let stream = tokio::net::UnixStream::from_std(stream).map_err(|e| self.broken(e))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| self.broken(e))?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "layerd")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| self.broken(e))?;
        let reply = sender
            .send_request(request)
            .await
            .map_err(|e| self.broken(e))?;
        let status = reply.status();
        let body = reply
            .into_body()
            .collect()
            .await
            .map_err(|e| self.broken(e))?;
        driver.abort();
        Ok((status, body.to_bytes()))
    }
}
