//! Stand-ins for 3FS, for tests alone.
//!
//! [`mount::StandIn`] is a FUSE mount over a folder with what is odd about a 3FS mount; `usrbio`, when this crate is loaded
//! as a library, is the C interface of 3FS's user-space I/O over a folder. Both are made from what is known of 3FS's source,
//! not from a running cluster: what they get wrong, our code may get wrong.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "support of tests: a broken expectation is a failed test"
)]

use std::path::PathBuf;

pub mod control;
mod fs;
pub mod holes;
pub mod mount;
mod tree;
mod usrbio;

/// The library that `dlopen` loads: where cargo puts it, beside the program that runs this.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let library = program.with_file_name("libthree_fs_stand_in.so");
    assert!(library.is_file(), "{} is missing", library.display());
    library
}
