//! The control process: everything but serving reads.
//!
//! It starts in this order: take the cache's lock, take the socket (answering at once), then, in the background, find
//! or start the data plane, take over mounts, and count the cache. It ends in two ways: SIGTERM or SIGINT unmount
//! everything and end the data plane; SIGUSR1 leaves both to the next control process (an upgrade).

mod cache;
mod feed;
mod layers;
mod link;
mod metrics;
mod mounts;
mod pages;
pub(crate) mod plane;
mod record;
mod server;
mod service;
mod table;

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use imgstore::fetch::origins::OriginSet;
use imgstore::origin::counting::{CountingOrigin, Traffic};
use imgstore::origin::url::OriginUrl;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::cache::disk::RealDisk;
use imgstore::store::cache::lock::{CacheLock, LockError};
use imgstore::store::cache::{CacheError, CacheSettings, SegmentCache};
use tokio::signal::unix::{SignalKind, signal};

use crate::paths::Paths;
use feed::Feed;
use layers::LayerStore;
use mounts::MountService;
use pages::PageDropper;
use plane::Starter;
use service::Service;

/// What layerd is started with.
#[derive(Debug, Clone)]
pub(crate) struct ControlConfig {
    /// Where layers are, in the order in which they are asked.
    pub(crate) origins: Vec<OriginUrl>,
    /// The cache's root.
    pub(crate) cache: PathBuf,
    /// Where to listen.
    pub(crate) socket: PathBuf,
    /// Bytes of disk that the cache may take.
    pub(crate) cache_bytes_max: u64,
    /// Free bytes that it leaves to others; `None`: the usual.
    pub(crate) cache_reserve_bytes: Option<u64>,
    /// How long a reader waits for an origin.
    pub(crate) patience: Duration,
    /// Bytes of plain segments the data plane keeps in memory.
    pub(crate) memory_bytes_max: u64,
    /// Whether the kernel reads past the page cache of the FUSE files.
    pub(crate) directio: bool,
}

/// Why layerd does not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("another layerd answers at `{0}`; end it or use another `--socket`")]
    SocketTaken(PathBuf),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Origin(#[from] OriginError),
    #[error(transparent)]
    Recover(#[from] service::RecoverError),
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ControlError {
    let path = path.to_owned();
    move |source| ControlError::Io { what, path, source }
}

/// Takes the cache for this process and opens it; the lock ends with the process.
fn take_cache(paths: &Paths, config: &ControlConfig) -> Result<Arc<SegmentCache>, ControlError> {
    let lock = CacheLock::take(paths.root(), "layerd")?;
    let settings =
        CacheSettings::new(config.cache_bytes_max).with_reserve(config.cache_reserve_bytes);
    // First, because it refuses a folder of another version before anything is changed.
    let cache = SegmentCache::open(paths.root(), lock, settings, Arc::new(RealDisk))?;
    for folder in paths.private() {
        fs::create_dir_all(&folder).map_err(failed("create", &folder))?;
        fs::set_permissions(&folder, Permissions::from_mode(0o700))
            .map_err(failed("protect", &folder))?;
    }
    for folder in [paths.layer_mounts(), paths.records()] {
        fs::create_dir_all(&folder).map_err(failed("create", &folder))?;
    }
    Ok(Arc::new(cache))
}

/// Listens at `path`. A socket that nobody answers at is a left-over and is replaced.
fn take_socket(path: &Path) -> Result<UnixListener, ControlError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed("create", folder))?;
    }
    match UnixStream::connect(path) {
        Ok(_) => return Err(ControlError::SocketTaken(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("replace", path))?;
        }
        Err(e) => return Err(failed("use socket", path)(e)),
    }
    let listener = UnixListener::bind(path).map_err(failed("listen at", path))?;
    fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(failed("protect", path))?;
    listener
        .set_nonblocking(true)
        .map_err(failed("listen at", path))?;
    Ok(listener)
}

fn build(
    config: &ControlConfig,
    paths: Paths,
    cache: Arc<SegmentCache>,
) -> Result<Service, ControlError> {
    let names = Arc::new(Traffic::default());
    let opened: Result<Vec<_>, _> = config.origins.iter().map(OriginUrl::open).collect();
    let origins = OriginSet::new(opened?);
    let counted = origins.decorated(|origin| {
        Arc::new(CountingOrigin::new(origin, Arc::clone(&names))) as Arc<dyn Origin>
    });
    let layers = Arc::new(LayerStore::new(paths.clone(), counted, Arc::clone(&cache)));
    let feed = Feed::new(
        origins,
        config.patience,
        Arc::clone(&layers),
        Arc::clone(&cache),
        PageDropper::start(paths.clone()).map_err(failed("start threads for", paths.root()))?,
    );
    let starter = Starter {
        paths: paths.clone(),
        patience: config.patience,
        memory_bytes_max: config.memory_bytes_max,
        directio: config.directio,
    };
    Ok(Service {
        mounts: MountService::new(paths, layers, feed, config.directio),
        cache,
        starter,
        names,
        counted: std::sync::Mutex::new((0, 0)),
        ending: AtomicBool::new(false),
    })
}

/// How layerd was told to end.
enum End {
    /// Unmount everything.
    Clean,
    /// Leave mounts and data plane.
    Leave,
    /// Recovery failed.
    Failed(service::RecoverError),
}

/// Runs until a signal says to end.
///
/// # Errors
/// Says why it cannot run.
pub(crate) fn run(config: &ControlConfig) -> Result<(), ControlError> {
    fs::create_dir_all(&config.cache).map_err(failed("create", &config.cache))?;
    let root = fs::canonicalize(&config.cache).map_err(failed("use", &config.cache))?;
    let paths = Paths::new(&root);
    let cache = take_cache(&paths, config)?;
    let listener = take_socket(&config.socket)?;
    let service = Arc::new(build(config, paths, cache)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(server::BLOCKING_THREADS)
        .build()
        .map_err(failed("start the runtime for", &config.socket))?;
    let ended = runtime.block_on(serve(listener, Arc::clone(&service), config));
    let result = match ended {
        Ok(End::Leave) => {
            tracing::info!("leaving mounts and data plane to the next layerd");
            service.leave();
            Ok(())
        }
        Ok(End::Clean) => {
            service.shut_down();
            Ok(())
        }
        Ok(End::Failed(error)) => {
            service.leave();
            Err(error.into())
        }
        Err(error) => {
            service.leave();
            Err(failed("serve", &config.socket)(error))
        }
    };
    fs::remove_file(&config.socket).map_err(failed("remove", &config.socket))?;
    runtime.shutdown_background();
    result
}

async fn serve(
    listener: UnixListener,
    service: Arc<Service>,
    config: &ControlConfig,
) -> io::Result<End> {
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut leave = signal(SignalKind::user_defined1())?;
    let (failed, failure) = tokio::sync::oneshot::channel();
    let recovering = Arc::clone(&service);
    let (locked, lock_held) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("recover".to_owned())
        .spawn(move || {
            let mut guarded = recovering.mounts.lock();
            if locked.send(()).is_err() {
                return;
            }
            if let Err(error) = recovering.recover(&mut guarded) {
                drop(failed.send(error));
                return;
            }
            drop(guarded);
            cache::keep(&recovering.cache);
        })?;
    // Requests are accepted when they can only queue up behind the recovery.
    if lock_held.await.is_err() {
        tracing::error!("recovery did not start");
    }
    tracing::info!(socket = %config.socket.display(), cache = %config.cache.display(), "layerd listens");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(server::serve(listener, service, async move {
        // Also when the sender is dropped.
        drop(stopped.await);
    }));
    let failure = async {
        match failure.await {
            Ok(error) => error,
            // Recovery went well and dropped its end.
            Err(_) => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        _ = terminate.recv() => End::Clean,
        _ = interrupt.recv() => End::Clean,
        _ = leave.recv() => End::Leave,
        error = failure => End::Failed(error),
    };
    drop(stop);
    match serving.await {
        Ok(served) => served.map(|()| end),
        Err(error) => Err(io::Error::other(error)),
    }
}
