//! `dsec disk snapshot`, `merge` and `restack`: on a disk that is attached by its server, else here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use disk_server::client;
use disk_server::control::{Reply, Request};
use imgstore::disk::folder::{DiskFolder, Lower, write_merged};
use imgstore::disk::layer::Layer;
use imgstore::disk::open::open_file;
use imgstore::disk::state;

use super::attach::disk_folder;
use super::{Disks, lowers};
use crate::commands::Failure;
use crate::mounts::SocketArg;
use crate::output;

/// `dsec disk snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: OsString,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `dsec disk merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// A disk; or, with `--to`, layer files, bottom first.
    #[arg(required = true, value_name = "DISK|FILE")]
    what: Vec<OsString>,
    /// Which sealed layers of the disk, counted from the bottom, as `0..3` [default: all that the disk wrote].
    #[arg(long, value_name = "FROM..TO", value_parser = parse_range)]
    layers: Option<(usize, usize)>,
    /// Write the merged files here; the disk's own are replaced in the disk.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `dsec disk restack`.
#[derive(Debug, Args)]
pub(crate) struct RestackArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: OsString,
    /// The layer files that take the place of the lowest ones, bottom first; their contents must be the same.
    #[arg(long, required = true, value_name = "FILE")]
    lower: Vec<PathBuf>,
    /// How many layers they replace, from the bottom [default: all that the disk did not write].
    #[arg(long)]
    count: Option<usize>,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
}

fn parse_range(text: &str) -> Result<(usize, usize), String> {
    let parsed = text
        .split_once("..")
        .and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    parsed.ok_or_else(|| format!("`{text}` is no range: expected FROM..TO, as in `0..3`"))
}

/// Asks the disk's server, or opens the disk where there is none.
pub(super) fn ask_or_open<T>(
    folder: &Path,
    socket: &Path,
    request: &Request,
    told: impl FnOnce(Reply) -> Result<T, Failure>,
    open: impl FnOnce(DiskFolder) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if client::status(folder)?.is_some() {
        return told(client::ask(folder, request)?);
    }
    lowers::with_mounted(folder, socket, || open(DiskFolder::open(folder)?))
}

fn layer_of(reply: Reply) -> Result<(PathBuf, u64), Failure> {
    match reply {
        Reply::Layer { file, held_us } => Ok((file, held_us)),
        other => Err(format!("unexpected answer: {other:?}").into()),
    }
}

fn show((file, held_us): &(PathBuf, u64), json: bool) {
    if json {
        output::json(&serde_json::json!({"layer": file, "held_us": held_us}));
    } else {
        output::line(&file.display().to_string());
    }
}

/// Seals what was written.
pub(crate) fn snapshot(args: &SnapshotArgs) -> Result<ExitCode, Failure> {
    let folder = disk_folder(&args.disks, &args.disk)?;
    let request = Request::Snapshot { always: true };
    let done = ask_or_open(&folder, &args.socket.socket, &request, layer_of, |disk| {
        Ok((disk.snapshot()?.layer, 0))
    })?;
    show(&done, args.json);
    Ok(ExitCode::SUCCESS)
}

fn merge_files(files: &[OsString], to: &Path) -> Result<(), Failure> {
    let open = |file: &OsString| open_file(Path::new(file), None).map(|opened| opened.layer);
    let layers = files.iter().map(open).collect::<Result<Vec<Layer>, _>>()?;
    Ok(write_merged(&layers, to)?)
}

/// Merges.
pub(crate) fn merge(args: &MergeArgs) -> Result<ExitCode, Failure> {
    if let Some(to) = &args.to {
        merge_files(&args.what, to)?;
        show(&(to.clone(), 0), args.json);
        return Ok(ExitCode::SUCCESS);
    }
    let [disk] = &*args.what else {
        return Err("several files are merged into a new one: say which with `--to FILE`".into());
    };
    let folder = disk_folder(&args.disks, disk)?;
    let state = state::read_state(&folder)?;
    let (from, to) = args.layers.unwrap_or((state.base(), state.layers.len()));
    let request = Request::Merge { from, to };
    let done = ask_or_open(&folder, &args.socket.socket, &request, layer_of, |disk| {
        Ok((disk.merge(from..to)?, 0))
    })?;
    show(&done, args.json);
    Ok(ExitCode::SUCCESS)
}

/// Changes what the disk lies on.
pub(crate) fn restack(args: &RestackArgs) -> Result<ExitCode, Failure> {
    let folder = disk_folder(&args.disks, &args.disk)?;
    let state = state::read_state(&folder)?;
    let count = args.count.unwrap_or_else(|| state.base());
    let files = args.lower.iter().map(std::path::absolute);
    let lowers = files
        .map(|file| file.map(Lower::Lsmt))
        .collect::<Result<Vec<_>, _>>()?;
    let request = Request::Restack {
        count,
        lowers: lowers.clone(),
    };
    let told = |reply| match reply {
        Reply::Done => Ok(()),
        other => Err(format!("unexpected answer: {other:?}").into()),
    };
    ask_or_open(&folder, &args.socket.socket, &request, told, |disk| {
        Ok(disk.restack(count, lowers)?)
    })?;
    Ok(ExitCode::SUCCESS)
}
