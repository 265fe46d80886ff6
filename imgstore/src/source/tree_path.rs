//! Paths inside a tree, as archives write them.
//!
//! Leading slashes are stripped (as GNU tar does when it extracts), `.` parts, empty parts and trailing slashes mean
//! nothing. `..` is refused wherever it stands, so is a NUL, and a path of no bytes.

use super::error::EntryFault;

/// Longest path of an entry: four times what a kernel call takes. Every part of it may be a new directory.
const PATH_BYTES_MAX: usize = 16 << 10;

/// The parts of an entry's path; none for the root (`./`).
pub(super) fn parts(path: &[u8]) -> Result<Vec<&[u8]>, EntryFault> {
    if path.is_empty() {
        return Err(EntryFault::UnsafePath("it is empty"));
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(EntryFault::UnsafePath("it is longer than 16384 bytes"));
    }
    if path.contains(&0) {
        return Err(EntryFault::UnsafePath("it has a NUL byte"));
    }
    let parts: Vec<&[u8]> = path
        .split(|b| *b == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .collect();
    if parts.contains(&b"..".as_slice()) {
        return Err(EntryFault::UnsafePath("it has a `..` part"));
    }
    Ok(parts)
}
