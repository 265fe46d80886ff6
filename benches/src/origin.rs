//! The origin simulator: a static file server whose distance can be set.
//!
//! Each request waits a settable delay before it is answered; all answers share one link with a settable
//! bandwidth. Requests and body bytes are counted. One blocking thread serves one connection: then a delay is
//! one `clock_nanosleep` with a timer slack of 1 ns, a few microseconds exact, and connections overlap as they
//! would with a real server. It runs as a process of its own (`dsec-bench origin`), so that its work is never
//! counted as a client's.
//!
//! Besides `GET` and `HEAD` of files it answers `GET /__stats` (JSON), `POST /__reset` (counters to zero) and
//! `POST /__set?delay_us=N&bandwidth=N` (0 = no cap); these neither wait nor count.

mod client;
mod connection;
mod link;
mod request;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Context, Result};
use crate::units;

pub(crate) use client::{GetArgs, OriginProcess, Served, get};
use link::{Link, now_ns, sleep_until_ns, use_exact_timers};

/// Serves a folder as an origin with a settable delay and bandwidth.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    dsec-bench origin --root /srv/origin --listen 127.0.0.1:8000 --delay 1ms --bandwidth 25MB/s\n  \
    curl -s http://127.0.0.1:8000/__stats")]
pub(crate) struct OriginArgs {
    /// Folder to serve. Put it on a tmpfs where disk reads must not be measured.
    #[arg(long)]
    root: PathBuf,
    /// Address to listen on; port 0 picks a free one. The address is printed as the first line.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Wait before each answer, as in 1ms or 250us.
    #[arg(long, default_value = "1ms", value_parser = units::parse_delay)]
    delay: Duration,
    /// Bandwidth of all answers together, as in 25MB/s, or none.
    #[arg(long, default_value = "none", value_parser = units::parse_bandwidth)]
    bandwidth: u64,
}

/// What all connections share.
#[derive(Debug)]
struct Shared {
    root: PathBuf,
    delay_ns: AtomicU64,
    link: Link,
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// Listens, prints the address, and serves until the process is ended.
pub(crate) fn run(args: &OriginArgs) -> Result<()> {
    let listener =
        TcpListener::bind(args.listen).during(format!("listening on {}", args.listen))?;
    let address = listener.local_addr().during("asking for the own address")?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "http://{address}")
        .and_then(|()| stdout.flush())
        .during("printing the address")?;
    let shared = Arc::new(Shared {
        root: args.root.clone(),
        delay_ns: AtomicU64::new(u64::try_from(args.delay.as_nanos()).unwrap_or(u64::MAX)),
        link: Link::new(args.bandwidth),
        requests: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
    });
    loop {
        let (stream, peer) = listener.accept().during("accepting a connection")?;
        let shared = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("origin {}", peer.port()))
            .spawn(move || connection::serve(&stream, &shared))
            .during("starting a thread for a connection")?;
    }
}

impl Shared {
    /// The counters and settings, as the one line of JSON that `/__stats` answers.
    fn stats(&self) -> String {
        format!(
            "{{\"requests\":{},\"bytes\":{},\"delay_us\":{},\"bandwidth\":{}}}\n",
            self.requests.load(Ordering::Relaxed),
            self.bytes.load(Ordering::Relaxed),
            self.delay_ns.load(Ordering::Relaxed) / 1000,
            self.link.bandwidth(),
        )
    }

    fn reset(&self) {
        self.requests.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
    }
}
