//! POSIX ACLs in text form, as `tar --acls` writes them, turned into the kernel's attribute.
//!
//! ```text
//! user::rw-,user:1000:r--,group::r--,mask::r--,other::r--     default ACLs may have `default:` before each
//! attribute: version u32 = 2, then per entry tag u16, permissions u16, id u32 (all ones without one), in canonical order
//! ```
//! Where the archive holds the attribute itself (`--xattrs`), the text is ignored. Names of users are looked up nowhere:
//! an entry must have a number, or star's fourth field.

use std::collections::BTreeMap;

use super::error::{EntryFault, shown};

const NAMES: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
const NO_ID: u32 = u32::MAX;

/// Adds the attributes for the texts (access, default).
pub(super) fn add(
    xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    texts: &[Option<Vec<u8>>; 2],
) -> Result<(), EntryFault> {
    for (name, text) in NAMES.iter().zip(texts) {
        let Some(text) = text else { continue };
        if xattrs.contains_key(*name) {
            continue;
        }
        let entries = parse(text)?;
        // Three entries say no more than the mode.
        if entries.len() > 3 || *name == b"system.posix_acl_default" {
            xattrs.insert(name.to_vec(), encode(entries));
        }
    }
    Ok(())
}

type Entry = (u16, u32, u16);

fn parse(text: &[u8]) -> Result<Vec<Entry>, EntryFault> {
    text.split(|b| matches!(b, b',' | b'\n'))
        .map(<[u8]>::trim_ascii)
        .filter(|entry| !entry.is_empty() && !entry.starts_with(b"#"))
        .map(|entry| parse_entry(entry).ok_or_else(|| EntryFault::Acl(shown(entry))))
        .collect()
}

fn parse_entry(entry: &[u8]) -> Option<Entry> {
    let text = std::str::from_utf8(entry).ok()?;
    let text = text.strip_prefix("default:").unwrap_or(text);
    // `#effective:` comments of getfacl.
    let text = text.split('#').next()?.trim_end();
    let mut fields = text.split(':');
    let tag = fields.next()?;
    let mut who = fields.next()?;
    let mut perm = fields.next();
    if perm.is_none() && matches!(tag, "mask" | "m" | "other" | "o") {
        // `mask:rwx` without the empty field.
        perm = Some(std::mem::take(&mut who));
    }
    let perm = permissions(perm?)?;
    let id = match (who, fields.next()) {
        ("", _) => None,
        (_, Some(number)) => Some(number.parse().ok()?),
        (number, None) => Some(number.parse().ok()?),
    };
    let tag = match (tag, id) {
        ("user" | "u", None) => 0x01,
        ("user" | "u", Some(_)) => 0x02,
        ("group" | "g", None) => 0x04,
        ("group" | "g", Some(_)) => 0x08,
        ("mask" | "m", None) => 0x10,
        ("other" | "o", None) => 0x20,
        _ => return None,
    };
    Some((tag, id.unwrap_or(NO_ID), perm))
}

fn permissions(text: &str) -> Option<u16> {
    text.chars().try_fold(0, |bits, c| match c {
        'r' => Some(bits | 4),
        'w' => Some(bits | 2),
        'x' => Some(bits | 1),
        '-' => Some(bits),
        _ => None,
    })
}

fn encode(mut entries: Vec<Entry>) -> Vec<u8> {
    entries.sort_unstable();
    let mut out = 2_u32.to_le_bytes().to_vec();
    for (tag, id, perm) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&perm.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}
