//! `layerd`: mounts layers whose data stays on an origin until it is read. See `--help`.
//!
//! One binary, two processes: the control process is what users start; it starts itself again as the data plane.

mod control;
mod driver;
mod histogram;
mod kernel;
mod kill;
mod memory;
mod paths;
mod plane;
mod protocol;
mod settings;
mod sys;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use imgstore::origin::url::OriginUrl;
use layerd_client::api::DEFAULT_SOCKET;
use rustix::process::{Resource, getrlimit, setrlimit};
use tracing_subscriber::EnvFilter;

use control::ControlConfig;
use control::selftest::Addressing;
use driver::{Driver, DriverChoice};
use plane::PlaneConfig;
use settings::{parse_duration, parse_size};

/// Mounts layers whose data stays on an origin until it is read.
///
/// Runs in the foreground as root. SIGTERM and SIGINT unmount everything and end; SIGUSR1 ends this process only and
/// leaves mounts and cached reads alive for the next one (an upgrade). Cached reads also go on if this process is killed.
#[derive(Debug, Parser)]
#[command(
    name = "layerd",
    version,
    after_help = "Examples:\n  layerd --origin dir:/srv/layers --cache /var/cache/dsec --socket /run/dsec/layerd.sock\n  layerd --origin http://mirror/layers --origin dir:/mnt/3fs/layers --cache /var/cache/dsec --cache-size 100GiB\n  dsec mount base/debian:12 /mnt        (then, in another terminal)\n\nThe log goes to standard error; DSEC_LOG=debug shows more."
)]
struct ControlArgs {
    /// Where layers are: `dir:/path`, `http(s)://…`, `s3://bucket/prefix` or `oci://registry/repository`. Given several times, they are asked in this order.
    #[arg(long, required = true, value_name = "ORIGIN")]
    origin: Vec<OriginUrl>,
    /// Folder for cached segments, mounts and state.
    #[arg(long, value_name = "DIR")]
    cache: PathBuf,
    /// Socket for `dsec mount` and others.
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Most bytes of disk that the cache takes: segments, descriptions of layers, files being written.
    #[arg(long, value_name = "SIZE", default_value = "20GiB", value_parser = parse_size)]
    cache_size: u64,
    /// Free space of the cache's disk that is left to others [default: 512MiB, at most a twentieth of the disk].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache_reserve: Option<u64>,
    /// How long a reader waits for an origin before it gets EIO.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    read_deadline: Duration,
    /// Decoded segments kept in memory.
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = parse_size)]
    memory: u64,
    /// Serve `/metrics` at this address too, to whoever can connect (`127.0.0.1:9150`). They are always at the socket.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// How long a lease on mounted layers runs on an origin that this host can write to; it is renewed long before.
    #[arg(long, value_name = "DURATION", default_value = "60m", value_parser = parse_duration)]
    lease: Duration,
    /// Most bytes on their way because of traces (see `dsec trace`), behind every reader; 0 fetches nothing before it is read.
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = parse_size)]
    trace_budget: u64,
    /// How layers reach the kernel: `ublk` (block devices; needs the module `ublk_drv`), `fuse` (needs Linux 6.13), or the first of
    /// them that works here. `dsec stats` says which it is and why.
    #[arg(long, value_name = "DRIVER", default_value = "auto")]
    driver: DriverChoice,
    /// Have the kernel read through the page cache of the FUSE files, for comparisons.
    #[arg(long, hide = true)]
    buffered: bool,
    /// How the self-test's image addresses blocks, for tests of the self-test.
    #[arg(long, hide = true, default_value = "flat")]
    self_test: Addressing,
    /// Start without a self-test.
    #[arg(long, hide = true)]
    no_self_test: bool,
}

/// The data plane: started by layerd, not by people.
#[derive(Debug, Parser)]
struct PlaneArgs {
    #[arg(long)]
    cache: PathBuf,
    #[arg(long, value_parser = parse_duration)]
    read_deadline: Duration,
    #[arg(long, value_parser = parse_size)]
    memory: u64,
    #[arg(long)]
    buffered: bool,
    #[arg(long)]
    driver: Driver,
}

fn start_log() {
    let filter = EnvFilter::try_from_env("DSEC_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // A full disk or a reader that went away must not become a failure here.
        .log_internal_errors(false)
        .init();
}

/// Allows as many open files as the system does: every layer and every reader takes some. The data plane inherits it.
fn allow_many_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

fn report(error: Option<String>) -> ExitCode {
    match error {
        None => ExitCode::SUCCESS,
        Some(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    sys::keep_little_memory();
    start_log();
    allow_many_files();
    let mut arguments = std::env::args_os();
    let program = arguments.next();
    if arguments
        .next()
        .is_some_and(|a| a == control::plane::SUBCOMMAND)
    {
        kill::arm(std::env::var_os("DSEC_KILL_DATA_PLANE"));
        let args = PlaneArgs::parse_from(program.into_iter().chain(arguments));
        let config = PlaneConfig {
            cache: args.cache,
            patience: args.read_deadline,
            memory_bytes_max: args.memory,
            directio: !args.buffered,
            driver: args.driver,
        };
        return report(plane::run(&config).err().map(|e| e.to_string()));
    }
    kill::arm(std::env::var_os("DSEC_KILL_CONTROL"));
    let args = ControlArgs::parse();
    let config = ControlConfig {
        origins: args.origin,
        cache: args.cache,
        socket: args.socket,
        cache_bytes_max: args.cache_size,
        cache_reserve_bytes: args.cache_reserve,
        patience: args.read_deadline,
        memory_bytes_max: args.memory,
        directio: !args.buffered,
        driver: args.driver,
        metrics: args.metrics,
        self_test: (!args.no_self_test).then_some(args.self_test),
        notify: std::env::var_os("NOTIFY_SOCKET"),
        lease_ttl: args.lease,
        traced_bytes_max: args.trace_budget,
    };
    report(control::run(&config).err().map(|e| e.to_string()))
}
