//! Names and inodes that come and go.

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
