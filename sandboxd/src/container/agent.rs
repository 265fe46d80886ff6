//! The agent: pid 1 of a sandbox. It starts execs, relays their streams, collects every process, and kills what is over time.
//!
//! One thread and one `epoll`. Each connection carries one operation (see [`super::protocol`]). It never runs a program from the
//! sandbox's file system, and its socket has no path inside. What it remembers is bounded: execs, bytes of output, bytes on
//! their way to a reader.
//!
//! Output is read from the pipes as fast as it comes, into a spool that keeps head and tail; if somebody follows it as a
//! stream, only as fast as they read, so that nothing is lost, until they stall: then they are dropped, not the process.

mod connection;
mod exec;
mod forgotten;
mod work;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::SocketFlags;
use rustix::process::WaitOptions;

use super::launcher::Launcher;
use super::shell::{self, Inherited};
use crate::sys::SingleThreaded;
use connection::Connection;
use exec::Exec;
use forgotten::Forgotten;

/// Execs that run at a time.
const RUNNING_MAX: usize = 1024;
/// Execs that are remembered after their end; the oldest go first.
const FINISHED_MAX: usize = 64;
/// Connections at a time.
const CONNECTIONS_MAX: usize = 4096;
/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;

/// What an event is about; the rest of its number says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Listener,
    Signals,
    Connection,
    Stdout,
    Stderr,
    Stdin,
}

impl Source {
    const ALL: [Self; 6] = [
        Self::Listener,
        Self::Signals,
        Self::Connection,
        Self::Stdout,
        Self::Stderr,
        Self::Stdin,
    ];

    fn token(self, serial: u64) -> EventData {
        let index = Self::ALL.iter().position(|s| *s == self);
        EventData::new_u64(serial << 3 | index.unwrap_or_default() as u64)
    }

    fn of(data: u64) -> Option<(Self, u64)> {
        let index = usize::try_from(data & 7).ok()?;
        Some((*Self::ALL.get(index)?, data >> 3))
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Agent {
    proof: SingleThreaded,
    inherited: Inherited,
    launcher: Launcher,
    epoll: OwnedFd,
    signals: SignalFd,
    execs: BTreeMap<u64, Exec>,
    connections: BTreeMap<u64, Connection>,
    forgotten: Forgotten,
    /// Groups of execs that were not started, until nothing is in them any more.
    abandoned: Vec<String>,
    next: u64,
    assigned: bool,
}

impl Agent {
    pub(crate) fn new(
        proof: SingleThreaded,
        inherited: Inherited,
        launcher: Launcher,
    ) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let readable = EventFlags::IN;
        epoll::add(
            &epoll,
            &inherited.listener,
            Source::Listener.token(0),
            readable,
        )?;
        epoll::add(&epoll, &signals, Source::Signals.token(0), readable)?;
        Ok(Self {
            proof,
            inherited,
            launcher,
            epoll,
            signals,
            execs: BTreeMap::new(),
            connections: BTreeMap::new(),
            forgotten: Forgotten::default(),
            abandoned: Vec::new(),
            next: 1,
            assigned: false,
        })
    }

    /// Serves for ever: the sandbox ends when this process is killed.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            let timeout = self.next_deadline().map(|at| {
                // A millisecond more: waking up too early would only mean waiting again.
                let wait = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                rustix::event::Timespec {
                    tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: wait.subsec_nanos().into(),
                }
            });
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let (flags, data) = (event.flags, event.data.u64());
                if let Some((source, serial)) = Source::of(data) {
                    self.handle(source, serial, flags);
                }
            }
            self.reap();
            self.look_at_deadlines();
        }
    }

    fn handle(&mut self, source: Source, serial: u64, flags: EventFlags) {
        match source {
            Source::Listener => self.accept(),
            // What ended is found by `reap`, which runs after every round.
            Source::Signals => while let Ok(Some(_)) = self.signals.read_signal() {},
            Source::Connection => self.serve(serial, flags),
            Source::Stdout => self.read_stream(serial, 0),
            Source::Stderr => self.read_stream(serial, 1),
            Source::Stdin => self.write_stdin(serial),
        }
    }

    fn watch(
        &self,
        fd: BorrowedFd<'_>,
        source: Source,
        serial: u64,
        flags: EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, source.token(serial), flags)?)
    }

    fn rewatch(&self, fd: BorrowedFd<'_>, source: Source, serial: u64, flags: EventFlags) {
        // It is registered: this can fail only for lack of memory, and then the next event tries again.
        epoll::modify(&self.epoll, fd, source.token(serial), flags).ok();
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        epoll::delete(&self.epoll, fd).ok();
    }

    fn serial(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn accept(&mut self) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        while let Ok(socket) = rustix::net::accept_with(&self.inherited.listener, flags) {
            if self.connections.len() >= CONNECTIONS_MAX {
                continue;
            }
            let serial = self.serial();
            if self
                .watch(socket.as_fd(), Source::Connection, serial, EventFlags::IN)
                .is_ok()
            {
                self.connections.insert(serial, Connection::new(socket));
                // The request is usually there already.
                self.serve(serial, EventFlags::IN);
            }
        }
    }

    /// Collects every process that ended, ours and orphans.
    fn reap(&mut self) {
        let mut any = false;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            any = true;
            let pid = pid.as_raw_nonzero().get();
            if pid == self.launcher.pid {
                if let Ok(launcher) = shell::restart_launcher(self.proof, &self.inherited) {
                    self.launcher = launcher;
                }
                continue;
            }
            let exec = self
                .execs
                .values_mut()
                .find(|e| e.pid == pid && e.status.is_none());
            if let Some(exec) = exec {
                exec.status = Some(status);
                let serial = exec.serial;
                self.main_ended(serial);
            }
        }
        if any {
            self.sweep_groups();
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let execs = self.execs.values().filter_map(Exec::next_deadline);
        let connections = self
            .connections
            .values()
            .filter_map(Connection::stall_deadline);
        execs.chain(connections).min()
    }

    fn look_at_deadlines(&mut self) {
        let now = Instant::now();
        let due = self
            .execs
            .values()
            .filter(|e| e.next_deadline().is_some_and(|at| at <= now));
        let due: Vec<u64> = due.map(|e| e.serial).collect();
        for serial in due {
            self.exec_due(serial, now);
        }
        let stalled = self
            .connections
            .iter()
            .filter(|(_, c)| c.stall_deadline().is_some_and(|at| at <= now));
        let stalled: Vec<u64> = stalled.map(|(serial, _)| *serial).collect();
        for serial in stalled {
            self.hang_up(serial);
        }
    }
}
