//! Reading everything that decides what is needed.
//!
//! The order matters: leases before tags. Whoever publishes, tags or untags holds a lease until the tags are as they shall
//! be; a lease that is gone when the leases are read has left its result in the tags that are read after it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use super::mark::roots;
use super::{GcError, GcOptions, parallel, record};
use crate::format::condemned::CONDEMNED_SECONDS_MAX;
use crate::format::names;
use crate::ids::{Digest, TagName};
use crate::origin::{ObjectInfo, Origin, OriginError};
use crate::process::Process;
use crate::store::layer::{self, LayerError};
use crate::store::lease::{self, Found};
use crate::store::trace;

/// Whether the maker of a temporary file still works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Maker {
    /// It has ended; nobody will come back to the file.
    Gone,
    /// It lives, on this host.
    Alive,
    /// Another host's, or a name that says nothing.
    Unknown,
}

/// What a layer needs on the origin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// Names of objects.
    pub objects: BTreeSet<String>,
    /// Per pack: offsets and lengths that are referred to.
    pub ranges: BTreeMap<Digest, BTreeSet<(u64, u64)>>,
}

/// The state of an origin, as far as it decides what is needed.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The time on the origin's clock.
    pub now: SystemTime,
    /// All leases, those that are over included.
    pub leases: Vec<Found>,
    /// All tags.
    pub tags: Vec<(TagName, Digest)>,
    /// All immutable objects, placements and bundles; nothing else that lies in their folders.
    pub objects: Vec<ObjectInfo>,
    /// What the layers need that tags, leases and young manifests name.
    pub layers: BTreeMap<Digest, Needs>,
    /// Published traces, and whether a tag or a layer that stays has a use for them.
    pub traces: Vec<(ObjectInfo, bool)>,
    /// Records and the like that collectors left behind.
    pub leftovers: Vec<ObjectInfo>,
    /// Files that are, or were, being written.
    pub temporaries: Vec<(ObjectInfo, Maker)>,
}

/// Takes a survey. `own_record` is left out of it.
///
/// # Errors
/// When the origin fails, or something that says what is needed cannot be read.
pub(super) fn take(
    origin: &dyn Origin,
    now: SystemTime,
    own_record: &str,
    options: &GcOptions<'_>,
) -> Result<Survey, GcError> {
    let leases = lease::read_all(origin)?;
    let listed = layer::list_tags(origin)?;
    let mut objects = Vec::new();
    for (folder, _) in names::COLLECTED {
        let all = origin.list_info(folder)?;
        objects.extend(
            all.into_iter()
                .filter(|info| names::parse_collected(&info.name).is_some()),
        );
    }
    let mut survey = Survey {
        now,
        leases,
        tags: listed.tags,
        objects,
        layers: BTreeMap::new(),
        traces: Vec::new(),
        leftovers: leftovers(origin, now, own_record)?,
        temporaries: temporaries(origin)?,
    };
    let mut unreadable: Vec<String> = listed.damaged.iter().map(ToString::to_string).collect();
    unreadable.extend(unreadable_leases(&survey));
    read_layers(origin, &mut survey, options, &mut unreadable)?;
    read_traces(origin, &mut survey, &listed.traces, options)?;
    if unreadable.is_empty() {
        return Ok(survey);
    }
    Err(GcError::Unreadable {
        origin: origin.address(),
        found: unreadable,
    })
}

fn unreadable_leases(survey: &Survey) -> impl Iterator<Item = String> {
    let live = survey.leases.iter().filter(|l| !l.is_over(survey.now));
    live.filter_map(|found| {
        let error = found.lease.as_ref().err()?;
        Some(format!("lease `{}`: {error}", found.info.name))
    })
}

fn read_layers(
    origin: &dyn Origin,
    survey: &mut Survey,
    options: &GcOptions<'_>,
    unreadable: &mut Vec<String>,
) -> Result<(), GcError> {
    let roots: Vec<_> = roots(survey, options.grace).into_iter().collect();
    let read = parallel::map(&roots, options.threads, |(digest, _)| {
        layer::open(origin, digest)
    });
    for ((digest, root), read) in roots.into_iter().zip(read) {
        let needs = match read {
            Ok(layer) => needs(&layer),
            Err(error) if is_damage(&error) => {
                if root.must_be_readable(is_missing(&error)) {
                    unreadable.push(format!("{root} needs layer `{digest}`: {error}"));
                }
                described(&digest)
            }
            Err(error) => return Err(error.into()),
        };
        survey.layers.insert(digest, needs);
    }
    Ok(())
}

/// Only those are read that are old and that no tag names.
fn read_traces(
    origin: &dyn Origin,
    survey: &mut Survey,
    tagged: &BTreeSet<Digest>,
    options: &GcOptions<'_>,
) -> Result<(), GcError> {
    let all = origin.list_info(names::TRACES)?.into_iter();
    let all: Vec<(ObjectInfo, Digest)> = all
        .filter_map(|info| names::parse_trace(&info.name).map(|digest| (info, digest)))
        .collect();
    let layers = &survey.layers;
    let used = parallel::map(&all, options.threads, |(info, digest)| {
        let young = survey.now.duration_since(info.modified).unwrap_or_default() < options.grace;
        if young || tagged.contains(digest) {
            return Ok(true);
        }
        match trace::read(origin, digest) {
            Ok(trace) => Ok(trace.layers.iter().any(|layer| layers.contains_key(layer))),
            // Nobody can use it.
            Err(error) if is_damage(&error) => Ok(false),
            Err(error) => Err(error),
        }
    });
    let mut traces = Vec::with_capacity(all.len());
    for ((info, _), used) in all.into_iter().zip(used) {
        traces.push((info, used?));
    }
    survey.traces = traces;
    Ok(())
}

/// Whether asking again would give the same: what is missing or damaged, not an origin that fails.
fn is_damage(error: &LayerError) -> bool {
    match error {
        LayerError::NoLayer { .. } | LayerError::Damaged { .. } => true,
        LayerError::Origin(e) => matches!(
            e,
            OriginError::NotFound { .. } | OriginError::WrongAnswer { .. }
        ),
    }
}

fn is_missing(error: &LayerError) -> bool {
    matches!(error, LayerError::NoLayer { .. })
}

/// What can be kept of a layer that cannot be read.
fn described(digest: &Digest) -> Needs {
    Needs {
        objects: BTreeSet::from([
            names::manifest(digest),
            names::placement(digest),
            names::bundle(digest),
        ]),
        ranges: BTreeMap::new(),
    }
}

fn needs(layer: &layer::Layer) -> Needs {
    let mut needs = described(&layer.digest);
    needs.objects.extend(layer::objects(layer));
    for index in 0..layer.placement.segments.len() {
        if let Some((pack, range)) = layer.placement.find(index) {
            let ranges = needs.ranges.entry(pack.digest).or_default();
            ranges.insert((range.start, range.len));
        }
    }
    needs
}

fn leftovers(
    origin: &dyn Origin,
    now: SystemTime,
    own_record: &str,
) -> Result<Vec<ObjectInfo>, GcError> {
    let records = record::read_all(origin)?;
    let over = records.iter().filter(|r| !r.is_live(now));
    let mut out: Vec<_> = over.map(|r| r.info.clone()).collect();
    let longest = Duration::from_secs(CONDEMNED_SECONDS_MAX);
    out.extend(origin.list_info(names::GC)?.into_iter().filter(|info| {
        let age = now.duration_since(info.modified).unwrap_or_default();
        info.name.starts_with(names::GC_CLOCK) && age > longest
    }));
    out.retain(|info| info.name != own_record);
    out.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(out)
}

fn temporaries(origin: &dyn Origin) -> Result<Vec<(ObjectInfo, Maker)>, GcError> {
    let folder = format!("{}/", names::TMP);
    let judge = |info: ObjectInfo| {
        let name = info.name.strip_prefix(&folder).unwrap_or_default();
        let maker = match Process::of_file_name(name) {
            Some(process) if process.is_gone() => Maker::Gone,
            Some(process) if process.is_here() => Maker::Alive,
            _ => Maker::Unknown,
        };
        (info, maker)
    };
    Ok(origin.list_info(&folder)?.into_iter().map(judge).collect())
}
