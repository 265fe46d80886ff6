//! Reading and checking all of a layer on its origin.
//!
//! Damage does not stop the check: everything that can still be read is read, and each damaged part is named once: the
//! object, the part of it, what was expected and what was found. A missing pack is one damage and not one a segment.
//! An origin that fails is an error and no damage.

use std::collections::{BTreeMap, HashMap};

use super::bundle::{self, State};
use super::layer::{self, Layer, LayerError};
use super::reader::LayerReader;
use super::runs::{self, Sought, or_damaged};
use crate::format::manifest::Manifest;
use crate::format::placement::Pack;
use crate::format::{FormatError, chunk_table, erofs, names};
use crate::ids::{Digest, LayerRef, to_u64};
use crate::origin::{Origin, OriginError};

/// One damaged or missing part.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Damage {
    /// The object on the origin.
    pub object: String,
    /// Which part of it, what was expected and what was found.
    pub what: String,
}

impl Damage {
    /// Damage of `object` as loading it tells; `None` when the origin failed, which says nothing about the object.
    pub(crate) fn of(object: String, error: &LayerError) -> Option<Self> {
        let what = match error {
            LayerError::NoLayer { .. } | LayerError::Origin(OriginError::NotFound { .. }) => {
                "expected the object, found none".to_owned()
            }
            LayerError::Origin(OriginError::WrongAnswer {
                expected, found, ..
            }) => format!("expected {expected}, found {found}"),
            LayerError::Damaged { source, .. } => source.to_string(),
            LayerError::Origin(_) => return None,
        };
        Some(Self { object, what })
    }

    fn format(object: &str, error: impl std::fmt::Display) -> Self {
        Self {
            object: object.to_owned(),
            what: error.to_string(),
        }
    }
}

/// What was checked.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct VerifyReport {
    /// Segments whose bytes were read and are right.
    pub segments_right: u64,
    /// Plain bytes of those segments.
    pub bytes_right: u64,
    /// Everything that is not right, in the layer's order.
    pub damage: Vec<Damage>,
}

impl VerifyReport {
    /// Notes what was wrong with `object`; gives the value if nothing was.
    fn note<T>(
        &mut self,
        object: String,
        loaded: Result<T, LayerError>,
    ) -> Result<Option<T>, LayerError> {
        match loaded {
            Ok(value) => Ok(Some(value)),
            Err(error) => match Damage::of(object, &error) {
                Some(damage) => {
                    self.damage.push(damage);
                    Ok(None)
                }
                None => Err(error),
            },
        }
    }
}

/// Metadata image and chunk table: bytes, and what they say.
///
/// # Errors
/// When the origin fails.
pub(crate) fn check_blobs(
    origin: &dyn Origin,
    manifest: &Manifest,
    damage: &mut Vec<Damage>,
) -> Result<(), LayerError> {
    let mut report = VerifyReport::default();
    let object = names::meta(&manifest.meta.digest);
    let meta = report.note(object.clone(), layer::read_meta(origin, manifest))?;
    if let Some(meta) = meta
        && let Err(found) = check_meta(&meta, manifest)
    {
        report.damage.push(Damage::format(&object, found));
    }
    let blob = manifest.chunks;
    let object = names::chunks(&blob.digest);
    let read = layer::read_frame(origin, &object, blob.digest, blob.size);
    if let Some(table) = report.note(object.clone(), read)?
        && let Err(found) = chunk_table::parse(&table)
    {
        report.damage.push(Damage::format(&object, found));
    }
    damage.append(&mut report.damage);
    Ok(())
}

fn check_meta(meta: &[u8], manifest: &Manifest) -> Result<(), String> {
    erofs::check::check(meta, manifest).map_err(|e: FormatError| e.to_string())?;
    let no_data = |_: usize| Err("not read here".to_owned());
    let reader = LayerReader::open(meta, manifest, &no_data).map_err(|e| e.to_string())?;
    reader.tree().map(drop).map_err(|e| e.to_string())
}

/// What an origin has under a pack's name, by its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PackState {
    /// An object of the right size.
    Sized,
    /// An object of another size.
    Other(u64),
    /// Nothing that can be told the size of; why.
    Missing(String),
}

impl PackState {
    /// Asks the origin.
    ///
    /// # Errors
    /// When the origin fails.
    pub(crate) fn of(origin: &dyn Origin, pack: &Pack) -> Result<Self, OriginError> {
        let size = or_damaged(origin.size(&names::pack(&pack.digest)))?;
        Ok(match size {
            Ok(size) if size == pack.size => Self::Sized,
            Ok(size) => Self::Other(size),
            Err(why) => Self::Missing(why),
        })
    }

    /// The damage, if it is one.
    pub(crate) fn damage(&self, pack: &Pack) -> Option<Damage> {
        let found = match self {
            Self::Sized => return None,
            Self::Other(size) => format!("one of {size} bytes"),
            Self::Missing(why) => format!("none ({why})"),
        };
        Some(Damage {
            object: names::pack(&pack.digest),
            what: format!("expected an object of {} bytes, found {found}", pack.size),
        })
    }
}

/// What is wrong with one segment.
pub(crate) fn segment_damage(one: &Sought, what: &str) -> Damage {
    Damage {
        object: names::pack(&one.place.pack.digest),
        what: format!(
            "segment {} at offset {}: {what}",
            one.index, one.place.range.start
        ),
    }
}

/// As [`verify`], of what `reference` names: a damaged tag, and a tag whose layer is not there, are damage.
///
/// # Errors
/// When the origin fails, or has no such tag or layer.
pub fn verify_ref(
    origin: &dyn Origin,
    reference: &LayerRef,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifyReport, LayerError> {
    let mut report = VerifyReport::default();
    let name = match reference {
        LayerRef::Layer(digest) => return verify(origin, digest, progress),
        LayerRef::Tag(name) => name,
    };
    let tag = match layer::read_tag(origin, name) {
        Err(e @ LayerError::NoLayer { .. }) => return Err(e),
        read => report.note(names::tag(name), read)?,
    };
    let Some(tag) = tag else {
        return Ok(report);
    };
    match verify(origin, &tag.layer, progress) {
        Err(e @ LayerError::NoLayer { .. }) => {
            report.note(names::manifest(&tag.layer), Err::<(), _>(e))?;
            Ok(report)
        }
        Ok(mut found) => {
            let object = names::bundle(&tag.layer);
            if tag.bundled && !bundle::is_there(origin, &tag.layer)? {
                let what = "expected the bundle that the tag speaks of, found none".to_owned();
                found.damage.push(Damage { object, what });
            }
            Ok(found)
        }
        Err(e) => Err(e),
    }
}

/// Reads and checks everything of `layer`. `progress` is called with plain bytes done and in all.
///
/// # Errors
/// When the origin fails, or has nothing of the layer; damage is in the report.
pub fn verify(
    origin: &dyn Origin,
    layer: &Digest,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifyReport, LayerError> {
    let mut report = VerifyReport::default();
    let object = names::manifest(layer);
    let manifest = match layer::read_manifest(origin, layer) {
        Err(e @ LayerError::NoLayer { .. })
            if or_damaged(origin.size(&names::placement(layer)))?.is_err() =>
        {
            return Err(e);
        }
        read => report.note(object, read)?,
    };
    let Some(manifest) = manifest else {
        return Ok(report);
    };
    check_blobs(origin, &manifest, &mut report.damage)?;
    let read = layer::read_placement(origin, layer, &manifest);
    let Some(placement) = report.note(names::placement(layer), read)? else {
        return Ok(report);
    };
    let described = Layer {
        digest: *layer,
        manifest,
        placement,
    };
    if let State::Wrong(what) = bundle::state(origin, &described)? {
        let object = names::bundle(layer);
        report.damage.push(Damage { object, what });
    }
    let Layer {
        manifest,
        placement,
        ..
    } = described;
    let total = manifest.segment_bytes();
    let mut packs: HashMap<Pack, PackState> = HashMap::new();
    let mut found: BTreeMap<usize, Damage> = BTreeMap::new();
    let mut readable = Vec::new();
    for one in runs::sought(&manifest, &placement) {
        let pack = one.place.pack;
        let state = match packs.get(&pack) {
            Some(state) => state,
            None => {
                let state = PackState::of(origin, &pack)?;
                report.damage.extend(state.damage(&pack));
                packs.entry(pack).or_insert(state)
            }
        };
        // A missing pack has been told; what a short one still has is read.
        if !matches!(state, PackState::Missing(_)) {
            readable.push(one);
        }
    }
    runs::read::<OriginError>(origin, readable, &mut |one, frame| {
        match frame {
            Ok(_) => {
                report.segments_right += 1;
                report.bytes_right += one.segment.len();
            }
            Err(what) => drop(found.insert(one.index, segment_damage(&one, &what))),
        }
        progress(report.bytes_right, total);
        Ok(())
    })?;
    report.damage.extend(found.into_values());
    debug_assert!(
        !report.damage.is_empty() || report.segments_right == to_u64(manifest.segments.len())
    );
    Ok(report)
}
