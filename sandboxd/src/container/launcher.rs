//! The launcher: the process that a sandbox's execs are born from.
//!
//! It sits in the sandbox's v1 groups, so that its children do too, without being moved; and it makes them children of the
//! agent (`CLONE_PARENT`), which collects them. It is a process of its own because the agent must stay outside of the limits:
//! a sandbox that is out of memory or processes still answers. If the kernel kills it (it counts towards the memory), the
//! agent starts another.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::child::{self, Streams};
use super::protocol::ExecSpec;
use super::{message, shell};
use crate::sys::{self, CloneArgs, Cloned, Instruction, SingleThreaded};

/// How long it may take to start a process before it is taken for stopped.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A launcher, as the agent sees it.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) socket: OwnedFd,
    pub(crate) pid: i32,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Launched {
    /// The process, in the sandbox's numbers.
    Pid(i32),
    /// The error number of what failed.
    Failed(i32),
}

impl Launcher {
    /// Starts a process: the exec's group, its three streams, and the pipe that tells why the program did not start.
    ///
    /// # Errors
    /// `None` inside when the launcher is gone; otherwise what the kernel said.
    pub(crate) fn launch(
        &self,
        spec: &ExecSpec,
        group: &OwnedFd,
        streams: &Streams,
    ) -> io::Result<Option<i32>> {
        let fds = [
            group.as_fd(),
            streams.stdin.as_fd(),
            streams.stdout.as_fd(),
            streams.stderr.as_fd(),
            streams.report.as_fd(),
        ];
        match message::send(&self.socket, spec, &fds) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            sent => sent?,
        }
        match message::receive::<Launched>(&self.socket) {
            Ok(Some((Launched::Pid(pid), _))) => Ok(Some(pid)),
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
    for group in join {
        rustix::io::write(group, b"0")?;
    }
    shell::own_cgroups()?;
    let filter = super::seccomp::filter();
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
            report: next()?,
        };
        let launched = launch(proof, &spec, &group, streams, &filter);
        message::send(&socket, &launched, &[])?;
    }
    Ok(())
}

fn launch(
    proof: SingleThreaded,
    spec: &ExecSpec,
    group: &OwnedFd,
    streams: Streams,
    filter: &[Instruction],
) -> Launched {
    let args = CloneArgs {
        flags: nix::libc::CLONE_PARENT,
        cgroup: Some(group.as_fd()),
    };
    match sys::clone(proof, &args) {
        Ok(Cloned::Child) => child::become_program(spec, streams, filter),
        Ok(Cloned::Parent { pid, .. }) => Launched::Pid(pid),
        Err(error) => Launched::Failed(error.raw_os_error().unwrap_or(nix::libc::EIO)),
    }
}
