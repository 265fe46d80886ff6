//! Integration tests of `imgstore`: one binary, one file a subject. Run as root: images are mounted with the kernel.

mod build;
mod damage;
mod fidelity;
mod kernel_mount;
mod observe;
mod random_tree;
