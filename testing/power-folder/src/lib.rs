//! A mount for tests whose power fails: it notes every write, cut, sync and change of a name, and tells afterwards what would be found
//! had the power failed after any of them.
//!
//! What is sure is what POSIX says, and no more. A file's bytes and length are those of its last sync; of each write and cut
//! since then it may have all, nothing, or (of writes) some sectors. A folder's names are those of its own last sync; each
//! change since then may be there or not, in order or not, as far as the names allow it. A synced file without its name is
//! not found.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "support of tests: a broken expectation is a failed test"
)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::{BackgroundSession, Config, MountOption, Session};

mod fs;
mod journal;

use fs::Server;
pub use journal::Event;

/// All that happened, in order.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<Vec<Event>>>);

impl Journal {
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, event: Event) {
        self.lock().push(event);
    }

    /// How many events there were.
    pub fn events(&self) -> usize {
        self.lock().len()
    }

    /// Puts what would be found after so many events into an empty folder. `random` gives a number below another.
    pub fn after(&self, events: usize, random: &mut dyn FnMut(u64) -> u64, into: &Path) {
        journal::after(&self.lock()[..events], random, into);
    }
}

/// The mount; it goes away with the value.
#[derive(Debug)]
pub struct PowerFolder {
    point: PathBuf,
    journal: Journal,
    _session: BackgroundSession,
}

impl PowerFolder {
    /// An empty folder at `point`.
    pub fn mount(point: &Path) -> Self {
        let journal = Journal::default();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("power-folder".to_owned())];
        let session = Session::new(Server::new(journal.clone()), point, &config).unwrap();
        Self {
            point: point.to_owned(),
            journal,
            _session: session.spawn().unwrap(),
        }
    }

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// What happened so far, and goes on to.
    pub fn journal(&self) -> Journal {
        self.journal.clone()
    }
}
