//! Bundles on an origin: who publishes a placement writes the bundle behind it, before the tag; who mounts by a tag that says that
//! there is one asks for it, and for the separate objects where it is missing or damaged.
//!
//! The bundle may be behind the placement after a crash between the two. A reader who believes such a bundle does not find its
//! packs, reads the placement itself and goes on; `dsec verify` tells, `dsec repair` writes it anew.

use super::layer::{self, Layer, LayerError};
use super::runs::or_damaged;
use crate::format::bundle::{BUNDLE_BYTES_MAX, BUNDLE_META_MAX, Bundle, encode};
use crate::format::{frame, names};
use crate::ids::{Digest, to_u64};
use crate::origin::{Created, Origin, OriginError};

/// How often a placement may change while a bundle is written.
const PLACEMENT_CHANGES_MAX: usize = 4;

/// What describes a layer.
#[derive(Debug, Clone)]
pub struct Described {
    /// The manifest's own bytes.
    pub manifest_bytes: Vec<u8>,
    /// Manifest and placement.
    pub layer: Layer,
    /// The plain metadata image, where it came along.
    pub meta: Option<Vec<u8>>,
}

/// The bundle of `layer`.
///
/// # Errors
/// [`LayerError::Damaged`] when a part is not what it should be, else what the origin said.
pub fn read(origin: &dyn Origin, layer: &Digest) -> Result<Bundle, LayerError> {
    let object = names::bundle(layer);
    // Not asked for again on an origin that lags: the separate objects are there too.
    let bytes = origin.fetch_all(&object, BUNDLE_BYTES_MAX)?;
    Bundle::parse(&bytes, layer).map_err(LayerError::damaged(origin, &object))
}

/// What describes `digest`: in one request where the origin is said to have a bundle and has a good one, else in two, without
/// metadata.
///
/// # Errors
/// As for [`layer::open`].
pub fn describe(
    origin: &dyn Origin,
    digest: &Digest,
    bundled: bool,
) -> Result<Described, LayerError> {
    if bundled {
        match read(origin, digest) {
            Ok(bundle) => {
                return Ok(Described {
                    manifest_bytes: bundle.manifest_bytes,
                    layer: Layer {
                        digest: *digest,
                        manifest: bundle.manifest,
                        placement: bundle.placement,
                    },
                    meta: Some(bundle.meta),
                });
            }
            Err(
                error @ (LayerError::Damaged { .. }
                | LayerError::Origin(
                    OriginError::NotFound { .. } | OriginError::WrongAnswer { .. },
                )),
            ) => {
                tracing::warn!(layer = %digest, origin = origin.address(), %error,
                    "no good bundle: asking for its parts one by one");
            }
            Err(error) => return Err(error),
        }
    }
    let (manifest_bytes, manifest) = layer::read_manifest_bytes(origin, digest)?;
    let placement = layer::read_placement(origin, digest, &manifest)?;
    Ok(Described {
        manifest_bytes,
        layer: Layer {
            digest: *digest,
            manifest,
            placement,
        },
        meta: None,
    })
}

/// What an origin has under a bundle's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    Absent,
    /// What it should.
    Right,
    /// Something else: what was expected and what was found.
    Wrong(String),
}

/// Compares the bundle of `layer` with the layer as it is on the origin.
///
/// # Errors
/// When the origin fails.
pub fn state(origin: &dyn Origin, layer: &Layer) -> Result<State, LayerError> {
    Ok(match read(origin, &layer.digest) {
        Ok(bundle) if bundle.placement == layer.placement => State::Right,
        Ok(_) => State::Wrong("expected the layer's placement, found another one".to_owned()),
        Err(LayerError::Origin(OriginError::NotFound { .. })) => State::Absent,
        Err(LayerError::Origin(OriginError::WrongAnswer {
            expected, found, ..
        })) => State::Wrong(format!("expected {expected}, found {found}")),
        Err(LayerError::Damaged { source, .. }) => State::Wrong(source.to_string()),
        Err(error) => return Err(error),
    })
}

/// Whether an origin has something under the bundle's name.
///
/// # Errors
/// When the origin fails.
pub fn is_there(origin: &dyn Origin, layer: &Digest) -> Result<bool, OriginError> {
    Ok(or_damaged(origin.size(&names::bundle(layer)))?.is_ok())
}

/// Writes the bundle of `layer`, whose parts are on the origin already, if there is no good one; gives the bytes written, or
/// none where the layer is too large for a bundle. `meta` is the frame of the metadata image.
///
/// # Errors
/// When the origin fails, or the parts are not what they should be.
pub(crate) fn write(
    origin: &dyn Origin,
    layer: &Layer,
    manifest: &[u8],
    meta: &[u8],
) -> Result<Option<u64>, LayerError> {
    let mut layer = layer.clone();
    let mut written = 0;
    for _ in 0..PLACEMENT_CHANGES_MAX {
        match put(origin, &layer, manifest, meta)? {
            Some(bytes) => written += bytes,
            None => return Ok(None),
        }
        // Somebody who published the same layer may have written another placement, and the bundle before ours.
        let placement = layer::read_placement(origin, &layer.digest, &layer.manifest)?;
        if placement == layer.placement {
            break;
        }
        layer.placement = placement;
    }
    Ok(Some(written))
}

fn put(
    origin: &dyn Origin,
    layer: &Layer,
    manifest: &[u8],
    meta: &[u8],
) -> Result<Option<u64>, LayerError> {
    let object = names::bundle(&layer.digest);
    let size = layer.manifest.meta.size;
    let Some(bytes) = encode(manifest, &layer.placement, meta, size) else {
        // A version with another limit may have written one, and nobody would renew it.
        if is_there(origin, &layer.digest)? {
            origin.remove(&object)?;
        }
        return Ok(None);
    };
    // Read back, as everything is that gets a name.
    Bundle::parse(&bytes, &layer.digest).map_err(LayerError::damaged(origin, &object))?;
    if origin.create(&object, &mut bytes.as_slice())? == Created::Existed {
        if state(origin, layer)? == State::Right {
            return Ok(Some(0));
        }
        origin.replace(&object, &bytes)?;
    }
    Ok(Some(to_u64(bytes.len())))
}

/// What goes into a bundle besides the placement: the bytes of the manifest and the frame of the metadata, of which nothing
/// comes along where it is too large.
fn parts(origin: &dyn Origin, layer: &Layer) -> Result<(Vec<u8>, Vec<u8>), LayerError> {
    let (manifest, _) = layer::read_manifest_bytes(origin, &layer.digest)?;
    let blob = layer.manifest.meta;
    if blob.size > BUNDLE_META_MAX {
        return Ok((manifest, Vec::new()));
    }
    let object = names::meta(&blob.digest);
    let meta = origin.fetch_all(&object, frame::frame_len_max(blob.size))?;
    Ok((manifest, meta))
}

/// As [`write()`], of a layer that is described on the origin: the parts are read there.
///
/// # Errors
/// As for [`write()`].
pub(crate) fn renew(origin: &dyn Origin, digest: &Digest) -> Result<Option<u64>, LayerError> {
    let layer = layer::open(origin, digest)?;
    let (manifest, meta) = parts(origin, &layer)?;
    write(origin, &layer, &manifest, &meta)
}

/// Writes the bundle of a layer that has one with the placement that it is about to get; whether it has one. Who dies in between
/// leaves a bundle that is right and a placement that asks for more mending.
///
/// # Errors
/// As for [`write()`].
pub(crate) fn go_ahead(origin: &dyn Origin, layer: &Layer) -> Result<bool, LayerError> {
    if !is_there(origin, &layer.digest)? {
        return Ok(false);
    }
    let (manifest, meta) = parts(origin, layer)?;
    Ok(put(origin, layer, &manifest, &meta)?.is_some())
}
