//! The rings of one origin: made when needed, used by one thread at a time, given back or kept aside.
//!
//! A ring on which a read is still under way (the client gave no answer in time) is kept aside with its memory until
//! that answer came: only then can nothing write there any more. One that answered something nobody asked stays
//! aside for good. Both count, so the number of rings, and with it the shared memory, is bounded; when all are aside, reads fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::ring::Worker;
use super::sys::Library;

/// Most rings of an origin: 3FS gives about 1.5 GiB/s through one.
pub(super) const RINGS_MAX: usize = 8;
/// Longest wait for rings in use when the pool is closed: the end of a process should not wait for a client that is silent.
const CLOSE_WAIT_MAX: Duration = Duration::from_millis(50);
/// Where the library puts links to its shared memory, below the mount point.
const LINKS: &str = "3fs-virt/iovs";

/// Why there is no ring.
#[derive(Debug, thiserror::Error)]
pub(super) enum PoolError {
    #[error("cannot make a ring: {0}; is there room in /dev/shm?")]
    Create(Errno),
    #[error(
        "all {RINGS_MAX} rings wait for answers of the 3FS client that did not come in time; if it was restarted, restart this program"
    )]
    AllAside,
    #[error("all {RINGS_MAX} rings are in use")]
    Busy,
    #[error("the origin was closed")]
    Closed,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Worker>,
    aside: Vec<Worker>,
    /// All rings there are, those in use included.
    made: usize,
    closed: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Pool {
    library: &'static Library,
    mount: PathBuf,
    state: Mutex<State>,
    given_back: Condvar,
}

/// A ring in use; given back when dropped.
#[derive(Debug)]
pub(super) struct Lent<'a> {
    pool: &'a Pool,
    worker: Option<Worker>,
}

impl Pool {
    /// No rings yet, below this mount point.
    pub(super) fn new(library: &'static Library, mount: PathBuf) -> Self {
        Self {
            library,
            mount,
            state: Mutex::new(State::default()),
            given_back: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ring on which nothing is under way. Waits for one until `deadline` if all are in use.
    pub(super) fn lend(&self, deadline: Instant) -> Result<Lent<'_>, PoolError> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Err(PoolError::Closed);
            }
            state.sweep();
            if let Some(worker) = state.free.pop() {
                return Ok(self.lent(worker));
            }
            if state.made < RINGS_MAX {
                state.made += 1;
                drop(state);
                return match Worker::create(self.library, &self.mount) {
                    Ok(worker) => Ok(self.lent(worker)),
                    Err(errno) => {
                        self.lock().made -= 1;
                        self.given_back.notify_one();
                        Err(PoolError::Create(errno))
                    }
                };
            }
            if state.aside.len() == RINGS_MAX {
                return Err(PoolError::AllAside);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(PoolError::Busy);
            }
            let waited = self.given_back.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lent(&self, worker: Worker) -> Lent<'_> {
        Lent {
            pool: self,
            worker: Some(worker),
        }
    }
}

impl State {
    /// Takes back the rings whose last answer has come.
    fn sweep(&mut self) {
        let aside = std::mem::take(&mut self.aside);
        for mut worker in aside {
            worker.sweep();
            self.put(worker);
        }
    }

    fn put(&mut self, worker: Worker) {
        if worker.is_quiet() && worker.is_sound() {
            self.free.push(worker);
        } else {
            self.aside.push(worker);
        }
    }
}

impl Lent<'_> {
    /// The ring.
    pub(super) fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().expect("taken by `drop` only")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.pool.lock().put(worker);
            // All of them: who finds that the last ring went aside must say so, too.
            self.pool.given_back.notify_all();
        }
    }
}

impl Pool {
    /// Destroys all rings, also those on which reads are under way: these end in the client's own mapping of the memory.
    /// Rings that are in use are waited for, [`CLOSE_WAIT_MAX`] in all.
    pub(super) fn close(&self) {
        let deadline = Instant::now() + CLOSE_WAIT_MAX;
        let mut state = self.lock();
        state.closed = true;
        let mut workers: Vec<Worker> = Vec::new();
        loop {
            let State { free, aside, .. } = &mut *state;
            workers.extend(free.drain(..).chain(aside.drain(..)));
            let left = deadline.saturating_duration_since(Instant::now());
            if workers.len() >= state.made || left.is_zero() {
                break;
            }
            let waited = self.given_back.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.made -= workers.len();
        drop(state);
        let ids: Vec<[u8; 16]> = workers.iter().flat_map(Worker::ids).collect();
        drop(workers);
        if !ids.is_empty() {
            remove_links(&self.mount.join(LINKS), &ids);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

/// Removes links that the library left behind: it looks for the link of a ring with flags under another name than it gave it.
fn remove_links(folder: &Path, ids: &[[u8; 16]]) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let id = name.to_str().and_then(id_of);
        if id.is_some_and(|id| ids.contains(&id))
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::debug!(path = %entry.path().display(), %error, "a link stays until the process ends");
        }
    }
}

/// The id that the name of a link begins with: 32 hexadecimal digits, dashes among them or not.
fn id_of(name: &str) -> Option<[u8; 16]> {
    let id = name.split('.').next()?.replace('-', "");
    if id.len() != 32 || !id.is_ascii() {
        return None;
    }
    // The digits are in the order of the bytes, the most significant first.
    let mut bytes = u128::from_str_radix(&id, 16).ok()?.to_le_bytes();
    bytes.reverse();
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_from_names() {
        let id: Vec<u8> = (0..16).map(|n| n * 17).collect();
        let plain = "00112233445566778899aabbccddeeff";
        let dashes = "00112233-4455-6677-8899-aabbccddeeff.r0.t0.f10";
        assert_eq!(id_of(plain).unwrap(), id[..]);
        assert_eq!(id_of(dashes).unwrap(), id[..]);
        for other in ["", "x", "0011", "..", "0011223344556677-8899aabbccddeef"] {
            assert_eq!(id_of(other), None);
        }
    }
}
