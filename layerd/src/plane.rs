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

mod image;
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

use std::fs;
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

use fuse_driver::mount::{FuseError, FuseMount};

use crate::paths::Paths;
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
    #[error(transparent)]
    Fuse(#[from] FuseError),
}

/// What is written to standard output when the socket is there and the mount serves.
pub(crate) const READY: &[u8] = b"ready\n";

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
    let fuse_path = paths.fuse();
    fs::create_dir_all(&fuse_path).map_err(failed("create", fuse_path.clone()))?;
    let fuse = Arc::new(FuseMount::new(&fuse_path, SystemTime::now())?);
    let link = Arc::new(Link::default());
    let settings = LoaderSettings {
        memory_bytes_max: config.memory_bytes_max,
        patience: config.patience,
    };
    let loader = Loader::start(&config.cache, Arc::clone(&link), &settings)
        .map_err(failed("start threads for", config.cache.clone()))?;
    let socket = paths.plane_socket();
    match fs::remove_file(&socket) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(failed("replace", socket)(e));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&socket).map_err(failed("listen at", socket.clone()))?;
    let pages = (!config.directio).then(|| Arc::new(PageWindow::new(Arc::clone(&link))));
    let (end, ended) = mpsc::channel();
    let server = Arc::new(Server {
        paths,
        fuse: Arc::clone(&fuse),
        layers: Layers::default(),
        loader,
        link,
        pages,
        end,
    });
    let accepting = Arc::clone(&server);
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(move || accepting.accept(&listener))
        .map_err(failed("start threads for", socket.clone()))?;
    let mut out = io::stdout();
    out.write_all(READY)
        .and_then(|()| out.flush())
        .map_err(failed("report", socket.clone()))?;
    // The sender lives in `server`, so this only ends when somebody says so.
    if ended.recv().is_err() {
        tracing::error!("nobody can end the data plane any more; ending");
    }
    fuse.unmount()?;
    fs::remove_file(&socket).map_err(failed("remove", socket))?;
    server.say_goodbye();
    Ok(())
}
