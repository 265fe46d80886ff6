//! What the daemon can ask an agent: each request, and who carries it out.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::super::protocol::{Answer, ExecSpec, Failure, Request, kind};
use super::super::shell;
use super::super::{dial, files};
use super::connection::Role;
use super::exec::winsize;
use super::{Agent, RUNNING_MAX};
use crate::sys::{self, CloneArgs, Cloned};

impl Agent {
    pub(super) fn request(&mut self, serial: u64, payload: &[u8]) {
        let request: Request = match serde_json::from_slice(payload) {
            Ok(request) => request,
            Err(error) => {
                return self.fail(serial, Failure::Invalid, format!("no request: {error}"), 0);
            }
        };
        match request {
            Request::Assign { hostname } => self.assign(serial, &hostname),
            Request::Ping => self.done(serial, &Answer::Ok),
            Request::List => {
                let execs = self.execs.values().map(|e| e.info()).collect();
                self.done(serial, &Answer::Execs { execs });
            }
            Request::Exec {
                spec,
                stream,
                resumed,
            } => self.exec(serial, *spec, stream, resumed),
            Request::Attach {
                exec_id,
                stdout_from,
                stderr_from,
                stream,
            } => {
                if let Some(exec) = self.find(serial, &exec_id) {
                    self.follow(serial, exec, (stdout_from, stderr_from), stream, true);
                }
            }
            Request::Stdin { exec_id } => {
                if let Some(exec) = self.find(serial, &exec_id)
                    && let Some(connection) = self.connections.get_mut(&serial)
                {
                    connection.role = Role::Writer { exec };
                    connection.answer(&Answer::Ok);
                }
            }
            Request::Signal {
                exec_id,
                signal,
                tree,
            } => self.signal(serial, &exec_id, signal, tree),
            Request::Resize { exec_id, size } => {
                let Some(exec) = self.find(serial, &exec_id) else {
                    return;
                };
                let terminal = self.execs.get(&exec).and_then(|e| e.terminal.as_ref());
                let done = match terminal {
                    Some(terminal) => rustix::termios::tcsetwinsize(terminal, winsize(size))
                        .map_err(io::Error::from),
                    None => Err(io::Error::from_raw_os_error(nix::libc::ENOTTY)),
                };
                self.answer_io(serial, done);
            }
            Request::Files { request, user } => {
                self.work_apart(serial, |socket, input| {
                    files::serve(socket, input, &request, user.as_deref())
                });
            }
            Request::Dial { port } => {
                self.work_apart(serial, |socket, _| dial::serve(&socket, port))
            }
        }
    }

    fn fail(&mut self, serial: u64, failure: Failure, message: String, errno: i32) {
        if let Some(connection) = self.connections.get_mut(&serial) {
            connection.fail(failure, message, errno);
        }
    }

    fn done(&mut self, serial: u64, answer: &Answer) {
        if let Some(connection) = self.connections.get_mut(&serial) {
            connection.answer(answer);
            connection.role = Role::Done;
            connection.closing = true;
        }
    }

    fn answer_io(&mut self, serial: u64, done: io::Result<()>) {
        match done {
            Ok(()) => self.done(serial, &Answer::Ok),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                self.fail(serial, Failure::Refused, error.to_string(), errno);
            }
        }
    }

    fn assign(&mut self, serial: u64, hostname: &str) {
        if self.assigned {
            let message = "this sandbox has a root file system already".to_owned();
            return self.fail(serial, Failure::Conflict, message, 0);
        }
        let root = self.connections.get_mut(&serial).and_then(|c| c.fds.pop());
        let Some(root) = root else {
            let message = "a root file system must come as a descriptor".to_owned();
            return self.fail(serial, Failure::Invalid, message, 0);
        };
        let entered = shell::enter(&root, hostname);
        // Half of a root is not one: this agent takes no second.
        self.assigned = true;
        self.answer_io(serial, entered);
    }

    fn find(&mut self, serial: u64, exec_id: &str) -> Option<u64> {
        let found = self
            .execs
            .values()
            .find(|e| e.spec.exec_id == exec_id)
            .map(|e| e.serial);
        if found.is_none() {
            let message = format!("no exec `{exec_id}` is known in this sandbox");
            self.fail(serial, Failure::NotFound, message, 0);
        }
        found
    }

    fn exec(&mut self, serial: u64, spec: ExecSpec, stream: bool, resumed: bool) {
        if !self.assigned {
            let message = "this sandbox has no root file system yet".to_owned();
            return self.fail(serial, Failure::Invalid, message, 0);
        }
        if spec.argv.is_empty() || spec.exec_id.is_empty() {
            let message = "an exec needs a name and a program".to_owned();
            return self.fail(serial, Failure::Invalid, message, 0);
        }
        let same = self.execs.values().find(|e| e.spec.exec_id == spec.exec_id);
        if let Some(exec) = same {
            if exec.spec.argv != spec.argv {
                let message = format!("exec `{}` runs something else", spec.exec_id);
                return self.fail(serial, Failure::Conflict, message, 0);
            }
            return self.follow(serial, exec.serial, (0, 0), stream, true);
        }
        if self.forgotten.may_have_run(&spec.exec_id, resumed) {
            let message = format!(
                "exec `{}` may have run, and what became of it is not remembered",
                spec.exec_id
            );
            return self.fail(serial, Failure::Forgotten, message, 0);
        }
        let running = self.execs.values().filter(|e| e.exit.is_none()).count();
        if running >= RUNNING_MAX {
            let message = format!("{running} execs run in this sandbox, the most that may");
            return self.fail(serial, Failure::Exhausted, message, 0);
        }
        match self.start(spec) {
            Ok(exec) => self.follow(serial, exec, (0, 0), stream, false),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let limit = errno == nix::libc::EAGAIN || errno == nix::libc::ENOMEM;
                let failure = if limit {
                    Failure::Exhausted
                } else if error.kind() == io::ErrorKind::InvalidInput {
                    Failure::Invalid
                } else {
                    Failure::Internal
                };
                let message = format!("cannot start a process: {error}");
                self.fail(serial, failure, message, errno);
            }
        }
    }

    /// Begins to send an exec's output and end.
    fn follow(&mut self, serial: u64, exec: u64, from: (u64, u64), stream: bool, again: bool) {
        let (Some(connection), Some(found)) =
            (self.connections.get_mut(&serial), self.execs.get_mut(&exec))
        else {
            return;
        };
        connection.role = Role::Follower { exec, stream };
        connection.answer(&Answer::Started {
            pid: found.pid,
            again,
        });
        if stream {
            let kinds = [(kind::STDOUT, from.0), (kind::STDERR, from.1)];
            for (stream, (kind, from)) in found.streams.iter_mut().zip(kinds) {
                for (at, bytes) in stream.spool.kept(from) {
                    connection.put(kind, &[&at.to_le_bytes(), bytes]);
                }
            }
        }
        if found.exit.is_some() {
            self.tell_end(serial, exec, from);
        } else {
            found.followers.push(serial);
            self.let_flow(exec);
        }
    }

    fn signal(&mut self, serial: u64, exec_id: &str, signal: i32, tree: bool) {
        let Some(exec) = self.find(serial, exec_id) else {
            return;
        };
        let ended = self.execs.get(&exec).is_some_and(|e| e.status.is_some());
        let done = if tree {
            self.kill_exec(exec).or_else(|error| {
                // Its group is gone when nothing is left of it.
                let gone = error.kind() == io::ErrorKind::NotFound && ended;
                if gone { Ok(()) } else { Err(error) }
            })
        } else if ended {
            // Its number may belong to another by now.
            Err(io::Error::from_raw_os_error(nix::libc::ESRCH))
        } else {
            let pid = self.execs.get(&exec).map_or(0, |e| e.pid);
            nix::sys::signal::Signal::try_from(signal)
                .and_then(|signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal))
                .map_err(io::Error::from)
        };
        self.answer_io(serial, done);
    }

    /// Input for the exec that this connection follows or writes to.
    pub(super) fn input(&mut self, serial: u64, bytes: &[u8]) {
        let Some(exec) = self.exec_of(serial) else {
            return;
        };
        let room = self.add_input(exec, bytes, false);
        if let Some(connection) = self.connections.get_mut(&serial) {
            connection.held = !room;
        }
    }

    pub(super) fn end_of_input(&mut self, serial: u64) {
        if let Some(exec) = self.exec_of(serial) {
            self.add_input(exec, &[], true);
        }
    }

    fn exec_of(&self, serial: u64) -> Option<u64> {
        match self.connections.get(&serial)?.role {
            Role::Follower { exec, .. } | Role::Writer { exec } => Some(exec),
            Role::New | Role::Done => None,
        }
    }

    /// There is room for input again: those who were held go on.
    pub(super) fn release_writers(&mut self, exec: u64) {
        let of_exec = |role: Role| match role {
            Role::Follower { exec: e, .. } | Role::Writer { exec: e } => e == exec,
            Role::New | Role::Done => false,
        };
        let held = self
            .connections
            .iter_mut()
            .filter(|(_, c)| c.held && of_exec(c.role));
        let mut released = Vec::new();
        for (serial, connection) in held {
            connection.held = false;
            released.push(*serial);
        }
        for serial in released {
            self.take_frames(serial);
            self.send(serial);
        }
    }

    /// Hands a connection to a process of its own that may block.
    fn work_apart(&mut self, serial: u64, work: impl FnOnce(OwnedFd, Vec<u8>) -> io::Result<()>) {
        if !self.assigned {
            let message = "this sandbox has no root file system yet".to_owned();
            return self.fail(serial, Failure::Invalid, message, 0);
        }
        match sys::clone(self.proof, &CloneArgs::default()) {
            Ok(Cloned::Child) => {
                let Some(connection) = self.connections.get_mut(&serial) else {
                    sys::exit_now(1)
                };
                let input = std::mem::take(&mut connection.input);
                let alone = sys::close_all_but(connection.socket.as_fd());
                let done = alone
                    .and_then(|()| connection.socket.try_clone())
                    .and_then(|socket| work(socket, input));
                sys::exit_now(i32::from(done.is_err()));
            }
            Ok(Cloned::Parent { .. }) => self.hang_up(serial),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let message = format!("cannot start a process: {error}");
                self.fail(serial, Failure::Exhausted, message, errno);
            }
        }
    }
}
