//! What describes a layer, kept on disk: manifest, placement and metadata image.
//!
//! They are fetched once and then local: mounting a layer again, and scanning all its inodes, costs no request. Nothing on
//! disk is trusted: the manifest is checked against the layer's name whenever it is loaded, the placement against
//! the manifest, the metadata image by the data plane (`plane/meta`). A file that is damaged is fetched again.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::fetch::origins::OriginSet;
use imgstore::format::erofs::check::check;
use imgstore::format::manifest::Manifest;
use imgstore::format::names;
use imgstore::format::placement::Placement;
use imgstore::format::trace::Trace;
use imgstore::ids::{Digest, LayerRef};
use imgstore::origin::counting::Traffic;
use imgstore::store::bundle;
use imgstore::store::cache::names::{MANIFEST, META, PLACEMENT};
use imgstore::store::cache::{CacheError, LayerHold, SegmentCache, kept};
use imgstore::store::layer::{self, Layer, LayerError};
use imgstore::store::meta_file::{MetaFileError, WHOLE_BYTES_MAX, write_meta};
use imgstore::store::trace;

use crate::kill::step;
use crate::paths::Paths;

/// Why a layer cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayersError {
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error("cannot keep what describes a layer: {0}")]
    Cache(#[from] CacheError),
}

/// What a reference names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    pub(crate) layer: Digest,
    pub(crate) trace: Option<Digest>,
    /// Whether what describes the layer is said to be in one object.
    pub(crate) bundled: bool,
}

impl Named {
    /// A layer of which nothing else is known.
    pub(crate) const fn of(layer: Digest) -> Self {
        Self {
            layer,
            trace: None,
            bundled: false,
        }
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct LayerStore {
    paths: Paths,
    origins: OriginSet,
    cache: Arc<SegmentCache>,
    /// What comes through `origins`.
    traffic: Arc<Traffic>,
    loaded: Mutex<HashMap<Digest, Arc<Layer>>>,
}

impl LayerStore {
    /// Layers of `origins`, kept below `paths` by `cache`; `traffic` counts what comes through `origins`.
    pub(crate) fn new(
        paths: Paths,
        origins: OriginSet,
        cache: Arc<SegmentCache>,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self {
            paths,
            origins,
            cache,
            traffic,
            loaded: Mutex::new(HashMap::new()),
        }
    }

    fn loaded(&self) -> MutexGuard<'_, HashMap<Digest, Arc<Layer>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The layer that a reference names now, and what else its tag says.
    ///
    /// # Errors
    /// When no origin knows it.
    pub(crate) fn find(&self, reference: &LayerRef) -> Result<Named, LayersError> {
        let name = match reference {
            LayerRef::Layer(layer) => return Ok(Named::of(*layer)),
            LayerRef::Tag(name) => name,
        };
        let read = |origin: &dyn imgstore::origin::Origin| layer::read_tag(origin, name);
        let tag = self.origins.first(read)?;
        Ok(Named {
            layer: tag.layer,
            trace: trace::of_tag(&tag),
            bundled: tag.bundled,
        })
    }

    /// How fast descriptions come, in bytes a millisecond, as far as one was long enough to tell.
    pub(crate) fn pace(&self) -> Option<u64> {
        self.traffic.bytes_per_ms()
    }

    /// A published trace.
    ///
    /// # Errors
    /// When no origin has it whole.
    pub(crate) fn trace(&self, digest: &Digest) -> Result<Trace, LayersError> {
        let read = |origin: &dyn imgstore::origin::Origin| trace::read(origin, digest);
        Ok(self.origins.first(read)?)
    }

    /// A layer that is loaded.
    pub(crate) fn get(&self, digest: &Digest) -> Option<Arc<Layer>> {
        self.loaded().get(digest).cloned()
    }

    /// Keeps a layer's files from being evicted for as long as the result lives. Take it before loading the layer.
    pub(crate) fn hold(&self, digest: Digest) -> LayerHold {
        self.cache.hold_layer(digest)
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
        self.load_named(Named::of(*digest))
    }

    /// As [`LayerStore::load`], in one request if there is a bundle.
    ///
    /// # Errors
    /// As for [`LayerStore::load`].
    pub(crate) fn load_named(&self, named: Named) -> Result<Arc<Layer>, LayersError> {
        let digest = &named.layer;
        if let Some(layer) = self.get(digest) {
            return Ok(layer);
        }
        let folder = self.paths.layer(digest);
        let layer = match self.local(&folder, digest) {
            Some((manifest, placement)) => Layer {
                digest: *digest,
                manifest,
                placement,
            },
            None => self.fetch(digest, named.bundled)?,
        };
        let layer = Arc::new(layer);
        self.loaded().insert(*digest, Arc::clone(&layer));
        Ok(layer)
    }

    fn local(&self, folder: &Path, digest: &Digest) -> Option<(Manifest, Placement)> {
        let bytes = fs::read(folder.join(MANIFEST)).ok()?;
        let manifest = Manifest::parse(&bytes, digest)
            .inspect_err(|error| tracing::warn!(layer = %digest, %error, "fetching a damaged manifest again"))
            .ok()?;
        let bytes = fs::read(folder.join(PLACEMENT)).ok()?;
        let placement = kept::unseal(&bytes, "digest of a kept placement")
            .and_then(|bytes| Placement::parse(bytes, digest, &manifest))
            .inspect_err(|error| tracing::warn!(layer = %digest, %error, "fetching a damaged placement again"))
            .ok()?;
        Some((manifest, placement))
    }

    /// The segments of a layer that is loaded or described on disk.
    pub(crate) fn segments(&self, digest: &Digest) -> Option<Vec<Digest>> {
        let of = |manifest: &Manifest| manifest.segments.iter().map(|s| s.digest()).collect();
        if let Some(layer) = self.get(digest) {
            return Some(of(&layer.manifest));
        }
        let bytes = fs::read(self.paths.layer(digest).join(MANIFEST)).ok()?;
        Some(of(&Manifest::parse(&bytes, digest).ok()?))
    }

    fn fetch(&self, digest: &Digest, bundled: bool) -> Result<Layer, LayersError> {
        let describe =
            |origin: &dyn imgstore::origin::Origin| bundle::describe(origin, digest, bundled);
        let bundle::Described {
            manifest_bytes,
            layer,
            meta,
        } = self.origins.first(describe)?;
        self.cache
            .put_layer_file(digest, MANIFEST, &manifest_bytes)?;
        self.keep_placement(digest, &layer.placement)?;
        if let Some(meta) = meta {
            step("writing a description");
            self.cache.put_layer_file(digest, META, &meta)?;
            step("a description is written");
        }
        Ok(layer)
    }

    fn keep_placement(&self, digest: &Digest, placement: &Placement) -> Result<(), LayersError> {
        let sealed = kept::seal(&placement.to_bytes());
        Ok(self.cache.put_layer_file(digest, PLACEMENT, &sealed)?)
    }

    /// Makes sure that what describes the layer is on disk: it may have been evicted while nobody held the layer.
    fn ensure_described(&self, layer: &Layer) -> Result<(), LayersError> {
        let folder = self.paths.layer(&layer.digest);
        if fs::metadata(folder.join(MANIFEST)).is_err() {
            let bytes = layer.manifest.to_bytes();
            self.cache.put_layer_file(&layer.digest, MANIFEST, &bytes)?;
        }
        if fs::metadata(folder.join(PLACEMENT)).is_err() {
            self.keep_placement(&layer.digest, &layer.placement)?;
        }
        Ok(())
    }

    /// Makes sure that the layer's metadata image is on disk, with the right length, and names the manifest's segments.
    /// The data plane verifies its bytes.
    ///
    /// # Errors
    /// When no origin has it, or the disk is full.
    pub(crate) fn ensure_meta(&self, layer: &Layer) -> Result<(), LayersError> {
        self.ensure_described(layer)?;
        let path = self.paths.layer(&layer.digest).join(META);
        if fs::metadata(&path).is_ok_and(|meta| meta.len() == layer.manifest.meta.size) {
            return Ok(());
        }
        self.fetch_meta(layer)
    }

    fn fetch_meta(&self, layer: &Layer) -> Result<(), LayersError> {
        if layer.manifest.meta.size > WHOLE_BYTES_MAX {
            return self.stream_meta(layer);
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
        step("writing a description");
        self.cache.put_layer_file(&layer.digest, META, &meta)?;
        step("a description is written");
        Ok(())
    }

    /// Writes a large metadata image as it comes.
    fn stream_meta(&self, layer: &Layer) -> Result<(), LayersError> {
        // A disk that fails is no fault of the origin: it is not a reason to ask the next one.
        let full = Cell::new(None);
        let write = |file: &File| {
            step("writing a description");
            self.origins.first(|origin| {
                let emptied = file.set_len(0).map_err(MetaFileError::Write);
                match emptied.and_then(|()| write_meta(origin, &layer.manifest, file)) {
                    Ok(()) => Ok(()),
                    Err(MetaFileError::Layer(error)) => Err(error),
                    Err(error) => {
                        full.set(Some(io::Error::other(error)));
                        Ok(())
                    }
                }
            })?;
            step("a description is written");
            match full.take() {
                Some(source) => Err(LayersError::from(CacheError::Write {
                    path: self.paths.layer(&layer.digest).join(META),
                    source,
                })),
                None => Ok(()),
            }
        };
        let size = layer.manifest.meta.size;
        self.cache
            .write_layer_file(&layer.digest, META, size, write)
    }

    /// Reads the placement from the origins again: packs may have moved. One that has not changed may be damaged, for it has no
    /// digest; then another origin's is taken, if there is one.
    ///
    /// # Errors
    /// When no origin has it.
    pub(crate) fn refresh(&self, layer: &Layer) -> Result<Arc<Layer>, LayersError> {
        let read = |origin: &dyn imgstore::origin::Origin| {
            layer::read_placement(origin, &layer.digest, &layer.manifest)
        };
        let mut placement = self.origins.first(read)?;
        if placement == layer.placement && self.origins.count() > 1 {
            placement = self.origins.first_from(1, read)?;
        }
        self.keep_placement(&layer.digest, &placement)?;
        let layer = Arc::new(Layer {
            digest: layer.digest,
            manifest: layer.manifest.clone(),
            placement,
        });
        self.loaded().insert(layer.digest, Arc::clone(&layer));
        Ok(layer)
    }

    /// Replaces what is kept of a layer, because it is damaged. Each file is whole at any time: another mount of the same
    /// layer may be reading it.
    ///
    /// # Errors
    /// When no origin has it, or the disk is full.
    pub(crate) fn fetch_again(&self, digest: &Digest) -> Result<Arc<Layer>, LayersError> {
        let layer = Arc::new(self.fetch(digest, false)?);
        self.fetch_meta(&layer)?;
        self.loaded().insert(*digest, Arc::clone(&layer));
        Ok(layer)
    }
}
