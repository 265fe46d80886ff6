//! Giving everything its name, in the order in which no reader can see a part missing:
//! packs, chunk table, metadata, manifest, placement, bundle; then the tag, then the index of tags.
//!
//! Before the tag everything is looked at once more, under a lease that still runs: a tag that is visible points to a
//! layer that is complete.
//!
//! An object that is there already is read, and replaced if it is not what its name says: its name is the digest of what
//! it should hold, so that can only be repair.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use super::error::BuildError;
use super::layout::Layout;
use super::segments::{Staged, StagedPack, Stored};
use crate::format::manifest::{Blob, FORMAT, MANIFEST_BYTES_MAX, Manifest};
use crate::format::placement::{PLACEMENT_BYTES_MAX, Pack, Placement, Spot};
use crate::format::tag::{TAG_BYTES_MAX, Tag};
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, TagName, to_u64};
use crate::origin::{ByteRange, Created, Origin, OriginError};
use crate::store::layer::{self, Layer, LayerError};
use crate::store::{bundle, lease, tags};

use super::dictionary::Dictionary;

/// Compression level of metadata images and chunk tables: written once, fetched at every first mount.
const META_LEVEL: i32 = 12;
/// Bytes of a pack that are fetched at once to check it.
const CHECK_BYTES: u64 = 8 << 20;

/// The objects of a layer besides its packs.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// Plain metadata image.
    pub meta: &'a [u8],
    /// Plain chunk table.
    pub chunks: &'a [u8],
    /// Manifest.
    pub manifest: &'a Manifest,
    /// Placement.
    pub placement: &'a Placement,
}

impl Parts<'_> {
    /// What names the rest.
    fn layer(&self) -> Layer {
        Layer {
            digest: self.placement.layer,
            manifest: self.manifest.clone(),
            placement: self.placement.clone(),
        }
    }
}

/// The placement of a layer whose own segments were staged and whose foreign ones are where the dictionaries say.
///
/// # Errors
/// [`BuildError::Dictionary`] when a dictionary does not say where a segment is.
pub fn placement(
    manifest: &Manifest,
    staged: &Staged,
    layout: &Layout,
    dictionary: &Dictionary,
) -> Result<Placement, BuildError> {
    let mut packs: Vec<Pack> = Vec::new();
    let mut index: HashMap<Digest, u32> = HashMap::new();
    let mut segments = Vec::with_capacity(manifest.segments.len());
    let mut add = |pack: Pack, range: ByteRange| {
        let next = u32::try_from(packs.len()).expect("at most one pack per segment");
        let pack_index = *index.entry(pack.digest).or_insert_with(|| {
            packs.push(pack);
            next
        });
        let len = u32::try_from(range.len).expect("a frame has at most 5 MiB");
        segments.push(Spot(pack_index, range.start, len));
    };
    for own in &staged.own {
        match own.stored {
            Stored::Known(pack, range) => add(pack, range),
            Stored::New(pack, range) => {
                add(
                    staged.packs.get(pack).expect("the pack was finished").pack,
                    range,
                );
            }
        }
    }
    for foreign in &layout.foreign {
        let layer = dictionary.layers.get(foreign.layer);
        let found = layer.and_then(|l| l.placement.find(foreign.index));
        let (pack, range) = found.ok_or_else(|| BuildError::Dictionary {
            layer: layer.map_or_else(String::new, |l| l.digest.to_hex()),
            source: FormatError::new(
                format!("spot of segment {}", foreign.index),
                "a pack and range",
                "none",
            ),
        })?;
        add(*pack, range);
    }
    Ok(Placement {
        format: FORMAT,
        layer: manifest.layer(),
        packs,
        segments,
    })
}

/// Holds what is about to be published against the limits of readers.
///
/// # Errors
/// [`BuildError::Unreadable`] names the limit.
pub fn check_readable(
    manifest: &Manifest,
    placement: &Placement,
    record: &Tag,
) -> Result<(), BuildError> {
    let check = || {
        let layer = manifest.layer();
        let bytes = (manifest.to_bytes(), placement.to_bytes(), record.to_bytes());
        for (what, bytes, max) in [
            ("bytes of the manifest", &bytes.0, MANIFEST_BYTES_MAX),
            ("bytes of the placement", &bytes.1, PLACEMENT_BYTES_MAX),
            ("bytes of the tag", &bytes.2, TAG_BYTES_MAX),
        ] {
            if to_u64(bytes.len()) > max {
                return Err(FormatError::new(
                    what,
                    format!("at most {max}"),
                    bytes.len(),
                ));
            }
        }
        let parsed = Manifest::parse(&bytes.0, &layer)?;
        Placement::parse(&bytes.1, &layer, &parsed).map(drop)
    };
    check().map_err(BuildError::Unreadable)
}

/// Who publishes, and under which lease.
#[derive(Debug, Clone, Copy)]
pub struct Publisher<'a> {
    /// Where to.
    pub origin: &'a dyn Origin,
    /// The lease.
    pub hold: &'a lease::Hold,
    /// How long to wait for a collection that wants what is published.
    pub patience: Duration,
}

impl Publisher<'_> {
    /// Makes the lease name everything that the layer needs, on top of what it names; afterwards nothing of that is
    /// collected.
    ///
    /// # Errors
    /// When the origin fails, or a collection does not end.
    pub fn claim(&self, layer: &Layer) -> Result<(), BuildError> {
        let mut wanted = self.hold.wanted();
        wanted.objects.extend(layer::objects(layer));
        let relied_on = wanted.objects.clone();
        self.hold
            .claim(self.origin, &wanted, &relied_on, self.patience)?;
        Ok(())
    }

    /// As [`Publisher::claim`], of single objects.
    ///
    /// # Errors
    /// As for [`Publisher::claim`].
    pub(crate) fn claim_objects(
        &self,
        objects: impl IntoIterator<Item = String>,
    ) -> Result<(), BuildError> {
        let mut wanted = self.hold.wanted();
        let before = wanted.objects.len();
        wanted.objects.extend(objects);
        if wanted.objects.len() > before {
            let relied_on = wanted.objects.clone();
            self.hold
                .claim(self.origin, &wanted, &relied_on, self.patience)?;
        }
        Ok(())
    }

    /// Looks whether the layer is complete, under a lease that runs.
    ///
    /// # Errors
    /// [`BuildError::Vanished`] when it is not.
    pub(crate) fn confirm(&self, layer: &Layer) -> Result<(), BuildError> {
        if !self.hold.is_fresh() {
            // This host slept, or the origin could not be written for long: a collector may have been here.
            self.claim(layer)?;
        }
        let objects = tags::missing(self.origin, layer)?;
        if objects.is_empty() {
            return Ok(());
        }
        Err(BuildError::Vanished {
            origin: self.origin.address(),
            objects,
        })
    }
}

/// Publishes everything, the tag last, which says whether there is a bundle; returns the bytes of the objects that were new.
///
/// # Errors
/// When the origin fails. Objects published so far stay; nothing refers to them until the tag is written.
pub fn publish(
    publisher: &Publisher<'_>,
    staged: &Staged,
    parts: &Parts<'_>,
    tag: &TagName,
    record: &Tag,
) -> Result<u64, BuildError> {
    let origin = publisher.origin;
    let (mut stored, meta_frame) = publish_objects(publisher, staged, parts)?;
    let (layer, manifest) = (parts.layer(), parts.manifest.to_bytes());
    let bundle = bundle::write(origin, &layer, &manifest, &meta_frame)?;
    stored += bundle.unwrap_or(0);
    publisher.confirm(&layer)?;
    let record = Tag {
        bundled: bundle.is_some(),
        ..record.clone()
    };
    tags::write(origin, tag, &record)?;
    Ok(stored)
}

/// Publishes everything but bundle and tag; gives the bytes of the objects that were new, and the frame of the metadata.
/// Whether all that the placement names is there is not looked at: a part of a layer may lack most of it.
///
/// # Errors
/// As for [`publish`].
pub fn publish_objects(
    publisher: &Publisher<'_>,
    staged: &Staged,
    parts: &Parts<'_>,
) -> Result<(u64, Vec<u8>), BuildError> {
    let origin = publisher.origin;
    let mut stored = 0;
    for pack in &staged.packs {
        stored += put_pack(origin, pack)?;
    }
    let (chunks, meta) = (parts.manifest.chunks, parts.manifest.meta);
    let chunks_frame = frame::encode(parts.chunks, META_LEVEL);
    stored += put_frame(
        origin,
        &names::chunks(&chunks.digest),
        chunks,
        &chunks_frame,
    )?;
    let meta_frame = frame::encode(parts.meta, META_LEVEL);
    stored += put_frame(origin, &names::meta(&meta.digest), meta, &meta_frame)?;
    let layer = parts.placement.layer;
    let manifest = parts.manifest.to_bytes();
    stored += put(origin, &names::manifest(&layer), &manifest)?;
    // Another placement may be as right as ours, but only ours has just been read back.
    stored += put(
        origin,
        &names::placement(&layer),
        &parts.placement.to_bytes(),
    )?;
    Ok((stored, meta_frame))
}

/// What is left of a read that only asks whether an object is right: an origin that fails is no answer to that.
fn or_damaged<T>(read: Result<T, OriginError>) -> Result<Option<T>, OriginError> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(OriginError::NotFound { .. } | OriginError::WrongAnswer { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Stores an object of exactly these bytes; gives how many of them were new.
///
/// # Errors
/// When the origin fails.
pub(crate) fn put(origin: &dyn Origin, object: &str, bytes: &[u8]) -> Result<u64, BuildError> {
    if origin.create(object, &mut &*bytes)? == Created::New {
        return Ok(to_u64(bytes.len()));
    }
    let found = or_damaged(origin.fetch_all(object, to_u64(bytes.len())))?;
    if found.is_none_or(|found| found != bytes) {
        tracing::info!(object, "object on the origin is replaced");
        origin.replace(object, bytes)?;
    }
    Ok(0)
}

/// Stores an object that is one frame of `blob`; gives how many bytes were new.
fn put_frame(
    origin: &dyn Origin,
    object: &str,
    blob: Blob,
    stored: &[u8],
) -> Result<u64, BuildError> {
    frame::check_claim(to_u64(stored.len()), blob.size).map_err(BuildError::Unreadable)?;
    if origin.create(object, &mut &*stored)? == Created::New {
        return Ok(to_u64(stored.len()));
    }
    // Another version of zstd may have made other bytes of the same plain ones.
    match layer::read_frame(origin, object, blob.digest, blob.size) {
        Ok(_) => return Ok(0),
        Err(LayerError::Origin(e)) => or_damaged::<()>(Err(e)).map(drop)?,
        Err(_) => {}
    }
    tracing::warn!(object, "damaged object on the origin is replaced");
    origin.replace(object, stored)?;
    Ok(0)
}

/// Stores a pack from staging; gives how many bytes were new.
///
/// # Errors
/// When the origin fails.
pub(crate) fn put_pack(origin: &dyn Origin, staged: &StagedPack) -> Result<u64, BuildError> {
    let object = names::pack(&staged.pack.digest);
    let path: &Path = &staged.path;
    if origin.create_from_file(&object, path)? == Created::New {
        return Ok(staged.pack.size);
    }
    if !is_right(origin, &object, &staged.pack)? {
        tracing::warn!(object, "damaged pack on the origin is replaced");
        origin.replace_from_file(&object, path)?;
    }
    Ok(0)
}

/// Whether the pack on the origin has the bytes that its name stands for.
fn is_right(origin: &dyn Origin, object: &str, pack: &Pack) -> Result<bool, OriginError> {
    if or_damaged(origin.size(object))? != Some(pack.size) {
        return Ok(false);
    }
    let mut hasher = blake3::Hasher::new();
    let mut start = 0;
    while start < pack.size {
        let len = CHECK_BYTES.min(pack.size - start);
        let Some(bytes) = or_damaged(origin.fetch(object, ByteRange { start, len }))? else {
            return Ok(false);
        };
        hasher.update(&bytes);
        start += len;
    }
    Ok(Digest::from(hasher.finalize()) == pack.digest)
}
