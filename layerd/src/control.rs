//! The control process: everything but serving reads.
//!
//! It starts in this order: take the cache's lock, take the socket (answering at once), then, in the background, find
//! or start the data plane, take over mounts, and count the cache. It ends in two ways: SIGTERM or SIGINT unmount
//! everything and end the data plane; SIGUSR1 leaves both to the next control process (an upgrade).

mod ahead;
mod cache;
mod feed;
mod layers;
mod leases;
mod link;
mod metrics;
mod mounts;
mod notify;
mod pages;
pub(crate) mod plane;
mod record;
pub(crate) mod selftest;
mod server;
mod service;
mod socket;
mod table;

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use imgstore::fetch::origins::OriginSet;
use imgstore::origin::counting::{CountingOrigin, Traffic};
use imgstore::origin::late::LateOrigin;
use imgstore::origin::url::OriginUrl;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::cache::disk::RealDisk;
use imgstore::store::cache::lock::{CacheLock, LockError};
use imgstore::store::cache::{CacheError, CacheSettings, SegmentCache};
use tokio::signal::unix::{SignalKind, signal};

use crate::driver::{self, Chosen, DriverChoice};
use crate::kill::step;
use crate::paths::Paths;
use feed::Feed;
use layers::LayerStore;
use leases::Leases;
use metrics::ControlMetrics;
use mounts::MountService;
use pages::PageDropper;
use plane::Starter;
use selftest::Addressing;
use service::Service;

/// How long requests that have come may take when this process makes room for the next one.
const GRACE: Duration = Duration::from_secs(1);

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
    /// How layers reach the kernel.
    pub(crate) driver: DriverChoice,
    /// Where to serve metrics besides the socket.
    pub(crate) metrics: Option<SocketAddr>,
    /// Which image the self-test mounts; `None` leaves it out.
    pub(crate) self_test: Option<Addressing>,
    /// The supervisor's socket (`NOTIFY_SOCKET`).
    pub(crate) notify: Option<OsString>,
    /// How long a lease on mounted layers runs without being renewed.
    pub(crate) lease_ttl: Duration,
    /// Bytes on their way because of traces; 0: nothing is fetched before it is read.
    pub(crate) traced_bytes_max: u64,
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
    #[error("`{0}` is no socket; remove it or use another `--socket`")]
    NoSocket(PathBuf),
    #[error("cannot serve metrics at {address}: {source}")]
    Metrics {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Origin(#[from] OriginError),
    #[error(transparent)]
    Recover(#[from] service::RecoverError),
    #[error("`--driver ublk` cannot work here: {0}; `--driver auto` takes what works")]
    Driver(#[from] ublk_driver::WhyNot),
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

/// Whether an earlier layerd left something that must be served whatever the origins say.
fn has_something_left(paths: &Paths) -> bool {
    let records = fs::read_dir(paths.records()).is_ok_and(|mut entries| entries.next().is_some());
    records || fs::exists(paths.plane_socket()).unwrap_or(false)
}

fn open_origin(url: &OriginUrl, paths: &Paths) -> Result<Arc<dyn Origin>, ControlError> {
    match url.open() {
        Err(error) if has_something_left(paths) => {
            tracing::error!(%error, "an origin cannot be opened now; what is cached is served, the rest waits for it");
            Ok(Arc::new(LateOrigin::new(url.clone())))
        }
        opened => Ok(opened?),
    }
}

/// Takes the address for metrics.
fn listen_for_metrics(address: SocketAddr) -> Result<TcpListener, ControlError> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        tracing::info!(address = %listener.local_addr()?, "metrics");
        Ok(listener)
    };
    listen().map_err(|source| ControlError::Metrics { address, source })
}

/// The service, and the origins that it uses.
fn build(
    config: &ControlConfig,
    paths: Paths,
    cache: Arc<SegmentCache>,
    chosen: Chosen,
) -> Result<(Service, Vec<Arc<dyn Origin>>), ControlError> {
    let names = Arc::new(Traffic::default());
    let open = |url: &OriginUrl| open_origin(url, &paths);
    let opened: Result<Vec<_>, _> = config.origins.iter().map(open).collect();
    let opened = opened?;
    let leases = Leases::start(&opened, &paths.lease_id(), config.lease_ttl)
        .map_err(failed("start threads for", paths.root()))?;
    let origins = OriginSet::new(opened.clone());
    let counted = origins.decorated(|origin| {
        Arc::new(CountingOrigin::new(origin, Arc::clone(&names))) as Arc<dyn Origin>
    });
    let layers = Arc::new(LayerStore::new(
        paths.clone(),
        counted,
        Arc::clone(&cache),
        Arc::clone(&names),
    ));
    let feed = Feed::new(
        origins,
        config,
        Arc::clone(&layers),
        Arc::clone(&cache),
        PageDropper::start(paths.clone()).map_err(failed("start threads for", paths.root()))?,
    );
    let starter = Starter {
        paths: paths.clone(),
        patience: config.patience,
        memory_bytes_max: config.memory_bytes_max,
        directio: config.directio,
        chosen,
    };
    let service = Service {
        mounts: MountService::new(paths, layers, feed, leases, config),
        cache,
        starter,
        names,
        counted: std::sync::Mutex::new((0, 0)),
        ending: AtomicBool::new(false),
        metrics: ControlMetrics::new(),
        self_test: config.self_test,
    };
    Ok((service, opened))
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
    let chosen = driver::choose(config.driver, ublk_driver::probe)?;
    tracing::info!(
        driver = chosen.driver.name(),
        reason = chosen.reason,
        "layers are offered to the kernel"
    );
    let cache = take_cache(&paths, config)?;
    let (listener, socket) = socket::take(&config.socket)?;
    step("listening");
    let metrics = config.metrics.map(listen_for_metrics).transpose()?;
    let (service, origins) = build(config, paths, cache, chosen)?;
    let service = Arc::new(service);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(server::BLOCKING_THREADS)
        .build()
        .map_err(failed("start the runtime for", &config.socket))?;
    let listeners = Listeners { listener, metrics };
    let ended = runtime.block_on(serve(listeners, Arc::clone(&service), config));
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
    drop(socket);
    // Threads that fetch may still hold them.
    for origin in &origins {
        origin.close();
    }
    runtime.shutdown_background();
    result
}

/// Where requests come from.
struct Listeners {
    listener: UnixListener,
    metrics: Option<TcpListener>,
}

/// Takes over what there is on a thread of its own; what went wrong. Resolves to the receiver when the lock is held.
async fn start_recovery(
    service: &Arc<Service>,
) -> io::Result<tokio::sync::oneshot::Receiver<service::RecoverError>> {
    let recovering = Arc::clone(service);
    let (failed, failure) = tokio::sync::oneshot::channel();
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
    Ok(failure)
}

async fn serve(
    listeners: Listeners,
    service: Arc<Service>,
    config: &ControlConfig,
) -> io::Result<End> {
    let listener = tokio::net::UnixListener::from_std(listeners.listener)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut leave = signal(SignalKind::user_defined1())?;
    let failure = start_recovery(&service).await?;
    tracing::info!(socket = %config.socket.display(), cache = %config.cache.display(), "layerd listens");
    if let Some(address) = &config.notify
        && let Err(error) = notify::ready(address)
    {
        tracing::warn!(%error, "cannot tell the supervisor that layerd is ready");
    }
    if let Some(metrics) = listeners.metrics {
        let metrics = tokio::net::TcpListener::from_std(metrics)?;
        tokio::spawn(server::serve_metrics(metrics, Arc::clone(&service)));
    }
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
    // The next process answers those who come now. A shutdown waits for nobody: an origin that hangs must not hold it up.
    let grace = match end {
        End::Leave => GRACE,
        End::Clean | End::Failed(_) => Duration::ZERO,
    };
    match tokio::time::timeout(grace, serving).await {
        Err(_elapsed) => Ok(end),
        Ok(Ok(served)) => served.map(|()| end),
        Ok(Err(error)) => Err(io::Error::other(error)),
    }
}
