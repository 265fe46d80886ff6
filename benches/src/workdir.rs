//! The work folder: where trees, artifacts, stores and scratch files are.
//!
//! `trees`, `artifacts` and `store` are made once and kept; `scratch` is emptied for every run.

use std::path::{Path, PathBuf};

use crate::error::{Context, Result};

/// Paths inside the work folder.
#[derive(Debug, Clone)]
pub(crate) struct WorkDir {
    root: PathBuf,
}

impl WorkDir {
    /// Opens the work folder, making it where it is missing. `None` takes `$XDG_CACHE_HOME/dsec-bench`, or
    /// `~/.cache/dsec-bench`.
    ///
    /// # Errors
    /// Where the folder cannot be made.
    pub(crate) fn open(root: Option<&Path>) -> Result<Self> {
        let root = root.map_or_else(default_root, Path::to_owned);
        std::fs::create_dir_all(&root).on("make", &root)?;
        let root = root.canonicalize().on("resolve", &root)?;
        Ok(Self { root })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A tree of the corpus.
    pub(crate) fn tree(&self, name: &str) -> PathBuf {
        self.root.join("trees").join(name)
    }

    /// An archive or image of a tree, as in `base-gcc.tar.gz`.
    pub(crate) fn artifact(&self, name: &str) -> PathBuf {
        self.root.join("artifacts").join(name)
    }

    /// A folder of this name directly below the root, made where it is missing.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        std::fs::create_dir_all(&path).on("make", &path)?;
        Ok(path)
    }

    /// An empty folder of this name; what was in it is removed.
    ///
    /// # Errors
    /// Where it cannot be emptied or made, as while something is mounted in it.
    pub(crate) fn empty_folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        if path.try_exists().on("look for", &path)? {
            std::fs::remove_dir_all(&path).on("empty", &path)?;
        }
        self.folder(name)
    }
}

fn default_root() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    cache
        .or_else(home)
        .unwrap_or_else(|| PathBuf::from("/var/cache"))
        .join("dsec-bench")
}
