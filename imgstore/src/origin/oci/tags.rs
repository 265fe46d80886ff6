//! Object names as registry tags, and back.
//!
//! A tag has 1 to 128 of `a-z A-Z 0-9 . _ -` and begins with none of the last two signs but `_`. So `/` becomes `_.`, `+`
//! becomes `_p`, `_` becomes `__`, and a name that is too long or has other signs becomes `_h` and its BLAKE3; such a name
//! is read from the manifest.

use crate::ids::Digest;

/// Longest tag of a registry.
const TAG_BYTES_MAX: usize = 128;
const HASHED: &str = "_h";

/// What a tag of a registry stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    /// This object.
    Object(String),
    /// An object whose name is in the manifest.
    Hashed,
    /// None of ours.
    Foreign,
}

/// The tag of an object.
pub(super) fn tag(object: &str) -> String {
    escaped(object)
        .filter(|tag| (1..=TAG_BYTES_MAX).contains(&tag.len()))
        .unwrap_or_else(|| format!("{HASHED}{}", Digest::of(object.as_bytes()).to_hex()))
}

fn escaped(object: &str) -> Option<String> {
    let mut out = String::with_capacity(object.len() + 8);
    for c in object.chars() {
        match c {
            '/' => out.push_str("_."),
            '+' => out.push_str("_p"),
            '_' => out.push_str("__"),
            'a'..='z' | 'A'..='Z' | '0'..='9' => out.push(c),
            '.' | '-' if !out.is_empty() => out.push(c),
            _ => return None,
        }
    }
    Some(out)
}

/// What a tag means.
pub(super) fn meaning(tag: &str) -> Meaning {
    if tag.starts_with(HASHED) {
        return Meaning::Hashed;
    }
    let mut out = String::with_capacity(tag.len());
    let mut signs = tag.chars();
    while let Some(c) = signs.next() {
        match c {
            '_' => match signs.next() {
                Some('.') => out.push('/'),
                Some('p') => out.push('+'),
                Some('_') => out.push('_'),
                _ => return Meaning::Foreign,
            },
            c => out.push(c),
        }
    }
    Meaning::Object(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        let hex = "0a".repeat(32);
        let names = [
            format!("placements/0a/{hex}.json"),
            format!("meta/0a/{hex}.erofs.zst"),
            "index.json".to_owned(),
            "tags/base/a+b_c.d-e__/1_p_h.json".to_owned(),
            "_/h".to_owned(),
        ];
        for name in names {
            let tag = tag(&name);
            assert!(tag.len() <= 128);
            assert!(
                tag.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)),
                "{tag}"
            );
            assert!(
                !tag.starts_with(['.', '-']) && !tag.starts_with(HASHED),
                "{tag}"
            );
            assert_eq!(meaning(&tag), Meaning::Object(name));
        }
        let long = format!("tags/base/{}/{}.json", "n".repeat(128), "v".repeat(128));
        for name in [long.as_str(), "", ".x", "-x", "a b", "ä"] {
            let tag = tag(name);
            assert_eq!(tag.len(), 66, "{name}");
            assert_eq!(meaning(&tag), Meaning::Hashed);
        }
        assert_eq!(meaning("a_b"), Meaning::Foreign);
        assert_eq!(meaning("a_"), Meaning::Foreign);
    }
}
