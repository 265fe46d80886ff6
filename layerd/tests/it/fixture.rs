//! Folders, layers built from them, and a place for everything a test makes.

use std::fs;
use std::path::{Path, PathBuf};

use imgstore::build::{BuildOptions, build};
use imgstore::ids::{Digest, TagName};
use imgstore::origin::dir::DirOrigin;
use imgstore::source::{self, SourceOptions, SourceSpec};
use imgstore::store::layer::{self, Layer};

/// A folder for one test, with an origin in it.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("origin")).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An empty folder.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    pub(crate) fn origin(&self) -> PathBuf {
        self.path("origin")
    }

    pub(crate) fn origin_url(&self) -> String {
        format!("dir:{}", self.origin().display())
    }

    /// Publishes the folder `tree` as `tag`.
    pub(crate) fn publish(&self, tree: &Path, tag: &str) -> Layer {
        let origin = DirOrigin::open(&self.origin()).unwrap();
        let options = SourceOptions::new(self.dir.path());
        let loaded = source::load(&SourceSpec::Directory(tree.to_owned()), &options).unwrap();
        let tag: TagName = tag.parse().unwrap();
        let options = BuildOptions {
            threads: 1,
            ..BuildOptions::default()
        };
        let report = build((&loaded.tree).into(), tag.into(), &origin, &options).unwrap();
        layer::open(&origin, &report.layer).unwrap()
    }

    /// Publishes `base/t:1`: one incompressible file `data` of `mib` MiB, and `small` with a few bytes.
    pub(crate) fn publish_data(&self, mib: usize) -> (Layer, Vec<u8>) {
        let tree = self.folder("tree");
        let data = noise(mib << 20);
        fs::write(tree.join("data"), &data).unwrap();
        fs::write(tree.join("small"), b"hello\n").unwrap();
        (self.publish(&tree, "base/t:1"), data)
    }
}

/// Bytes that do not compress, always the same.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"noise");
    hasher.finalize_xof().fill(&mut out);
    out
}

/// The cached file of a segment.
pub(crate) fn cached(cache: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.to_hex();
    cache.join("segments").join(&hex[..2]).join(&hex)
}
