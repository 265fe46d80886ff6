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
mod tests {
    use imgstore::image::ReadDone;

    use super::*;

    #[derive(Debug)]
    struct Zeros(u64);

    impl BlockImage for Zeros {
        fn len(&self) -> u64 {
            self.0
        }

        fn read_at(&self, _offset: u64, len: u32, done: ReadDone) {
            done(Ok(&vec![0; usize::try_from(len).unwrap()]));
        }
    }

    #[test]
    fn a_name_added_again_never_gets_an_old_inode_number() {
        let mut tree = Tree::new();
        let first = tree.add("a", Arc::new(Zeros(1)), 0).unwrap();
        assert_eq!(tree.add("a", Arc::new(Zeros(1)), 0), None);
        assert_eq!(tree.remove("a"), Some(first));
        let second = tree.add("a", Arc::new(Zeros(2)), 0).unwrap();
        assert_ne!(first, second);
        assert!(tree.inode(first).is_none());
        assert_eq!(tree.inode(second).unwrap().image.len(), 2);
    }

    #[test]
    fn an_open_handle_outlives_its_name() {
        let mut tree = Tree::new();
        let ino = tree.add("a", Arc::new(Zeros(7)), 0).unwrap();
        let opened = tree.open(ino).unwrap();
        tree.remove("a");
        assert!(tree.open(ino).is_none());
        assert_eq!(tree.handle(opened.handle).unwrap().image.len(), 7);
        tree.release(opened.handle);
        assert!(tree.handle(opened.handle).is_none());
    }

    #[test]
    fn only_the_first_open_preloads() {
        let mut tree = Tree::new();
        let ino = tree.add("a", Arc::new(Zeros(10)), 64).unwrap();
        assert_eq!(tree.open(ino).unwrap().preload, 10);
        assert_eq!(tree.open(ino).unwrap().preload, 0);
    }

    #[test]
    fn listing_goes_on_where_it_stopped() {
        let mut tree = Tree::new();
        tree.add("b", Arc::new(Zeros(1)), 0).unwrap();
        tree.add("a", Arc::new(Zeros(2)), 0).unwrap();
        let names: Vec<&str> = tree.entries(0).iter().map(|e| e.2).collect();
        assert_eq!(names, [".", "..", "a", "b"]);
        let rest: Vec<(usize, &str)> = tree.entries(3).iter().map(|e| (e.0, e.2)).collect();
        assert_eq!(rest, [(4, "b")]);
        assert_eq!(tree.totals(), (2, 3));
    }
}
