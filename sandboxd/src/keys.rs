//! Who may ask: API keys, and the project that each stands for.
//!
//! The daemon knows hashes only: a file that is read by the wrong people gives no key away. Keys are random (`dsec sandbox
//! new-key` makes 160 bits), so one round of SHA-256 is enough; there is nothing to guess.

use std::fmt;
use std::path::Path;

use axum::http::HeaderMap;
use sha2::{Digest as _, Sha256};

use crate::error::{ApiError, ErrorKind};

/// The project of whoever asks a daemon without keys.
pub(crate) const EVERYBODY: &str = "default";
/// Most keys of one file.
const KEYS_MAX: usize = 10_000;

/// One key.
struct Key {
    hash: [u8; 32],
    project: String,
}

/// See the head of this file.
pub struct Keys {
    /// `None`: nobody is asked for a key.
    known: Option<Vec<Key>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.known {
            None => f.write_str("Keys(none needed)"),
            Some(known) => write!(f, "Keys({})", known.len()),
        }
    }
}

/// Whether two hashes or tokens are the same, in a time that does not depend on where they differ.
pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b));
    // Kept from being turned into an early end.
    a.len() == b.len() && std::hint::black_box(differ) == 0
}

impl Keys {
    /// Whoever can connect may do everything.
    pub fn open() -> Self {
        Self { known: None }
    }

    /// Reads a file of lines `HASH PROJECT`, with the SHA-256 of a key in hexadecimal; empty lines and those that begin with `#`
    /// say nothing. A file without keys lets nobody in.
    ///
    /// # Errors
    /// When it cannot be read or a line is not of that form.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("cannot read `{}`: {e}", path.display()))?;
        Self::parse(&text).map_err(|e| format!("`{}` {e}", path.display()))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut known: Vec<Key> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            // What is wrong is not shown: it may be a key.
            let wrong = || {
                format!(
                    "line {number}: `HASH PROJECT` is expected, with the 64 hexadecimal digits of the key's SHA-256 (`dsec sandbox new-key PROJECT` makes a key and its line)"
                )
            };
            let (hash, project) = line.split_once(char::is_whitespace).ok_or_else(wrong)?;
            let (hash, project) = (digest_of(hash).ok_or_else(wrong)?, project.trim());
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if project.is_empty() || !project.chars().all(plain) {
                return Err(format!(
                    "line {number}: a project's name is made of letters, digits, `-`, `_` and `.`"
                ));
            }
            if known.iter().any(|key| key.hash == hash) {
                return Err(format!("line {number}: this key was given above"));
            }
            if known.len() == KEYS_MAX {
                return Err(format!("has more than {KEYS_MAX} keys"));
            }
            let project = project.to_owned();
            known.push(Key { hash, project });
        }
        Ok(Self { known: Some(known) })
    }

    /// Whether anybody may ask.
    pub fn are_open(&self) -> bool {
        self.known.is_none()
    }

    /// The project that a key stands for.
    pub(crate) fn project(&self, key: &str) -> Option<&str> {
        let hash = Sha256::digest(key.as_bytes());
        let mut found = None;
        // All of them: how long it takes does not tell which one it was.
        for known in self.known.iter().flatten() {
            if same(&known.hash, &hash) {
                found = Some(known.project.as_str());
            }
        }
        found
    }

    /// The project of a request: `Authorization: Bearer KEY` or `X-API-Key: KEY`.
    ///
    /// # Errors
    /// `Unauthenticated`.
    pub(crate) fn project_of(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        if self.are_open() {
            return Ok(EVERYBODY.to_owned());
        }
        let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
        let bearer = header("authorization").and_then(|v| v.strip_prefix("Bearer "));
        let key = bearer.or_else(|| header("x-api-key"));
        let project = key.and_then(|key| self.project(key));
        let message = if key.is_some() {
            "this API key is not known here"
        } else {
            "an API key is needed: `Authorization: Bearer KEY` or `X-API-Key: KEY` (clients read DSEC_API_KEY)"
        };
        let refused = || ApiError::new(ErrorKind::Unauthenticated, message);
        project.map(str::to_owned).ok_or_else(refused)
    }
}

fn digest_of(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect::<Option<_>>()?;
    let mut digest = [0; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = pair else { return None };
        *byte = high << 4 | low;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `abc` (FIPS 180-2, appendix B.1).
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    /// Mutations: `same` that compares only the first bytes lets the key of one more bit in; an empty file read as "none
    /// needed" lets everybody in.
    #[test]
    fn keys_are_known_by_their_hash_and_an_empty_file_lets_nobody_in() {
        let keys = Keys::parse(&format!("# people\n\n{ABC}  blue-team\n")).unwrap();
        assert_eq!(keys.project("abc"), Some("blue-team"));
        assert_eq!(keys.project(ABC), None);
        assert_eq!(keys.project(""), None);
        let mut near = digest_of(ABC).unwrap();
        near[31] ^= 1;
        assert!(!same(&near, &digest_of(ABC).unwrap()));
        assert!(!same(b"ab", b"abc") && !same(b"abc", b"") && same(b"", b""));
        let empty = Keys::parse("# nobody\n").unwrap();
        assert!(!empty.are_open());
        assert!(empty.project_of(&HeaderMap::new()).is_err());
        assert_eq!(format!("{keys:?}"), "Keys(1)");
    }

    #[test]
    fn what_is_no_list_of_hashes_is_refused_without_showing_it() {
        for bad in [
            "my-secret-key project",
            ABC,
            &format!("{ABC} a b"),
            &format!("{}g x", &ABC[1..]),
        ] {
            let refused = Keys::parse(bad).map(|_| ()).unwrap_err();
            assert!(refused.starts_with("line 1: "), "{refused}");
            assert!(
                !refused.contains("secret") && !refused.contains("ba7816"),
                "{refused}"
            );
        }
        let twice = Keys::parse(&format!("{ABC} a\n{ABC} b"))
            .map(|_| ())
            .unwrap_err();
        assert_eq!(twice, "line 2: this key was given above");
    }
}
