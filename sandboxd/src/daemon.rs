//! The daemon's life: set up, listen, serve, end.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::serve::ListenerExt as _;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use crate::container::backend::Settings;
use crate::keys::Keys;
use crate::network::{Hosts, Networks};
use crate::sandboxes::{Packer, Service};
use crate::server::{self, ForE2b};

/// Where it listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// `ADDRESS:PORT`.
    Tcp(SocketAddr),
    /// `unix:PATH`.
    Unix(PathBuf),
}

impl std::str::FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        text.parse()
            .map(Self::Tcp)
            .map_err(|e| format!("`{text}` is neither ADDRESS:PORT nor unix:PATH: {e}"))
    }
}

/// How the daemon is started.
#[derive(Debug)]
pub struct Config {
    /// layerd's socket.
    pub layerd: PathBuf,
    /// Where it listens.
    pub listen: Listen,
    /// Folder for everything it keeps.
    pub state: PathBuf,
    /// What clients of E2B are told.
    pub e2b: ForE2b,
    /// A file of API keys.
    pub api_keys: Option<PathBuf>,
    /// What publishes layers.
    pub packer: Packer,
    /// A file of names and addresses that rules may use.
    pub hosts: Option<PathBuf>,
    /// Disk limit of sandboxes that ask for none, in MiB.
    pub disk_mb: Option<u64>,
    /// First of the host's ids that sandboxes have.
    pub first_id: u32,
    /// Shells kept ready.
    pub pool: usize,
}

/// Control groups of this state folder: the same name after a restart, another for another folder.
fn cgroup_name(state: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    // FNV-1a: short, and nothing depends on its being hard to guess.
    let hash = state
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("dsec-{hash:016x}")
}

/// Runs the daemon until it is told to end; sandboxes go on.
///
/// # Errors
/// In words: why it cannot serve.
pub fn run(config: Config) -> Result<(), String> {
    std::fs::create_dir_all(&config.state)
        .map_err(|e| format!("cannot create `{}`: {e}", config.state.display()))?;
    let state = std::fs::canonicalize(&config.state)
        .map_err(|e| format!("cannot use `{}`: {e}", config.state.display()))?;
    let lock = std::fs::File::create(state.join("lock"))
        .map_err(|e| format!("cannot lock `{}`: {e}", state.display()))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_locked| format!("another sandboxd uses `{}`", state.display()))?;
    let keys = match &config.api_keys {
        Some(path) => Keys::read(path)?,
        None => Keys::open(),
    };
    if let Listen::Tcp(address) = config.listen
        && !address.ip().is_loopback()
        && keys.are_open()
    {
        return Err(format!(
            "`{address}` can be reached from other machines: give API keys (`--api-keys FILE`, `dsec sandbox new-key` makes them), or listen at loopback or `unix:PATH`"
        ));
    }
    let program = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let settings = Settings {
        program,
        run: state.join("run"),
        cgroup: cgroup_name(&state),
        first_id: config.first_id,
        pool: config.pool,
    };
    let secrets = state.clone();
    let hosts = match &config.hosts {
        Some(path) => Hosts::read(path)?,
        None => Hosts::default(),
    };
    let networks = Networks::new(hosts);
    let (packer, disk_mb) = (config.packer, config.disk_mb);
    let service = Service::start(state, &config.layerd, packer, networks, disk_mb, settings)
        .map_err(|e| e.to_string())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("no runtime: {e}"))?;
    let app = |e2b| {
        server::router(Arc::clone(&service), keys, &secrets, e2b)
            .map_err(|e| format!("the secret of `{}`: {e}", secrets.display()))
    };
    let served = runtime.block_on(serve(&service, app, config.e2b, &config.listen));
    // Streams that are still followed must not hold the end up.
    runtime.shutdown_background();
    service.close();
    served
}

async fn serve(
    service: &Arc<Service>,
    app: impl FnOnce(ForE2b) -> Result<axum::Router, String>,
    mut e2b: ForE2b,
    listen: &Listen,
) -> Result<(), String> {
    service.open_networks();
    server::take_over(service);
    let looked_after = tokio::spawn(Arc::clone(service).look_after());
    let failed = |e: std::io::Error| format!("cannot listen at {listen:?}: {e}");
    let served = async {
        match listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address).await.map_err(failed)?;
                let at = listener.local_addr().map_err(failed)?;
                // Names below `localhost` lead to this machine (RFC 6761).
                let here = || format!("localhost:{}", at.port());
                e2b.domain = Some(e2b.domain.unwrap_or_else(here));
                let router = app(e2b)?;
                tracing::info!(%at, "listening");
                let listener = listener.tap_io(|stream| {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "small replies may be late");
                    }
                });
                axum::serve(listener, router).await.map_err(failed)
            }
            Listen::Unix(path) => {
                // One that nobody listens at was left by a daemon that was killed; the lock says that it is not another's.
                match std::fs::remove_file(path) {
                    Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(failed(e)),
                    _ => {}
                }
                let listener = UnixListener::bind(path).map_err(failed)?;
                let private = std::os::unix::fs::PermissionsExt::from_mode(0o660);
                std::fs::set_permissions(path, private).map_err(failed)?;
                let router = app(e2b)?;
                tracing::info!(path = %path.display(), "listening");
                axum::serve(listener, router).await.map_err(failed)
            }
        }
    };
    let told = async {
        let mut term = signal(SignalKind::terminate()).map_err(failed)?;
        let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        Ok(())
    };
    let ended = tokio::select! { served = served => served, told = told => told };
    looked_after.abort();
    ended
}
