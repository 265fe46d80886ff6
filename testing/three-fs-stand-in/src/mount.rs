//! A mount that behaves like one of 3FS: what tests do with it.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::fs::Server;
use crate::holes::Lost;

/// Longest wait for anything.
const SOON: Duration = Duration::from_secs(20);
/// Threads that answer; reads that hang occupy them.
const THREADS: usize = 8;
/// Default chunk size, and most bytes of a request.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// Something that the kernel asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A name was looked up on the server: it was found, or not.
    Lookup(String, bool),
    /// Opened: inode, for writing or not.
    Open(u64, bool),
    /// Closed for good: inode, was it open for writing.
    Release(u64, bool),
    /// Synced.
    Fsync(u64),
    /// Inode got another name.
    Link(u64, String),
    /// A name went away.
    Unlink(String),
    /// From, to.
    Rename(String, String),
    /// Inode, offset, bytes asked for.
    Read(u64, u64, u32),
    /// Inode got these flags.
    SetFlags(u64, u32),
    /// Something that 3FS does not have.
    Missing(&'static str),
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) events: Vec<Event>,
    pub(crate) hanging: bool,
    pub(crate) lost: HashMap<u64, Vec<Lost>>,
    /// Inodes without any data.
    pub(crate) gone: Vec<u64>,
    pub(crate) flags: HashMap<u64, u32>,
    pub(crate) latency: Duration,
    pub(crate) reads: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, event: Event) {
        self.lock().events.push(event);
        self.changed.notify_all();
    }

    /// Waits while reads hang.
    pub(crate) fn pass(&self) {
        let mut state = self.lock();
        state.reads += 1;
        self.changed.notify_all();
        while state.hanging {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A mount over a folder. Everything goes away with it.
#[derive(Debug)]
pub struct StandIn {
    folder: PathBuf,
    point: PathBuf,
    connection: u64,
    shared: Arc<Shared>,
    _session: BackgroundSession,
}

impl StandIn {
    /// Mounts `folder` at `point`.
    pub fn mount(folder: &Path, point: &Path) -> Self {
        let shared = Arc::new(Shared::default());
        let server = Server::new(folder, Arc::clone(&shared)).unwrap();
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("hf3fs.stand-in".to_owned()),
            MountOption::Subtype("hf3fs".to_owned()),
            MountOption::DefaultPermissions,
            MountOption::CUSTOM(format!("max_read={CHUNK_BYTES}")),
        ];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let session = Session::new(server, point, &config).unwrap();
        let session = session.spawn().unwrap();
        // An anonymous device has major 0; its minor is the number of the FUSE connection.
        let device = fs::metadata(point).unwrap().dev();
        Self {
            folder: folder.to_owned(),
            point: point.to_owned(),
            connection: u64::from(rustix::fs::minor(device)),
            shared,
            _session: session,
        }
    }

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Every request takes so much longer.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.lock().latency = latency;
    }

    /// The inode number of a file of the folder.
    pub fn inode(&self, name: &str) -> u64 {
        fs::symlink_metadata(self.folder.join(name)).unwrap().ino()
    }

    /// Loses a chunk of a file but for its first `keep` bytes.
    pub fn lose(&self, name: &str, chunk: u64, keep: u64) {
        let ino = self.inode(name);
        let lost = Lost { chunk, keep };
        self.shared.lock().lost.entry(ino).or_default().push(lost);
    }

    /// Brings all lost chunks back.
    pub fn heal(&self) {
        self.shared.lock().lost.clear();
    }

    /// What was asked for since the last call.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.shared.lock().events)
    }

    /// Whether a file has this flag of `FS_IOC_SETFLAGS`.
    pub fn has_flag(&self, name: &str, flag: u32) -> bool {
        let flags = self.shared.lock().flags.get(&self.inode(name)).copied();
        flags.unwrap_or(0) & flag != 0
    }

    /// Lets reads hang, or go on.
    pub fn hang(&self, hang: bool) {
        self.shared.lock().hanging = hang;
        self.shared.changed.notify_all();
    }

    /// Waits until so many reads have come in all.
    pub fn wait_for_reads(&self, reads: usize) {
        let deadline = Instant::now() + SOON;
        let mut state = self.shared.lock();
        while state.reads < reads {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain for {reads} reads");
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets the server die: all requests fail, those under way too.
    pub fn kill(&self) {
        self.abort().unwrap();
        self.hang(false);
    }

    fn abort(&self) -> io::Result<()> {
        let file = format!("{}/abort", self.connection);
        let known = Path::new("/sys/fs/fuse/connections").join(&file);
        if known.try_exists()? {
            return fs::write(known, b"1");
        }
        // Where nobody mounted the file system that controls FUSE: mounts it in a place of its own for a moment.
        let place = self.folder.join(".control");
        fs::create_dir_all(&place)?;
        rustix::mount::mount("none", &place, "fusectl", MountFlags::empty(), None)?;
        let written = fs::write(place.join(file), b"1");
        rustix::mount::unmount(&place, UnmountFlags::DETACH)?;
        fs::remove_dir(&place)?;
        written
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.hang(false);
        // It may have been unmounted by the test.
        let _gone = rustix::mount::unmount(&*self.point, UnmountFlags::DETACH);
        // The server is in this process: a file that is still open at its end would be closed by asking a server that has
        // ended already, and the process would stay for ever. There is no connection to abort if it has ended.
        drop(self.abort());
    }
}
