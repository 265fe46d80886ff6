//! `dsec disk attach`, `detach`, and the process that serves.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use disk_server::control::{Reply, Request, Status};
use disk_server::error::ServeError;
use disk_server::{Way, client, serve};
use imgstore::disk::state;

use super::{Disks, lowers};
use crate::commands::Failure;
use crate::mounts::SocketArg;
use crate::output;

/// Longest wait for a server to be ready: it may have to mount layers and read large indexes.
const READY_MAX: Duration = Duration::from_secs(120);
/// Longest wait for a server to end after it said that it would.
const END_MAX: Duration = Duration::from_secs(60);

/// `dsec disk attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: OsString,
    #[command(flatten)]
    way: WayArgs,
    /// Stay, and serve in this process.
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// At most one of these.
#[derive(Debug, Args)]
#[group(multiple = false)]
struct WayArgs {
    /// As a block device [default, where the kernel has ublk].
    #[arg(long)]
    ublk: bool,
    /// As the regular file PATH, which is made if it is missing.
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// At a unix socket that speaks NBD, for a virtual machine.
    #[arg(long, value_name = "SOCKET")]
    nbd: Option<PathBuf>,
}

/// `dsec disk detach`.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: OsString,
    /// Also while it is in use: users get errors.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
}

/// `dsec disk serve`: what `attach` starts.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    folder: PathBuf,
    /// A [`Way`] as JSON.
    #[arg(long)]
    way: String,
    #[command(flatten)]
    socket: SocketArg,
}

fn way(args: &WayArgs, folder: &Path) -> Result<Way, Failure> {
    match args {
        WayArgs {
            file: Some(path), ..
        } => Ok(Way::File(std::path::absolute(path)?)),
        WayArgs {
            nbd: Some(path), ..
        } => Ok(Way::Nbd(std::path::absolute(path)?)),
        WayArgs { ublk: true, .. } => Ok(Way::device()?),
        WayArgs { .. } => match serve::left_attached(folder)? {
            // Its server was killed: what used it finds it at the same place.
            Some(before) => Ok(before.way),
            None => Ok(Way::device()?),
        },
    }
}

/// The disk's folder; it is a disk.
pub(super) fn disk_folder(disks: &Disks, disk: &OsString) -> Result<PathBuf, Failure> {
    let folder = disks.folder(disk)?;
    if !state::is_disk(&folder)? {
        return Err(format!(
            "`{}` is no disk (it has no `disk.json`); `dsec disk create` makes one, `dsec disk ls` lists them",
            folder.display()
        )
        .into());
    }
    Ok(folder)
}

/// Attaches.
pub(crate) fn attach(args: &AttachArgs) -> Result<ExitCode, Failure> {
    let folder = disk_folder(&args.disks, &args.disk)?;
    let way = way(&args.way, &folder)?;
    if args.foreground {
        run_server(&folder, &way, &args.socket.socket, |status| {
            show(status, args.json)
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let status = start(&folder, &way, &args.socket.socket)?;
    show(&status, args.json);
    Ok(ExitCode::SUCCESS)
}

fn show(status: &Status, json: bool) {
    if json {
        output::json(status);
    } else {
        output::line(&status.path.display().to_string());
    }
}

/// Serves until told to end, with the published layers below mounted.
fn run_server(
    folder: &Path,
    way: &Way,
    socket: &Path,
    ready: impl FnOnce(&Status),
) -> Result<(), Failure> {
    lowers::with_mounted(folder, socket, || Ok(serve::serve(folder, way, ready)?))
}

/// What `attach` starts: apart from its terminal, and one line to say that it is ready.
pub(crate) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    nix::unistd::setsid()?;
    let way: Way = serde_json::from_str(&args.way)?;
    run_server(&args.folder, &way, &args.socket.socket, |status| {
        // One line: the reader waits for its end.
        output::line(&serde_json::json!(status).to_string());
    })?;
    Ok(ExitCode::SUCCESS)
}

fn start(folder: &Path, way: &Way, socket: &Path) -> Result<Status, Failure> {
    let log_path = folder.join("server.log");
    let log = File::create(&log_path)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["disk", "serve"])
        .arg(folder)
        .args(["--way", &serde_json::to_string(way)?, "--socket"])
        .arg(socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()?;
    let line = match first_line(&mut child) {
        Ok(line) => line,
        Err(error) => {
            // Whatever state it is in: half a server must not stay.
            child.kill()?;
            child.wait()?;
            return Err(error);
        }
    };
    match serde_json::from_str(&line) {
        Ok(status) => Ok(status),
        Err(_) => {
            child.wait()?;
            let said = std::fs::read_to_string(&log_path).unwrap_or_default();
            let said = said.trim().lines().last().unwrap_or("it said nothing");
            Err(said
                .strip_prefix("dsec: ")
                .unwrap_or(said)
                .to_owned()
                .into())
        }
    }
}

/// The first line of a process's output; empty when it ended without one.
fn first_line(child: &mut Child) -> Result<String, Failure> {
    let Some(output) = child.stdout.take() else {
        return Ok(String::new());
    };
    let (send, receive) = std::sync::mpsc::channel();
    let read = move || {
        let mut line = String::new();
        let read = BufReader::new(output.take(64 << 10)).read_line(&mut line);
        send.send(read.map(|_| line)).unwrap_or_default();
    };
    std::thread::Builder::new().spawn(read)?;
    match receive.recv_timeout(READY_MAX) {
        Ok(line) => Ok(line?),
        Err(_) => Err(format!("the disk's server was not ready within {READY_MAX:?}").into()),
    }
}

/// Detaches, and waits until the disk can be attached again.
pub(crate) fn detach(args: &DetachArgs) -> Result<ExitCode, Failure> {
    let folder = disk_folder(&args.disks, &args.disk)?;
    let force = args.force;
    match client::ask(&folder, &Request::Detach { force }) {
        Ok(Reply::Done) => {}
        Ok(other) => return Err(format!("unexpected answer: {other:?}").into()),
        Err(ServeError::NotAttached(_)) if serve::left_attached(&folder)?.is_some() => {
            // Its server was killed.
            serve::clean_up(&folder)?;
            lowers::with_mounted(&folder, &args.socket.socket, || Ok(()))?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    }
    let deadline = Instant::now() + END_MAX;
    while serve::left_attached(&folder)?.is_some() || state::is_held(&folder)? {
        if Instant::now() > deadline {
            return Err(format!(
                "the disk's server did not end within {END_MAX:?}; its log is `{}`",
                folder.join("server.log").display()
            )
            .into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(ExitCode::SUCCESS)
}
