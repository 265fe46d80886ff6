//! `sandboxd`: runs sandboxes composed of layers. See `--help`.
//!
//! One binary, two roles: the daemon is what users start; it starts itself again as the spawner of containers.

use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use sandboxd::container::spawner;
use sandboxd::daemon::{self, Config, Listen};
use sandboxd::sandboxes::Packer;
use sandboxd::server::ForE2b;
use tracing_subscriber::EnvFilter;

/// Runs sandboxes composed of layers.
///
/// Runs in the foreground as root. Sandboxes go on when it ends, also when it is killed: the next one with the same state
/// folder adopts them.
#[derive(Debug, Parser)]
#[command(
    name = "sandboxd",
    version,
    after_help = "Examples:\n  sandboxd --layerd /run/dsec/layerd.sock --listen 127.0.0.1:7070 --state /var/lib/dsec/sandboxes\n  sandboxd --layerd /run/dsec/layerd.sock --listen unix:/run/dsec/sandboxd.sock --state /var/lib/dsec/sandboxes --origin dir:/srv/layers\n  DSEC_URL=http://127.0.0.1:7070 dsec run --base base/debian:12 -- echo hello\n\nThe log goes to standard error; DSEC_LOG=debug shows more."
)]
struct Args {
    /// layerd's socket.
    #[arg(long, value_name = "PATH", default_value = layerd_client::api::DEFAULT_SOCKET)]
    layerd: PathBuf,
    /// Where to listen: `ADDRESS:PORT` or `unix:PATH`. Beyond loopback only with API keys.
    #[arg(long, value_name = "WHERE", default_value = "127.0.0.1:7070")]
    listen: Listen,
    /// Folder for records and for what sandboxes write. Not on a file system that is a layer itself.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// File of API keys: lines of `HASH PROJECT`, as `dsec sandbox new-key` writes them. Without it everybody who can connect
    /// may do everything.
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// What the host names of sandboxes' ports end with, for clients of E2B: `PORT-ID.DOMAIN`.
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    /// What E2B's default template `base` stands for: `base[+workspace][+toolkit]...`.
    #[arg(long, value_name = "REFS")]
    e2b_template: Option<String>,
    /// Where packed layers are published: `dir:/path`, `s3://…` or `oci://…`.
    #[arg(long, value_name = "ORIGIN")]
    origin: Option<String>,
    /// The program that publishes them.
    #[arg(long, value_name = "PATH", default_value = "dsec")]
    dsec: PathBuf,
    /// Addresses of names that network rules may use, as in /etc/hosts; others are looked up as this host does.
    #[arg(long, value_name = "FILE")]
    hosts: Option<PathBuf>,
    /// MiB that a sandbox may write if its request says nothing. Without it: as much as the state's file system holds.
    #[arg(long, value_name = "MIB")]
    disk_mb: Option<u64>,
    /// First of the host's user and group ids that sandboxes have, 65536 each; a multiple of 65536 that nobody else uses.
    #[arg(long, value_name = "ID", default_value_t = 1 << 30)]
    first_id: u32,
    /// For tests: every so many-th step of making a sandbox fails.
    #[arg(long, value_name = "N", default_value_t = 0, hide = true)]
    fail_every: u64,
    /// Empty sandboxes kept ready.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pool: usize,
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

fn main() -> ExitCode {
    // Without a log of its own: every sandbox begins as a copy of this process.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|a| a == spawner::SUBCOMMAND)
    {
        return spawner::run_inherited().map_or_else(
            |error| {
                // Nobody is left to tell if this fails too.
                drop(writeln!(
                    std::io::stderr(),
                    "sandboxd: the spawner: {error}"
                ));
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    start_log();
    let args = Args::parse();
    sandboxd::faults::fail_every(args.fail_every);
    report(daemon::run(Config {
        layerd: args.layerd,
        listen: args.listen,
        state: args.state,
        api_keys: args.api_keys,
        e2b: ForE2b {
            domain: args.domain,
            template: args.e2b_template,
        },
        packer: Packer {
            program: args.dsec,
            origin: args.origin,
        },
        hosts: args.hosts,
        disk_mb: args.disk_mb,
        first_id: args.first_id,
        pool: args.pool,
    }))
}

fn report(done: Result<(), String>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}
