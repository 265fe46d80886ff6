//! `dsec mount`, `umount`, `stats` and `mounts`: one request to layerd each.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use imgstore::format::trace::Trace;
use layerd_client::api::{Counters, DEFAULT_SOCKET, Mount, MountRequest, MountState};
use layerd_client::client::Client;

use crate::commands::Failure;
use crate::output;

/// Which layerd to talk to.
#[derive(Debug, Args)]
pub(crate) struct SocketArg {
    /// layerd's socket.
    #[arg(long, value_name = "PATH", env = "DSEC_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// `dsec mount`.
#[derive(Debug, Args)]
pub(crate) struct MountArgs {
    /// Layers, lowest first (`axis/name:version` or digests), then an existing directory to mount them at.
    #[arg(required = true, num_args = 2.., value_names = ["REF", "MOUNTPOINT"])]
    refs_and_mountpoint: Vec<OsString>,
    /// Allow writes; they go to a fresh directory that `dsec mounts --json` shows as `upper`.
    #[arg(long)]
    rw: bool,
    /// Fetch what this trace foresees in the background, in place of what is published with the layers.
    #[arg(long, value_name = "FILE", conflicts_with = "no_trace")]
    trace: Option<PathBuf>,
    /// Fetch nothing before it is read.
    #[arg(long)]
    no_trace: bool,
    /// Print the mount as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

/// `dsec umount`.
#[derive(Debug, Args)]
pub(crate) struct UmountArgs {
    /// Where the composition is mounted.
    #[arg(value_name = "MOUNTPOINT")]
    mountpoint: PathBuf,
    #[command(flatten)]
    socket: SocketArg,
}

/// `dsec stats` and `dsec mounts`.
#[derive(Debug, Args)]
pub(crate) struct QueryArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

/// Mounts a composition.
///
/// # Errors
/// What layerd said, or why it could not be asked.
pub(crate) fn mount(args: &MountArgs) -> Result<ExitCode, Failure> {
    let Some((mountpoint, refs)) = args.refs_and_mountpoint.split_last() else {
        return Err("a layer and a mountpoint are needed".into());
    };
    let trace = args.trace.as_deref().map(crate::commands::trace::read);
    let trace = trace.transpose()?;
    let text = |trace: &Trace| String::from_utf8_lossy(&trace.to_bytes()).into_owned();
    let given = trace.as_ref().map(text);
    let text = |reference: &OsString| {
        let text = reference.to_str().map(str::to_owned);
        text.ok_or_else(|| format!("`{}` is not a layer", reference.display()))
    };
    let request = MountRequest {
        refs: refs.iter().map(text).collect::<Result<_, _>>()?,
        mountpoint: std::path::absolute(mountpoint)?,
        rw: args.rw,
        trace: given,
        no_trace: args.no_trace,
    };
    let mounted = Client::new(&args.socket.socket).mount(&request)?;
    let unused = trace.iter().flat_map(|trace| &trace.layers);
    for layer in unused.filter(|layer| !mounted.layers.contains(&layer.to_hex())) {
        output::note(&format!(
            "the trace also names layer {layer}, which is not mounted here: that part is ignored"
        ));
    }
    if args.json {
        output::json(&mounted);
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes a composition away.
///
/// # Errors
/// As for [`mount`].
pub(crate) fn umount(args: &UmountArgs) -> Result<ExitCode, Failure> {
    let mountpoint = std::path::absolute(&args.mountpoint)?;
    let was = Client::new(&args.socket.socket).umount(&mountpoint)?;
    if let Some(upper) = was.upper.filter(|upper| has_entries(upper)) {
        output::note(&format!(
            "what was written stays in `{}`; delete it when it is not needed",
            upper.display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn has_entries(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

/// Shows the counters.
///
/// # Errors
/// As for [`mount`].
pub(crate) fn stats(args: &QueryArgs) -> Result<ExitCode, Failure> {
    let stats = Client::new(&args.socket.socket).stats()?;
    if args.json {
        output::json(&stats);
        return Ok(ExitCode::SUCCESS);
    }
    for mount in &stats.mounts {
        output::line(&format!("{}", mount.mountpoint.display()));
        counters(&mount.counters);
    }
    output::line("total");
    counters(&stats.total);
    output::line(&format!(
        "cache: {} of {}",
        output::bytes(stats.cache.bytes_used),
        output::bytes(stats.cache.bytes_max)
    ));
    Ok(ExitCode::SUCCESS)
}

fn counters(counters: &Counters) {
    output::line(&format!(
        "  fetched   {} in {} requests ({} retries), {} unpacked",
        output::bytes(counters.remote_bytes),
        counters.remote_requests,
        counters.retries,
        output::bytes(counters.fetched_plain_bytes)
    ));
    output::line(&format!(
        "  served    {} in {} reads, {} of them distinct",
        output::bytes(counters.served_bytes),
        counters.fuse_reads,
        output::bytes(counters.needed_bytes)
    ));
    output::line(&format!(
        "  cache     {} hits, {} misses, {} verification failures, {} failed reads",
        counters.cache_hits, counters.cache_misses, counters.verify_failures, counters.failed_reads
    ));
}

/// Lists the compositions.
///
/// # Errors
/// As for [`mount`].
pub(crate) fn mounts(args: &QueryArgs) -> Result<ExitCode, Failure> {
    let mounts = Client::new(&args.socket.socket).mounts()?;
    if args.json {
        output::json(&mounts);
        return Ok(ExitCode::SUCCESS);
    }
    for mount in &mounts.mounts {
        output::line(&line(mount));
    }
    Ok(ExitCode::SUCCESS)
}

fn line(mount: &Mount) -> String {
    let access = if mount.rw { "rw" } else { "ro" };
    let state = match mount.state {
        MountState::Alive => "",
        MountState::Dead => "  DEAD: mount it again or unmount it",
    };
    format!(
        "{}  {access}  {}{state}",
        mount.mountpoint.display(),
        mount.refs.join(" + ")
    )
}
