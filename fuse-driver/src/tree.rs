//! The names, inodes and open handles of the mount.
//!
//! A flat directory. Every added image gets an inode number and a handle number that were never used before, so
//! nothing that the kernel still remembers of a removed image can ever reach another one. A handle keeps its image alive:
//! a file that is open when its name goes away can be read until it is closed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use imgstore::image::BlockImage;

/// Inode number of the root directory (fixed by FUSE).
pub(crate) const ROOT_INO: u64 = 1;

/// One file.
#[derive(Debug, Clone)]
pub(crate) struct File {
    /// Inode number, and generation.
    pub(crate) ino: u64,
    /// What is read.
    pub(crate) image: Arc<dyn BlockImage>,
    /// Bytes from the start that are put into the page cache when the file is first opened.
    preload: u64,
}

/// An opened file.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Handle number.
    pub(crate) handle: u64,
    /// The file.
    pub(crate) file: File,
    /// Bytes to put into the page cache before the open is answered; 0 for every open but the first.
    pub(crate) preload: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Tree {
    names: BTreeMap<String, File>,
    inodes: HashMap<u64, String>,
    handles: HashMap<u64, File>,
    next: u64,
}

impl Tree {
    /// An empty directory.
    pub(crate) fn new() -> Self {
        Self {
            names: BTreeMap::new(),
            inodes: HashMap::new(),
            handles: HashMap::new(),
            next: ROOT_INO,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds a file; its inode number, or `None` if the name is taken.
    pub(crate) fn add(
        &mut self,
        name: &str,
        image: Arc<dyn BlockImage>,
        preload: u64,
    ) -> Option<u64> {
        if self.names.contains_key(name) {
            return None;
        }
        let ino = self.fresh();
        let preload = preload.min(image.len());
        let file = File {
            ino,
            image,
            preload,
        };
        self.names.insert(name.to_owned(), file);
        self.inodes.insert(ino, name.to_owned());
        Some(ino)
    }

    /// Removes a name; its inode number if it existed.
    pub(crate) fn remove(&mut self, name: &str) -> Option<u64> {
        let file = self.names.remove(name)?;
        self.inodes.remove(&file.ino);
        Some(file.ino)
    }

    /// The file of this name.
    pub(crate) fn lookup(&self, name: &str) -> Option<&File> {
        self.names.get(name)
    }

    /// The file with this inode number, while it has a name.
    pub(crate) fn inode(&self, ino: u64) -> Option<&File> {
        self.inodes.get(&ino).and_then(|name| self.names.get(name))
    }

    /// Opens the file with this inode number.
    pub(crate) fn open(&mut self, ino: u64) -> Option<Opened> {
        let name = self.inodes.get(&ino)?;
        let entry = self.names.get_mut(name)?;
        let preload = std::mem::take(&mut entry.preload);
        let file = entry.clone();
        let handle = self.fresh();
        self.handles.insert(handle, file.clone());
        Some(Opened {
            handle,
            file,
            preload,
        })
    }

    /// The file behind an open handle.
    pub(crate) fn handle(&self, handle: u64) -> Option<&File> {
        self.handles.get(&handle)
    }

    /// Closes a handle.
    pub(crate) fn release(&mut self, handle: u64) {
        self.handles.remove(&handle);
    }

    /// Directory entries from position `from`: (position of the next entry, inode, name).
    pub(crate) fn entries(&self, from: usize) -> Vec<(usize, u64, &str)> {
        let dots = [(ROOT_INO, "."), (ROOT_INO, "..")].into_iter();
        let files = self.names.iter().map(|(name, file)| (file.ino, &**name));
        let all = dots.chain(files).enumerate().skip(from);
        all.map(|(at, (ino, name))| (at + 1, ino, name)).collect()
    }

    /// Number of files and sum of their lengths.
    pub(crate) fn totals(&self) -> (usize, u64) {
        let bytes = self.names.values().map(|file| file.image.len()).sum();
        (self.names.len(), bytes)
    }
}

#[cfg(test)]
mod tests;
