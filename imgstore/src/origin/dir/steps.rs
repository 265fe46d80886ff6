//! What a directory origin does to its file system, one system call at a time: the seam for tests that lose power.

use std::io;
use std::path::Path;

/// A change that is about to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<'a> {
    /// A temporary file is made.
    Create(&'a Path),
    /// A file's bytes become durable.
    Sync(&'a Path),
    /// A file gets a second name.
    Link(&'a Path, &'a Path),
    /// A file gets another name, which may have been another file's.
    Rename(&'a Path, &'a Path),
    /// A name goes away.
    Remove(&'a Path),
    /// A folder is made, if it is missing.
    MakeDir(&'a Path),
    /// The names in a folder become durable.
    SyncDir(&'a Path),
}

/// Someone who is told of every step, and can end it all.
pub trait Steps: Send + Sync + std::fmt::Debug {
    /// Called before the step is made.
    ///
    /// # Errors
    /// The step is not made then.
    fn before(&self, step: Step<'_>) -> io::Result<()>;
}
