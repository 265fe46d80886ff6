//! The data plane: a small process that owns the FUSE session and serves cached segments by itself.
//!
//! It outlives the control process on purpose (own session, own socket), so that a crash or an upgrade there does not
//! touch a reader. If it dies itself, the kernel aborts its FUSE connection and readers get EIO at once. It never
//! talks to an origin and never writes to the cache; it decides nothing but whether bytes are right.
//!
//! ```text
//! kernel ─ FUSE loop ─► image ─► loader ─► memory │ cache on disk │ pending ──► link ──► control process
//!                                  ▲  verify (the only exit)                              │
//!                                  └───────────────── frames, not verified ◄──────────────┘
//! ```

mod devices;
mod door;
mod hotahead;
mod image;
mod latency;
mod layer;
mod link;
mod loader;
mod loose;
mod lru;
mod meta;
mod pages;
mod pending;
mod readahead;
mod serve;
mod touched;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use fuse_driver::mount::{FuseError, FuseMount};
use imgstore::store::cache::SegmentFiles;
use rustix::fs::FlockOperation;

use crate::driver::Driver;
use crate::kill::step;
use crate::paths::Paths;
use devices::Devices;
use door::{Door, DoorError};
use layer::Layers;
use link::Link;
use loader::{Loader, LoaderSettings};
use pages::PageWindow;
use serve::Server;

/// What the data plane is started with.
#[derive(Debug, Clone)]
pub(crate) struct PlaneConfig {
    /// The cache's root.
    pub(crate) cache: PathBuf,
    /// How long a reader waits for an origin.
    pub(crate) patience: Duration,
    /// Bytes of plain segments kept in memory.
    pub(crate) memory_bytes_max: u64,
    /// Whether the kernel reads past the page cache of the FUSE files.
    pub(crate) directio: bool,
    /// How layers are offered.
    pub(crate) driver: Driver,
}

/// Why the data plane could not start or end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaneError {
    #[error("data plane cannot {what} `{path}`: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another data plane of the cache `{0}` does not end")]
    Taken(PathBuf),
    #[error("the FUSE mount `{0}` was taken away or aborted; its readers get errors")]
    Aborted(PathBuf),
    #[error(transparent)]
    Fuse(#[from] FuseError),
    #[error(transparent)]
    Door(#[from] DoorError),
}

/// Why the data plane ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The control process says so.
    Asked,
    /// The kernel let go of the mount.
    Aborted,
}

/// What is written to standard output when the socket is there and the mount serves.
pub(crate) const READY: &[u8] = b"ready\n";

/// How long an earlier data plane of this cache, whose control process was killed while it started, may take to end.
const TAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// A thread that only waits.
const WATCH_STACK_BYTES: usize = 64 << 10;
/// Pause between two looks.
const TAKE_PAUSE: Duration = Duration::from_millis(5);

/// Makes this the only data plane of the cache: two would take each other's socket. The lock ends with the process.
fn take(paths: &Paths) -> Result<File, PlaneError> {
    let path = paths.plane_lock();
    let failed = |what| {
        let path = path.clone();
        move |source| PlaneError::Io { what, path, source }
    };
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(failed("open"))?;
    let until = Instant::now() + TAKE_TIMEOUT;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(TAKE_PAUSE);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(PlaneError::Taken(paths.root().to_owned()));
            }
            Err(error) => return Err(failed("lock")(error.into())),
        }
    }
}

/// A process without its mount must end, so that the control process makes another.
fn watch_mount(fuse: &Arc<FuseMount>, end: mpsc::Sender<End>) -> io::Result<()> {
    let fuse = Arc::clone(fuse);
    let watch = move || {
        fuse.wait_for_end();
        if end.send(End::Aborted).is_err() {
            tracing::debug!("the mount is gone; the process is ending anyway");
        }
    };
    std::thread::Builder::new()
        .name("watch-mount".to_owned())
        .stack_size(WATCH_STACK_BYTES)
        .spawn(watch)
        .map(|_handle| ())
}

fn open_door(driver: Driver, paths: &Paths) -> Result<Door, PlaneError> {
    if driver == Driver::Ublk {
        let devices = Devices::start(paths.clone()).map_err(DoorError::from)?;
        return Ok(Door::Ublk(devices));
    }
    devices::clear(paths);
    let path = paths.fuse();
    fs::create_dir_all(&path).map_err(|source| PlaneError::Io {
        what: "create",
        path: path.clone(),
        source,
    })?;
    Ok(Door::Fuse(Arc::new(FuseMount::new(
        &path,
        SystemTime::now(),
    )?)))
}

/// Runs until the control process says to end.
///
/// # Errors
/// When the mount or the socket cannot be made, or the mount not taken away.
pub(crate) fn run(config: &PlaneConfig) -> Result<(), PlaneError> {
    let paths = Paths::new(&config.cache);
    let failed = |what, path: PathBuf| move |source| PlaneError::Io { what, path, source };
    // Signals for the control process's terminal or session are not for this process.
    rustix::process::setsid()
        .map_err(|e| failed("leave the session of", paths.root().to_owned())(e.into()))?;
    // The process is started by way of a link whose name says nothing.
    if let Err(error) = rustix::thread::set_name(c"layerd-data") {
        tracing::debug!(%error, "the process keeps its name");
    }
    let lock = take(&paths)?;
    step("a data plane");
    let door = open_door(config.driver, &paths)?;
    step("the FUSE mount is there");
    let link = Arc::new(Link::default());
    let settings = LoaderSettings {
        memory_bytes_max: config.memory_bytes_max,
        patience: config.patience,
    };
    let loader = Loader::start(
        SegmentFiles::new(&config.cache),
        Arc::clone(&link),
        &settings,
    )
    .map_err(failed("start threads for", config.cache.clone()))?;
    let socket = paths.plane_socket();
    match fs::remove_file(&socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(failed("replace", socket)(e));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&socket).map_err(failed("listen at", socket.clone()))?;
    let second_copy = !config.directio && config.driver == Driver::Fuse;
    let pages = second_copy.then(|| Arc::new(PageWindow::new(Arc::clone(&link))));
    let (end, ended) = mpsc::channel();
    let server = Arc::new(Server {
        paths,
        door,
        layers: Layers::default(),
        loader,
        link,
        pages,
        end,
    });
    match &server.door {
        Door::Fuse(fuse) => watch_mount(fuse, server.end.clone())
            .map_err(failed("start threads for", server.paths.fuse()))?,
        Door::Ublk(devices) => devices
            .recover(|layer| server.reopen(layer))
            .map_err(DoorError::from)?,
    }
    let accepting = Arc::clone(&server);
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(move || accepting.accept(&listener))
        .map_err(failed("start threads for", socket.clone()))?;
    step("the socket is there");
    let mut out = io::stdout();
    out.write_all(READY)
        .and_then(|()| out.flush())
        .map_err(failed("report", socket.clone()))?;
    step("said to be ready");
    // The sender lives in `server`, so this only ends when somebody says so.
    match ended.recv() {
        Ok(End::Asked) => {}
        Ok(End::Aborted) => return Err(PlaneError::Aborted(server.paths.fuse())),
        Err(_) => tracing::error!("nobody can end the data plane any more; ending"),
    }
    step("ending");
    server.door.close()?;
    step("the FUSE mount is gone");
    fs::remove_file(&socket).map_err(failed("remove", socket))?;
    server.say_goodbye();
    drop(lock);
    Ok(())
}
