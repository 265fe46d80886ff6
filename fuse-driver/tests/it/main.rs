//! The FUSE driver on a real mount (needs root and /dev/fuse).

mod serving;
