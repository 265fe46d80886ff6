//! What the tests of garbage collection share: layers that have packs in common, origins whose objects can be made old,
//! and a second opinion on what is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use imgstore::build::{self, BuildError, BuildOptions, BuildReport};
use imgstore::ids::{Axis, Digest, TagName};
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{Origin, OriginError};
use imgstore::store::gc::{self, GcError, GcOptions, GcReport};
use imgstore::store::lease::HoldError;
use imgstore::store::tags::TagError;
use imgstore::store::{layer, verify};
use imgstore::tree::{Inode, Kind, Meta, ROOT, Tree};

use crate::random_tree::{Rng, Spool};

/// Files to choose from: each is one segment.
pub(crate) const FILES: u32 = 5;
/// The grace period of these tests.
pub(crate) const GRACE: Duration = Duration::from_mins(60);
const FILE_BYTES: usize = 128 << 10;

/// A tree of those files whose bit is set.
pub(crate) fn tree(mask: u8) -> (Tree, Spool) {
    let mut spool = Spool::new();
    let mut tree = Tree::new(Meta::default());
    for n in (0..FILES).filter(|n| mask & (1 << n) != 0) {
        let mut rng = Rng::new(u64::from(n) + 1);
        // No two blocks are equal, and each compresses well: little to write and to sync.
        let blocks = (0..FILE_BYTES / 4096).flat_map(|_| rng.bytes(64).repeat(64));
        let bytes: Vec<u8> = blocks.collect();
        let content = spool.content(u64::try_from(FILE_BYTES).unwrap(), &[(0, bytes)]);
        let id = tree.add(Inode {
            meta: Meta {
                perm: 0o644,
                ..Meta::default()
            },
            kind: Kind::File(content),
        });
        let name = format!("file-{n}").into_bytes();
        tree.dir_mut(ROOT).unwrap().insert(name, id);
    }
    (tree, spool)
}

pub(crate) fn tag(version: &str) -> TagName {
    TagName::new(Axis::Base, "t", version).unwrap()
}

/// Segments as long as the files; one thread, so that the calls come in one order; no waiting for a collection, which
/// could not end while a test holds it in the middle.
pub(crate) fn options() -> BuildOptions {
    BuildOptions {
        segment_bytes: 128 << 10,
        threads: 1,
        gc_patience: Duration::ZERO,
        ..BuildOptions::default()
    }
}

pub(crate) fn publish(
    origin: &dyn Origin,
    mask: u8,
    version: &str,
) -> Result<BuildReport, BuildError> {
    let (tree, _spool) = tree(mask);
    build::build((&tree).into(), tag(version).into(), origin, &options())
}

/// Collects with this grace period.
pub(crate) fn collect(origin: &dyn Origin, grace: Duration) -> Result<GcReport, GcError> {
    gc::collect(
        origin,
        &GcOptions {
            grace,
            threads: 1,
            ..GcOptions::default()
        },
    )
}

/// The names that a dry run lists.
pub(crate) fn would_remove(origin: &dyn Origin, grace: Duration) -> Vec<String> {
    let options = GcOptions {
        grace,
        dry_run: true,
        threads: 1,
        ..GcOptions::default()
    };
    names(&gc::collect(origin, &options).unwrap())
}

pub(crate) fn names(report: &GcReport) -> Vec<String> {
    report.removed.iter().map(|d| d.object.clone()).collect()
}

/// An origin whose time can be moved.
#[derive(Debug)]
pub(crate) enum Aged {
    Mem(Arc<MemOrigin>),
    Dir(Arc<DirOrigin>, PathBuf),
}

impl Aged {
    pub(crate) fn mem() -> Self {
        Self::Mem(Arc::default())
    }

    pub(crate) fn dir(path: PathBuf) -> Self {
        Self::Dir(Arc::new(DirOrigin::create_root(&path).unwrap()), path)
    }

    pub(crate) fn origin(&self) -> Arc<dyn Origin> {
        match self {
            Self::Mem(origin) => Arc::clone(origin) as _,
            Self::Dir(origin, _) => Arc::clone(origin) as _,
        }
    }

    /// Makes everything that is there older.
    pub(crate) fn pass(&self, time: Duration) {
        let all = self.origin().list_info("").unwrap();
        for info in all {
            let at = info.modified - time;
            match self {
                Self::Mem(origin) => origin.age(&info.name, at),
                Self::Dir(_, root) => {
                    let file = File::open(root.join(&info.name)).unwrap();
                    file.set_modified(at).unwrap();
                }
            }
        }
    }
}

/// A copy of an origin in memory, as old as time itself.
pub(crate) fn copy_of(origin: &MemOrigin) -> Arc<MemOrigin> {
    let copy = MemOrigin::default();
    let objects = origin.snapshot();
    copy.tamper(|all| *all = objects);
    Arc::new(copy)
}

/// All names in the folders of immutable objects, placements and bundles.
pub(crate) fn objects(origin: &dyn Origin) -> BTreeSet<String> {
    let folders = [
        "manifests/",
        "placements/",
        "bundles/",
        "meta/",
        "chunks/",
        "packs/",
    ];
    let lists = folders.iter().map(|folder| origin.list(folder).unwrap());
    lists.flatten().collect()
}

fn fan(folder: &str, hex: &str, ending: &str) -> String {
    format!("{folder}/{}/{hex}{ending}", &hex[..2])
}

/// What a layer needs, read from the JSON alone: not by the code that is tested.
pub(crate) fn needs(origin: &dyn Origin, layer: &str) -> BTreeSet<String> {
    let names = [
        fan("manifests", layer, ".json"),
        fan("placements", layer, ".json"),
    ];
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&origin.fetch_all(name, 1 << 20).unwrap()).unwrap()
    };
    let (manifest, placement) = (read(&names[0]), read(&names[1]));
    let hex = |value: &serde_json::Value| value["digest"].as_str().unwrap().to_owned();
    let mut out = BTreeSet::from(names);
    out.insert(fan("bundles", layer, ".bundle"));
    out.insert(fan("meta", &hex(&manifest["meta"]), ".erofs.zst"));
    out.insert(fan("chunks", &hex(&manifest["chunks"]), ".zst"));
    let packs = placement["packs"].as_array().unwrap();
    out.extend(packs.iter().map(|pack| fan("packs", &hex(pack), ".zst")));
    out
}

/// The tags, as the tag objects and as the index say.
pub(crate) fn tags(origin: &dyn Origin) -> BTreeMap<String, Digest> {
    let listed = layer::list_tags(origin).unwrap();
    assert!(listed.damaged.is_empty(), "{:?}", listed.damaged);
    let all = listed.tags.into_iter();
    all.map(|(tag, layer)| (tag.to_string(), layer)).collect()
}

/// The index says the same as the tags.
pub(crate) fn index_is_right(origin: &dyn Origin) {
    let bytes = match origin.fetch_all("index.json", 1 << 20) {
        Err(OriginError::NotFound { .. }) if tags(origin).is_empty() => return,
        bytes => bytes.unwrap(),
    };
    let index: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(index["tags"], serde_json::to_value(tags(origin)).unwrap());
}

/// Every layer is there and right, to the last segment.
pub(crate) fn all_right(origin: &dyn Origin, layers: impl IntoIterator<Item = Digest>, when: &str) {
    let layers: BTreeSet<Digest> = layers.into_iter().collect();
    for layer in layers {
        let report = verify::verify(origin, &layer, &|_, _| ())
            .unwrap_or_else(|e| panic!("{when}: layer {layer}: {e}"));
        assert_eq!(report.damage, Vec::new(), "{when}: layer {layer}");
    }
}

/// Every tag points to a layer that is whole.
pub(crate) fn tags_are_right(origin: &dyn Origin, when: &str) {
    all_right(origin, tags(origin).into_values(), when);
}

/// Whether somebody gave way, which is what should happen when a collection is held in the middle.
pub(crate) fn gave_way(error: &HoldError) -> bool {
    matches!(error, HoldError::Condemned { .. })
}

pub(crate) fn build_gave_way(error: &BuildError) -> bool {
    matches!(error, BuildError::Hold(e) if gave_way(e))
}

pub(crate) fn tag_gave_way(error: &TagError) -> bool {
    matches!(error, TagError::Hold(e) if gave_way(e))
}

/// A folder in memory where there is one: tests that sync thousands of files do not wait for a disk.
pub(crate) fn memory_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}
