//! From a tree to a published layer.
//!
//! `scan` reads and hashes all files; `layout` decides, from the hashes alone, which chunk goes where; `segments` reads
//! again, compresses and writes packs into the origin's staging folder; `readback` reads the result with an independent
//! EROFS reader and compares; `publish` gives everything its name, in an order in which no reader can see a part missing.
//! What a layer is called depends on the tree, the options and the dictionaries; threads and the origin's contents only
//! change how fast it is made and how much of it is stored anew.

pub mod coverage;
pub mod dictionary;
pub mod error;
pub mod hot;
pub mod known;
pub mod layout;
pub mod optimize;
pub mod options;
pub mod partial;
pub mod publish;
pub mod readback;
pub mod scan;
pub mod segments;

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::format::chunk_table::{self, Record};
use crate::format::manifest::{Blob, FORMAT, Manifest, Segment, Totals};
use crate::format::placement::Placement;
use crate::format::tag::Tag;
use crate::format::{erofs, names};
use crate::ids::{Digest, TagName, to_u64};
use crate::origin::Origin;
use crate::source::SourceError;
use crate::store::layer::Layer;
use crate::store::lease::hold::publishing;
use crate::store::tags;
use crate::tree::{InodeId, Kind, Tree};

pub use error::BuildError;
pub use options::{BuildOptions, Phase};

use dictionary::Dictionary;
use layout::Layout;
use publish::Publisher;
use segments::Staged;

/// How often a build begins again because packs that it wanted to reuse were collected.
const ATTEMPTS_MAX: usize = 3;

/// What a build did. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct BuildReport {
    /// The layer's name.
    pub layer: Digest,
    /// Bytes of all regular files of the source, holes included.
    pub bytes_in: u64,
    /// Bytes that were new on the origin: packs, metadata, manifest, chunk table, placement.
    pub bytes_stored: u64,
    /// Segments stored by this build.
    pub segments_new: u64,
    /// Segments of the layer that were there before.
    pub segments_reused: u64,
    /// Bytes of the metadata image.
    pub bytes_meta: u64,
    /// Plain bytes of all segments of the layer.
    pub bytes_segments: u64,
    /// Inodes.
    pub inodes: u64,
}

/// What to build.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The tree.
    pub tree: &'a Tree,
    /// Asked after the last content was read and before anything is published: fails if the source changed meanwhile in a
    /// way that reading the contents cannot notice (an archive whose parts are named by offset).
    pub unchanged: &'a dyn Fn() -> Result<(), SourceError>,
}

impl std::fmt::Debug for Input<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input")
            .field("inodes", &self.tree.inodes.len())
            .finish_non_exhaustive()
    }
}

impl<'a> From<&'a Tree> for Input<'a> {
    fn from(tree: &'a Tree) -> Self {
        Self {
            tree,
            unchanged: &|| Ok(()),
        }
    }
}

impl<'a> Input<'a> {
    /// A source that was loaded; `unchanged` is its [`Loaded::check_unchanged`](crate::source::Loaded::check_unchanged).
    pub fn new(tree: &'a Tree, unchanged: &'a dyn Fn() -> Result<(), SourceError>) -> Self {
        Self { tree, unchanged }
    }
}

/// The tag to write, besides the layer's name.
#[derive(Debug, Clone)]
pub struct Naming {
    /// The tag.
    pub tag: TagName,
    /// How the layer is built, for people.
    pub info: BTreeMap<String, String>,
    /// The user's labels and the image's configuration.
    pub labels: BTreeMap<String, String>,
}

impl From<TagName> for Naming {
    fn from(tag: TagName) -> Self {
        Self {
            tag,
            info: BTreeMap::new(),
            labels: BTreeMap::new(),
        }
    }
}

/// Builds a layer and publishes it on `origin` under its tag.
///
/// # Errors
/// [`BuildError`]; nothing is visible on the origin then but, at most, objects that nothing refers to.
pub fn build(
    input: Input<'_>,
    naming: Naming,
    origin: &dyn Origin,
    options: &BuildOptions,
) -> Result<BuildReport, BuildError> {
    publishing(origin, |hold| {
        let publisher = Publisher {
            origin,
            hold,
            patience: options.gc_patience,
        };
        build_held(input, naming, &publisher, options)
    })
}

fn build_held(
    input: Input<'_>,
    naming: Naming,
    publisher: &Publisher<'_>,
    options: &BuildOptions,
) -> Result<BuildReport, BuildError> {
    let (tree, origin) = (input.tree, publisher.origin);
    let dictionary = Dictionary::load(origin, &options.dict)?;
    let scanned = scan::scan(tree, options)?;
    let layout = layout::plan(tree, &scanned, &dictionary, options)?;
    let subject = Planned {
        tree,
        scanned: &scanned,
        layout: &layout,
        dictionary: &dictionary,
    };
    let made = make_and_claim(&subject, publisher, options)?;
    let manifest = &made.manifest;
    let layer = manifest.layer();
    let Naming { tag, info, labels } = naming;
    let record = Tag {
        build: info,
        bundled: false,
        created: tags::unix_now(),
        format: FORMAT,
        labels,
        layer,
        tag: tag.to_string(),
    };
    publish::check_readable(manifest, &made.placement, &record)?;
    erofs::check::check(&made.meta, manifest).map_err(|e| BuildError::ReadBack {
        what: "metadata image".into(),
        found: e.to_string(),
    })?;
    let subject = readback::Subject {
        tree,
        scanned: &scanned,
        meta: &made.meta,
        manifest,
        staged: &made.staged,
        placement: &made.placement,
        origin,
    };
    readback::compare(&subject, options)?;
    (input.unchanged)()?;

    let parts = publish::Parts {
        meta: &made.meta,
        chunks: &made.chunks,
        manifest,
        placement: &made.placement,
    };
    let stored = publish::publish(publisher, &made.staged, &parts, &tag, &record)?;
    let new = to_u64(made.staged.own.iter().filter(|s| s.is_new()).count());
    Ok(BuildReport {
        layer,
        bytes_in: manifest.totals.file_bytes,
        bytes_stored: stored,
        segments_new: new,
        segments_reused: to_u64(manifest.segments.len()) - new,
        bytes_meta: manifest.meta.size,
        bytes_segments: manifest.segment_bytes(),
        inodes: manifest.totals.inodes,
    })
}

/// What is to be made.
struct Planned<'a> {
    tree: &'a Tree,
    scanned: &'a HashMap<InodeId, scan::Scanned>,
    layout: &'a Layout,
    dictionary: &'a Dictionary,
}

/// What was made, in staging and in memory.
struct Made {
    staged: Staged,
    meta: Vec<u8>,
    chunks: Vec<u8>,
    manifest: Manifest,
    placement: Placement,
}

/// Makes everything and claims it; again if a collector took a pack in between that was to be reused. Once claimed, what
/// is there stays.
fn make_and_claim(
    planned: &Planned<'_>,
    publisher: &Publisher<'_>,
    options: &BuildOptions,
) -> Result<Made, BuildError> {
    let mut attempt = 1;
    loop {
        let made = make(planned, publisher.origin, options)?;
        let layer = Layer {
            digest: made.manifest.layer(),
            manifest: made.manifest.clone(),
            placement: made.placement.clone(),
        };
        publisher.claim(&layer)?;
        let own: HashSet<Digest> = made.staged.packs.iter().map(|p| p.pack.digest).collect();
        let mut gone = Vec::new();
        for pack in &made.placement.packs {
            if !own.contains(&pack.digest) && !known::is_present(publisher.origin, pack)? {
                gone.push(names::pack(&pack.digest));
            }
        }
        if gone.is_empty() {
            return Ok(made);
        }
        if attempt == ATTEMPTS_MAX {
            return Err(BuildError::Vanished {
                origin: publisher.origin.address(),
                objects: gone,
            });
        }
        tracing::info!(
            ?gone,
            "packs to be reused were collected; storing their segments anew"
        );
        attempt += 1;
    }
}

fn make(
    planned: &Planned<'_>,
    origin: &dyn Origin,
    options: &BuildOptions,
) -> Result<Made, BuildError> {
    let Planned {
        tree,
        scanned,
        layout,
        dictionary,
    } = *planned;
    let known = known::load(origin)?;
    let staged = segments::stage(tree, layout, &known, origin, options)?;
    let mut table: Vec<Segment> = staged.own.iter().map(|s| s.segment).collect();
    table.extend(layout.foreign.iter().map(|f| f.segment));
    let maps = layout::file_maps(scanned, layout);
    let meta = erofs::write::image(tree, &maps, &table)?;
    let chunks = chunk_table::encode(records(layout));
    let manifest = Manifest {
        chunks: Blob {
            digest: Digest::of(&chunks),
            size: to_u64(chunks.len()),
        },
        features_compat: Vec::new(),
        features_incompat: Vec::new(),
        format: FORMAT,
        meta: Blob {
            digest: Digest::of(&meta),
            size: to_u64(meta.len()),
        },
        totals: totals(tree, scanned),
        segments: table,
    };
    let placement = publish::placement(&manifest, &staged, layout, dictionary)?;
    Ok(Made {
        staged,
        meta,
        chunks,
        manifest,
        placement,
    })
}

fn totals(tree: &Tree, scanned: &HashMap<InodeId, scan::Scanned>) -> Totals {
    let links = tree.link_counts();
    let lens = links.keys().filter_map(|id| match &tree.inode(*id).kind {
        Kind::File(content) => Some(content.len),
        _ => None,
    });
    let files = to_u64(lens.clone().count());
    debug_assert!(to_u64(scanned.len()) <= files);
    Totals {
        file_bytes: lens.fold(0, u64::saturating_add),
        files,
        inodes: to_u64(links.len()),
    }
}

fn records(layout: &Layout) -> Vec<Record> {
    let small = |n: u32| u16::try_from(n).expect("a segment has at most 1024 blocks");
    let record = |(digest, addr): (&Digest, &layout::Addr)| Record {
        digest: *digest,
        segment: u16::try_from(addr.slot).expect("the layout allows at most 65535 segments"),
        block: small(addr.block),
        blocks: small(addr.blocks),
    };
    layout.addrs.iter().map(record).collect()
}
