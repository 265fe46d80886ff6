//! `dsec import`: an image of a registry becomes a layer. It is pulled into a temporary OCI layout, and from there on it is
//! what `dsec build oci:DIR` makes.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use imgstore::credentials::environment::Environment;
use imgstore::ids::{Axis, LayerRef};
use imgstore::origin::url::OriginUrl;
use imgstore::registry::pull;
use imgstore::registry::reference::ImageReference;
use imgstore::source::SourceSpec;

use super::{Failure, build};
use crate::cli::Build;
use crate::progress;

/// `dsec import`.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// `docker://HOST[:PORT]/REPOSITORY[:TAG|@sha256:DIGEST]`; encrypted unless the host is this one (`docker+http://` leaves it out).
    #[arg(value_name = "IMAGE")]
    pub(crate) image: ImageReference,
    /// base, workspace or toolkit.
    #[arg(long, value_name = "AXIS")]
    pub(crate) axis: Axis,
    /// Name of the layer on its axis.
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the layer.
    #[arg(long = "version", value_name = "V")]
    pub(crate) layer_version: String,
    /// Where to publish: `dir:/path`, `s3://bucket/prefix` or `oci://registry/repository`.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) origin: OriginUrl,
    /// Which part of an image for several platforms: `os/architecture[/variant]`; that of this host if not given.
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    /// Layer on the same origin whose chunks may be referred to; can be given several times.
    #[arg(long, value_name = "REF")]
    pub(crate) dict: Vec<LayerRef>,
    /// Label for the tag, `key=value`; can be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = crate::cli::parse_label)]
    pub(crate) label: Vec<(String, String)>,
    /// Keep an extended attribute that is left out otherwise (see docs/sources.md), for example security.selinux.
    #[arg(long, value_name = "NAME")]
    pub(crate) keep_xattr: Vec<String>,
    /// Worker threads; never changes the result.
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    /// Folder for temporary files: the image as it is on the registry, and what it unpacks to.
    #[arg(long, value_name = "DIR", env = "TMPDIR", default_value = "/tmp")]
    pub(crate) tmp: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Pulls, builds and publishes.
pub(crate) fn run(args: &Import) -> Result<ExitCode, Failure> {
    // What can be wrong with the rest is better known before gigabytes have come in.
    imgstore::ids::TagName::new(args.axis, &args.name, &args.layer_version)?;
    args.origin.open_or_create()?;
    let layout = tempfile::Builder::new()
        .prefix("dsec-import-")
        .tempdir_in(&args.tmp)
        .map_err(|e| format!("cannot make a folder in `{}`: {e}", args.tmp.display()))?;
    let bar = progress::bar();
    bar.set_message("pulling");
    let pulled = pull::pull(
        &args.image,
        args.platform.as_deref(),
        layout.path(),
        &Environment::of_process(),
        &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    )?;
    bar.reset();
    let build = Build {
        source: SourceSpec::Oci(layout.path().to_owned(), None),
        axis: args.axis,
        name: args.name.clone(),
        layer_version: args.layer_version.clone(),
        origin: args.origin.clone(),
        dict: args.dict.clone(),
        label: args.label.clone(),
        keep_xattr: args.keep_xattr.clone(),
        segment_kib: imgstore::build::options::SEGMENT_BYTES >> 10,
        chunk_kib: imgstore::build::options::CHUNK_BYTES >> 10,
        level: imgstore::build::options::LEVEL,
        path_order: false,
        threads: args.threads,
        tmp: args.tmp.clone(),
        json: args.json,
    };
    let from = [
        ("source", args.image.to_string()),
        ("image", pulled.manifest),
    ];
    build::run_from(&build, &from, &bar)
}
