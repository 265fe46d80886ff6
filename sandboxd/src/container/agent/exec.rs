//! One exec: its process, its streams, its end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::process::WaitStatus;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::super::cgroup::oom_kills;
use super::super::child::Streams;
use super::super::launcher::NotStarted;
use super::super::protocol::{ExecInfo, ExecSpec, Exit, Outcome, TerminalSize, kind};
use super::super::spool::Spool;
use super::connection::{OUTPUT_BYTES_FULL, Role};
use super::{Agent, FINISHED_MAX, Source, shell};

/// Bytes read from a pipe at a time.
const READ_BYTES: usize = 64 << 10;
/// Bytes that wait for a program to read its input, above which no more are taken.
pub(super) const INPUT_BYTES_FULL: usize = 256 << 10;
/// A terminal hands its last output over a little after its last process has ended.
const TERMINAL_DRAIN: Duration = Duration::from_millis(100);

/// One stream of output.
#[derive(Debug, Default)]
pub(super) struct Stream {
    fd: Option<OwnedFd>,
    pub(super) spool: Spool,
    /// After the main process has ended: bytes that it may have written and that are not read yet.
    owed: Option<u64>,
    /// Nobody reads it now, because a follower is behind.
    held: bool,
}

/// A program's standard input.
#[derive(Debug)]
pub(super) struct Input {
    fd: OwnedFd,
    waiting: VecDeque<u8>,
    ended: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Exec {
    pub(super) serial: u64,
    pub(super) spec: ExecSpec,
    pub(super) pid: i32,
    pub(super) followers: Vec<u64>,
    pub(super) streams: [Stream; 2],
    pub(super) status: Option<WaitStatus>,
    pub(super) exit: Option<Exit>,
    pub(super) input: Option<Input>,
    pub(super) terminal: Option<OwnedFd>,
    /// Why it did not become a program.
    complaint: Option<NotStarted>,
    started: Instant,
    deadline: Option<Instant>,
    drain_deadline: Option<Instant>,
    timed_out: bool,
    oom_kills_before: u64,
    group_exists: bool,
}

impl Exec {
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        [self.deadline, self.drain_deadline]
            .into_iter()
            .flatten()
            .min()
    }

    pub(super) fn info(&self) -> ExecInfo {
        ExecInfo {
            exec_id: self.spec.exec_id.clone(),
            pid: self.pid,
            argv: self.spec.argv.clone(),
            pty: self.spec.pty.is_some(),
            exit: self.exit.clone(),
        }
    }

    fn group(&self) -> String {
        group_name(self.serial)
    }
}

fn group_name(serial: u64) -> String {
    format!("x-{serial}")
}

/// Our ends of a new exec's streams.
struct Ends {
    output: [Option<OwnedFd>; 2],
    input: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?)
}

pub(super) fn winsize(size: TerminalSize) -> Winsize {
    Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn open_streams(spec: &ExecSpec) -> io::Result<(Streams, Ends)> {
    if let Some(size) = spec.pty {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let master = rustix::fs::open("/dev/pts/ptmx", flags, Mode::empty())?;
        rustix::pty::unlockpt(&master)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        rustix::termios::tcsetwinsize(&master, winsize(size))?;
        nonblocking(&master)?;
        let streams = Streams {
            stdin: slave.try_clone()?,
            stdout: slave.try_clone()?,
            stderr: slave,
        };
        let ends = Ends {
            output: [Some(master.try_clone()?), None],
            input: Some(master.try_clone()?),
            terminal: Some(master),
        };
        return Ok((streams, ends));
    }
    let (stdin, input) = if spec.stdin {
        let (read, write) = pipe()?;
        nonblocking(&write)?;
        (read, Some(write))
    } else {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        (rustix::fs::open("/dev/null", flags, Mode::empty())?, None)
    };
    let (out_read, stdout) = pipe()?;
    let (err_read, stderr) = pipe()?;
    nonblocking(&out_read)?;
    nonblocking(&err_read)?;
    let streams = Streams {
        stdin,
        stdout,
        stderr,
    };
    let ends = Ends {
        output: [Some(out_read), Some(err_read)],
        input,
        terminal: None,
    };
    Ok((streams, ends))
}

impl Agent {
    /// Starts a program in a group of its own.
    pub(super) fn start(&mut self, spec: ExecSpec) -> io::Result<u64> {
        if let Some(serial) = self.start_once(&spec)? {
            return Ok(serial);
        }
        // The launcher was killed, for lack of memory or from inside. Once: the next attempt is a request of its own.
        self.launcher = shell::restart_launcher(self.proof, &self.inherited)?;
        self.start_once(&spec)?
            .ok_or_else(|| io::Error::other("the sandbox's launcher does not stay alive"))
    }

    /// `None` when the launcher is gone; what it had begun and did not tell of is killed then.
    fn start_once(&mut self, spec: &ExecSpec) -> io::Result<Option<u64>> {
        if self.abandoned.len() >= FINISHED_MAX {
            return Err(io::Error::other(
                "execs that could not be started do not end",
            ));
        }
        let serial = self.serial();
        let name = group_name(serial);
        rustix::fs::mkdirat(&self.inherited.run, &*name, Mode::from_raw_mode(0o755))?;
        let made = self.start_in(serial, &name, spec);
        if !matches!(made, Ok(Some(_))) {
            let killed = self.kill_group(&name);
            self.abandoned.push(name);
            self.sweep_groups();
            killed?;
        }
        made
    }

    fn start_in(&mut self, serial: u64, name: &str, spec: &ExecSpec) -> io::Result<Option<u64>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let group = rustix::fs::openat(&self.inherited.run, name, flags, Mode::empty())?;
        let (streams, ends) = open_streams(spec)?;
        let oom_kills_before = self.oom_kills();
        let started = Instant::now();
        let Some(begun) = self.launcher.launch(spec, &group, &streams)? else {
            return Ok(None);
        };
        drop(streams);
        let deadline =
            (spec.timeout_ms > 0).then(|| started + Duration::from_millis(spec.timeout_ms));
        let [stdout, stderr] = ends.output;
        let stream = |fd| Stream {
            fd,
            ..Stream::default()
        };
        let exec = Exec {
            serial,
            spec: spec.clone(),
            pid: begun.pid,
            followers: Vec::new(),
            streams: [stream(stdout), stream(stderr)],
            status: None,
            exit: None,
            input: ends.input.map(|fd| Input {
                fd,
                waiting: VecDeque::new(),
                ended: false,
            }),
            terminal: ends.terminal,
            complaint: begun.failed,
            started,
            deadline,
            drain_deadline: None,
            timed_out: false,
            oom_kills_before,
            group_exists: true,
        };
        for (stream, source) in exec.streams.iter().zip([Source::Stdout, Source::Stderr]) {
            if let Some(fd) = &stream.fd {
                self.watch(fd.as_fd(), source, serial, EventFlags::IN)?;
            }
        }
        if let Some(input) = &exec.input {
            self.watch(input.fd.as_fd(), Source::Stdin, serial, EventFlags::empty())?;
        }
        self.execs.insert(serial, exec);
        self.forget_old();
        Ok(Some(serial))
    }

    fn oom_kills(&self) -> u64 {
        let mut text = [0; 512];
        let len = rustix::io::pread(&self.inherited.oom, &mut text, 0).unwrap_or(0);
        oom_kills(&String::from_utf8_lossy(
            text.get(..len).unwrap_or_default(),
        ))
    }

    fn forget_old(&mut self) {
        let finished = self
            .execs
            .values()
            .filter(|e| e.exit.is_some() && e.followers.is_empty());
        let finished: Vec<u64> = finished.map(|e| e.serial).collect();
        let over = finished.len().saturating_sub(FINISHED_MAX);
        for serial in finished.into_iter().take(over) {
            if let Some(exec) = self.execs.remove(&serial) {
                self.forgotten.add(&exec.spec.exec_id);
            }
        }
    }

    /// Reads what a stream has, keeps it, and passes it on.
    pub(super) fn read_stream(&mut self, serial: u64, which: usize) {
        let mut buffer = [0; READ_BYTES];
        let mut all_owed_read = false;
        loop {
            let Some(exec) = self.execs.get_mut(&serial) else {
                return;
            };
            let Some(stream) = exec.streams.get_mut(which) else {
                return;
            };
            let Some(fd) = &stream.fd else { return };
            if stream.held {
                return;
            }
            match rustix::io::read(fd, &mut buffer) {
                Ok(len) if len > 0 => {
                    let bytes = buffer.get(..len).unwrap_or_default();
                    let at = stream.spool.total();
                    stream.spool.push(bytes);
                    if let Some(owed) = &mut stream.owed {
                        *owed = owed.saturating_sub(len as u64);
                    }
                    let followers = exec.followers.clone();
                    self.pass_on(&followers, which, at, bytes);
                    self.let_flow(serial);
                    match self.owes(serial, which) {
                        // A stream that never ends must not keep the agent from its other work.
                        None => break,
                        // Once more, to see whether it has ended.
                        Some(0) if all_owed_read => break,
                        Some(0) => all_owed_read = true,
                        Some(_) => {}
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if let Some(owed) = &mut stream.owed {
                        *owed = 0;
                    }
                    break;
                }
                // A terminal whose last process has gone says EIO.
                Ok(_) | Err(_) => {
                    if let Some(fd) = stream.fd.take() {
                        self.unwatch(fd.as_fd());
                    }
                    break;
                }
            }
        }
        self.finish_if_over(serial);
    }

    fn owes(&self, serial: u64, which: usize) -> Option<u64> {
        self.execs.get(&serial)?.streams.get(which)?.owed
    }

    fn pass_on(&mut self, followers: &[u64], which: usize, at: u64, bytes: &[u8]) {
        let kind = if which == 0 {
            kind::STDOUT
        } else {
            kind::STDERR
        };
        for follower in followers {
            if let Some(connection) = self.connections.get_mut(follower)
                && matches!(connection.role, Role::Follower { stream: true, .. })
            {
                connection.put(kind, &[&at.to_le_bytes(), bytes]);
                self.send_only(*follower);
            }
        }
    }

    /// Sends without looking at the exec again: the caller does.
    fn send_only(&mut self, serial: u64) {
        if let Some(connection) = self.connections.get_mut(&serial)
            && !connection.flush()
        {
            self.hang_up(serial);
            return;
        }
        self.watch_connection(serial);
    }

    /// Reads an exec's output again, or no more, as its slowest follower has room.
    pub(super) fn let_flow(&mut self, serial: u64) {
        let Some(exec) = self.execs.get(&serial) else {
            return;
        };
        let full = exec.followers.iter().any(|follower| {
            self.connections
                .get(follower)
                .is_some_and(|c| c.waiting() >= OUTPUT_BYTES_FULL)
        });
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        let mut changed = Vec::new();
        for (stream, source) in exec
            .streams
            .iter_mut()
            .zip([Source::Stdout, Source::Stderr])
        {
            if stream.held != full {
                stream.held = full;
                changed.push(source);
            }
        }
        let Some(exec) = self.execs.get(&serial) else {
            return;
        };
        for (stream, source) in exec.streams.iter().zip([Source::Stdout, Source::Stderr]) {
            if let Some(fd) = &stream.fd
                && changed.contains(&source)
            {
                let flags = if full {
                    EventFlags::empty()
                } else {
                    EventFlags::IN
                };
                self.rewatch(fd.as_fd(), source, serial, flags);
            }
        }
    }

    /// The main process has ended: what it wrote is in the pipes now, and only that is waited for. Processes that it left
    /// behind may write on.
    pub(super) fn main_ended(&mut self, serial: u64) {
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        if let Some(input) = exec.input.take() {
            rustix::event::epoll::delete(&self.epoll, &input.fd).ok();
        }
        if exec.terminal.is_some() {
            exec.drain_deadline = Some(Instant::now() + TERMINAL_DRAIN);
        }
        for which in 0..2 {
            self.settle_stream(serial, which);
        }
        self.finish_if_over(serial);
    }

    /// From now on only what is in the pipe is owed. One stream after the other: one that is not looked at yet owes all.
    fn settle_stream(&mut self, serial: u64, which: usize) {
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        if exec.terminal.is_none()
            && let Some(stream) = exec.streams.get_mut(which)
            && let Some(fd) = &stream.fd
        {
            // Not known: until end of file, then.
            stream.owed = rustix::io::ioctl_fionread(fd).ok();
        }
        self.read_stream(serial, which);
    }

    pub(super) fn exec_due(&mut self, serial: u64, now: Instant) {
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        if exec.drain_deadline.is_some_and(|at| at <= now) {
            exec.drain_deadline = None;
            for stream in &mut exec.streams {
                stream.owed = Some(0);
            }
        }
        if exec.deadline.is_some_and(|at| at <= now) {
            exec.deadline = None;
            if exec.status.is_none() {
                exec.timed_out = true;
                let group = exec.group();
                if self.kill_group(&group).is_err() {
                    self.kill_main(serial);
                }
            }
        }
        self.finish_if_over(serial);
    }

    fn kill_main(&self, serial: u64) {
        let pid = self
            .execs
            .get(&serial)
            .and_then(|e| rustix::process::Pid::from_raw(e.pid));
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        }
    }

    /// Kills everything that an exec has started.
    pub(super) fn kill_group(&self, group: &str) -> io::Result<()> {
        let path = format!("{group}/cgroup.kill");
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.inherited.run, path, flags, Mode::empty())?;
        rustix::io::write(file, b"1")?;
        Ok(())
    }

    pub(super) fn kill_exec(&self, serial: u64) -> io::Result<()> {
        self.kill_group(&group_name(serial))
    }

    fn finish_if_over(&mut self, serial: u64) {
        let oom_kills = self.oom_kills();
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        let Some(status) = exec.status else { return };
        let drained = |s: &Stream| s.fd.is_none() || s.owed == Some(0);
        if exec.exit.is_some() || !exec.streams.iter().all(drained) {
            return;
        }
        exec.deadline = None;
        exec.drain_deadline = None;
        let oom = oom_kills > exec.oom_kills_before;
        exec.exit = Some(describe_end(exec, status, oom));
        exec.terminal = None;
        let followers = exec.followers.clone();
        for follower in followers {
            self.tell_end(follower, serial, (0, 0));
        }
        self.sweep_groups();
        self.forget_old();
    }

    /// Sends an exec's end, and before it, to those who did not follow the stream, what is kept of the output.
    pub(super) fn tell_end(&mut self, follower: u64, serial: u64, from: (u64, u64)) {
        let (Some(exec), Some(connection)) = (
            self.execs.get_mut(&serial),
            self.connections.get_mut(&follower),
        ) else {
            return;
        };
        let Some(exit) = &exec.exit else { return };
        if matches!(connection.role, Role::Follower { stream: false, .. }) {
            let kinds = [(kind::STDOUT, from.0), (kind::STDERR, from.1)];
            for (stream, (kind, from)) in exec.streams.iter_mut().zip(kinds) {
                for (at, bytes) in stream.spool.kept(from) {
                    connection.put(kind, &[&at.to_le_bytes(), bytes]);
                }
            }
        }
        let exit = serde_json::to_vec(exit).unwrap_or_default();
        connection.put(kind::EXIT, &[&exit]);
        connection.closing = true;
        exec.followers.retain(|f| *f != follower);
        self.send(follower);
    }

    /// Removes the groups of ended execs that no process is in any more.
    pub(super) fn sweep_groups(&mut self) {
        let mut abandoned = std::mem::take(&mut self.abandoned);
        abandoned.retain(|group| !self.remove_group(group));
        self.abandoned = abandoned;
        let left = self
            .execs
            .values()
            .filter(|e| e.exit.is_some() && e.group_exists);
        let left: Vec<(u64, String)> = left.map(|e| (e.serial, e.group())).collect();
        for (serial, group) in left {
            if self.remove_group(&group)
                && let Some(exec) = self.execs.get_mut(&serial)
            {
                exec.group_exists = false;
            }
        }
    }

    fn remove_group(&self, name: &str) -> bool {
        rustix::fs::unlinkat(&self.inherited.run, name, AtFlags::REMOVEDIR).is_ok()
    }

    /// Gives a program more of its input.
    pub(super) fn write_stdin(&mut self, serial: u64) {
        let Some(exec) = self.execs.get_mut(&serial) else {
            return;
        };
        let Some(input) = &mut exec.input else { return };
        let mut broken = false;
        while !input.waiting.is_empty() {
            match rustix::io::write(&input.fd, input.waiting.as_slices().0) {
                Ok(len) => drop(input.waiting.drain(..len)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                // The program does not read any more.
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        let over = broken || (input.ended && input.waiting.is_empty());
        let room = over || input.waiting.len() < INPUT_BYTES_FULL;
        let flags = if input.waiting.is_empty() {
            EventFlags::empty()
        } else {
            EventFlags::OUT
        };
        if let Some(input) = exec.input.take() {
            if over {
                self.unwatch(input.fd.as_fd());
            } else {
                self.rewatch(input.fd.as_fd(), Source::Stdin, serial, flags);
                if let Some(exec) = self.execs.get_mut(&serial) {
                    exec.input = Some(input);
                }
            }
        }
        if room {
            self.release_writers(serial);
        }
    }

    /// Puts bytes into a program's input; whether there is room for more.
    pub(super) fn add_input(&mut self, serial: u64, bytes: &[u8], end: bool) -> bool {
        let Some(exec) = self.execs.get_mut(&serial) else {
            return true;
        };
        let terminal = exec.terminal.is_some();
        let Some(input) = &mut exec.input else {
            return true;
        };
        input.waiting.extend(bytes);
        if end && terminal {
            // A terminal has no end of file; a program at one sees Ctrl-D.
            input.waiting.push_back(4);
        } else if end {
            input.ended = true;
        }
        self.write_stdin(serial);
        let input = self.execs.get(&serial).and_then(|e| e.input.as_ref());
        input.is_none_or(|input| input.waiting.len() < INPUT_BYTES_FULL)
    }
}

fn describe_end(exec: &Exec, status: WaitStatus, oom: bool) -> Exit {
    let signal = status.terminating_signal();
    let code = status.exit_status().unwrap_or(0);
    let message = exec
        .complaint
        .as_ref()
        .map(|(what, errno)| format!("cannot {what}: {}", io::Error::from_raw_os_error(*errno)));
    let outcome = match (signal, &message) {
        (_, Some(_)) => Outcome::NotStarted,
        _ if exec.timed_out => Outcome::TimedOut,
        // A process of the exec, or another of the sandbox at the same time; a shell reports its child's as 137.
        (Some(9), _) if oom => Outcome::Oom,
        (None, _) if oom && code == 137 => Outcome::Oom,
        (Some(_), _) => Outcome::Signal,
        (None, _) => Outcome::UserExit,
    };
    let [stdout, stderr] = &exec.streams;
    Exit {
        outcome,
        exit_code: signal.map_or(code, |signal| 128 + signal),
        signal,
        stdout_bytes: stdout.spool.total(),
        stderr_bytes: stderr.spool.total(),
        open_streams: exec.terminal.is_none() && exec.streams.iter().any(|s| s.fd.is_some()),
        message,
        duration_ms: u64::try_from(exec.started.elapsed().as_millis()).unwrap_or(u64::MAX),
    }
}
