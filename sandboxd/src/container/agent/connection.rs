//! One connection of the daemon: bytes in, bytes out, and what it is about.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::super::protocol::{self, Answer, Failure, kind};
use super::{Agent, Source};

/// Bytes on their way to a reader above which no more output is read for it.
pub(super) const OUTPUT_BYTES_FULL: usize = 256 << 10;
/// Bytes taken from a connection at a time.
const READ_BYTES: usize = 64 << 10;
/// How long a reader may take nothing while something waits for it.
const STALL_MAX: Duration = Duration::from_secs(30);

/// What a connection is for, once it has said so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It has not said.
    New,
    /// It gets an exec's output and end, and may send input.
    Follower { exec: u64, stream: bool },
    /// It sends input.
    Writer { exec: u64 },
    /// It has its answer.
    Done,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) input: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
    output: Vec<u8>,
    sent: usize,
    pub(super) role: Role,
    /// To be closed when the output is sent.
    pub(super) closing: bool,
    /// Nothing more is read from it for now.
    pub(super) held: bool,
    ended: bool,
    watched: bool,
    progress: Instant,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            input: Vec::new(),
            fds: Vec::new(),
            output: Vec::new(),
            sent: 0,
            role: Role::New,
            closing: false,
            held: false,
            ended: false,
            watched: true,
            progress: Instant::now(),
        }
    }

    /// Bytes that wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.output.len() - self.sent
    }

    pub(super) fn stall_deadline(&self) -> Option<Instant> {
        (self.waiting() > 0).then(|| self.progress + STALL_MAX)
    }

    pub(super) fn put(&mut self, kind: u8, parts: &[&[u8]]) {
        if self.waiting() == 0 {
            self.progress = Instant::now();
        }
        protocol::frame(kind, parts, &mut self.output);
    }

    pub(super) fn answer(&mut self, answer: &Answer) {
        let bytes = serde_json::to_vec(answer).unwrap_or_default();
        self.put(kind::ANSWER, &[&bytes]);
    }

    /// Answers that it cannot be done; the connection is over then.
    pub(super) fn fail(&mut self, failure: Failure, message: String, errno: i32) {
        self.answer(&Answer::Failed {
            failure,
            message,
            errno,
        });
        self.role = Role::Done;
        self.closing = true;
    }

    fn receive(&mut self) -> io::Result<bool> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let mut bytes = [0; READ_BYTES];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            &self.socket,
            &mut [io::IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        )?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                // Only a request may bring any; others are closed by being dropped.
                let room = if self.role == Role::New { 1 } else { 0 };
                self.fds.extend(fds.take(room));
            }
        }
        let bytes = bytes.get(..received.bytes).unwrap_or_default();
        self.input.extend_from_slice(bytes);
        Ok(!bytes.is_empty())
    }

    /// What to watch for.
    pub(super) fn interest(&self) -> EventFlags {
        let mut flags = EventFlags::empty();
        if !self.held && !self.ended {
            flags |= EventFlags::IN;
        }
        if self.waiting() > 0 {
            flags |= EventFlags::OUT;
        }
        flags
    }

    /// Sends what waits; whether the other end is still there.
    pub(super) fn flush(&mut self) -> bool {
        while self.waiting() > 0 {
            let rest = self.output.get(self.sent..).unwrap_or_default();
            match rustix::net::send(
                &self.socket,
                rest,
                rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
            ) {
                Ok(sent) => {
                    self.sent += sent;
                    self.progress = Instant::now();
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        if self.waiting() == 0 {
            self.output.clear();
            self.sent = 0;
            // What one burst took is not kept for an idle connection.
            self.output.shrink_to(READ_BYTES);
        }
        true
    }
}

impl Agent {
    /// Something happened on a connection.
    pub(super) fn serve(&mut self, serial: u64, flags: EventFlags) {
        let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if flags.contains(EventFlags::IN) || gone {
            self.read_connection(serial);
        }
        let role = self.connections.get(&serial).map(|c| c.role);
        if gone && !matches!(role, Some(Role::Writer { .. })) {
            // Nobody is left to read.
            self.hang_up(serial);
        }
        self.send(serial);
    }

    fn read_connection(&mut self, serial: u64) {
        let Some(connection) = self.connections.get_mut(&serial) else {
            return;
        };
        if connection.held {
            return;
        }
        match connection.receive() {
            Ok(true) => self.take_frames(serial),
            Ok(false) => {
                connection.ended = true;
                self.other_end_closed(serial);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.hang_up(serial),
        }
    }

    fn other_end_closed(&mut self, serial: u64) {
        let Some(connection) = self.connections.get(&serial) else {
            return;
        };
        match connection.role {
            // The daemon may shut down its half when it has no more to say, and still listen.
            Role::Follower { .. } | Role::Done => self.pace(serial),
            Role::New | Role::Writer { .. } => self.hang_up(serial),
        }
    }

    /// Handles the whole frames that have arrived.
    pub(super) fn take_frames(&mut self, serial: u64) {
        loop {
            let Some(connection) = self.connections.get_mut(&serial) else {
                return;
            };
            if connection.held {
                return;
            }
            let frame = protocol::take_frame(&mut connection.input);
            match frame {
                Ok(None) => return,
                Ok(Some((kind::REQUEST, payload))) if connection.role == Role::New => {
                    self.request(serial, &payload);
                }
                Ok(Some((kind::DATA, payload))) => self.input(serial, &payload),
                Ok(Some((kind::END, _))) => self.end_of_input(serial),
                Ok(Some((kind, _))) => {
                    let message = format!("a frame of kind {kind} is not expected here");
                    connection.fail(Failure::Invalid, message, 0);
                    return;
                }
                Err(error) => {
                    connection.fail(Failure::Invalid, error.to_string(), 0);
                    return;
                }
            }
        }
    }

    /// Sends what waits on a connection, and closes it when that was the last.
    pub(super) fn send(&mut self, serial: u64) {
        let Some(connection) = self.connections.get_mut(&serial) else {
            return;
        };
        let alive = connection.flush();
        let over = connection.closing && connection.waiting() == 0;
        if !alive || over {
            self.hang_up(serial);
            return;
        }
        self.pace(serial);
    }

    /// Watches for what the connection can do now, and lets its exec's output flow again if there is room.
    fn pace(&mut self, serial: u64) {
        let Some(connection) = self.connections.get(&serial) else {
            return;
        };
        let role = connection.role;
        self.watch_connection(serial);
        if let Role::Follower { exec, stream: true } = role {
            self.let_flow(exec);
        }
    }

    /// Watches for what a connection can do now. One that waits for nothing is not watched at all: the kernel reports an
    /// other end that has gone whether it is asked or not, again and again.
    pub(super) fn watch_connection(&mut self, serial: u64) {
        let Some(connection) = self.connections.get(&serial) else {
            return;
        };
        let (flags, watched) = (connection.interest(), connection.watched);
        let held = connection.held && connection.waiting() == 0;
        let socket = connection.socket.as_fd();
        let watch = match (watched, held) {
            (true, true) => {
                self.unwatch(socket);
                false
            }
            (false, false) => self
                .watch(socket, Source::Connection, serial, flags)
                .is_ok(),
            (true, false) => {
                self.rewatch(socket, Source::Connection, serial, flags);
                true
            }
            (false, true) => false,
        };
        if let Some(connection) = self.connections.get_mut(&serial) {
            connection.watched = watch;
        }
    }

    /// Forgets a connection.
    pub(super) fn hang_up(&mut self, serial: u64) {
        let Some(connection) = self.connections.remove(&serial) else {
            return;
        };
        self.unwatch(connection.socket.as_fd());
        if let Role::Follower { exec, .. } = connection.role {
            if let Some(exec) = self.execs.get_mut(&exec) {
                exec.followers.retain(|follower| *follower != serial);
            }
            self.let_flow(exec);
        }
    }
}
