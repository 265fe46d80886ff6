//! Mending a layer on an origin, from another origin or from what else the origin itself holds.
//!
//! Everything of the layer is read. What is damaged is replaced, in the order in which a build publishes, each object whole:
//! 1. metadata and chunk table are copied from the other origin;
//! 2. damaged segments are looked for elsewhere on the origin, then on the other one; each good frame is verified and spooled;
//! 3. a damaged pack is rebuilt under its own name where that gives its digest (its bytes with the good frames put in, or the
//!    other origin's copy): that heals every layer which refers to it, known to us or not;
//! 4. where it does not, the good frames go into a new pack and *every* placement on the origin that refers to the damaged
//!    places is rewritten, found by listing them. An origin that cannot list gets only the asked layer mended, and the report says so;
//! 5. manifest, placement, tag; a bundle that is damaged or behind the placement.
//!
//! A layer without damage causes no write. What nobody has is reported and left as it is.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::bundle::{self, State};
use super::layer::{self, Layer, LayerError};
use super::lease::hold::{PATIENCE, publishing};
use super::places::{self, Places};
use super::repair_named::{LostTag, Named, is_damage, resolve};
use super::repair_packs::{Mender, Spool};
use super::runs::{self, Place, Sought, sought};
use super::tags;
use super::transfer::{self, Staging};
use super::verify::{Damage, PackState};
use crate::build::BuildError;
use crate::build::publish::{self, Publisher};
use crate::format::manifest::{Manifest, Segment};
use crate::format::names;
use crate::format::placement::{Pack, Placement};
use crate::ids::{Digest, LayerRef, to_u64};
use crate::origin::counting::{CountingOrigin, Traffic};
use crate::origin::{ByteRange, Origin, OriginError};

/// Why a repair could not be carried out. Whatever was written until then is right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepairError {
    /// An origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// Neither origin has a tag, manifest or placement that can be used.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The origin or its staging could not be written.
    #[error(transparent)]
    Publish(#[from] BuildError),
}

/// What was found and mended.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RepairReport {
    /// The layer.
    pub layer: Digest,
    /// Segments read on the origin: the layer's, and those of other layers in damaged packs.
    pub segments_checked: u64,
    /// Segments that were damaged, missing, of unknown place, or in a pack that is not whole.
    pub segments_damaged: u64,
    /// Of those, how many are right now.
    pub segments_mended: u64,
    /// Damaged packs that have their bytes again.
    pub packs_rebuilt: u64,
    /// Packs made for segments whose pack could not be rebuilt.
    pub packs_new: u64,
    /// Objects written on the origin.
    pub objects_written: Vec<String>,
    /// Other layers whose segments were damaged too and that were mended as well.
    pub layers_healed: Vec<Digest>,
    /// What could not be mended.
    pub left: Vec<Damage>,
    /// Whether other layers could be looked at; an origin that cannot list hides them.
    pub other_layers_checked: bool,
    /// Bytes read from the other origin.
    pub bytes_read: u64,
    /// Requests sent to the other origin.
    pub requests: u64,
}

impl RepairReport {
    fn new(layer: Digest) -> Self {
        Self {
            layer,
            segments_checked: 0,
            segments_damaged: 0,
            segments_mended: 0,
            packs_rebuilt: 0,
            packs_new: 0,
            objects_written: Vec::new(),
            layers_healed: Vec::new(),
            left: Vec::new(),
            other_layers_checked: true,
            bytes_read: 0,
            requests: 0,
        }
    }
}

/// Stored bytes checked and to be checked, for a progress bar.
pub type RepairProgress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Mends what `reference` names on `origin`; without `from`, from what the origin itself has.
///
/// # Errors
/// [`RepairError`]; what merely cannot be mended is in the report.
pub fn repair(
    origin: &dyn Origin,
    from: Option<Arc<dyn Origin>>,
    reference: &LayerRef,
    progress: RepairProgress<'_>,
) -> Result<RepairReport, RepairError> {
    let traffic = Arc::new(Traffic::default());
    let from = from.map(|from| CountingOrigin::new(from, Arc::clone(&traffic)));
    let from = from.as_ref().map(|from| from as &dyn Origin);
    let named = resolve(origin, from, reference)?;
    let mut report = run(origin, from, named, progress)?;
    (report.requests, report.bytes_read) = (traffic.requests(), traffic.bytes());
    Ok(report)
}

/// Mends a layer from what the origin itself has; `bundled` says that it should have a bundle.
///
/// # Errors
/// As for [`repair`].
pub(crate) fn mend(
    origin: &dyn Origin,
    digest: &Digest,
    bundled: bool,
) -> Result<RepairReport, RepairError> {
    let named = Named {
        digest: *digest,
        bundled,
        lost: None,
    };
    run(origin, None, named, &|_, _| ())
}

fn run(
    origin: &dyn Origin,
    from: Option<&dyn Origin>,
    named: Named,
    progress: RepairProgress<'_>,
) -> Result<RepairReport, RepairError> {
    let Named {
        digest,
        bundled,
        lost,
    } = named;
    publishing(origin, |hold| -> Result<RepairReport, RepairError> {
        let mut repair = Repair {
            origin,
            from,
            publisher: Publisher {
                origin,
                hold,
                patience: PATIENCE,
            },
            digest,
            report: RepairReport::new(digest),
            progress,
        };
        repair.run(lost)?;
        repair.bundle(&digest, bundled)?;
        Ok(repair.report)
    })
}

struct Repair<'a> {
    origin: &'a dyn Origin,
    from: Option<&'a dyn Origin>,
    publisher: Publisher<'a>,
    digest: Digest,
    report: RepairReport,
    progress: RepairProgress<'a>,
}

/// The place of a segment that no placement names.
const NOWHERE: Place = Place {
    pack: Pack {
        digest: Digest::from_bytes([0; 32]),
        size: 0,
    },
    range: ByteRange { start: 0, len: 0 },
};

/// A segment at a place.
type Spot = (Digest, Place);

const fn spot(one: &Sought) -> Spot {
    (one.segment.digest(), one.place)
}

/// What came of mending segments.
#[derive(Default)]
struct Mended {
    /// New places of those whose place stays bad.
    homes: HashMap<Spot, Place>,
    /// Those that nobody has.
    unmended: HashSet<Spot>,
}

/// What is wrong with a layer's segments.
#[derive(Default)]
struct Findings {
    /// Segments that are right, and where.
    right: HashMap<Digest, Place>,
    /// Places that do not hold their segment, or lie in a pack that is not whole, each once.
    bad: Vec<Sought>,
    /// Of those, the ones that can be read: their pack is short, or longer than it should be.
    readable: Vec<Sought>,
    /// Other layers that refer to a bad place.
    others: Vec<Digest>,
}

impl Repair<'_> {
    fn run(&mut self, tag: LostTag) -> Result<(), RepairError> {
        let (manifest, lost_manifest) = self.manifest()?;
        self.frames(&manifest)?;
        let placement = self.placement(&manifest)?;
        let mut findings = Findings::default();
        let mut lost: Vec<Sought> = Vec::new();
        match &placement {
            Some(placement) => {
                let own = sought(&manifest, placement);
                self.check(own, &mut findings)?;
            }
            None => lost = self.guess(&manifest, &mut findings)?,
        }
        self.check_others(&mut findings)?;
        let damaged = findings.bad.len() + lost.len();
        self.report.segments_damaged = to_u64(damaged);
        let mended = if damaged == 0 {
            Mended::default()
        } else {
            self.mend(&findings, &lost)?
        };
        if let Some(bytes) = lost_manifest {
            publish::put(self.origin, &names::manifest(&self.digest), &bytes)?;
            self.wrote(names::manifest(&self.digest));
        }
        // The asked layer last: if we die before, asking again finds the damage and goes on.
        for other in &findings.others {
            self.place_other(other, &mended.homes)?;
        }
        self.place(&manifest, placement, &findings, &mended)?;
        if let Some((name, bytes)) = tag
            && self.report.left.is_empty()
        {
            self.origin.replace(&names::tag(&name), &bytes)?;
            tags::rebuild_index(self.origin)?;
            self.wrote(names::tag(&name));
            self.wrote(names::INDEX.to_owned());
        }
        Ok(())
    }

    fn wrote(&mut self, object: String) {
        self.report.objects_written.push(object);
    }

    fn left(&mut self, object: String, what: String) {
        self.report.left.push(Damage { object, what });
    }

    fn manifest(&self) -> Result<(Manifest, Option<Vec<u8>>), RepairError> {
        match (layer::read_manifest(self.origin, &self.digest), self.from) {
            (Ok(manifest), _) => Ok((manifest, None)),
            (Err(e), Some(from)) if is_damage(&e) => {
                let (bytes, manifest) = layer::read_manifest_bytes(from, &self.digest)?;
                Ok((manifest, Some(bytes)))
            }
            (Err(e), _) => Err(e.into()),
        }
    }

    /// Metadata image and chunk table.
    fn frames(&mut self, manifest: &Manifest) -> Result<(), RepairError> {
        for (object, blob) in [
            (names::chunks(&manifest.chunks.digest), manifest.chunks),
            (names::meta(&manifest.meta.digest), manifest.meta),
        ] {
            let Err(what) = transfer::check_frame_object(self.origin, &object, blob)? else {
                continue;
            };
            let Some(from) = self.from else {
                self.left(object, what);
                continue;
            };
            let staging = Staging::of(self.origin)?;
            match transfer::copy_frame_object(from, self.origin, (&object, blob), &staging)? {
                Ok(_) => self.wrote(object),
                Err(there) => {
                    self.left(object, format!("{what}; on `{}`: {there}", from.address()))
                }
            }
        }
        Ok(())
    }

    /// The layer's placement, if it can be read.
    fn placement(&self, manifest: &Manifest) -> Result<Option<Placement>, RepairError> {
        match layer::read_placement(self.origin, &self.digest, manifest) {
            Ok(placement) => Ok(Some(placement)),
            Err(e) if is_damage(&e) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Reads segments where they should be.
    fn check(&mut self, sought: Vec<Sought>, findings: &mut Findings) -> Result<(), OriginError> {
        let total = sought.iter().map(|s| s.place.range.len).sum();
        let mut done = 0;
        let mut packs: HashMap<Pack, PackState> = HashMap::new();
        for one in &sought {
            state_of(self.origin, &one.place.pack, &mut packs)?;
        }
        runs::read::<OriginError>(self.origin, sought, &mut |one, frame| {
            self.report.segments_checked += 1;
            done += one.place.range.len;
            (self.progress)(done, total);
            match frame {
                Ok(_) if packs.get(&one.place.pack) == Some(&PackState::Sized) => {
                    findings.right.insert(one.segment.digest(), one.place);
                }
                Ok(_) => {
                    findings.bad.push(one);
                    findings.readable.push(one);
                }
                Err(what) => {
                    let (pack, offset) = (one.place.pack.digest, one.place.range.start);
                    tracing::info!(%pack, offset, what, "damaged segment");
                    findings.bad.push(one);
                }
            }
            Ok(())
        })
    }

    /// Reads what other layers have in the packs that are damaged.
    fn check_others(&mut self, findings: &mut Findings) -> Result<(), OriginError> {
        let packs: HashSet<Pack> = findings.bad.iter().map(|s| s.place.pack).collect();
        if packs.is_empty() {
            return Ok(());
        }
        let Some(layers) = places::placed_layers(self.origin)? else {
            self.report.other_layers_checked = false;
            return Ok(());
        };
        let mut seen: HashSet<_> = findings.bad.iter().map(spot).collect();
        let mut more = Vec::new();
        let mut in_packs = Vec::new();
        for digest in layers.into_iter().filter(|other| *other != self.digest) {
            let Some(other) = places::open_if_right(self.origin, &digest)? else {
                continue;
            };
            let mut theirs = sought(&other.manifest, &other.placement);
            theirs.retain(|s| packs.contains(&s.place.pack));
            if !theirs.is_empty() {
                in_packs.push((digest, theirs.iter().map(spot).collect::<HashSet<_>>()));
            }
            theirs.retain(|s| findings.right.get(&s.segment.digest()) != Some(&s.place));
            theirs.retain(|s| seen.insert(spot(s)));
            more.extend(theirs);
        }
        self.check(more, findings)?;
        let bad: HashSet<_> = findings.bad.iter().map(spot).collect();
        let hit = in_packs
            .into_iter()
            .filter(|(_, theirs)| !theirs.is_disjoint(&bad));
        findings.others = hit.map(|(digest, _)| digest).collect();
        Ok(())
    }

    /// Without a placement: finds what the origin has by other placements and by the other origin's; gives what is lost.
    fn guess(
        &mut self,
        manifest: &Manifest,
        findings: &mut Findings,
    ) -> Result<Vec<Sought>, RepairError> {
        let wanted: HashSet<Digest> = manifest.segments.iter().map(|s| s.digest()).collect();
        let mut guesses: Places = places::find(self.origin, &[], &wanted)?;
        if let Some(from) = self.from
            && let Some(theirs) = places::open_if_right(from, &self.digest)?
        {
            places::add(&mut guesses, &theirs, &wanted);
        }
        let mut seen = HashSet::new();
        let segments = manifest.segments.iter().copied().enumerate();
        let mut missing: Vec<(usize, Segment)> = segments
            .filter(|(_, segment)| seen.insert(segment.digest()))
            .collect();
        let mut states = HashMap::new();
        for choice in 0.. {
            let mut tried = Vec::new();
            for (index, segment) in &missing {
                let places = guesses.get(&segment.digest());
                let Some(place) = places.and_then(|places| places.get(choice)) else {
                    continue;
                };
                let state = state_of(self.origin, &place.pack, &mut states)?;
                let there = state == PackState::Sized;
                tried.extend(there.then_some(Sought {
                    index: *index,
                    segment: *segment,
                    place: *place,
                }));
            }
            let more = missing.iter().any(|(_, s)| {
                let places = guesses.get(&s.digest());
                places.is_some_and(|places| places.len() > choice)
            });
            if !more {
                break;
            }
            let mut found = Findings::default();
            self.check(tried, &mut found)?;
            missing.retain(|(_, segment)| !found.right.contains_key(&segment.digest()));
            findings.right.extend(found.right);
        }
        let mut lost = Vec::new();
        for (index, segment) in missing {
            let places = guesses.get(&segment.digest());
            let guessed = places.and_then(|places| places.first());
            let one = |place| Sought {
                index,
                segment,
                place,
            };
            match guessed {
                // Where it should be: the pack may be rebuilt, for others as well.
                Some(place) => findings.bad.push(one(*place)),
                None => lost.push(one(NOWHERE)),
            }
        }
        Ok(lost)
    }

    /// Finds good frames, rebuilds packs, makes new ones; gives the new place of each place that is still bad.
    fn mend(&mut self, findings: &Findings, lost: &[Sought]) -> Result<Mended, RepairError> {
        let staging = Staging::of(self.origin)?;
        let mut spool = Spool::new(&staging)?;
        // No collection may take what is about to be whole again.
        let packs = findings.bad.iter().map(|s| s.place.pack.digest);
        let own = [
            names::manifest(&self.digest),
            names::placement(&self.digest),
            names::bundle(&self.digest),
        ];
        self.publisher
            .claim_objects(packs.map(|pack| names::pack(&pack)).chain(own))?;
        let needed: Vec<Sought> = findings.bad.iter().chain(lost).copied().collect();
        let places = findings.readable.iter();
        let places = places.map(|one| (one.segment.digest(), vec![one.place]));
        spool.collect(self.origin, &findings.readable, &places.collect(), false)?;
        self.collect_here(&needed, &mut spool)?;
        if let Some(from) = self.from {
            self.collect_there(from, &needed, &mut spool)?;
        }
        let mut mender = Mender::new(&self.publisher, self.from, &staging, spool);
        let mut homeless = lost.to_vec();
        for (pack, bad) in by_pack(&findings.bad) {
            homeless.extend(mender.pack(pack, &bad)?);
        }
        let homes = mender.new_homes(&homeless)?;
        let mender = mender.done();
        self.report.packs_rebuilt += to_u64(mender.rebuilt.len());
        self.report.packs_new += mender.packs_new;
        for object in mender.rebuilt.into_iter().chain(mender.written) {
            self.wrote(object);
        }
        let mut unmended = HashSet::new();
        for one in &homeless {
            if homes.contains_key(&spot(one)) || !unmended.insert(spot(one)) {
                continue;
            }
            let what = format!(
                "segment {} at offset {}: expected its {} plain bytes with digest {}, found them nowhere",
                one.index,
                one.place.range.start,
                one.segment.len(),
                one.segment.digest(),
            );
            let object = if one.place.range.len == 0 {
                names::placement(&self.digest)
            } else {
                names::pack(&one.place.pack.digest)
            };
            self.left(object, what);
        }
        self.report.segments_mended = self.report.segments_damaged - to_u64(unmended.len());
        Ok(Mended { homes, unmended })
    }

    /// Spools what other places on the origin have.
    fn collect_here(&self, needed: &[Sought], spool: &mut Spool) -> Result<(), RepairError> {
        let wanted = needed.iter().map(|s| s.segment.digest()).collect();
        let mut places = places::find(self.origin, &[], &wanted)?;
        // Where the placement is what is wrong, the other origin's may be right for the packs that are here.
        if let Some(from) = self.from
            && let Some(theirs) = places::open_if_right(from, &self.digest)?
        {
            places::add(&mut places, &theirs, &wanted);
        }
        for one in needed {
            if let Some(places) = places.get_mut(&one.segment.digest()) {
                places.retain(|place| *place != one.place);
            }
        }
        // A frame in a pack that is not whole is good, and no place to refer to.
        let mut states = HashMap::new();
        let mut elsewhere = Places::new();
        for (digest, places) in &mut places {
            let mut whole = Vec::new();
            for place in std::mem::take(places) {
                if state_of(self.origin, &place.pack, &mut states)? == PackState::Sized {
                    whole.push(place);
                } else {
                    elsewhere.entry(*digest).or_default().push(place);
                }
            }
            *places = whole;
        }
        spool.collect(self.origin, needed, &places, true)?;
        spool.collect(self.origin, needed, &elsewhere, false)
    }

    /// Spools what the other origin has: first by the layer's own placement, then by all others.
    fn collect_there(
        &self,
        from: &dyn Origin,
        needed: &[Sought],
        spool: &mut Spool,
    ) -> Result<(), RepairError> {
        let wanted: HashSet<Digest> = needed.iter().map(|s| s.segment.digest()).collect();
        let mut places = Places::new();
        if let Some(theirs) = places::open_if_right(from, &self.digest)? {
            places::add(&mut places, &theirs, &wanted);
        }
        spool.collect(from, needed, &places, false)?;
        let left: HashSet<Digest> = wanted.into_iter().filter(|d| !spool.has(d)).collect();
        if !left.is_empty() {
            let places = places::find(from, &[], &left)?;
            spool.collect(from, needed, &places, false)?;
        }
        Ok(())
    }

    /// Writes the layer's placement if it is lost or refers to a place that stays bad.
    fn place(
        &mut self,
        manifest: &Manifest,
        placement: Option<Placement>,
        findings: &Findings,
        mended: &Mended,
    ) -> Result<(), RepairError> {
        let object = names::placement(&self.digest);
        let homes = &mended.homes;
        let mended = match placement {
            Some(placement) => moved(&self.digest, manifest, &placement, homes),
            None => {
                let mut spots = findings.right.clone();
                let rebuilt = findings.bad.iter().map(spot);
                spots.extend(rebuilt.filter(|spot| !mended.unmended.contains(spot)));
                spots.extend(homes.iter().map(|((digest, _), place)| (*digest, *place)));
                let placement = places::placement(&self.digest, manifest, &spots);
                if placement.is_none() && self.report.left.is_empty() {
                    self.left(
                        object.clone(),
                        "expected a placement, found none".to_owned(),
                    );
                }
                placement
            }
        };
        if let Some(placement) = mended {
            self.origin.replace(&object, &placement.to_bytes())?;
            self.wrote(object);
        }
        Ok(())
    }

    fn place_other(
        &mut self,
        digest: &Digest,
        homes: &HashMap<Spot, Place>,
    ) -> Result<(), RepairError> {
        let Some(Layer {
            manifest,
            placement,
            ..
        }) = places::open_if_right(self.origin, digest)?
        else {
            return Ok(());
        };
        if let Some(placement) = moved(digest, &manifest, &placement, homes) {
            let (object, bytes) = (names::placement(digest), placement.to_bytes());
            self.publisher.claim_objects([names::bundle(digest)])?;
            let layer = Layer {
                digest: *digest,
                manifest,
                placement,
            };
            // Before the placement: asking again finds those layers only whose placement is still the old one.
            match bundle::go_ahead(self.origin, &layer) {
                Ok(true) => self.wrote(names::bundle(digest)),
                Ok(false) => {}
                // Its metadata is damaged: that is another repair's.
                Err(e) if is_damage(&e) => {
                    tracing::warn!(layer = %digest, error = %e, "the bundle stays behind")
                }
                Err(e) => return Err(e.into()),
            }
            self.origin.replace(&object, &bytes)?;
            self.wrote(object);
        }
        self.report.layers_healed.push(*digest);
        Ok(())
    }

    /// Writes a layer's bundle anew if it is damaged or behind the placement, or missing although the tag speaks of it.
    fn bundle(&mut self, digest: &Digest, told: bool) -> Result<(), RepairError> {
        let Some(layer) = places::open_if_right(self.origin, digest)? else {
            return Ok(());
        };
        match bundle::state(self.origin, &layer)? {
            State::Right => return Ok(()),
            State::Absent if !told => return Ok(()),
            State::Absent | State::Wrong(_) => {}
        }
        let object = names::bundle(digest);
        self.publisher.claim_objects([object.clone()])?;
        match bundle::renew(self.origin, digest) {
            Ok(Some(_)) => self.wrote(object),
            Ok(None) => {}
            Err(e) if is_damage(&e) => self.left(object, e.to_string()),
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }
}

/// The placement with bad places exchanged; `None` if it has none of them.
fn moved(
    layer: &Digest,
    manifest: &Manifest,
    placement: &Placement,
    homes: &HashMap<Spot, Place>,
) -> Option<Placement> {
    let mut changed = false;
    let mut spots = HashMap::new();
    for one in sought(manifest, placement) {
        let home = homes.get(&spot(&one));
        changed |= home.is_some();
        spots.insert(one.segment.digest(), *home.unwrap_or(&one.place));
    }
    changed
        .then(|| places::placement(layer, manifest, &spots))
        .flatten()
}

/// Asks for a pack's state once.
fn state_of(
    origin: &dyn Origin,
    pack: &Pack,
    known: &mut HashMap<Pack, PackState>,
) -> Result<PackState, OriginError> {
    match known.get(pack) {
        Some(state) => Ok(state.clone()),
        None => {
            let state = PackState::of(origin, pack)?;
            Ok(known.entry(*pack).or_insert(state).clone())
        }
    }
}

fn by_pack(bad: &[Sought]) -> Vec<(Pack, Vec<Sought>)> {
    let mut out: Vec<(Pack, Vec<Sought>)> = Vec::new();
    for one in bad {
        match out.iter_mut().find(|(pack, _)| *pack == one.place.pack) {
            Some((_, list)) => list.push(*one),
            None => out.push((one.place.pack, vec![*one])),
        }
    }
    out
}
