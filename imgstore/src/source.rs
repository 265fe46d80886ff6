//! Sources: what a user names on the command line, turned into a [`Tree`].
//!
//! Every loader (directory, tar, OCI image, docker archive, OverlayFS upper) produces a raw tree: names, attributes and
//! *places* of file contents, but no contents. `finish` then does the same to all of them: filters extended attributes
//! (`xattr_filter`), and refuses what the layer format cannot hold. So the same tree gives the same layer, whatever it
//! came from. File contents are read later, by the builder, through `content::ContentReader`, which notices files that
//! changed in between.
//!
//! Rules that hold for every source are written where they are applied: paths and parents in `tree_edit`, tar entries
//! in `tar_apply`, image layers in `image_layers`, upper directories in `upper`.

mod acl_text;
pub mod content;
mod decompress;
mod directory;
mod docker_archive;
mod error;
mod finish;
mod host_file;
mod image_config;
mod image_layers;
pub mod merge;
mod meter;
mod oci_layout;
mod pax;
mod spool;
mod tar_apply;
mod tar_header;
mod tar_input;
mod tar_read;
mod tar_sparse;
mod tree_edit;
mod tree_path;
mod upper;
pub mod xattr_filter;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use decompress::Expansion;
pub(crate) use error::shown;
pub use error::{EntryFault, SourceError, TarFault};
use meter::Meter;
pub use meter::Progress;
pub(crate) use oci_layout::host_platform;
use spool::Spool;
pub(crate) use tar_read::LAYER_COMMENT;
use xattr_filter::{OverlayXattrs, XattrFilter};

use crate::tree::{Stamp, Tree};

/// What a user wrote as SOURCE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceSpec {
    /// A directory of this host.
    Directory(PathBuf),
    /// A tar file: plain, gzip or zstd, told by its first bytes.
    Tar(PathBuf),
    /// A tar on standard input: plain, gzip or zstd.
    Stdin,
    /// An OCI image layout: the directory, and the `org.opencontainers.image.ref.name` of one image in it.
    Oci(PathBuf, Option<String>),
    /// A `docker save` archive.
    DockerArchive(PathBuf),
    /// An OverlayFS upper directory.
    Upper(PathBuf),
}

impl FromStr for SourceSpec {
    type Err = SourceError;

    /// `-`, `oci:DIR[:TAG]`, `docker-archive:FILE`, `upper:DIR`, or the path of a directory or tar file.
    /// Looks at the file system to tell a directory from a tar, and a tag from a colon in a name.
    fn from_str(text: &str) -> Result<Self, SourceError> {
        if text == "-" {
            return Ok(Self::Stdin);
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            return Ok(oci_layout::split_tag(rest));
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            return Ok(Self::DockerArchive(rest.into()));
        }
        if let Some(rest) = text.strip_prefix("upper:") {
            return Ok(Self::Upper(rest.into()));
        }
        let stat = std::fs::metadata(text).map_err(|e| SourceError::io(text, "open source", e))?;
        Ok(if stat.is_dir() {
            Self::Directory(text.into())
        } else {
            Self::Tar(text.into())
        })
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::Tar(path) => write!(f, "{}", path.display()),
            Self::Stdin => f.write_str("-"),
            Self::Oci(path, None) => write!(f, "oci:{}", path.display()),
            Self::Oci(path, Some(tag)) => write!(f, "oci:{}:{tag}", path.display()),
            Self::DockerArchive(path) => write!(f, "docker-archive:{}", path.display()),
            Self::Upper(path) => write!(f, "upper:{}", path.display()),
        }
    }
}

/// Called now and then while a source is read.
pub type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

/// How to read a source.
#[derive(Clone)]
pub struct SourceOptions {
    /// Where spool files are made; they have no name and go away by themselves.
    pub spool_dir: PathBuf,
    /// Extended attributes to keep although [`xattr_filter`] drops them by default (`security.selinux`).
    pub keep_xattrs: Vec<String>,
    /// Told how far the reading is.
    pub progress: Option<ProgressFn>,
}

impl SourceOptions {
    /// Default options with spool files in `spool_dir`.
    pub fn new(spool_dir: impl Into<PathBuf>) -> Self {
        Self {
            spool_dir: spool_dir.into(),
            keep_xattrs: Vec::new(),
            progress: None,
        }
    }
}

impl fmt::Debug for SourceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceOptions")
            .field("spool_dir", &self.spool_dir)
            .field("keep_xattrs", &self.keep_xattrs)
            .finish_non_exhaustive()
    }
}

/// A source that has been read.
#[derive(Debug)]
pub struct Loaded {
    /// The tree, ready to be built.
    pub tree: Tree,
    /// What an image said about itself (`oci.entrypoint`, `oci.cmd`, `oci.env` …, each a JSON text); empty for others.
    pub labels: BTreeMap<String, String>,
    /// Sum of the sizes of all regular files, holes included, hard links once.
    pub bytes_in: u64,
    /// Files of the host that the tree refers to by offset.
    archives: Vec<Archive>,
}

impl Loaded {
    /// Fails if an archive the tree refers to was changed since it was read. Call it after the last content was read and
    /// before anything is published: contents of archives are named by offset, so nothing else would notice.
    ///
    /// # Errors
    /// [`SourceError::Changed`] names the archive.
    pub fn check_unchanged(&self) -> Result<(), SourceError> {
        self.archives.iter().try_for_each(Archive::check)
    }
}

/// A seekable file whose parts are contents.
#[derive(Debug, Clone)]
struct Archive {
    path: PathBuf,
    file: Arc<OwnedFd>,
    stamp: Stamp,
}

impl Archive {
    fn open(path: &Path) -> Result<Self, SourceError> {
        let file =
            std::fs::File::open(path).map_err(|e| SourceError::io(path, "open source", e))?;
        let file = Arc::new(OwnedFd::from(file));
        let stamp = host_file::stamp(&file).map_err(|e| SourceError::io(path, "stat source", e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            stamp,
        })
    }

    fn is_regular(&self) -> Result<bool, SourceError> {
        host_file::is_regular(&self.file).map_err(|e| SourceError::io(&self.path, "stat source", e))
    }

    fn check(&self) -> Result<(), SourceError> {
        let found = host_file::stamp(&self.file)
            .map_err(|e| SourceError::io(&self.path, "stat source", e))?;
        if found == self.stamp {
            return Ok(());
        }
        Err(SourceError::Changed {
            path: self.path.clone(),
            how: "size or times of the archive differ",
        })
    }
}

/// What all loaders share while they run.
#[derive(Debug)]
struct Session<'a> {
    spool: Spool,
    expansion: Expansion,
    meter: Meter<'a>,
    archives: Vec<Archive>,
    labels: BTreeMap<String, String>,
}

/// Reads a source.
///
/// # Errors
/// Anything that would make the tree differ from what the user named: unreadable or changed files, damaged archives,
/// and input the layer format cannot hold. The message names the path and what to do.
pub fn load(spec: &SourceSpec, options: &SourceOptions) -> Result<Loaded, SourceError> {
    match spec {
        SourceSpec::Stdin => load_tar_stream(std::io::stdin().lock(), "-", options),
        other => load_with(options, |session| match other {
            SourceSpec::Directory(path) => {
                Ok((directory::walk(path, session)?, OverlayXattrs::Escape))
            }
            SourceSpec::Upper(path) => {
                let mut tree = directory::walk(path, session)?;
                upper::convert(&mut tree)?;
                Ok((tree, OverlayXattrs::AsStored))
            }
            SourceSpec::Tar(path) => tar_apply::load_file(path, session),
            SourceSpec::Oci(path, tag) => oci_layout::load(path, tag.as_deref(), session),
            SourceSpec::DockerArchive(path) => docker_archive::load(path, session),
            SourceSpec::Stdin => unreachable!("handled above"),
        }),
    }
}

/// Reads a tar (plain, gzip or zstd) from a stream; `name` is what messages call it.
///
/// # Errors
/// As [`load`].
pub fn load_tar_stream(
    stream: impl Read,
    name: &str,
    options: &SourceOptions,
) -> Result<Loaded, SourceError> {
    load_with(options, |session| {
        tar_apply::load_stream(Box::new(stream), name, session)
    })
}

fn load_with(
    options: &SourceOptions,
    read: impl FnOnce(&mut Session<'_>) -> Result<(Tree, OverlayXattrs), SourceError>,
) -> Result<Loaded, SourceError> {
    let filter = XattrFilter::new(&options.keep_xattrs);
    let mut session = Session {
        spool: Spool::new(&options.spool_dir)?,
        expansion: Expansion::default(),
        meter: Meter::new(options.progress.as_deref()),
        archives: Vec::new(),
        labels: BTreeMap::new(),
    };
    let (mut tree, overlay) = read(&mut session)?;
    let bytes_in = finish::finish(&mut tree, &filter, overlay)?;
    session.meter.report();
    Ok(Loaded {
        tree,
        labels: session.labels,
        bytes_in,
        archives: session.archives,
    })
}
