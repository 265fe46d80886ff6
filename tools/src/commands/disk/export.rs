//! `dsec disk export`.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use imgstore::disk::export;
use imgstore::disk::layer::Layer;
use imgstore::disk::open::open_file;
use imgstore::disk::stack::Stack;
use imgstore::disk::state::{self, Held};

use super::{Disks, lowers};
use crate::commands::Failure;
use crate::mounts::SocketArg;
use crate::{output, progress};

/// `dsec disk export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Layer files, bottom first (LSMT, ZFile or tar around either; a writable data file with its index beside it), or one disk.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<OsString>,
    /// The raw image; one that is there is replaced.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Index file of the last FILE, where it is a writable data file and its index has another name.
    #[arg(long, value_name = "FILE")]
    index: Option<PathBuf>,
    /// Accept layers that name other parents than the ones given.
    #[arg(long)]
    unrelated: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The disk that is meant, if it is one: a folder with a disk in it, or a name where no such file is.
fn as_disk(disks: &Disks, files: &[OsString]) -> Result<Option<PathBuf>, Failure> {
    let [only] = files else { return Ok(None) };
    if Path::new(only).is_file() {
        return Ok(None);
    }
    let folder = match disks.folder(only) {
        Ok(folder) => folder,
        Err(_) if Path::new(only).is_dir() => Path::new(only).to_owned(),
        Err(error) => return Err(error),
    };
    if !state::is_disk(&folder)? {
        return Err(format!(
            "`{}` is neither a layer file nor a disk (there is no `{}`)",
            only.display(),
            folder.join("disk.json").display()
        )
        .into());
    }
    Ok(Some(folder))
}

fn refuse_to_replace(files: &[OsString], to: &Path) -> Result<(), Failure> {
    let Ok(target) = std::fs::metadata(to) else {
        return Ok(());
    };
    if !target.is_file() {
        return Err(format!("`{}` is there and no file", to.display()).into());
    }
    for file in files {
        let same = std::fs::metadata(file)
            .is_ok_and(|file| (file.dev(), file.ino()) == (target.dev(), target.ino()));
        if same {
            return Err(format!("`{}` is one of the layers; write elsewhere", to.display()).into());
        }
    }
    Ok(())
}

/// Flattens.
pub(crate) fn run(args: &ExportArgs) -> Result<ExitCode, Failure> {
    refuse_to_replace(&args.files, &args.to)?;
    match as_disk(&args.disks, &args.files)? {
        None => export(args, None),
        Some(folder) => lowers::with_mounted(&folder, &args.socket.socket, || {
            export(args, Some(&state::hold(&folder)?))
        }),
    }
}

fn export(args: &ExportArgs, held: Option<&Held>) -> Result<ExitCode, Failure> {
    let opened;
    let layers: &[Layer] = if let Some(held) = held {
        &held.layers
    } else {
        let last = args.files.len() - 1;
        let open = |(at, file): (usize, &OsString)| {
            let index = args.index.as_deref().filter(|_| at == last);
            open_file(Path::new(file), index).map(|opened| opened.layer)
        };
        let files = args.files.iter().enumerate();
        opened = files.map(open).collect::<Result<Vec<_>, _>>()?;
        &opened
    };
    let stack = if args.unrelated {
        Stack::unrelated(layers)?
    } else {
        Stack::new(layers).map_err(|error| match error {
            imgstore::disk::DiskError::WrongParent { .. } => {
                format!("{error}; is the order right (bottom first)? `--unrelated` exports them all the same")
            }
            error => error.to_string(),
        })?
    };
    let bar = progress::bar();
    bar.set_message("exporting");
    let done = export::export_file(&stack, &args.to, &|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    if args.json {
        output::json(&serde_json::json!({
            "to": args.to, "layers": layers.len(), "virtual_size": done.virtual_size, "written": done.written,
        }));
    } else {
        output::line(&format!(
            "{} of {} layers in `{}`, {} of them data",
            output::bytes(done.virtual_size),
            layers.len(),
            args.to.display(),
            output::bytes(done.written)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
