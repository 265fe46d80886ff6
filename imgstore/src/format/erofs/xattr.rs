//! Inline extended attributes: a 12-byte header, then entries padded to 4 bytes.

use std::collections::BTreeMap;

use super::write::EncodeError;

/// Prefixes with their on-disk index (`EROFS_XATTR_INDEX_*`); the two ACL names are stored with an empty rest.
const PREFIXES: [(&[u8], u8, bool); 5] = [
    (b"user.", 1, false),
    (b"system.posix_acl_access", 2, true),
    (b"system.posix_acl_default", 3, true),
    (b"trusted.", 4, false),
    (b"security.", 6, false),
];
/// Largest region: `i_xattr_icount` is 16 bits and counts 4-byte units behind the header.
const BYTES_MAX: usize = 12 + 4 * (u16::MAX as usize - 1);

/// Splits a full name into on-disk index and rest; `None` for names EROFS cannot store.
pub fn split_name(name: &[u8]) -> Option<(u8, &[u8])> {
    PREFIXES.iter().find_map(|(prefix, index, whole)| {
        let rest = name.strip_prefix(*prefix)?;
        (rest.is_empty() == *whole).then_some((*index, rest))
    })
}

/// The region for these attributes; empty if there are none.
///
/// # Errors
/// [`EncodeError::Xattr`] for a name or value that EROFS cannot store.
pub fn encode(xattrs: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<Vec<u8>, EncodeError> {
    if xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut out = vec![0; 12];
    for (name, value) in xattrs {
        let refuse = |why| EncodeError::Xattr {
            name: String::from_utf8_lossy(name).into_owned(),
            why,
        };
        let (index, rest) = split_name(name).ok_or_else(|| {
            refuse("its prefix is none of user., trusted., security. and the two POSIX ACLs")
        })?;
        let name_len =
            u8::try_from(rest.len()).map_err(|_e| refuse("its name is longer than 255 bytes"))?;
        let value_len = u16::try_from(value.len())
            .map_err(|_e| refuse("its value is longer than 65535 bytes"))?;
        out.extend_from_slice(&[name_len, index]);
        out.extend_from_slice(&value_len.to_le_bytes());
        out.extend_from_slice(rest);
        out.extend_from_slice(value);
        out.resize(out.len().next_multiple_of(4), 0);
        if out.len() > BYTES_MAX {
            return Err(refuse(
                "all attributes of the file together exceed 262148 bytes",
            ));
        }
    }
    Ok(out)
}

/// `i_xattr_icount` for a region of this length.
pub fn icount(region_len: usize) -> u16 {
    if region_len == 0 {
        return 0;
    }
    u16::try_from(1 + (region_len - 12) / 4).expect("bounded by BYTES_MAX")
}
