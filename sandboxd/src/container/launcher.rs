//! The launcher: the process that a sandbox's execs are born from.
//!
//! It sits in the sandbox's v1 groups, so that its children do too, without being moved; and it makes them children of the
//! agent (`CLONE_PARENT`), which collects them. It is a process of its own because the agent must stay outside of the limits:
//! a sandbox that is out of memory or processes still answers. If the kernel kills it (it counts towards the memory), the
//! agent starts another.
//!
//! A new process borrows its memory until it is a program (`sys::borrow`), so it knows by then whether that failed, and why.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::child::{self, Prepared, Step, Streams};
use super::protocol::ExecSpec;
use super::{message, shell};
use crate::sys::borrow::{self, Stack};
use crate::sys::{self, CloneArgs, Filter, SingleThreaded};

/// How long it may take to start a process before it is taken for stopped.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A launcher, as the agent sees it.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) socket: OwnedFd,
    pub(crate) pid: i32,
}

/// What a process tried when it could not become a program, and the error number.
pub(crate) type NotStarted = (String, i32);

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Launched {
    /// The process itself, right before it becomes a program: what has said so may have run, and is not started again.
    Ready(i32),
    /// The process, in the sandbox's numbers, and why it did not become a program.
    Pid(i32, Option<NotStarted>),
    /// The error number of what failed.
    Failed(i32),
}

/// A process that was started.
#[derive(Debug)]
pub(crate) struct Begun {
    /// In the sandbox's numbers.
    pub(crate) pid: i32,
    /// Why it did not become a program, if it did not.
    pub(crate) failed: Option<NotStarted>,
}

impl Launcher {
    /// Starts a process: the exec's group, and its three streams.
    ///
    /// # Errors
    /// `None` inside when the launcher is gone; otherwise what the kernel said.
    pub(crate) fn launch(
        &self,
        spec: &ExecSpec,
        group: &OwnedFd,
        streams: &Streams,
    ) -> io::Result<Option<Begun>> {
        let fds = [
            group.as_fd(),
            streams.stdin.as_fd(),
            streams.stdout.as_fd(),
            streams.stderr.as_fd(),
        ];
        match message::send(&self.socket, spec, &fds) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            sent => sent?,
        }
        let mut answer = message::receive::<Launched>(&self.socket);
        if let Ok(Some((Launched::Ready(pid), _))) = answer {
            answer = message::receive::<Launched>(&self.socket);
            if !matches!(answer, Ok(Some(_))) {
                // What it started may have killed or stopped it, and runs all the same. An answer that comes later would be taken for
                // another's: it must not live on.
                if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
                }
                return Ok(Some(Begun { pid, failed: None }));
            }
        }
        match answer {
            Ok(Some((Launched::Ready(_), _))) => {
                Err(io::Error::other("the sandbox's launcher told twice"))
            }
            Ok(Some((Launched::Pid(pid, failed), _))) => Ok(Some(Begun { pid, failed })),
            Ok(Some((Launched::Failed(errno), _))) => Err(io::Error::from_raw_os_error(errno)),
            Ok(None) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            // What is inside can stop it as well as kill it: it has the same ids.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if let Some(pid) = rustix::process::Pid::from_raw(self.pid) {
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
                }
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

/// Runs the launcher until the agent is gone.
///
/// # Errors
/// When it cannot be set up, or the agent sends nonsense.
pub(crate) fn run(proof: SingleThreaded, socket: OwnedFd, join: &[OwnedFd]) -> io::Result<()> {
    // New programs have what this process has.
    sys::reset_signals()?;
    for group in join {
        rustix::io::write(group, b"0")?;
    }
    shell::own_cgroups()?;
    let filter = Filter::new(&super::seccomp::filter());
    let mut stack = Stack::new()?;
    while let Some((spec, fds)) = message::receive::<ExecSpec>(&socket)? {
        let mut fds = fds.into_iter();
        let mut next = || {
            fds.next()
                .ok_or_else(|| io::Error::other("a launch lacks descriptors"))
        };
        let group = next()?;
        let streams = Streams {
            stdin: next()?,
            stdout: next()?,
            stderr: next()?,
        };
        let launched = launch(
            proof,
            &spec,
            (&socket, &group),
            streams,
            (&filter, &mut stack),
        );
        message::send(&socket, &launched, &[])?;
    }
    Ok(())
}

fn launch(
    proof: SingleThreaded,
    spec: &ExecSpec,
    (socket, group): (&OwnedFd, &OwnedFd),
    streams: Streams,
    (filter, stack): (&Filter, &mut Stack),
) -> Launched {
    let args = CloneArgs {
        flags: nix::libc::CLONE_PARENT,
        cgroup: Some(group.as_fd()),
    };
    let prepared = Prepared::new(spec);
    // In one store: the borrower may be killed at any moment.
    let told = AtomicU64::new(0);
    let mut work = || match &prepared {
        Ok(prepared) => {
            let (step, errno) = prepared.become_program(&streams, filter, &|| tell_ready(socket));
            let number = u64::from(errno.raw_os_error().unsigned_abs());
            told.store(u64::from(step.number()) << 32 | number, Ordering::Release);
            child::status(errno)
        }
        Err((_, errno)) => child::status(rustix::io::Errno::from_raw_os_error(*errno)),
    };
    let cloned = borrow::clone_borrowing(proof, &args, stack, &mut work);
    // Before the agent hears of it: who still holds the program's output open must not be us.
    drop(streams);
    match cloned {
        Ok(pid) => {
            let told = told.into_inner();
            let step = u32::try_from(told >> 32).ok().and_then(Step::of);
            let errno = i32::try_from(told & u64::from(u32::MAX)).unwrap_or(0);
            let failed = match (prepared, step) {
                (Err(failed), _) => Some(failed),
                (Ok(prepared), Some(step)) => Some((prepared.describe(step), errno)),
                (Ok(_), None) => None,
            };
            Launched::Pid(pid, failed)
        }
        Err(error) => Launched::Failed(error.raw_os_error().unwrap_or(nix::libc::EIO)),
    }
}

/// Sends [`Launched::Ready`] as the borrower. Allocates nothing.
fn tell_ready(socket: &OwnedFd) -> Result<(), rustix::io::Errno> {
    use std::io::Write as _;
    let mut text = [0; 32];
    let room = text.len();
    let mut rest = &mut text[..];
    let pid = rustix::process::getpid().as_raw_nonzero();
    // It has room for every number.
    if write!(rest, "{{\"Ready\":{pid}}}").is_err() {
        return Err(rustix::io::Errno::NOBUFS);
    }
    let len = room - rest.len();
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    rustix::net::send(socket, text.get(..len).unwrap_or_default(), flags).map(drop)
}
