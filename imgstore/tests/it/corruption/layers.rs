//! What is published before it is damaged: a layer in two generations and one more, and what is in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use imgstore::build::BuildOptions;
use imgstore::format::names;
use imgstore::ids::{Digest, TagName};
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::layer::{self, Layer};
use imgstore::tree::{Inode, Kind, Meta, ROOT, Tree};

use super::{Digests, Subject, mem};
use crate::build::{build_as, tag};
use crate::random_tree::{Rng, Spool};

/// The right bytes of a layer.
#[derive(Debug)]
pub(super) struct Truth {
    pub(super) meta: Vec<u8>,
    pub(super) segments: Vec<Vec<u8>>,
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct World {
    /// The tag that is read.
    pub(super) tag: TagName,
    /// The layer it names.
    pub(super) layer: Digest,
    pub(super) loaded: Layer,
    /// Every object, undamaged.
    pub(super) objects: BTreeMap<String, Vec<u8>>,
    /// All objects before the second generation was published.
    before: BTreeMap<String, Vec<u8>>,
    pub(super) truth: Digests,
    /// An origin that nobody damages.
    pub(super) good: Arc<MemOrigin>,
}

/// A file of text that compresses, a short one that does not, a tiny one. Several segments in a few kilobytes stored.
fn tree(seed: u64, spool: &mut Spool) -> Tree {
    let mut rng = Rng::new(seed);
    let line = format!("line of generation {seed}, again and again\n");
    let text: Vec<u8> = line.bytes().cycle().take(150_000).collect();
    let mut tree = Tree::new(Meta::default());
    for (name, bytes) in [
        ("long.txt", text),
        ("noise.bin", rng.bytes(6000)),
        ("tiny", rng.bytes(100)),
    ] {
        let len = u64::try_from(bytes.len()).unwrap();
        let content = spool.content(len, &[(0, bytes)]);
        let id = tree.add(Inode {
            meta: Meta::default(),
            kind: Kind::File(content),
        });
        let root = tree.dir_mut(ROOT).unwrap();
        root.insert(name.as_bytes().to_vec(), id);
    }
    tree
}

fn truth(origin: &dyn Origin, digest: &Digest) -> Truth {
    let loaded = layer::open(origin, digest).unwrap();
    let segment = |index| layer::read_segment(origin, &loaded, index).unwrap();
    Truth {
        meta: layer::read_meta(origin, &loaded.manifest).unwrap(),
        segments: (0..loaded.manifest.segments.len()).map(segment).collect(),
    }
}

impl World {
    pub(super) fn new() -> Self {
        let origin = MemOrigin::default();
        let options = BuildOptions {
            segment_bytes: 128 << 10,
            threads: 1,
            ..BuildOptions::default()
        };
        let mut spool = Spool::new();
        let mut publish = |seed, version| {
            let tree = tree(seed, &mut spool);
            build_as(&tree, version, &origin, &options).layer
        };
        let old = publish(1, "read");
        let other = publish(2, "other");
        let before = origin.snapshot();
        let layer = publish(3, "read");
        let objects = origin.snapshot();
        assert_ne!(layer, old);
        let digests = [old, other, layer];
        let loaded = layer::open(&origin, &layer).unwrap();
        assert!(loaded.manifest.segments.len() >= 2);
        Self {
            tag: tag("read"),
            layer,
            loaded,
            before,
            truth: digests
                .into_iter()
                .map(|digest| (digest, truth(&origin, &digest)))
                .collect(),
            good: Arc::new(mem(&objects)),
            objects,
        }
    }

    /// Objects of the same kind as `object`; of any kind where it is the only one.
    pub(super) fn others(&self, folder: &str, object: &str) -> Vec<String> {
        let other = |name: &&String| name.starts_with(folder) && *name != object;
        self.objects.keys().filter(other).cloned().collect()
    }

    /// What an origin that is behind, or that was restored from a backup, may have under this name: the object as it was, or the one
    /// of an earlier layer.
    pub(super) fn earlier(&self, rng: &mut Rng, subject: Subject, object: &str) -> Vec<u8> {
        if let Some(bytes) = self.before.get(object) {
            return bytes.clone();
        }
        let folder = subject.folder();
        let of_kind = |(name, _): &(&String, &Vec<u8>)| name.starts_with(folder);
        let bytes: Vec<Vec<u8>> = self
            .before
            .iter()
            .filter(of_kind)
            .map(|(_, bytes)| bytes.clone())
            .collect();
        assert!(!bytes.is_empty() && object != names::INDEX);
        rng.pick(&bytes)
    }
}
