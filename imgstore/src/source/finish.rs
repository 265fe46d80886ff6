//! What is done to every tree whatever it came from: the attribute filter, and the limits of the layer format.
//!
//! A limit that is passed is an error that names the path. Nothing is cut, dropped or clamped.

use std::collections::HashSet;

use super::SourceError;
use super::xattr_filter::{OverlayXattrs, XattrFilter};
use crate::ids::to_u64;
use crate::tree::{Inode, Kind, ROOT, Tree};

/// Longest name (`NAME_MAX`).
const NAME_MAX: usize = 255;
/// Longest symbolic link target (`PATH_MAX` less its NUL).
pub(super) const SYMLINK_MAX: usize = 4095;
/// Longest path, from the root down. Longer ones can be made (through links), and then every walk over the tree is quadratic.
const PATH_BYTES_MAX: usize = 64 << 10;
/// Linux keeps device numbers in 32 bits: 12 of major, 20 of minor.
const MAJOR_MAX: u32 = 4095;
const MINOR_MAX: u32 = 1_048_575;
/// EROFS keeps the length of a value in 16 bits.
const XATTR_VALUE_MAX: usize = 65_535;
/// All of a file's attributes as EROFS stores them: `12 + 4 * (65,535 - 1)` less the 12 of the header.
const XATTR_TOTAL_MAX: usize = 4 * 65_534;
/// Sizes of files, alone and together. A sparse file claims any size for nothing, but a build keeps a record of each of its
/// units, holes too: 64 TiB are 16 million of the largest.
const FILE_BYTES_MAX: u64 = 1 << 46;
/// The kernel's "no such id".
const NO_ID: u32 = u32::MAX;

/// Filters and checks every reachable inode; gives the sum of file sizes, hard links once.
pub(super) fn finish(
    tree: &mut Tree,
    filter: &XattrFilter<'_>,
    overlay: OverlayXattrs,
) -> Result<u64, SourceError> {
    check_depth(tree)?;
    let mut seen = HashSet::new();
    let mut bytes = 0_u64;
    for (path, id) in tree.walk() {
        check_name(&path)?;
        if !seen.insert(id) {
            continue;
        }
        let inode = tree.inode_mut(id);
        filter.apply(&mut inode.meta, &path, overlay)?;
        check_meta(inode, &path)?;
        check_kind(inode, &path)?;
        if let Kind::File(content) = &inode.kind {
            bytes = bytes.saturating_add(content.len);
            if bytes > FILE_BYTES_MAX {
                return Err(SourceError::unsupported(
                    &path,
                    "size of all files up to this one",
                    "at most 70368744177664 bytes (64 TiB)",
                    bytes,
                ));
            }
        }
    }
    Ok(bytes)
}

/// Looks at lengths only: the paths themselves could be more than fits into memory.
fn check_depth(tree: &Tree) -> Result<(), SourceError> {
    let mut todo = vec![(ROOT, 0_usize)];
    while let Some((dir, len)) = todo.pop() {
        for (name, child) in tree.entries(dir) {
            let len = len + 1 + name.len();
            if len > PATH_BYTES_MAX {
                return Err(SourceError::unsupported(
                    name,
                    "path from the root to this name",
                    "at most 65536 bytes",
                    format!("{len} bytes"),
                ));
            }
            if matches!(tree.inode(child).kind, Kind::Dir(_)) {
                todo.push((child, len));
            }
        }
    }
    Ok(())
}

fn check_name(path: &[u8]) -> Result<(), SourceError> {
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    if name.len() <= NAME_MAX {
        return Ok(());
    }
    Err(SourceError::unsupported(
        path,
        "name",
        "at most 255 bytes",
        format!("{} bytes", name.len()),
    ))
}

fn check_meta(inode: &Inode, path: &[u8]) -> Result<(), SourceError> {
    let meta = &inode.meta;
    if meta.uid == NO_ID || meta.gid == NO_ID {
        return Err(SourceError::unsupported(
            path,
            "owner",
            "uid and gid up to 4294967294",
            format!("{}:{}", meta.uid, meta.gid),
        ));
    }
    let mut total = 0;
    for (name, value) in &meta.xattrs {
        if name.len() > NAME_MAX || value.len() > XATTR_VALUE_MAX || name.contains(&0) {
            return Err(SourceError::unsupported(
                path,
                "extended attribute",
                "a name of at most 255 bytes without NUL and a value of at most 65535 bytes",
                format!(
                    "`{}` ({} bytes) with {} bytes",
                    super::error::shown(name),
                    name.len(),
                    value.len()
                ),
            ));
        }
        total += (4 + name.len() + value.len()).next_multiple_of(4);
    }
    if total > XATTR_TOTAL_MAX {
        return Err(SourceError::unsupported(
            path,
            "extended attributes together",
            "at most 262136 bytes",
            total,
        ));
    }
    Ok(())
}

fn check_kind(inode: &Inode, path: &[u8]) -> Result<(), SourceError> {
    match &inode.kind {
        Kind::Symlink(target) if target.is_empty() || target.len() > SYMLINK_MAX => {
            Err(SourceError::unsupported(
                path,
                "symbolic link target",
                "1 to 4095 bytes",
                format!("{} bytes", to_u64(target.len())),
            ))
        }
        Kind::Symlink(target) if target.contains(&0) => Err(SourceError::unsupported(
            path,
            "symbolic link target",
            "no NUL byte",
            super::error::shown(target),
        )),
        Kind::Char(major, minor) | Kind::Block(major, minor)
            if *major > MAJOR_MAX || *minor > MINOR_MAX =>
        {
            Err(SourceError::unsupported(
                path,
                "device number",
                "major up to 4095 and minor up to 1048575",
                format!("{major}:{minor}"),
            ))
        }
        Kind::File(content) if content.len > FILE_BYTES_MAX => Err(SourceError::unsupported(
            path,
            "file size",
            "at most 70368744177664 bytes (64 TiB)",
            content.len,
        )),
        _ => Ok(()),
    }
}
