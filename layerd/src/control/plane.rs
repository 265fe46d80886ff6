//! Starting the data plane, or finding the one that an earlier control process left.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::link::{LinkError, PlaneLink, PlaneReader};
use crate::driver::{Chosen, Driver};
use crate::kernel::mount;
use crate::kill::step;
use crate::paths::Paths;
use crate::plane::READY;

/// How long an ending data plane may take before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// The thread that waits for a child does nothing else.
const REAPER_STACK_BYTES: usize = 64 << 10;
/// The name of the hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "data-plane";

/// Why there is no data plane.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("cannot start the data plane `{program}`: {source}")]
    Spawn {
        program: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the data plane did not start; its reason is in the log above")]
    NotReady,
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// How to start one.
#[derive(Debug, Clone)]
pub(crate) struct Starter {
    pub(crate) paths: Paths,
    pub(crate) patience: Duration,
    pub(crate) memory_bytes_max: u64,
    pub(crate) directio: bool,
    pub(crate) chosen: Chosen,
}

/// A data plane we are connected to.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) link: PlaneLink,
    pub(crate) reader: PlaneReader,
}

impl Starter {
    /// The data plane that listens already, if there is one.
    ///
    /// # Errors
    /// When it is not one of this version.
    pub(crate) fn adopt(&self) -> Result<Option<Plane>, StartError> {
        let found = PlaneLink::connect(&self.paths.plane_socket())?;
        Ok(found.map(|(link, reader)| Plane { link, reader }))
    }

    /// Starts a new one and waits until it serves.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn start(&self) -> Result<Plane, StartError> {
        // This very binary, also when its file was replaced or removed meanwhile: the two speak one protocol.
        let program = PathBuf::from("/proc/self/exe");
        let mut child = Command::new(&program)
            .arg0("layerd")
            .arg(SUBCOMMAND)
            .arg("--cache")
            .arg(self.paths.root())
            .arg("--read-deadline")
            .arg(format!("{}ms", self.patience.as_millis()))
            .arg("--memory")
            .arg(self.memory_bytes_max.to_string())
            .args((!self.directio).then_some("--buffered"))
            .args(["--driver", self.chosen.driver.name()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| StartError::Spawn { program, source })?;
        step("the data plane starts");
        let mut line = Vec::new();
        if let Some(out) = child.stdout.take() {
            // An error reads as an end: not ready.
            if let Err(error) = BufReader::new(out).read_until(b'\n', &mut line) {
                tracing::warn!(%error, "cannot hear the data plane");
            }
        }
        step("the data plane is ready");
        let found = if line == READY {
            PlaneLink::connect(&self.paths.plane_socket())?
        } else {
            None
        };
        if found.is_none()
            && let Err(error) = child.kill()
        {
            tracing::debug!(%error, "the data plane ended by itself");
        }
        let reaper = std::thread::Builder::new()
            .name("reap".to_owned())
            .stack_size(REAPER_STACK_BYTES)
            .spawn(move || match child.wait() {
                Ok(status) => tracing::debug!(pid = child.id(), %status, "data plane ended"),
                Err(error) => tracing::warn!(%error, "cannot wait for the data plane"),
            });
        if let Err(error) = reaper {
            tracing::warn!(%error, "the data plane will be a zombie when it ends");
        }
        let (link, reader) = found.ok_or(StartError::NotReady)?;
        Ok(Plane { link, reader })
    }
}

/// Whether a data plane has certainly ended.
pub(crate) fn is_dead(link: &PlaneLink) -> bool {
    link.process
        .as_ref()
        .is_some_and(|p| wait(p, Duration::ZERO))
}

fn kill(process: Option<&OwnedFd>) {
    let killed = process.map(|process| pidfd_send_signal(process, Signal::KILL));
    if let Some(Err(error)) = killed {
        tracing::debug!(%error, "the data plane was gone already");
    }
}

/// Waits until a process has ended; whether it has.
fn wait(process: &OwnedFd, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot wait for the data plane");
                return false;
            }
        }
    }
}

/// Makes sure that a data plane that is lost is dead: the kernel then gives EIO for what it served. Its FUSE connection
/// is aborted, so that readers do not wait for the process's end, nor the process for its readers.
pub(crate) fn make_dead(link: &PlaneLink, paths: &Paths) {
    kill(link.process.as_ref());
    if link.driver == Driver::Fuse
        && let Err(error) = mount::abort(&paths.fuse())
    {
        tracing::debug!(%error, "the FUSE mount is gone already");
    }
    let dead = link.process.as_ref().is_none_or(|p| wait(p, EXIT_TIMEOUT));
    if !dead {
        tracing::error!(pid = link.pid, "a killed data plane does not end");
    }
}

/// Ends a data plane: asks it, waits, and kills it if it does not listen.
pub(crate) fn stop(link: &PlaneLink, paths: &Paths) {
    if let Err(error) = link.exit() {
        tracing::warn!(%error, "the data plane does not end by itself");
    }
    let ended = link.process.as_ref().is_none_or(|p| wait(p, EXIT_TIMEOUT));
    if !ended {
        tracing::warn!(pid = link.pid, "the data plane does not end; killing it");
        make_dead(link, paths);
    }
}
