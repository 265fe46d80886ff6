//! Origin addresses as users write them, and how each is opened.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::dir::DirOrigin;
use super::http::{HttpOrigin, without_credentials};
use super::oci::OciOrigin;
use super::s3::{S3Address, S3Origin};
use super::three_fs::origin::ThreeFsOrigin;
use super::{Origin, OriginError};
use crate::credentials::environment::Environment;
use crate::registry::reference::Repository;

/// A parsed `--origin`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginUrl {
    /// `dir:/path`: a directory, or a 3FS mount.
    Dir(PathBuf),
    /// `3fs:/path`: a folder of a 3FS mount, packs read through its user-space I/O library.
    ThreeFs(PathBuf),
    /// `http://…` or `https://…`, without a trailing slash; read-only.
    Http(String),
    /// `s3://bucket/prefix`.
    S3(S3Address),
    /// `oci://registry/repository`, or `oci+http://…` without encryption.
    Oci(Repository),
}

/// An address that names no origin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an origin: expected `dir:/absolute/path`, `3fs:/absolute/path`, `http(s)://host/…`, `s3://bucket/prefix` or \
     `oci://registry/repository`"
)]
pub struct OriginUrlError(String);

impl FromStr for OriginUrl {
    type Err = OriginUrlError;

    fn from_str(text: &str) -> Result<Self, OriginUrlError> {
        if let Some(path) = text.strip_prefix("dir:") {
            if path.starts_with('/') {
                return Ok(Self::Dir(PathBuf::from(path)));
            }
        } else if let Some(path) = text.strip_prefix("3fs:") {
            if path.starts_with('/') {
                return Ok(Self::ThreeFs(PathBuf::from(path)));
            }
        } else if text
            .strip_prefix("http://")
            .or_else(|| text.strip_prefix("https://"))
            .is_some_and(|r| !r.is_empty())
        {
            return Ok(Self::Http(text.trim_end_matches('/').to_owned()));
        } else if let Some(address) = text.strip_prefix("s3://").and_then(S3Address::parse) {
            return Ok(Self::S3(address));
        } else if let Some((scheme, rest)) = text.split_once("://")
            && matches!(scheme, "oci" | "oci+http")
            && let Some(repository) =
                Repository::parse(rest.trim_end_matches('/'), scheme == "oci+http")
        {
            return Ok(Self::Oci(repository));
        }
        Err(OriginUrlError(text.to_owned()))
    }
}

impl fmt::Display for OriginUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(path) => write!(f, "dir:{}", path.display()),
            Self::ThreeFs(path) => write!(f, "3fs:{}", path.display()),
            // It may have a password in it.
            Self::Http(url) => f.write_str(&without_credentials(url)),
            Self::S3(address) => address.fmt(f),
            Self::Oci(repository) => repository.fmt(f),
        }
    }
}

impl OriginUrl {
    /// Opens the origin for reading (and writing where it can be written).
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the directory is missing or the client cannot be made. A server is first
    /// contacted by the first request. What the environment says about credentials is read here.
    pub fn open(&self) -> Result<Arc<dyn Origin>, OriginError> {
        Ok(match self {
            Self::Dir(path) => Arc::new(DirOrigin::open(path)?),
            Self::ThreeFs(path) => Arc::new(ThreeFsOrigin::open(path)?),
            Self::Http(url) => Arc::new(HttpOrigin::open(url)?),
            Self::S3(address) => Arc::new(S3Origin::open(address, &Environment::of_process())?),
            Self::Oci(repository) => {
                Arc::new(OciOrigin::open(repository, &Environment::of_process())?)
            }
        })
    }

    /// Opens the origin for publishing; a directory is created if it is missing, a bucket is not.
    ///
    /// # Errors
    /// As for [`OriginUrl::open`]; [`OriginError::Unsupported`] for origins that cannot be written.
    pub fn open_or_create(&self) -> Result<Arc<dyn Origin>, OriginError> {
        match self {
            Self::Dir(path) => Ok(Arc::new(DirOrigin::create_root(path)?)),
            Self::ThreeFs(path) => Ok(Arc::new(ThreeFsOrigin::create_root(path)?)),
            Self::Http(url) => Err(OriginError::Unsupported {
                origin: url.clone(),
                what: "be written",
            }),
            Self::S3(_) | Self::Oci(_) => self.open(),
        }
    }
}
