//! `dsec disk inspect`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use imgstore::disk::folder::Lower;
use imgstore::disk::inspect::{Extent, Inspection, inspect};
use imgstore::disk::state::{self, DiskState};

use super::{Disks, lowers};
use crate::commands::Failure;
use crate::mounts::SocketArg;
use crate::output;

/// Extents shown to people unless they ask for all.
const SHOWN: usize = 16;

/// `dsec disk inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A layer file, or a disk.
    #[arg(value_name = "FILE")]
    file: OsString,
    /// Index file of a writable data file, where it is not beside it under the usual name.
    #[arg(long, value_name = "FILE")]
    index: Option<PathBuf>,
    /// Read all data and check every block's checksum.
    #[arg(long)]
    deep: bool,
    /// Show all extents.
    #[arg(long)]
    extents: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON, with all extents.
    #[arg(long)]
    json: bool,
}

/// Shows; status 1 when anything is damaged.
pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode, Failure> {
    let path = Path::new(&args.file);
    if path.is_file() || args.index.is_some() {
        let found = inspect(path, args.index.as_deref(), args.deep)?;
        if args.json {
            output::json(&found);
        } else {
            show(&found, args.extents);
        }
        return Ok(status(found.is_sound()));
    }
    let folder = args.disks.folder(&args.file)?;
    let state = state::read_state(&folder)?;
    let layers = lowers::with_mounted(&folder, &args.socket.socket, || {
        let files = files(&folder, &state);
        let files = files.iter();
        let inspected = files.map(|(file, index)| inspect(file, index.as_deref(), args.deep));
        Ok(inspected.collect::<Result<Vec<_>, _>>()?)
    })?;
    if args.json {
        output::json(&serde_json::json!({"disk": state, "folder": folder, "layers": layers}));
    } else {
        output::line(&format!("disk      {}", folder.display()));
        output::line(&format!("size      {}", output::bytes(state.virtual_size)));
        output::line(&format!(
            "layers    {} and the writable one",
            state.layers.len()
        ));
        for layer in &layers {
            output::line("");
            show(layer, args.extents);
        }
    }
    Ok(status(layers.iter().all(Inspection::is_sound)))
}

/// The files of a disk's layers, bottom to top. Images without format have nothing to inspect.
fn files(folder: &Path, state: &DiskState) -> Vec<(PathBuf, Option<PathBuf>)> {
    let pair = |name: &String| {
        let index = folder.join(format!("{name}.index"));
        let there = index.is_file().then_some(index);
        (folder.join(format!("{name}.data")), there)
    };
    let file = |lower: &Lower| match lower {
        Lower::Lsmt(path) => Some((folder.join(path), None)),
        Lower::Pair(name) => Some(pair(name)),
        Lower::Published {
            layer,
            form: form @ state::Form::Disk,
        } => Some((folder.join(Lower::published_path(layer, *form)), None)),
        Lower::Raw(_) | Lower::Published { .. } => None,
    };
    let below = state.layers.iter().filter_map(file);
    below.chain([pair(&state.top)]).collect()
}

fn status(sound: bool) -> ExitCode {
    if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn show(found: &Inspection, all: bool) {
    let line = |name: &str, text: &str| output::line(&format!("{name:<9} {text}"));
    line("file", &found.file);
    line(
        "bytes",
        &format!("{} ({})", found.bytes, output::bytes(found.bytes)),
    );
    let tar = if found.tar { ", in a tar" } else { "" };
    line("kind", &format!("{}{tar}", found.kind));
    if let Some(zfile) = &found.zfile {
        let algorithm = format!("{:?}", zfile.algorithm).to_lowercase();
        let sums = if zfile.block_checksums {
            "with"
        } else {
            "without"
        };
        line(
            "zfile",
            &format!(
                "{algorithm}, {} blocks of {} bytes {sums} checksums, {} of {} bytes",
                zfile.blocks, zfile.block_size, zfile.stored, zfile.original_size
            ),
        );
    }
    if let Some(index) = &found.index_file {
        line("index", index);
    }
    if let Some(header) = &found.header {
        let none = || "none".to_owned();
        line("flags", &format!("{:#x}", header.flags));
        line("size", &format!("{} bytes", header.virtual_size));
        line(
            "uuid",
            &header.uuid.map_or_else(none, |uuid| uuid.to_string()),
        );
        line(
            "parent",
            &header.parent.map_or_else(none, |uuid| uuid.to_string()),
        );
        if !header.user_tag.is_empty() {
            line("tag", &header.user_tag.escape_debug().to_string());
        }
        line(
            "records",
            &format!("{} at byte {}", header.index_records, header.index_offset),
        );
    }
    line(
        "extents",
        &format!(
            "{}: {} sectors of data, {} of zeros",
            found.extents.len(),
            found.data_sectors,
            found.zero_sectors
        ),
    );
    let shown = if all { found.extents.len() } else { SHOWN };
    for Extent {
        lba,
        sectors,
        place,
    } in found.extents.iter().take(shown)
    {
        let place = place.map_or_else(
            || "zeros".to_owned(),
            |place| format!("data at sector {place}"),
        );
        output::line(&format!("  {lba} + {sectors}  {place}"));
    }
    if found.extents.len() > shown {
        output::line(&format!(
            "  … {} more; `--extents` shows all",
            found.extents.len() - shown
        ));
    }
    for check in &found.checks {
        let state = if check.ok { "ok" } else { "BAD" };
        line("check", &format!("{state}  {}: {}", check.name, check.text));
    }
}
