//! Where the kernel finds layers: files of the FUSE mount, or block devices.

use std::path::PathBuf;
use std::sync::Arc;

use fuse_driver::mount::{FuseError, FuseMount};
use imgstore::ids::Digest;
use imgstore::image::BlockImage;

use super::devices::{DeviceError, Devices};
use crate::driver::Driver;

/// See the head of this file.
#[derive(Debug)]
pub(crate) enum Door {
    /// One file a layer.
    Fuse(Arc<FuseMount>),
    /// One device a layer.
    Ublk(Devices),
}

/// Why a layer cannot be offered or taken back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DoorError {
    #[error(transparent)]
    Fuse(#[from] FuseError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Door {
    /// Which of the two it is.
    pub(crate) const fn driver(&self) -> Driver {
        match self {
            Self::Fuse(_) => Driver::Fuse,
            Self::Ublk(_) => Driver::Ublk,
        }
    }

    /// Offers a layer; where the kernel finds it. Of a file the first `preload` bytes are put into the page cache. A layer that
    /// is offered already is fine.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(crate) fn add(
        &self,
        layer: Digest,
        image: Arc<dyn BlockImage>,
        preload: u64,
    ) -> Result<PathBuf, DoorError> {
        match self {
            Self::Fuse(fuse) => {
                let name = layer.to_hex();
                match fuse.add(&name, image, preload) {
                    // Two requests for one layer at a time: the other one has added it.
                    Ok(()) | Err(FuseError::Exists(_)) => Ok(fuse.path_of(&name)),
                    Err(error) => Err(error.into()),
                }
            }
            Self::Ublk(devices) => Ok(devices.add(layer, image)?),
        }
    }

    /// Where a layer is that is offered.
    pub(crate) fn source(&self, layer: &Digest) -> Option<PathBuf> {
        match self {
            Self::Fuse(fuse) => Some(fuse.path_of(&layer.to_hex())),
            Self::Ublk(devices) => devices.source(layer),
        }
    }

    /// Takes a layer back. What is still open is served until it is closed.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(crate) fn remove(&self, layer: &Digest) -> Result<(), DoorError> {
        match self {
            Self::Fuse(fuse) => Ok(fuse.remove(&layer.to_hex())?),
            Self::Ublk(devices) => {
                devices.remove(layer);
                Ok(())
            }
        }
    }

    /// Takes everything back: this process ends.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(crate) fn close(&self) -> Result<(), DoorError> {
        match self {
            Self::Fuse(fuse) => Ok(fuse.unmount()?),
            Self::Ublk(devices) => {
                devices.close();
                Ok(())
            }
        }
    }
}
