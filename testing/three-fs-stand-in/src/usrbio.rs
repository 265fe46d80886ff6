//! What 3FS's client does behind its user-space I/O library: rings, registered files, and all the ways of answering that
//! [`crate::control`] can ask for. The C interface is in `sys`.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::control::Control;
use crate::holes;
use crate::mount::CHUNK_BYTES;

mod sys;

/// Holes are errors.
const FORBID_READ_HOLES: u64 = 2;
const ENODATA: i64 = 61;

/// A read that was prepared.
#[derive(Debug)]
struct Io {
    ring: usize,
    memory: Arc<sys::Memory>,
    at: usize,
    len: usize,
    file: Arc<File>,
    offset: u64,
    userdata: usize,
}

/// A read that has finished.
#[derive(Debug, Clone, Copy)]
struct Done {
    result: i64,
    userdata: usize,
}

#[derive(Debug)]
struct Ring {
    mount: PathBuf,
    entries: usize,
    for_read: bool,
    flags: u64,
    prepared: Vec<Io>,
    done: VecDeque<Done>,
    /// Prepared, and not yet handed to the waiter.
    under_way: usize,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<i32, Arc<File>>,
    rings: HashMap<usize, Ring>,
    /// Reads that wait until `hold` is gone, by mount.
    held: Vec<(PathBuf, Io)>,
    /// How many were held since `hold` is there.
    held_in_all: usize,
    next_ring: usize,
}

#[derive(Debug)]
struct Client {
    state: Mutex<Option<State>>,
    finished: Condvar,
}

static CLIENT: Client = Client {
    state: Mutex::new(None),
    finished: Condvar::new(),
};

/// The folder above `path` that is a mount of 3FS: it has a `3fs-virt`.
fn mount_of(path: &Path) -> Option<PathBuf> {
    let mut above = path.ancestors();
    let found = above.find(|folder| folder.join("3fs-virt").is_dir());
    found.map(Path::to_owned)
}

fn path_of(file: &File) -> PathBuf {
    use std::os::fd::AsRawFd as _;
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

impl Client {
    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        run(self.lock().get_or_insert_default())
    }
}

impl State {
    fn finish(&mut self, io: &Io, control: &Control) {
        let ring = self.rings.get_mut(&io.ring);
        let forbid = ring.is_some_and(|ring| ring.flags & FORBID_READ_HOLES != 0);
        // Also if the ring was destroyed meanwhile: the client has its own mapping of the memory.
        let result = do_io(io, control, forbid);
        let Some(ring) = self.rings.get_mut(&io.ring) else {
            return;
        };
        let done = Done {
            result: control.result.unwrap_or(result - control.cut),
            userdata: if control.foreign {
                usize::MAX
            } else {
                io.userdata
            },
        };
        ring.done.push_back(done);
        if control.twice {
            ring.done.push_back(done);
        }
        CLIENT.finished.notify_all();
    }

    /// Does what was held, if it is held no more.
    fn release(&mut self, mount: &Path, control: &Control) {
        if control.hold > 0 {
            return;
        }
        self.held_in_all = 0;
        let held = std::mem::take(&mut self.held);
        for (place, io) in held {
            if place == mount {
                self.finish(&io, control);
            } else {
                self.held.push((place, io));
            }
        }
    }

    fn run(&mut self, io: Io, mount: &Path, control: &Control) {
        if self.held_in_all < control.hold {
            self.held_in_all += 1;
            self.held.push((mount.to_owned(), io));
        } else {
            self.finish(&io, control);
        }
    }

    /// Prepares a read; a slot, or a negative error number.
    fn prepare(&mut self, io: Io, control: &Control) -> i32 {
        let ring = self.rings.get_mut(&io.ring).unwrap();
        let capacity = control.capacity.unwrap_or(ring.entries).min(ring.entries);
        if ring.under_way >= capacity {
            return -11; // EAGAIN
        }
        ring.under_way += 1;
        let slot = i32::try_from(ring.under_way - 1).unwrap();
        if control.early {
            let mount = ring.mount.clone();
            self.run(io, &mount, control);
        } else {
            ring.prepared.push(io);
        }
        slot
    }

    fn submit(&mut self, ring: usize, control: &Control) {
        let ring = self.rings.get_mut(&ring).unwrap();
        let mount = ring.mount.clone();
        let mut prepared = std::mem::take(&mut ring.prepared);
        if control.reverse {
            prepared.reverse();
        }
        for io in prepared {
            self.run(io, &mount, control);
        }
    }

    fn take(&mut self, ring: usize, max: usize) -> Vec<Done> {
        let ring = self.rings.get_mut(&ring).unwrap();
        let count = ring.done.len().min(max);
        let done: Vec<Done> = ring.done.drain(..count).collect();
        ring.under_way = ring.under_way.saturating_sub(count);
        done
    }
}

/// Reads into the client's own mapping of the memory; the result.
fn do_io(io: &Io, control: &Control, forbid: bool) -> i64 {
    let mut bytes = vec![0; io.len];
    let mut len = 0;
    while len < bytes.len() {
        let at = io.offset + u64::try_from(len).unwrap();
        match io.file.read_at(&mut bytes[len..], at) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) => return -i64::from(e.raw_os_error().unwrap_or(5)),
        }
    }
    bytes.truncate(len);
    let path = path_of(&io.file);
    let lost = control.lost.iter();
    let lost: Vec<_> = lost
        .filter(|(name, _)| path.ends_with(name))
        .map(|(_, lost)| *lost)
        .collect();
    if !lost.is_empty() && holes::apply(&mut bytes, io.offset, CHUNK_BYTES, &lost, forbid).is_err()
    {
        return -ENODATA;
    }
    io.memory.write(io.at, &bytes);
    i64::try_from(bytes.len()).unwrap()
}
