//! What describes a layer, kept on disk: manifest, placement and metadata image.
//!
//! They are fetched once and then local: mounting a layer again, and scanning all its inodes, costs no request. Nothing on
//! disk is trusted: the manifest is checked against the layer's name whenever it is loaded, the placement against
//! the manifest, the metadata image by the data plane (`plane/meta`). A file that is damaged is fetched again.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::fetch::origins::OriginSet;
use imgstore::format::erofs::check::check;
use imgstore::format::manifest::Manifest;
use imgstore::format::placement::Placement;
use imgstore::format::{FormatError, names};
use imgstore::ids::{Digest, LayerRef};
use imgstore::store::layer::{self, Layer, LayerError};

use crate::paths::{self, Paths};

/// Why a layer cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayersError {
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error("cannot keep `{path}`: {source}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A placement as it is kept: its own digest in the first line, for nothing else names it. A wrong offset could never
/// become a wrong byte, but it would become EIO for ever.
fn seal(placement: &Placement) -> Vec<u8> {
    let bytes = placement.to_bytes();
    let mut sealed = Digest::of(&bytes).to_hex().into_bytes();
    sealed.push(b'\n');
    sealed.extend(bytes);
    sealed
}

fn unseal(sealed: &[u8]) -> Result<&[u8], FormatError> {
    let (head, bytes) = sealed.split_at_checked(65).unwrap_or_default();
    let found = Digest::of(bytes).to_hex();
    if head.strip_suffix(b"\n") == Some(found.as_bytes()) {
        return Ok(bytes);
    }
    let expected = String::from_utf8_lossy(head).into_owned();
    Err(FormatError::new(
        "digest of a kept placement",
        expected,
        found,
    ))
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct LayerStore {
    paths: Paths,
    origins: OriginSet,
    loaded: Mutex<HashMap<Digest, Arc<Layer>>>,
    next_tmp: AtomicU64,
}

impl LayerStore {
    /// Layers of `origins`, kept below `paths`.
    pub(crate) fn new(paths: Paths, origins: OriginSet) -> Self {
        Self {
            paths,
            origins,
            loaded: Mutex::new(HashMap::new()),
            next_tmp: AtomicU64::new(0),
        }
    }

    fn loaded(&self) -> MutexGuard<'_, HashMap<Digest, Arc<Layer>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The layer that a reference names now.
    ///
    /// # Errors
    /// When no origin knows it.
    pub(crate) fn resolve(&self, reference: &LayerRef) -> Result<Digest, LayersError> {
        let resolve = |origin: &dyn imgstore::origin::Origin| layer::resolve(origin, reference);
        Ok(self.origins.first(resolve)?)
    }

    /// A layer that is loaded.
    pub(crate) fn get(&self, digest: &Digest) -> Option<Arc<Layer>> {
        self.loaded().get(digest).cloned()
    }

    /// Forgets a layer; its files stay.
    pub(crate) fn unload(&self, digest: &Digest) {
        self.loaded().remove(digest);
    }

    /// Loads a layer from disk, and what is missing or damaged there from the origins.
    ///
    /// # Errors
    /// When no origin has it.
    pub(crate) fn load(&self, digest: &Digest) -> Result<Arc<Layer>, LayersError> {
        if let Some(layer) = self.get(digest) {
            return Ok(layer);
        }
        let folder = self.paths.layer(digest);
        let (manifest, placement) = match self.local(&folder, digest) {
            Some(both) => both,
            None => self.fetch(&folder, digest)?,
        };
        let layer = Arc::new(Layer {
            digest: *digest,
            manifest,
            placement,
        });
        self.loaded().insert(*digest, Arc::clone(&layer));
        Ok(layer)
    }

    fn local(&self, folder: &Path, digest: &Digest) -> Option<(Manifest, Placement)> {
        let bytes = fs::read(folder.join(paths::MANIFEST)).ok()?;
        let manifest = Manifest::parse(&bytes, digest)
            .inspect_err(|error| tracing::warn!(layer = %digest, %error, "fetching a damaged manifest again"))
            .ok()?;
        let bytes = fs::read(folder.join(paths::PLACEMENT)).ok()?;
        let placement = unseal(&bytes)
            .and_then(|bytes| Placement::parse(bytes, digest, &manifest))
            .inspect_err(|error| tracing::warn!(layer = %digest, %error, "fetching a damaged placement again"))
            .ok()?;
        Some((manifest, placement))
    }

    fn fetch(&self, folder: &Path, digest: &Digest) -> Result<(Manifest, Placement), LayersError> {
        let (bytes, manifest, placement) = self.origins.first(|origin| {
            let (bytes, manifest) = layer::read_manifest_bytes(origin, digest)?;
            let placement = layer::read_placement(origin, digest, &manifest)?;
            Ok((bytes, manifest, placement))
        })?;
        self.keep(&folder.join(paths::MANIFEST), &bytes)?;
        self.keep(&folder.join(paths::PLACEMENT), &seal(&placement))?;
        Ok((manifest, placement))
    }

    /// Makes sure that the layer's metadata image is on disk, with the right length, and names the manifest's segments.
    /// The data plane verifies its bytes.
    ///
    /// # Errors
    /// When no origin has it, or the disk is full.
    pub(crate) fn ensure_meta(&self, layer: &Layer) -> Result<(), LayersError> {
        let path = self.paths.layer(&layer.digest).join(paths::META);
        if fs::metadata(&path).is_ok_and(|meta| meta.len() == layer.manifest.meta.size) {
            return Ok(());
        }
        let read = |origin: &dyn imgstore::origin::Origin| {
            let meta = layer::read_meta(origin, &layer.manifest)?;
            check(&meta, &layer.manifest).map_err(|source| LayerError::Damaged {
                object: names::meta(&layer.manifest.meta.digest),
                origin: origin.address(),
                source,
            })?;
            Ok(meta)
        };
        let meta = self.origins.first(read)?;
        self.keep(&path, &meta)
    }

    /// Reads the placement from the origins again: packs may have moved.
    ///
    /// # Errors
    /// When no origin has it.
    pub(crate) fn refresh(&self, layer: &Layer) -> Result<Arc<Layer>, LayersError> {
        let read = |origin: &dyn imgstore::origin::Origin| {
            layer::read_placement(origin, &layer.digest, &layer.manifest)
        };
        let placement = self.origins.first(read)?;
        let folder = self.paths.layer(&layer.digest);
        self.keep(&folder.join(paths::PLACEMENT), &seal(&placement))?;
        let layer = Arc::new(Layer {
            digest: layer.digest,
            manifest: layer.manifest.clone(),
            placement,
        });
        self.loaded().insert(layer.digest, Arc::clone(&layer));
        Ok(layer)
    }

    /// Removes what is kept of a layer, because it is damaged.
    ///
    /// # Errors
    /// What the disk said.
    pub(crate) fn drop_files(&self, digest: &Digest) -> Result<(), LayersError> {
        self.unload(digest);
        let path = self.paths.layer(digest);
        match fs::remove_dir_all(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(LayersError::Io { path, source })
            }
            _ => Ok(()),
        }
    }

    fn keep(&self, path: &Path, bytes: &[u8]) -> Result<(), LayersError> {
        let number = self.next_tmp.fetch_add(1, Ordering::Relaxed);
        let tmp = self
            .paths
            .root()
            .join("tmp")
            .join(format!("layer-{}-{number}", std::process::id()));
        let write = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(&tmp, bytes)?;
            fs::rename(&tmp, path)
        };
        write().map_err(|source| LayersError::Io {
            path: path.to_owned(),
            source,
        })
    }
}
