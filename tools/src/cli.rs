//! What can be typed. Help texts are written for people who never read the design.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use imgstore::ids::{Axis, LayerRef};
use imgstore::origin::url::OriginUrl;
use imgstore::source::SourceSpec;

/// Build, inspect and mount content-addressed layers.
#[derive(Debug, Parser)]
#[command(
    name = "dsec",
    version,
    max_term_width = 100,
    after_help = "Examples:
  dsec build ./rootfs --axis base --name debian --version 12 --origin dir:/srv/layers
  dsec layers --origin dir:/srv/layers
  layerd --origin dir:/srv/layers --cache /var/cache/dsec --socket /run/dsec/layerd.sock &
  dsec mount base/debian:12 /mnt --rw
  dsec umount /mnt"
)]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A layer and the origin it is on.
#[derive(Debug, Args)]
pub(crate) struct OnOrigin {
    /// Layer: `axis/name:version` or a digest.
    #[arg(value_name = "REF")]
    pub(crate) layer: LayerRef,
    /// Where layers are: `dir:/path`, `http(s)://host/path`, `s3://bucket/prefix` or `oci://registry/repository`.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Build a layer from a directory, archive or image and publish it.
    #[command(after_help = "Examples:
  dsec build ./rootfs --axis base --name python --version 3.11 --origin dir:/srv/layers
  tar -C src --xattrs --format=pax -c . | dsec build - --axis workspace --name repo --version a1b2 --origin dir:/srv/layers
  dsec build oci:./image:latest --axis base --name app --version 1 --origin dir:/srv/layers --dict base/python:3.11
  dsec build upper:/var/lib/overlay/upper --axis workspace --name repo --version step-2 --origin dir:/srv/layers")]
    Build(Box<Build>),
    /// Make a layer of an image on a registry and publish it.
    #[command(after_help = "Examples:
  dsec import docker://docker.io/library/debian:12 --axis base --name debian --version 12 --origin dir:/srv/layers
  dsec import docker://127.0.0.1:5000/app@sha256:… --axis base --name app --version 1 --origin s3://layers --platform linux/arm64

Credentials: DSEC_REGISTRY_USERNAME and DSEC_REGISTRY_PASSWORD, or what `docker login` wrote.")]
    Import(Box<crate::commands::import::Import>),
    /// List the layers that have a tag.
    #[command(after_help = "Example:\n  dsec layers --origin http://127.0.0.1:8080/layers --json")]
    Layers {
        /// Where layers are: `dir:/path`, `http(s)://host/path`, `s3://bucket/prefix` or `oci://registry/repository`.
        #[arg(long, value_name = "ORIGIN")]
        origin: OriginUrl,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show what a layer is made of.
    #[command(after_help = "Example:\n  dsec inspect base/python:3.11 --origin dir:/srv/layers")]
    Inspect(OnOrigin),
    /// Read and check all of a layer; exit status 1 and a list if anything is damaged.
    #[command(after_help = "Example:\n  dsec verify base/python:3.11 --origin dir:/srv/layers")]
    Verify(OnOrigin),
    /// Copy layers and their tags to another origin: only what is missing there, all of it verified.
    #[command(after_help = "Examples:
  dsec push base/python:3.11 workspace/repo:a1b2 --origin dir:/srv/layers --to dir:/mnt/mirror
  dsec push base/python:3.11 --origin http://host/layers --to dir:/srv/layers --json

A layer named by its digest is copied without a tag; garbage collection removes it unless a tag, lease or dictionary needs it.")]
    Push(crate::commands::copy::PushArgs),
    /// Copy layers and their tags from another origin; `push` seen from the other side.
    #[command(after_help = "Example:
  dsec pull base/python:3.11 --from http://host/layers --origin dir:/srv/layers")]
    Pull(crate::commands::copy::PullArgs),
    /// Mend a damaged layer on an origin from another origin; other layers that share the damaged parts are mended too.
    #[command(after_help = "Examples:
  dsec repair base/python:3.11 --from dir:/mnt/mirror --origin dir:/srv/layers
  dsec verify base/python:3.11 --origin dir:/srv/layers")]
    Repair(crate::commands::repair::RepairArgs),
    /// Write a layer as a plain PAX tar.
    #[command(after_help = "Examples:
  dsec export base/python:3.11 --origin dir:/srv/layers --to out.tar
  dsec export base/python:3.11 --origin dir:/srv/layers --to - --skip-sockets | tar -tv")]
    Export {
        /// Layer and origin.
        #[command(flatten)]
        on: OnOrigin,
        /// The tar file, or `-` for standard output.
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Leave out unix sockets, which tar cannot hold; without this they are an error.
        #[arg(long)]
        skip_sockets: bool,
    },
    /// Show what is in layerd's cache, and say what must stay there.
    #[command(after_help = "Examples:
  dsec cache ls
  dsec cache pin base/python:3.11
  dsec cache unpin base/python:3.11")]
    Cache {
        /// What to do.
        #[command(subcommand)]
        what: crate::commands::cache::CacheCommand,
    },
    /// Check an origin, or a cache folder that no layerd uses, and mend it; exit status 1 if anything is damaged.
    #[command(after_help = "Examples:
  dsec fsck --origin dir:/srv/layers
  dsec fsck --origin dir:/srv/layers --deep --repair --json
  dsec fsck --cache /var/cache/dsec
  dsec fsck --cache /var/cache/dsec --repair --json")]
    Fsck(crate::commands::fsck::FsckArgs),
    /// Mount layers, base first, then workspace, toolkits on top.
    #[command(after_help = "Examples:
  dsec mount base/python:3.11 workspace/repo:a1b2 toolkit/uv:0.9 /mnt --rw
  dsec mount base/python:3.11 /mnt --socket /run/dsec/layerd.sock")]
    Mount(crate::mounts::MountArgs),
    /// Unmount a composition.
    #[command(after_help = "Example:\n  dsec umount /mnt")]
    Umount(crate::mounts::UmountArgs),
    /// Show what was fetched, served and cached.
    #[command(after_help = "Example:\n  dsec stats --json")]
    Stats(crate::mounts::QueryArgs),
    /// List the mounted compositions.
    #[command(after_help = "Example:\n  dsec mounts")]
    Mounts(crate::mounts::QueryArgs),
    /// Remove what no tag, lease, mount or publisher needs from an origin.
    #[command(after_help = "Examples:
  dsec gc --origin dir:/srv/layers --dry-run
  dsec gc --origin dir:/srv/layers --grace 7d --json")]
    Gc(crate::commands::gc::GcArgs),
    /// Give a layer another tag, or point a tag to another layer.
    #[command(
        after_help = "Example:\n  dsec tag base/python:3.11 base/python:stable --origin dir:/srv/layers"
    )]
    Tag(crate::commands::tags::TagArgs),
    /// Take a tag away; the layer's bytes stay until they are collected.
    #[command(after_help = "Example:\n  dsec untag base/python:3.11 --origin dir:/srv/layers")]
    Untag(crate::commands::tags::UntagArgs),
    /// Take away all tags of a layer, unless somebody has it mounted or leased.
    #[command(after_help = "Example:\n  dsec rm base/python:3.11 --origin dir:/srv/layers")]
    Rm(OnOrigin),
    /// Keep layers for a while, and see who else does.
    #[command(
        subcommand,
        after_help = "Examples:
  dsec lease create base/python:3.11 --ttl 7d --origin dir:/srv/layers
  dsec lease ls --origin dir:/srv/layers"
    )]
    Lease(crate::commands::lease::LeaseCommand),
    /// Record, show and publish what a start reads first.
    #[command(
        subcommand,
        after_help = "Examples:
  dsec trace record /mnt --out start.trace -- chroot /mnt python3 -c 'import ssl'
  dsec trace show start.trace
  dsec trace apply base/python:3.11 --trace start.trace --origin dir:/srv/layers"
    )]
    Trace(crate::commands::trace::TraceCommand),
    /// Publish layers again with what a trace names in front, so that a start fetches it in a few large requests.
    #[command(after_help = "Examples:
  dsec optimize base/python:3.11 --trace start.trace --origin dir:/srv/layers
  dsec optimize base/python:3.11 workspace/repo:a1b2 --trace start.trace --version fast --origin dir:/srv/layers")]
    Optimize(crate::commands::optimize::Optimize),
    /// Choose the part of an origin that lets the most workloads run without the rest, and write it.
    ///
    /// A workload is a trace; it runs from the part if all that it read is in it. Prints how many workloads how many bytes
    /// cover. What the part lacks is an error (EIO) there, never a wrong byte; with the whole origin as second it is read from
    /// that. Layers that were optimised (`dsec optimize`) with the same traces make the smallest part.
    #[command(after_help = "Examples:
  dsec export-set --traces traces/*.trace --bytes 500MiB --origin dir:/srv/layers
  dsec export-set --traces a.trace b.trace --bytes 2GiB --origin http://mirror/layers --to dir:/srv/part --svg curve.svg")]
    ExportSet(crate::commands::export_set::ExportSet),
    /// Run a command in a new sandbox and remove the sandbox; its exit status becomes this command's.
    #[command(after_help = "Examples:
  dsec run --base base/debian:12 -- echo hello
  dsec run --base base/python:3.11 --workspace workspace/repo:a1b2 --toolkit toolkit/uv:0.9 --timeout 60 -- pytest -q
  tar -c . | dsec run -i --base base/debian:12 -- sha256sum")]
    Run(Box<crate::commands::run::RunArgs>),
    /// Make sandboxes and work with them.
    #[command(
        subcommand,
        after_help = "Examples:
  ID=$(dsec sandbox create --base base/debian:12)
  dsec sandbox exec $ID -- apt-get install -y jq
  dsec sandbox cp ./input.json $ID:/w/input.json
  dsec sandbox pack-diff $ID workspace/repo:step-2
  dsec sandbox fork $ID 8
  dsec sandbox kill $ID"
    )]
    Sandbox(crate::commands::sandbox::SandboxCommand),
    /// Show what was asked of a sandbox and what it did, or do it again elsewhere.
    #[command(
        subcommand,
        after_help = "Examples:
  dsec trajectory show sb-0123456789abcdef
  dsec trajectory replay sb-0123456789abcdef --on base/debian:12"
    )]
    Trajectory(crate::commands::trajectory::TrajectoryCommand),
    /// Make, attach and snapshot writable disks, and read OverlayBD layer files.
    #[command(after_help = "Examples:
  dsec disk create vm1 --from ./debian.qcow2 --size 20GiB
  dsec disk attach vm1 --nbd /run/vm1.sock
  dsec disk snapshot vm1
  dsec disk export base.lsmt top.lsmt --to raw.img

DISK is a folder (`./vm1`), or a name: a folder below the one that --disks or DSEC_DISKS names.")]
    Disk {
        /// What to do.
        #[command(subcommand)]
        what: crate::commands::disk::DiskCommand,
    },
    /// Measure (runs `dsec-bench`, which is installed beside `dsec`).
    #[command(
        disable_help_flag = true,
        after_help = "Example:\n  dsec bench cold-start --small --runs 3 --json out.json --svg out.svg"
    )]
    Bench {
        /// Arguments of `dsec-bench`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
}

/// `dsec build`.
#[derive(Debug, Args)]
pub(crate) struct Build {
    /// A directory, a tar file (plain, gzip, zstd), `-` for a tar on standard input, `oci:DIR[:TAG]`, `docker-archive:FILE`, or `upper:DIR` (an OverlayFS upper directory).
    #[arg(value_name = "SOURCE")]
    pub(crate) source: SourceSpec,
    /// base, workspace or toolkit.
    #[arg(long, value_name = "AXIS")]
    pub(crate) axis: Axis,
    /// Name of the layer on its axis.
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the layer.
    #[arg(long = "version", value_name = "V")]
    pub(crate) layer_version: String,
    /// Where to publish: `dir:/path` (made if it is missing), `s3://bucket/prefix` or `oci://registry/repository`.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) origin: OriginUrl,
    /// Layer on the same origin whose chunks may be referred to; can be given several times.
    #[arg(long, value_name = "REF")]
    pub(crate) dict: Vec<LayerRef>,
    /// Label for the tag, `key=value`; can be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_label)]
    pub(crate) label: Vec<(String, String)>,
    /// Keep an extended attribute that is left out otherwise (see docs/sources.md), for example security.selinux.
    #[arg(long, value_name = "NAME")]
    pub(crate) keep_xattr: Vec<String>,
    /// Segment size in KiB: 128 to 4096, a power of two.
    #[arg(long, value_name = "KIB", default_value_t = imgstore::build::options::SEGMENT_BYTES >> 10)]
    pub(crate) segment_kib: u64,
    /// Deduplication unit in KiB: 4 to 256, a power of two.
    #[arg(long, value_name = "KIB", default_value_t = imgstore::build::options::CHUNK_BYTES >> 10)]
    pub(crate) chunk_kib: u64,
    /// Zstd level of stored segments, 1 to 19.
    #[arg(long, value_name = "LEVEL", default_value_t = imgstore::build::options::LEVEL, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub(crate) level: i32,
    /// Lay files out by path alone instead of by kind and path (for comparisons).
    #[arg(long)]
    pub(crate) path_order: bool,
    /// Worker threads; never changes the result.
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Folder for temporary files.
    #[arg(long, value_name = "DIR", env = "TMPDIR", default_value = "/tmp")]
    pub(crate) tmp: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not a label: expected KEY=VALUE")),
    }
}
