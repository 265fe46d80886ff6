//! A small HTTP client of `sandboxd`: one connection, one request, one reply.

use std::env;

use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::commands::Failure;

/// Where the daemon is unless the environment says otherwise.
const DEFAULT_URL: &str = "http://127.0.0.1:7070";

/// A piece of a body that is sent as it is read.
type Piece = Result<Frame<Bytes>, std::io::Error>;
/// Bodies: whole, or piece by piece.
type Body = Either<Full<Bytes>, Pieces>;

/// Pieces from a thread that reads a file.
pub(crate) struct Pieces(tokio::sync::mpsc::Receiver<Piece>);

impl Pieces {
    /// Reads `source` to its end in the background, a few pieces ahead at most.
    pub(crate) fn read(mut source: impl std::io::Read + Send + 'static) -> Self {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let read = move || {
            let mut buffer = vec![0; 256 << 10];
            loop {
                let piece = match source.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(len) => {
                        let bytes = buffer.get(..len).unwrap_or_default();
                        Ok(Frame::data(Bytes::copy_from_slice(bytes)))
                    }
                    Err(error) => Err(error),
                };
                let last = piece.is_err();
                if sender.blocking_send(piece).is_err() || last {
                    return;
                }
            }
        };
        std::thread::spawn(read);
        Self(receiver)
    }
}

/// What a body's pieces come from.
impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Piece>> {
        self.0.poll_recv(context)
    }
}

/// A stream that can be read and written.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// See the head of this file.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    url: String,
    key: Option<String>,
}

impl Client {
    /// The daemon that DSEC_URL names, with the key of DSEC_API_KEY.
    pub(crate) fn from_env() -> Self {
        Self {
            url: env::var("DSEC_URL").unwrap_or_else(|_unset| DEFAULT_URL.to_owned()),
            key: env::var("DSEC_API_KEY").ok(),
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, Failure> {
        let failed = |e: std::io::Error| {
            format!(
                "cannot reach sandboxd at `{}`: {e} (is it running? DSEC_URL says where)",
                self.url
            )
        };
        if let Some(path) = self.url.strip_prefix("unix:") {
            let stream = tokio::net::UnixStream::connect(path).await;
            return Ok(Box::new(stream.map_err(failed)?));
        }
        let Some(address) = self.url.strip_prefix("http://") else {
            let message = "DSEC_URL is `http://ADDRESS:PORT` or `unix:PATH`";
            return Err(format!("{message}, not `{}`", self.url).into());
        };
        let address = address.trim_end_matches('/');
        let stream = tokio::net::TcpStream::connect(address)
            .await
            .map_err(failed)?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, Failure> {
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "sandboxd");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let response = sender.send_request(request.body(body)?).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        let said = serde_json::from_slice::<Value>(&bytes).ok();
        // The kind is the same word as in HTTP and in Python: what scripts look for.
        let said = said.and_then(|said| {
            let text = |name: &str| said.get(name).and_then(Value::as_str);
            Some(format!("{} ({})", text("message")?, text("kind")?))
        });
        Err(said
            .unwrap_or_else(|| format!("`{}` answered with HTTP status {status}", self.url))
            .into())
    }

    /// Sends JSON (or nothing) and wants JSON.
    ///
    /// # Errors
    /// What the daemon said, or why it was not reached.
    pub(crate) async fn json(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, Failure> {
        let response = self.stream(method, path, body).await?;
        let bytes = response.into_body().collect().await?.to_bytes();
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Sends JSON (or nothing) and wants the reply's body as it comes.
    ///
    /// # Errors
    /// As for [`Client::json`].
    pub(crate) async fn stream(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Response<Incoming>, Failure> {
        let bytes = body
            .map(serde_json::to_vec)
            .transpose()?
            .unwrap_or_default();
        self.send(method, path, Either::Left(Full::new(bytes.into())))
            .await
    }

    /// Sends what `source` holds as it is read.
    ///
    /// # Errors
    /// As for [`Client::json`].
    pub(crate) async fn upload(
        &self,
        method: Method,
        path: &str,
        source: Pieces,
    ) -> Result<(), Failure> {
        let response = self.send(method, path, Either::Right(source)).await?;
        response.into_body().collect().await?;
        Ok(())
    }
}

/// A text as part of a query.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
