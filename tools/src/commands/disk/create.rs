//! `dsec disk create`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args;
use imgstore::disk::folder::{DiskFolder, Lower};
use imgstore::disk::state::{self, read_state};
use imgstore::ids::LayerRef;
use imgstore::media::file::FileMedia;
use layerd_client::client::Client;

use super::{Disks, lowers};
use crate::commands::Failure;
use crate::commands::export_set::parse_size;
use crate::mounts::SocketArg;
use crate::output;

/// `dsec disk create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The disk: a name, or a folder that is made.
    #[arg(value_name = "DISK")]
    disk: OsString,
    /// What it begins with: a layer file, a raw or qcow2 image, or a published layer (`axis/name:version` or a digest). Several
    /// layer files lie on each other, the lowest first.
    #[arg(long, value_name = "FILE|REF")]
    from: Vec<OsString>,
    /// Bytes of the disk, as in `20GiB` [default: what it begins with].
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// Read a raw image where it is instead of copying it: it must never change.
    #[arg(long)]
    in_place: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What a file is, by how it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Layer,
    Qcow2,
    Raw,
}

fn kind_of(path: &Path) -> Result<Kind, Failure> {
    use std::io::Read as _;
    let failed = |error: std::io::Error| format!("cannot read `{}`: {error}", path.display());
    let mut head = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(4096).read_to_end(&mut head).map_err(failed)?;
    Ok(imgstore::format::overlaybd::kind_of(&head).map_or_else(
        || {
            if head.starts_with(b"QFI\xfb") {
                Kind::Qcow2
            } else {
                Kind::Raw
            }
        },
        |_| Kind::Layer,
    ))
}

/// Refuses an image that makes its reader open other files: whoever wrote it chose their names.
fn must_stand_alone(image: &Path) -> Result<(), Failure> {
    use std::io::Read as _;
    let mut head = [0; 80];
    std::fs::File::open(image)?.read_exact(&mut head)?;
    let backing = head.get(8..16).is_some_and(|at| at.iter().any(|b| *b != 0));
    // Bit 2 of the incompatible features (version 3): data lies in another file.
    let version_3 = head.get(4..8) == Some(&[0, 0, 0, 3]);
    let elsewhere = version_3 && head.get(79).is_some_and(|bits| bits & 4 != 0);
    if backing || elsewhere {
        return Err(format!(
            "`{}` needs another file (a backing or data file); make it stand alone first: `qemu-img convert -O qcow2 OLD NEW`",
            image.display()
        )
        .into());
    }
    Ok(())
}

/// A raw file of what a qcow2 image holds; goes away with the value.
fn converted(image: &Path, beside: &Path) -> Result<tempfile::TempPath, Failure> {
    must_stand_alone(image)?;
    let raw = tempfile::Builder::new()
        .prefix(".dsec-qcow2-")
        .tempfile_in(beside)?;
    let raw = raw.into_temp_path();
    let run = Command::new("qemu-img")
        .args(["convert", "-f", "qcow2", "-O", "raw"])
        .args([image, &*raw])
        .output();
    match run {
        Ok(output) if output.status.success() => Ok(raw),
        Ok(output) => Err(format!(
            "`qemu-img convert` cannot read `{}`: {}",
            image.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        )
        .into()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(format!(
            "`{}` is a qcow2 image, and `qemu-img` is not installed; install it (Debian: qemu-utils), or convert the image to raw",
            image.display()
        )
        .into()),
        Err(error) => Err(format!("cannot run `qemu-img`: {error}").into()),
    }
}

/// Makes the disk.
pub(crate) fn run(args: &CreateArgs) -> Result<ExitCode, Failure> {
    let folder = args.disks.folder(&args.disk)?;
    let files: Vec<PathBuf> = args.from.iter().map(PathBuf::from).collect();
    match &*files {
        [] if args.size.is_none() => {
            return Err("an empty disk needs a size: `--size 20GiB`".into());
        }
        [] => DiskFolder::create(&folder, Vec::new(), args.size)?,
        [only] => from_one(args, &folder, only)?,
        several => from_layers(args, &folder, several)?,
    }
    let state = read_state(&folder)?;
    if args.json {
        output::json(&serde_json::json!({"folder": folder, "disk": state}));
    } else {
        output::line(&format!(
            "{}: {} on {} layers",
            folder.display(),
            output::bytes(state.virtual_size),
            state.layers.len()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn from_one(args: &CreateArgs, folder: &Path, file: &Path) -> Result<(), Failure> {
    if !file.try_exists()?
        && let Some(reference) = file.to_str().and_then(|text| text.parse().ok())
    {
        return from_published(args, folder, &reference);
    }
    match kind_of(file)? {
        Kind::Layer => match of_disk(file)? {
            Some(layers) => from_lowers(args, folder, layers),
            None => from_layers(args, folder, &[file.to_owned()]),
        },
        Kind::Raw if args.in_place => {
            let raw = Lower::Raw(std::path::absolute(file)?);
            Ok(DiskFolder::create(folder, vec![raw], args.size)?)
        }
        Kind::Raw => Ok(DiskFolder::create_from_raw(
            folder,
            &FileMedia::open(file)?,
            args.size,
        )?),
        Kind::Qcow2 => {
            let parent = folder.parent().unwrap_or(folder);
            std::fs::create_dir_all(parent)?;
            let raw = converted(file, parent)?;
            Ok(DiskFolder::create_from_raw(
                folder,
                &FileMedia::open(&raw)?,
                args.size,
            )?)
        }
    }
}

/// The layers of the disk that a file lies in the folder of, up to that file; `None` where it is no disk's layer. A layer of a disk holds
/// what was written since the one below: alone it would show something that nobody ever wrote.
fn of_disk(file: &Path) -> Result<Option<Vec<Lower>>, Failure> {
    let file = std::fs::canonicalize(file)?;
    let Some(of) = file.parent() else {
        return Ok(None);
    };
    if !state::is_disk(of)? {
        return Ok(None);
    }
    let layers = read_state(of)?.layers;
    let is_it = |lower: &Lower| matches!(lower, Lower::Lsmt(path) if of.join(path) == file);
    let Some(at) = layers.iter().position(is_it) else {
        return Ok(None);
    };
    let below = layers.into_iter().take(at + 1).map(|lower| match lower {
        Lower::Lsmt(path) => Lower::Lsmt(of.join(path)),
        Lower::Raw(path) => Lower::Raw(of.join(path)),
        Lower::Published { .. } | Lower::Pair(_) => lower,
    });
    Ok(Some(below.collect()))
}

/// Layers of which some may be published: those are mounted while they are looked at.
fn from_lowers(args: &CreateArgs, folder: &Path, lowers: Vec<Lower>) -> Result<(), Failure> {
    if state::is_disk(folder)? {
        return Err(format!("`{}` is a disk already", folder.display()).into());
    }
    let published: Vec<_> = lowers
        .iter()
        .filter_map(|lower| match lower {
            Lower::Published { layer, form } => Some((*layer, *form)),
            Lower::Lsmt(_) | Lower::Raw(_) | Lower::Pair(_) => None,
        })
        .collect();
    let client = Client::new(&args.socket.socket);
    let mounted = published
        .iter()
        .try_for_each(|layer| lowers::mount(folder, &client, *layer));
    let made = mounted.and_then(|()| Ok(DiskFolder::create(folder, lowers, args.size)?));
    lowers::unmount(folder, &client, &published);
    made
}

/// A disk over a published layer and what that lies on; layerd mounts all of it.
fn from_published(args: &CreateArgs, folder: &Path, reference: &LayerRef) -> Result<(), Failure> {
    if state::is_disk(folder)? {
        return Err(format!("`{}` is a disk already", folder.display()).into());
    }
    let client = Client::new(&args.socket.socket);
    let layers = lowers::of_published(folder, &client, reference)?;
    let of = |(layer, form): (_, _)| Lower::Published { layer, form };
    from_lowers(args, folder, layers.into_iter().map(of).collect())
}

fn from_layers(args: &CreateArgs, folder: &Path, files: &[PathBuf]) -> Result<(), Failure> {
    let mut layers = Vec::new();
    for file in files {
        if kind_of(file)? != Kind::Layer {
            return Err(format!(
                "`{}` is no OverlayBD layer; an image without layers is given alone",
                file.display()
            )
            .into());
        }
        layers.push(Lower::Lsmt(std::path::absolute(file)?));
    }
    Ok(DiskFolder::create(folder, layers, args.size)?)
}
