//! Where things are below the cache's root. Written down once.
//!
//! ```text
//! CACHE/lock                      held by the control process
//! CACHE/cache.json, segments, layers, pins, tmp     the cache proper (imgstore::store::cache::names)
//! CACHE/rw/<id>/{upper,work}      what was written into a composition
//! CACHE/run/data-plane.sock       the data plane listens here
//! CACHE/run/fuse/                 the FUSE mount, one file a layer
//! CACHE/run/ublk/<number>         the layer of a block device
//! CACHE/run/layers/<digest>/      one EROFS mount a layer
//! CACHE/run/mounts/<id>.json      one record a composition
//! CACHE/run/lease                 the name of the leases on origins
//! ```

use std::path::{Path, PathBuf};

use imgstore::ids::Digest;
use imgstore::store::cache::names;
pub(crate) use imgstore::store::cache::names::{MANIFEST, META};

/// The cache's root, and all that is found from it.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    root: PathBuf,
}

impl Paths {
    /// Below an absolute `root`.
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Held by the data plane as long as it lives.
    pub(crate) fn plane_lock(&self) -> PathBuf {
        self.run().join("data-plane.lock")
    }

    /// Folder of everything that lasts only as long as mounts do.
    pub(crate) fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    pub(crate) fn plane_socket(&self) -> PathBuf {
        self.run().join("data-plane.sock")
    }

    pub(crate) fn fuse(&self) -> PathBuf {
        self.run().join("fuse")
    }

    /// Folder that says which block device is for which layer.
    pub(crate) fn ublk(&self) -> PathBuf {
        self.run().join("ublk")
    }

    /// The layer (its digest in hex) that `/dev/ublkbN` was made for by a data plane of this cache.
    pub(crate) fn layer_of_device(&self, device: &Path) -> Option<String> {
        let number = device.to_str()?.strip_prefix("/dev/ublkb")?;
        let number: u32 = number.parse().ok()?;
        std::fs::read_to_string(self.ublk().join(number.to_string())).ok()
    }

    /// Folder of the EROFS mounts.
    pub(crate) fn layer_mounts(&self) -> PathBuf {
        self.run().join("layers")
    }

    pub(crate) fn layer_mount(&self, layer: &Digest) -> PathBuf {
        self.layer_mounts().join(layer.to_hex())
    }

    /// Folder of the compositions' records.
    pub(crate) fn records(&self) -> PathBuf {
        self.run().join("mounts")
    }

    /// The file with the name of the leases on origins.
    pub(crate) fn lease_id(&self) -> PathBuf {
        self.run().join("lease")
    }

    /// Folders that only root may enter. In them are files of whole systems, setuid programs among them, and what is
    /// written into compositions.
    pub(crate) fn private(&self) -> [PathBuf; 6] {
        ["run", "rw", "layers", "segments", "pins", "tmp"].map(|name| self.root.join(name))
    }

    /// Folder of what describes a layer.
    pub(crate) fn layer(&self, layer: &Digest) -> PathBuf {
        self.root.join(names::LAYERS).join(layer.to_hex())
    }

    /// Folder of what was written into a composition.
    pub(crate) fn rw(&self, id: &str) -> PathBuf {
        self.root.join("rw").join(id)
    }
}
