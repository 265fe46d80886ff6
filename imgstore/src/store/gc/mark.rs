//! Deciding what is needed: a function from a survey to two lists, without any other input.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, SystemTime};

use super::survey::{Maker, Survey};
use crate::format::lease::Purpose;
use crate::format::names;
use crate::ids::{Digest, TagName};
use crate::origin::ObjectInfo;

/// Temporary files of an unknown maker are kept at least this long: a build on another host may still work.
pub const TMP_AGE: Duration = Duration::from_hours(24);

/// An object that nobody needs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Doomed {
    /// Its name.
    pub object: String,
    /// Its size.
    pub bytes: u64,
}

/// What stays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Kept {
    /// Tags.
    pub tags: u64,
    /// Leases that run.
    pub leases: u64,
    /// Layers that tags, leases or the grace period keep.
    pub layers: u64,
    /// Objects that are kept.
    pub objects: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Of those, objects that nobody needs and that are kept because they are young.
    pub young_objects: u64,
    /// Bytes of those.
    pub young_bytes: u64,
    /// Packs of which only a part is needed; they stay whole.
    pub packs_partly_dead: u64,
    /// Bytes of frames in kept packs that no layer refers to.
    pub dead_bytes: u64,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// To be removed, in this order: what names other objects goes first.
    pub remove: Vec<Doomed>,
    /// What stays.
    pub kept: Kept,
}

/// Why a layer is needed; the strongest reason counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Root {
    /// A tag points to it.
    Tag(TagName),
    /// A lease names it.
    Lease(String),
    /// It lost a tag, or was published without one, less than the grace period ago.
    Young,
}

impl Root {
    /// Whether nothing may be collected while the layer cannot be read. A lease may name a layer of another origin.
    pub const fn must_be_readable(&self, missing: bool) -> bool {
        match self {
            Self::Tag(_) => true,
            Self::Lease(_) => !missing,
            Self::Young => false,
        }
    }
}

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => write!(f, "tag `{tag}`"),
            Self::Lease(lease) => write!(f, "lease `{lease}`"),
            Self::Young => f.write_str("the grace period"),
        }
    }
}

fn age(now: SystemTime, info: &ObjectInfo) -> Duration {
    now.duration_since(info.modified).unwrap_or_default()
}

/// The layers that are needed, each with one reason. Looks at everything in the survey but its layers.
pub fn roots(survey: &Survey, grace: Duration) -> BTreeMap<Digest, Root> {
    let mut roots: BTreeMap<Digest, Root> = BTreeMap::new();
    let mut add = |layer: Digest, root: Root| {
        let entry = roots.entry(layer).or_insert_with(|| root.clone());
        if root < *entry {
            *entry = root;
        }
    };
    for (tag, layer) in &survey.tags {
        add(*layer, Root::Tag(tag.clone()));
    }
    for found in survey.leases.iter().filter(|l| !l.is_over(survey.now)) {
        let Ok(lease) = &found.lease else { continue };
        let root = match lease.purpose {
            Purpose::Untagged if age(survey.now, &found.info) < grace => Root::Young,
            Purpose::Untagged => continue,
            _ => Root::Lease(found.info.name.clone()),
        };
        for layer in &lease.layers {
            add(*layer, root.clone());
        }
    }
    let manifests = survey
        .objects
        .iter()
        .filter(|info| info.name.starts_with(names::MANIFESTS) && age(survey.now, info) < grace);
    for layer in manifests.filter_map(|info| names::parse_collected(&info.name)) {
        add(layer, Root::Young);
    }
    roots
}

/// Decides.
pub fn mark(survey: &Survey, grace: Duration) -> Plan {
    let now = survey.now;
    let mut needed: BTreeSet<&str> = BTreeSet::new();
    for layer in survey.layers.values() {
        needed.extend(layer.objects.iter().map(String::as_str));
    }
    let mut kept = Kept {
        tags: u64::try_from(survey.tags.len()).unwrap_or(u64::MAX),
        layers: u64::try_from(survey.layers.len()).unwrap_or(u64::MAX),
        ..Kept::default()
    };
    let mut spent: Vec<&ObjectInfo> = Vec::new();
    for found in &survey.leases {
        let over = match &found.lease {
            Ok(lease) if lease.purpose == Purpose::Untagged => age(now, &found.info) >= grace,
            _ => found.is_over(now),
        };
        if over {
            spent.push(&found.info);
            continue;
        }
        kept.leases += 1;
        if let Ok(lease) = &found.lease {
            needed.extend(lease.objects.iter().map(String::as_str));
        }
    }
    let mut remove: Vec<&ObjectInfo> = Vec::new();
    for info in &survey.objects {
        let is_needed = needed.contains(&*info.name);
        if !is_needed && age(now, info) >= grace {
            remove.push(info);
            continue;
        }
        kept.objects += 1;
        kept.bytes += info.size;
        if !is_needed {
            kept.young_objects += 1;
            kept.young_bytes += info.size;
        }
    }
    count_dead(survey, &needed, &mut kept);
    let folder = |info: &ObjectInfo| {
        let mut folders = names::COLLECTED.iter();
        folders.position(|(folder, _)| info.name.starts_with(folder))
    };
    remove.sort_by(|a, b| (folder(a), &a.name).cmp(&(folder(b), &b.name)));
    for (info, used) in &survey.traces {
        if *used || age(now, info) < grace || needed.contains(&*info.name) {
            kept.objects += 1;
            kept.bytes += info.size;
        } else {
            remove.push(info);
        }
    }
    remove.extend(spent);
    remove.extend(&survey.leftovers);
    let unused = |(info, maker): &&(ObjectInfo, Maker)| match maker {
        Maker::Gone => true,
        Maker::Alive => false,
        Maker::Unknown => age(now, info) >= grace.max(TMP_AGE),
    };
    remove.extend(survey.temporaries.iter().filter(unused).map(|(i, _)| i));
    let doomed = |info: &ObjectInfo| Doomed {
        object: info.name.clone(),
        bytes: info.size,
    };
    Plan {
        remove: remove.into_iter().map(doomed).collect(),
        kept,
    }
}

/// Counts what is not referred to in packs that are needed. The seek table at a pack's end is a few bytes per frame and
/// counts as unneeded only where a frame is.
fn count_dead(survey: &Survey, needed: &BTreeSet<&str>, kept: &mut Kept) {
    let mut live: BTreeMap<String, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for layer in survey.layers.values() {
        for (pack, ranges) in &layer.ranges {
            let entry = live.entry(names::pack(pack)).or_default();
            entry.extend(ranges);
        }
    }
    for info in &survey.objects {
        let Some(ranges) = live.get(&info.name) else {
            continue;
        };
        let frames = u64::try_from(ranges.len()).unwrap_or(u64::MAX);
        let used: u64 = ranges.iter().map(|(_, len)| len).sum();
        let dead = info.size.saturating_sub(used + table_bytes(frames));
        if needed.contains(&*info.name) && dead > 0 {
            kept.packs_partly_dead += 1;
            kept.dead_bytes += dead;
        }
    }
}

/// Bytes of the seek table of a pack with that many frames.
const fn table_bytes(frames: u64) -> u64 {
    17 + 8 * frames
}
