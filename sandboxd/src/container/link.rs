//! The daemon's end of a connection to an agent.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::protocol::{self, Answer, Exit, Failure, Request, kind};
use crate::backend::Door;

/// Bytes read at a time.
const READ_BYTES: usize = 64 << 10;
/// How long an agent may take to answer a request that runs nothing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an agent did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It does not listen: its sandbox is gone.
    #[error("the sandbox's agent is gone: {0}")]
    Gone(#[source] io::Error),
    /// It did not answer in time.
    #[error("the sandbox's agent did not answer within {0:?}")]
    Silent(Duration),
    /// It refused.
    #[error("{message}")]
    Refused {
        /// What the caller can do.
        failure: Failure,
        /// What happened.
        message: String,
        /// The error number, or 0.
        errno: i32,
    },
    /// It says what it should not.
    #[error("the sandbox's agent broke the protocol: {0}")]
    Protocol(String),
}

/// What comes from an agent after its answer.
#[derive(Debug)]
pub enum Event {
    /// Output, at an offset of its stream.
    Stdout(u64, Vec<u8>),
    /// Error output, at an offset of its stream.
    Stderr(u64, Vec<u8>),
    /// An exec's end: nothing follows.
    Exit(Box<Exit>),
    /// A file's bytes.
    Data(Vec<u8>),
    /// No more of those.
    End,
    /// An answer after data was sent.
    Answer(Answer),
}

/// One connection, for one operation.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    input: Vec<u8>,
}

/// The answer that an event is.
fn answer_of(event: Event) -> Result<Answer, LinkError> {
    match event {
        Event::Answer(Answer::Failed {
            failure,
            message,
            errno,
        }) => Err(LinkError::Refused {
            failure,
            message,
            errno,
        }),
        Event::Answer(answer) => Ok(answer),
        other => Err(LinkError::Protocol(format!("no answer but {other:?}"))),
    }
}

impl Link {
    /// Connects to the agent behind a door.
    ///
    /// # Errors
    /// [`LinkError::Gone`] when nobody does.
    pub async fn connect(door: &Door) -> Result<Self, LinkError> {
        let stream = UnixStream::connect(door.socket())
            .await
            .map_err(LinkError::Gone)?;
        Ok(Self {
            stream,
            input: Vec::new(),
        })
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub async fn request(&mut self, request: &Request) -> Result<Answer, LinkError> {
        let payload =
            serde_json::to_vec(request).map_err(|e| LinkError::Protocol(e.to_string()))?;
        self.send(kind::REQUEST, &payload).await?;
        self.answer().await
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub async fn answer(&mut self) -> Result<Answer, LinkError> {
        let event = tokio::time::timeout(ANSWER_TIMEOUT, self.next());
        match event.await {
            Err(_) => Err(LinkError::Silent(ANSWER_TIMEOUT)),
            Ok(event) => answer_of(event?),
        }
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// [`LinkError::Gone`].
    pub async fn send(&mut self, kind: u8, payload: &[u8]) -> Result<(), LinkError> {
        let mut bytes = Vec::with_capacity(payload.len() + 5);
        protocol::frame(kind, &[payload], &mut bytes);
        self.stream.write_all(&bytes).await.map_err(LinkError::Gone)
    }

    /// Says that nothing more will be sent, and waits until all of it was taken.
    ///
    /// # Errors
    /// [`LinkError::Gone`].
    pub async fn finish(mut self) -> Result<(), LinkError> {
        self.stream.shutdown().await.map_err(LinkError::Gone)?;
        let mut rest = [0; 64];
        while self.stream.read(&mut rest).await.map_err(LinkError::Gone)? > 0 {}
        Ok(())
    }

    /// What comes next. May be cancelled: what has arrived is kept.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub async fn next(&mut self) -> Result<Event, LinkError> {
        loop {
            let frame = protocol::take_frame(&mut self.input);
            if let Some((kind, payload)) = frame.map_err(|e| LinkError::Protocol(e.to_string()))? {
                if kind == kind::KEEPALIVE {
                    continue;
                }
                return event(kind, payload);
            }
            self.input.reserve(READ_BYTES);
            let len = self
                .stream
                .read_buf(&mut self.input)
                .await
                .map_err(LinkError::Gone)?;
            if len == 0 {
                return Err(LinkError::Gone(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

fn event(kind: u8, mut payload: Vec<u8>) -> Result<Event, LinkError> {
    let bad = |e: serde_json::Error| LinkError::Protocol(e.to_string());
    let mut at_offset = || {
        let Some(offset) = payload.first_chunk::<8>().copied() else {
            return Err(LinkError::Protocol("output without an offset".to_owned()));
        };
        payload.drain(..8);
        Ok((u64::from_le_bytes(offset), std::mem::take(&mut payload)))
    };
    match kind {
        kind::STDOUT => at_offset().map(|(at, bytes)| Event::Stdout(at, bytes)),
        kind::STDERR => at_offset().map(|(at, bytes)| Event::Stderr(at, bytes)),
        kind::EXIT => Ok(Event::Exit(serde_json::from_slice(&payload).map_err(bad)?)),
        kind::ANSWER => Ok(Event::Answer(
            serde_json::from_slice(&payload).map_err(bad)?,
        )),
        kind::DATA => Ok(Event::Data(payload)),
        kind::END => Ok(Event::End),
        other => Err(LinkError::Protocol(format!("a frame of kind {other}"))),
    }
}

/// Hands an agent its root file system; blocks until it lives there.
///
/// # Errors
/// See [`LinkError`].
pub(crate) fn assign(socket: &Path, hostname: &str, root: impl AsFd) -> Result<(), LinkError> {
    let request = Request::Assign {
        hostname: hostname.to_owned(),
    };
    exchange(socket, &request, Some(root.as_fd())).map(|_| ())
}

/// A connection to something inside. Who has one need not know how its bytes travel: here it is a socket that was made inside.
#[derive(Debug)]
pub(crate) struct Dialed(std::net::TcpStream);

impl Dialed {
    /// For use in a runtime.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn into_async(
        self,
    ) -> io::Result<impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static>
    {
        self.0.set_nonblocking(true)?;
        tokio::net::TcpStream::from_std(self.0)
    }
}

/// A connection to what listens at a port inside; blocks.
///
/// # Errors
/// See [`LinkError`].
pub(crate) fn dial(door: &Door, port: u16) -> Result<Dialed, LinkError> {
    match exchange(door.socket(), &Request::Dial { port }, None)? {
        (_, Some(connection)) => Ok(Dialed(connection.into())),
        (answer, None) => Err(LinkError::Protocol(format!("no connection but {answer:?}"))),
    }
}

/// Waits until an agent is there.
///
/// # Errors
/// See [`LinkError`].
pub(crate) fn ping(socket: &Path) -> Result<(), LinkError> {
    exchange(socket, &Request::Ping, None).map(|_| ())
}

fn exchange(
    socket: &Path,
    request: &Request,
    fd: Option<std::os::fd::BorrowedFd<'_>>,
) -> Result<(Answer, Option<OwnedFd>), LinkError> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let stream = std::os::unix::net::UnixStream::connect(socket).map_err(LinkError::Gone)?;
    stream
        .set_read_timeout(Some(ANSWER_TIMEOUT))
        .map_err(LinkError::Gone)?;
    let payload = serde_json::to_vec(request).map_err(|e| LinkError::Protocol(e.to_string()))?;
    let mut bytes = Vec::new();
    protocol::frame(kind::REQUEST, &[&payload], &mut bytes);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(LinkError::Protocol("no room for a descriptor".to_owned()));
    }
    let sent = sendmsg(
        &stream,
        &[io::IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    );
    if sent.map_err(|e| LinkError::Gone(e.into()))? < bytes.len() {
        return Err(LinkError::Protocol("a request was cut".to_owned()));
    }
    let mut input = Vec::new();
    let mut brought = None;
    loop {
        let frame = protocol::take_frame(&mut input);
        if let Some((kind, payload)) = frame.map_err(|e| LinkError::Protocol(e.to_string()))? {
            return Ok((answer_of(event(kind, payload)?)?, brought));
        }
        let mut buffer = [0; 4096];
        match receive(&stream, &mut buffer, &mut brought) {
            Ok(0) => return Err(LinkError::Gone(io::ErrorKind::UnexpectedEof.into())),
            Ok(len) => input.extend_from_slice(buffer.get(..len).unwrap_or_default()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(LinkError::Silent(ANSWER_TIMEOUT));
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(LinkError::Gone(e)),
        }
    }
}

/// Reads bytes, and the descriptor that comes with them.
fn receive(
    stream: impl AsFd,
    buffer: &mut [u8],
    brought: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [io::IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            *brought = fds.last().or(brought.take());
        }
    }
    Ok(received.bytes)
}
