//! The seam between what users ask of a sandbox and what it is made of.
//!
//! A [`Backend`] makes sandboxes of one kind. The API and the records above it know a sandbox by its [`Place`] and speak to what runs
//! inside through its [`Door`], in the protocol of [`crate::container::protocol`], whatever carries it. What a kind cannot do it
//! refuses with [`BackendError::Lacks`]; nothing is done instead.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::container::backend::{Containers, Settings};
use crate::container::cgroup::{Limits, Usage};
use crate::container::link::LinkError;

/// What sandboxes are made of.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Processes of this host, in namespaces.
    #[default]
    Container,
    /// A small virtual machine that begins from a snapshot.
    Microvm,
    /// A virtual machine.
    Vm,
    /// One call of a function in a worker that is ready.
    Fncall,
}

impl Kind {
    /// All that have a name, whether this daemon makes them or not.
    pub const ALL: [Self; 4] = [Self::Container, Self::Microvm, Self::Vm, Self::Fncall];

    /// As requests and records name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Microvm => "microvm",
            Self::Vm => "vm",
            Self::Fncall => "fncall",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a sandbox is: enough to find it again after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Who made it. Records of earlier versions do not say: those were containers.
    #[serde(default)]
    pub backend: Kind,
    /// What of its backend's numbered room it has: ids, control groups, sockets.
    pub slot: u32,
    /// The host's process that it lives and dies with: its agent, or its machine.
    pub pid: i32,
    /// When that began, in the kernel's ticks since boot: numbers are used again.
    pub started: u64,
}

/// How what runs inside is reached. Who holds one need not know what is behind it: the socket of an agent, or of a machine's vsock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door(PathBuf);

impl Door {
    /// An agent that listens at a socket of this host.
    pub fn at(socket: PathBuf) -> Self {
        Self(socket)
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.0
    }
}

/// What a sandbox is to be.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Layers, lowest first: folders or mounts that stay.
    pub layers: &'a [PathBuf],
    /// What it writes goes here.
    pub rw: &'a Path,
    /// Name of its machine.
    pub hostname: &'a str,
    /// What it may use.
    pub limits: &'a Limits,
    /// How long to wait for room.
    pub patience: Duration,
}

/// Why a backend did not do something.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// No backend of this name, or not in this daemon.
    #[error("backend `{name}` is not one of: {there}")]
    Unknown {
        /// The name.
        name: String,
        /// Those that are there.
        there: String,
    },
    /// This kind of sandbox cannot do that.
    #[error("a sandbox of the backend `{backend}` cannot {what}")]
    Lacks {
        /// The kind.
        backend: Kind,
        /// What was asked for.
        what: &'static str,
    },
    /// As many exist as may.
    #[error("{most} sandboxes exist or are being made, the most that may")]
    Full {
        /// How many.
        most: u32,
    },
    /// No room came in time.
    #[error("no room for a new sandbox within {waited:?} ({reason}); try again")]
    Busy {
        /// How long.
        waited: Duration,
        /// The last failure.
        reason: String,
    },
    /// It is being shut down.
    #[error("the backend `{backend}` is shutting down")]
    Closed {
        /// Which.
        backend: Kind,
    },
    /// The sandbox's process is not the one that was recorded.
    #[error("process {pid} is gone")]
    Gone {
        /// Its number.
        pid: i32,
    },
    /// What runs inside did not do what it was asked.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The backend's own machinery failed.
    #[error(transparent)]
    Own(Box<dyn Error + Send + Sync>),
}

/// Sandboxes of one kind. All calls may block.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Which kind.
    fn kind(&self) -> Kind;

    /// Something is asked for now: work ahead can wait.
    fn asked(&self) {}

    /// Makes a sandbox.
    ///
    /// # Errors
    /// See [`BackendError`]; nothing of the sandbox is left then but [`Plan::rw`].
    fn create(&self, plan: &Plan<'_>) -> Result<Place, BackendError>;

    /// Whether it lives; of an earlier daemon's too.
    fn lives(&self, place: &Place) -> bool;

    /// How what runs inside is reached.
    fn door(&self, place: &Place) -> Door;

    /// The network namespace that its packets appear in, where the daemon puts its gate.
    ///
    /// # Errors
    /// See [`BackendError`].
    fn network(&self, place: &Place) -> Result<OwnedFd, BackendError> {
        lacks(place, "have a network")
    }

    /// Makes it stand still for a moment, with its files on disk as they are at that moment.
    ///
    /// # Errors
    /// See [`BackendError`]; it goes on then.
    fn freeze(&self, place: &Place) -> Result<(), BackendError> {
        lacks(place, "stand still to be copied")
    }

    /// Makes it stand still for long, and gives the memory back that it does not need.
    ///
    /// # Errors
    /// See [`BackendError`]; it goes on then.
    fn pause(&self, place: &Place) -> Result<(), BackendError> {
        lacks(place, "be paused")
    }

    /// Lets it go on; one that runs does.
    ///
    /// # Errors
    /// See [`BackendError`].
    fn resume(&self, place: &Place) -> Result<(), BackendError>;

    /// What it uses.
    ///
    /// # Errors
    /// See [`BackendError`].
    fn usage(&self, place: &Place) -> Result<Usage, BackendError> {
        lacks(place, "tell what it uses")
    }

    /// Ends a sandbox in any state, also one that is half gone. Returns when nothing is left.
    ///
    /// # Errors
    /// When it cannot end: its room stays taken, and the call may be made again.
    fn kill(&self, place: &Place) -> Result<(), BackendError>;

    /// Ends what was made ahead. Sandboxes go on.
    fn close(&self);
}

fn lacks<T>(place: &Place, what: &'static str) -> Result<T, BackendError> {
    Err(BackendError::Lacks {
        backend: place.backend,
        what,
    })
}

/// The backends of this daemon.
#[derive(Debug, Default)]
pub struct Backends(BTreeMap<Kind, Box<dyn Backend>>);

impl Backends {
    /// Starts those that this host can have. `kept` are the places of sandboxes that are to be adopted.
    ///
    /// # Errors
    /// When one does not start, or one that is to be adopted is of a backend that is not there.
    pub fn start(containers: Settings, kept: &[Place]) -> Result<Self, BackendError> {
        let mut all = Self::default();
        let of_kind = |kind| kept.iter().filter(move |place| place.backend == kind);
        let kept_containers: Vec<Place> = of_kind(Kind::Container).cloned().collect();
        all.add(Box::new(Containers::start(containers, &kept_containers)?));
        for place in kept {
            all.of(place)?;
        }
        Ok(all)
    }

    fn add(&mut self, backend: Box<dyn Backend>) {
        self.0.insert(backend.kind(), backend);
    }

    /// The kind that a request names.
    ///
    /// # Errors
    /// [`BackendError::Unknown`] says which there are.
    pub fn choose(&self, name: &str) -> Result<Kind, BackendError> {
        let known = self.0.keys().find(|kind| kind.name() == name);
        known.copied().ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> BackendError {
        let there: Vec<&str> = self.0.keys().map(|kind| kind.name()).collect();
        BackendError::Unknown {
            name: name.to_owned(),
            there: there.join(", "),
        }
    }

    /// Who makes sandboxes of a kind.
    ///
    /// # Errors
    /// [`BackendError::Unknown`].
    pub fn get(&self, kind: Kind) -> Result<&dyn Backend, BackendError> {
        let found = self.0.get(&kind).map(|backend| &**backend);
        found.ok_or_else(|| self.unknown(kind.name()))
    }

    /// Who made what is at a place.
    ///
    /// # Errors
    /// [`BackendError::Unknown`].
    pub fn of(&self, place: &Place) -> Result<&dyn Backend, BackendError> {
        self.get(place.backend)
    }

    /// Ends what was made ahead. Sandboxes go on.
    pub fn close(&self) {
        for backend in self.0.values() {
            backend.close();
        }
    }
}

#[cfg(test)]
mod tests;
