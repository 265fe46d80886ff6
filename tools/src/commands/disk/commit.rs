//! `dsec disk commit`: what a disk holds as one compact layer, in a file or published.

use std::ffi::OsString;
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, ValueEnum};
use disk_server::control::{Reply, Request};
use imgstore::disk::committed::write_committed;
use imgstore::disk::folder::{Lower, open_lower};
use imgstore::disk::layer::Layer;
use imgstore::disk::published::PublishedDisk;
use imgstore::disk::state::{self, DISK_FILE, DiskState};
use imgstore::disk::zfile::ZOptions;
use imgstore::format::overlaybd::zfile::Algorithm;
use imgstore::ids::TagName;
use imgstore::origin::url::OriginUrl;

use super::attach::disk_folder;
use super::{Disks, lowers};
use crate::commands::{Failure, build};
use crate::mounts::SocketArg;
use crate::{cli, output, progress};

/// `dsec disk commit`.
#[derive(Debug, Args)]
pub(crate) struct CommitArgs {
    /// The disk; it may be attached.
    #[arg(value_name = "DISK")]
    disk: OsString,
    #[command(flatten)]
    target: Target,
    /// Where to publish: `dir:/path`, `s3://bucket/prefix` or `oci://registry/repository`.
    #[arg(long, value_name = "ORIGIN", requires = "publish")]
    origin: Option<OriginUrl>,
    /// Compress the file.
    #[arg(long, value_name = "ALGORITHM", conflicts_with = "publish")]
    zfile: Option<Compression>,
    /// Only what the disk has that the layers it was made from have not [default for --publish over published layers].
    #[arg(long, conflicts_with = "complete")]
    delta: bool,
    /// All of the disk: the layer needs no other [default otherwise].
    #[arg(long)]
    complete: bool,
    #[command(flatten)]
    disks: Disks,
    #[command(flatten)]
    socket: SocketArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Target {
    /// The new layer file.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Publish it as a layer of this name, for `dsec disk create --from`.
    #[arg(long, value_name = "TAG", requires = "origin")]
    publish: Option<TagName>,
}

/// How a layer file is compressed.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Compression {
    /// Fast.
    Lz4,
    /// Small.
    Zstd,
}

impl Compression {
    fn options(self) -> ZOptions {
        ZOptions {
            algorithm: match self {
                Self::Lz4 => Algorithm::Lz4,
                Self::Zstd => Algorithm::Zstd,
            },
            ..ZOptions::default()
        }
    }
}

/// Commits.
pub(crate) fn run(args: &CommitArgs) -> Result<ExitCode, Failure> {
    let folder = disk_folder(&args.disks, &args.disk)?;
    // What is committed has a name of its own: nobody writes to it any more.
    let request = Request::Snapshot { always: false };
    let told = |reply: Reply| match reply {
        Reply::Layer { .. } | Reply::Done => Ok(()),
        other => Err(format!("unexpected answer: {other:?}").into()),
    };
    super::snapshot::ask_or_open(&folder, &args.socket.socket, &request, told, |disk| {
        disk.snapshot_if_written()?;
        Ok(())
    })?;
    lowers::with_mounted(&folder, &args.socket.socket, || commit(args, &folder))?;
    Ok(ExitCode::SUCCESS)
}

/// How many layers from the bottom are left out.
fn left_out(args: &CommitArgs, state: &DiskState) -> Result<usize, Failure> {
    let base = state.base();
    let below = state.layers.get(..base).unwrap_or_default();
    let all_published = below
        .iter()
        .all(|lower| matches!(lower, Lower::Published { .. }));
    if args.target.publish.is_none() {
        return Ok(if args.delta { base } else { 0 });
    }
    match (args.delta, args.complete) {
        (true, _) if !all_published => Err(
            "the disk lies on layers that are not published, so nobody could find them; publish it with `--complete`"
                .into(),
        ),
        (_, true) => Ok(0),
        _ if all_published => Ok(base),
        _ => Ok(0),
    }
}

fn commit(args: &CommitArgs, folder: &Path) -> Result<(), Failure> {
    let state = state::read_state(folder)?;
    let below = left_out(args, &state)?;
    let used = state.layers.get(below..).unwrap_or_default();
    if used.is_empty() {
        return Err("nothing was written to the disk; there is nothing to commit".into());
    }
    let layers = used
        .iter()
        .map(|lower| open_lower(folder, lower))
        .collect::<Result<Vec<Layer>, _>>()?;
    if let Some(to) = &args.target.to {
        write_committed(&layers, to, args.zfile.map(Compression::options))?;
        let bytes = fs::metadata(to)?.len();
        if args.json {
            output::json(&serde_json::json!({"to": to, "layers": layers.len(), "bytes": bytes}));
        } else {
            output::line(&format!(
                "{} layers in `{}`, {}",
                layers.len(),
                to.display(),
                output::bytes(bytes)
            ));
        }
        return Ok(());
    }
    let (Some(tag), Some(origin)) = (&args.target.publish, &args.origin) else {
        return Err("say where: `--to FILE`, or `--publish TAG --origin ORIGIN`".into());
    };
    let parents = state.layers.get(..below).unwrap_or_default();
    publish(args, folder, (&state, parents), &layers, (tag, origin))
}

/// Publishes a tree of two files: the layer, and what lies below it.
fn publish(
    args: &CommitArgs,
    folder: &Path,
    (state, parents): (&DiskState, &[Lower]),
    layers: &[Layer],
    (tag, origin): (&TagName, &OriginUrl),
) -> Result<(), Failure> {
    // In the disk's folder: there is room for a disk.
    let tree = tempfile::Builder::new()
        .prefix(".publish-")
        .tempdir_in(folder)?;
    write_committed(layers, &tree.path().join(DISK_FILE), None)?;
    let about = PublishedDisk::new(state.virtual_size, parents);
    fs::write(tree.path().join(PublishedDisk::FILE), about.to_bytes())?;
    // The same disk is the same layer, whenever it is published.
    let times = FileTimes::new()
        .set_accessed(SystemTime::UNIX_EPOCH)
        .set_modified(SystemTime::UNIX_EPOCH);
    for path in [
        tree.path().join(DISK_FILE),
        tree.path().join(PublishedDisk::FILE),
        tree.path().to_owned(),
    ] {
        File::open(path)?.set_times(times)?;
    }
    let defaults = imgstore::build::BuildOptions::default();
    let build = cli::Build {
        source: tree.path().display().to_string().parse()?,
        axis: tag.axis(),
        name: tag.name().to_owned(),
        layer_version: tag.version().to_owned(),
        origin: origin.clone(),
        dict: Vec::new(),
        label: vec![("disk".to_owned(), state.virtual_size.to_string())],
        keep_xattr: Vec::new(),
        segment_kib: defaults.segment_bytes >> 10,
        chunk_kib: defaults.chunk_bytes >> 10,
        level: defaults.level,
        path_order: false,
        threads: None,
        tmp: folder.to_owned(),
        json: args.json,
    };
    let from = format!("disk {}", folder.display());
    build::run_from(&build, &[("source", from)], &progress::bar())?;
    Ok(())
}
