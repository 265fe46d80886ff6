//! Integration tests of `imgstore`: one binary, one file a subject. Run as root: images are mounted with the kernel.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "test helpers: a broken expectation is a failed test"
)]

#[allow(
    dead_code,
    reason = "each of the test binaries with this file uses a part of it"
)]
mod bad_web;
mod build;
mod bundles;
mod cache_crash;
mod cache_disk;
mod collected;
mod copy;
mod corruption;
mod crash;
mod damage;
mod disk_bytewise;
mod disk_folder;
mod disk_folder_power;
mod disk_recent;
mod fidelity;
mod fsck_origin;
mod fuzz;
mod gate;
mod gc_model;
mod gc_races;
mod golden;
mod hostile;
mod http;
mod kernel_mount;
mod model;
mod observe;
mod oci;
mod optimize;
mod origin_rules;
mod overlaybd_golden;
mod overlaybd_writing;
mod partial;
mod power;
mod random_tree;
mod repair;
mod rng;
mod s3;
mod source_directory;
mod source_export;
mod source_image;
mod source_stacks;
mod source_tar;
mod source_tar_damage;
mod source_tar_odd;
mod source_upper;
mod source_xattrs;
mod strangers;
mod tar_bytes;
mod three_fs_mount;
mod three_fs_rings;
mod trace_life;
mod two_origins;
mod verify_kinds;
mod watched_origin;
mod wrappers;
