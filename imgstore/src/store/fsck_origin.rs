//! Checking a whole origin: every tag, what it refers to, and what nothing refers to.
//!
//! Tag → manifest → metadata, chunk table, placement → packs. Small objects are read and their digests compared; packs are
//! asked for their size, and with `deep` read once from end to end: the digest of the whole object, and every segment in it.
//! Layers without a tag are checked if they are whole; parts of layers (a publish that runs or stopped) are no damage, only
//! orphans. Orphans are listed and left alone: removing them is garbage collection, which knows of leases and grace periods.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::bundle::{self, State};
use super::layer::{self, Layer, LayerError};
use super::places::layer_of;
use super::repair::{self, RepairError};
use super::runs::{self, Sought, check_frame, or_damaged};
use super::tags;
use super::transfer;
use super::verify::{Damage, PackState, check_blobs};
use crate::format::names;
use crate::format::placement::Pack;
use crate::format::tag::{INDEX_BYTES_MAX, Index};
use crate::ids::{Digest, to_u64, to_usize};
use crate::origin::{Origin, OriginError};

/// A temporary file of this age belongs to nobody who still runs.
const STALE_AGE: Duration = Duration::from_hours(48);

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct FsckReport {
    /// Tags that can be read.
    pub tags: u64,
    /// Layers checked.
    pub layers: u64,
    /// Packs checked.
    pub packs: u64,
    /// Segments read and right; 0 without `deep`.
    pub segments_right: u64,
    /// Everything that is not right.
    pub damage: Vec<Damage>,
    /// Layers that cannot be read whole.
    pub damaged_layers: Vec<Digest>,
    /// Temporary files that nobody writes any more.
    pub stale_temporaries: Vec<String>,
    /// Objects that no tag and no whole layer needs.
    pub orphans: Vec<String>,
    /// Whether the origin could be listed; if not, only tagged layers were checked.
    pub listed: bool,
}

/// Checks everything on `origin`. `progress` is called with bytes of packs read and to be read (`deep`), or layers.
///
/// # Errors
/// When the origin fails; damage is in the report.
pub fn fsck(
    origin: &dyn Origin,
    deep: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<FsckReport, LayerError> {
    let mut check = Check {
        origin,
        deep,
        progress,
        report: FsckReport::default(),
        needed: HashSet::new(),
        packs: BTreeMap::new(),
        bundled: BTreeSet::new(),
        bad_packs: HashSet::new(),
        bad_places: HashSet::new(),
        damaged: BTreeSet::new(),
    };
    let tags = check.tags()?;
    let tagged: BTreeSet<Digest> = tags.values().copied().collect();
    let mut layers: Vec<Digest> = tagged.iter().copied().collect();
    let objects = check.list()?;
    let named = |folder: &str| -> BTreeSet<Digest> {
        let all = objects.iter().flatten();
        let inside = all.filter(|object| object.starts_with(folder));
        inside.filter_map(|object| layer_of(object)).collect()
    };
    let whole = named(names::MANIFESTS)
        .intersection(&named(names::PLACEMENTS))
        .copied()
        .collect::<BTreeSet<_>>();
    layers.extend(whole.difference(&tagged));
    let total = to_u64(layers.len());
    for (n, digest) in layers.iter().enumerate() {
        check.layer(digest)?;
        if !deep {
            progress(to_u64(n) + 1, total);
        }
    }
    check.packs()?;
    check.who_is_hit(&layers)?;
    check.index(&tags)?;
    check.leftovers(objects)?;
    let mut report = check.report;
    report.tags = to_u64(tags.len());
    report.layers = total;
    report.damaged_layers = check.damaged.into_iter().collect();
    Ok(report)
}

/// Mends what the origin can mend from what it has: placements of segments that another pack holds, and the index.
/// Gives the objects written.
///
/// # Errors
/// When the origin fails.
pub fn mend(origin: &dyn Origin, report: &FsckReport) -> Result<Vec<String>, RepairError> {
    let mut written = Vec::new();
    for digest in &report.damaged_layers {
        let bundle = names::bundle(digest);
        let bundled = report.damage.iter().any(|d| d.object == bundle);
        match repair::mend(origin, digest, bundled) {
            Ok(mended) => written.extend(mended.objects_written),
            // Its manifest is gone or damaged: only another origin helps.
            Err(RepairError::Layer(error)) => tracing::info!(layer = %digest, %error, "not mended"),
            Err(e) => return Err(e),
        }
    }
    if report.damage.iter().any(|d| d.object == names::INDEX) {
        tags::rebuild_index(origin)?;
        written.push(names::INDEX.to_owned());
    }
    Ok(written)
}

/// Segments by offset, length and digest.
type InPack = HashMap<(u64, u64, Digest), Sought>;

type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

struct Check<'a> {
    origin: &'a dyn Origin,
    deep: bool,
    progress: Progress<'a>,
    report: FsckReport,
    /// Objects that some layer needs.
    needed: HashSet<String>,
    /// By digest and size, so that the order is the same every time; with `deep`, the segments that should be in it.
    packs: BTreeMap<(Digest, u64), InPack>,
    /// Layers that have a bundle, as a tag says.
    bundled: BTreeSet<Digest>,
    bad_packs: HashSet<Pack>,
    bad_places: HashSet<(Digest, runs::Place)>,
    damaged: BTreeSet<Digest>,
}

impl Check<'_> {
    fn tags(&mut self) -> Result<BTreeMap<String, Digest>, LayerError> {
        let listed = match layer::list_tags(self.origin) {
            Ok(listed) => listed,
            // An origin that cannot list, with a damaged index: nothing more can be found.
            Err(error) => {
                let damage = Damage::of(names::INDEX.to_owned(), &error).ok_or(error)?;
                self.report.damage.push(damage);
                return Ok(BTreeMap::new());
            }
        };
        for error in listed.damaged {
            let object = match &error {
                LayerError::Damaged { object, .. }
                | LayerError::Origin(OriginError::WrongAnswer { object, .. }) => object.clone(),
                _ => names::TAGS.to_owned(),
            };
            self.needed.insert(object.clone());
            self.report.damage.extend(Damage::of(object, &error));
        }
        self.bundled = listed.bundled;
        let tags = listed.tags.into_iter();
        Ok(tags
            .map(|(name, layer)| (name.to_string(), layer))
            .collect())
    }

    /// All objects of the folders that layers use; `None` where the origin cannot list.
    fn list(&mut self) -> Result<Option<Vec<String>>, OriginError> {
        let mut out = Vec::new();
        for (folder, _) in names::COLLECTED {
            match self.origin.list(folder) {
                Ok(objects) => out.extend(objects),
                Err(OriginError::Unsupported { .. }) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        self.report.listed = true;
        Ok(Some(out))
    }

    /// Notes damage of an object that `layer` needs.
    fn damage(&mut self, layer: &Digest, damage: Damage) {
        self.damaged.insert(*layer);
        if !self.report.damage.contains(&damage) {
            self.report.damage.push(damage);
        }
    }

    fn layer(&mut self, digest: &Digest) -> Result<(), LayerError> {
        let object = names::manifest(digest);
        self.needed.insert(object.clone());
        self.needed.insert(names::placement(digest));
        self.needed.insert(names::bundle(digest));
        let manifest = match layer::read_manifest(self.origin, digest) {
            Ok(manifest) => manifest,
            Err(error) => {
                let damage = Damage::of(object, &error).ok_or(error)?;
                self.damage(digest, damage);
                return Ok(());
            }
        };
        self.needed.insert(names::meta(&manifest.meta.digest));
        self.needed.insert(names::chunks(&manifest.chunks.digest));
        let mut damage = Vec::new();
        check_blobs(self.origin, &manifest, &mut damage)?;
        for damage in damage {
            self.damage(digest, damage);
        }
        let placement = match layer::read_placement(self.origin, digest, &manifest) {
            Ok(placement) => placement,
            Err(error) => {
                let damage = Damage::of(names::placement(digest), &error).ok_or(error)?;
                self.damage(digest, damage);
                return Ok(());
            }
        };
        let described = Layer {
            digest: *digest,
            manifest,
            placement,
        };
        let wrong = match bundle::state(self.origin, &described)? {
            State::Wrong(what) => Some(what),
            State::Absent if self.bundled.contains(digest) => {
                Some("expected the bundle that a tag speaks of, found none".to_owned())
            }
            State::Absent | State::Right => None,
        };
        if let Some(what) = wrong {
            let object = names::bundle(digest);
            self.damage(digest, Damage { object, what });
        }
        for one in runs::sought(&described.manifest, &described.placement) {
            let Pack { digest, size } = one.place.pack;
            let segments = self.packs.entry((digest, size)).or_default();
            if self.deep {
                let range = one.place.range;
                segments.insert((range.start, range.len, one.segment.digest()), one);
            }
        }
        Ok(())
    }

    fn packs(&mut self) -> Result<(), LayerError> {
        let packs = std::mem::take(&mut self.packs);
        self.report.packs = to_u64(packs.len());
        let total = packs
            .keys()
            .map(|(_, size)| *size)
            .fold(0, u64::saturating_add);
        let mut done = 0;
        for ((digest, size), segments) in packs {
            let pack = Pack { digest, size };
            self.needed.insert(names::pack(&digest));
            let state = PackState::of(self.origin, &pack)?;
            if let Some(damage) = state.damage(&pack) {
                self.bad_packs.insert(pack);
                self.report.damage.push(damage);
            } else if self.deep {
                let mut sought: Vec<Sought> = segments.into_values().collect();
                sought
                    .sort_by_key(|s| (s.place.range.start, s.place.range.len, s.segment.digest()));
                self.read_pack(&pack, &sought, (done, total))?;
            }
            done += size;
        }
        Ok(())
    }

    /// Reads a pack once: its digest, and every segment that should be in it.
    fn read_pack(
        &mut self,
        pack: &Pack,
        sought: &[Sought],
        (done, total): (u64, u64),
    ) -> Result<(), OriginError> {
        let object = names::pack(&pack.digest);
        let mut hasher = blake3::Hasher::new();
        // Bytes from `start` that a frame may still need: at most a range and a frame.
        let (mut start, mut buf) = (0_u64, Vec::new());
        let mut todo = sought.iter().peekable();
        let mut bad = Vec::new();
        let mut right = 0;
        let read =
            transfer::stream::<OriginError>(self.origin, &object, pack.size, &mut |bytes| {
                hasher.update(bytes);
                buf.extend_from_slice(bytes);
                let end = start + to_u64(buf.len());
                while let Some(one) =
                    todo.next_if(|one| one.place.range.start + one.place.range.len <= end)
                {
                    let from = to_usize(one.place.range.start - start);
                    let frame = buf.get(from..from + to_usize(one.place.range.len));
                    match check_frame(one.segment, frame.unwrap_or_default()) {
                        Ok(()) => right += 1,
                        Err(what) => bad.push((*one, what.to_string())),
                    }
                }
                let keep = todo
                    .peek()
                    .map_or(end, |one| one.place.range.start.min(end));
                buf.drain(..to_usize(keep.saturating_sub(start)));
                start = start.max(keep);
                (self.progress)(done + end, total);
                Ok(())
            })?;
        self.report.segments_right += right;
        for (one, what) in &bad {
            self.bad_places.insert((one.segment.digest(), one.place));
            self.report.damage.push(Damage {
                object: object.clone(),
                what: format!(
                    "segment {} at offset {}: {what}",
                    one.segment.digest(),
                    one.place.range.start
                ),
            });
        }
        let found = Digest::from(hasher.finalize());
        let wrong = match read {
            Err(what) => what,
            Ok(()) if found != pack.digest && bad.is_empty() => format!(
                "digest of the object: expected {}, found {found}; the segments of all layers in it are right",
                pack.digest
            ),
            Ok(()) => return Ok(()),
        };
        self.report.damage.push(Damage {
            object,
            what: wrong,
        });
        Ok(())
    }

    /// Which layers refer to what was found bad in packs.
    fn who_is_hit(&mut self, layers: &[Digest]) -> Result<(), OriginError> {
        if self.bad_packs.is_empty() && self.bad_places.is_empty() {
            return Ok(());
        }
        for digest in layers {
            let Some(layer) = super::places::open_if_right(self.origin, digest)? else {
                continue;
            };
            let sought = runs::sought(&layer.manifest, &layer.placement);
            let bad = |one: &Sought| {
                self.bad_packs.contains(&one.place.pack)
                    || self.bad_places.contains(&(one.segment.digest(), one.place))
            };
            if sought.iter().any(bad) {
                self.damaged.insert(*digest);
            }
        }
        Ok(())
    }

    fn index(&mut self, tags: &BTreeMap<String, Digest>) -> Result<(), LayerError> {
        if !self.report.listed {
            return Ok(()); // the tags come from there
        }
        let object = names::INDEX;
        let bytes = or_damaged(self.origin.fetch_all(object, INDEX_BYTES_MAX))?;
        let what = match bytes.map(|bytes| Index::parse(&bytes)) {
            Err(_) if tags.is_empty() => return Ok(()),
            Err(_) => format!("expected an index of {} tags, found none", tags.len()),
            Ok(Err(e)) => e.to_string(),
            Ok(Ok(index)) if index.tags == *tags => return Ok(()),
            Ok(Ok(index)) => {
                let differ =
                    |(name, layer): &(&String, &Digest)| index.tags.get(*name) != Some(*layer);
                let here = tags.iter().find(differ).map(|(name, _)| name);
                let there = index.tags.keys().find(|name| !tags.contains_key(*name));
                let first = here.or(there).map_or("", String::as_str);
                format!(
                    "expected the {} tags under `{}`, found {} tags, first difference `{first}`",
                    tags.len(),
                    names::TAGS,
                    index.tags.len()
                )
            }
        };
        let object = object.to_owned();
        self.report.damage.push(Damage { object, what });
        Ok(())
    }

    fn leftovers(&mut self, objects: Option<Vec<String>>) -> Result<(), LayerError> {
        let orphans = objects.unwrap_or_default().into_iter();
        self.report.orphans = orphans
            .filter(|object| !self.needed.contains(object))
            .collect();
        let temporaries = match self.origin.list_info(&format!("{}/", names::TMP)) {
            Ok(temporaries) => temporaries,
            Err(OriginError::Unsupported { .. }) => Vec::new(),
            Err(e) => return Err(e.into()),
        };
        for info in temporaries {
            if info.modified.elapsed().is_ok_and(|age| age > STALE_AGE) {
                self.report.stale_temporaries.push(info.name);
            }
        }
        Ok(())
    }
}
