//! EROFS metadata images: the writer, and a checker for what a reader relies on.
//!
//! The images use a small, old subset of the format (kernel documentation, `Documentation/filesystems/erofs.rst`, and
//! `fs/erofs/erofs_fs.h`): extended inodes, inline tails for directories and symbolic links, inline xattrs, chunk-based
//! files with 8-byte indexes, a device table. Every integer is little-endian.

pub mod check;
pub mod directory;
pub mod extents;
pub mod inode;
pub mod superblock;
pub mod write;
pub mod xattr;
