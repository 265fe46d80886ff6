//! From what a user has (a directory, an archive, an image) to a tree.

pub mod content;
