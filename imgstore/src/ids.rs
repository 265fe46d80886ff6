//! Names of things: digests, axes, tags and references to layers.
//!
//! Everything that crosses a boundary (origin, socket, command line) is parsed into one of these types
//! once; the rest of the code never sees a raw string.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes in a file system block; every chunk and segment length is a multiple of it.
pub const BLOCK_SIZE: u64 = 4096;

/// A BLAKE3 digest of some bytes (32 bytes; written as 64 lower-case hex digits).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Wraps 32 raw digest bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 raw bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// 64 lower-case hex digits.
    pub fn to_hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_hex().get(..12).unwrap_or_default())
    }
}

impl FromStr for Digest {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let lower =
            text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match blake3::Hash::from_hex(text) {
            Ok(hash) if lower => Ok(hash.into()),
            _ => Err(IdError::Digest(text.chars().take(80).collect())),
        }
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// Not 64 lower-case hex digits.
    #[error("`{0}` is not a digest: expected 64 lower-case hex digits")]
    Digest(String),
    /// Not one of the three axes.
    #[error("`{0}` is not an axis: expected `base`, `workspace` or `toolkit`")]
    Axis(String),
    /// A name or version with characters that are not allowed.
    #[error(
        "`{0}` cannot be a {1}: expected 1 to 128 of a-z A-Z 0-9 . _ + - and first a letter or digit"
    )]
    Part(String, &'static str),
    /// Neither a tag nor a digest.
    #[error(
        "`{0}` is not a layer: expected `axis/name:version` (as in `base/python:3.11`) or a digest of 64 hex digits"
    )]
    Reference(String),
}

/// One of the three independent lines of versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// The operating system and language runtime.
    Base,
    /// The task's source tree.
    Workspace,
    /// Tools placed on top.
    Toolkit,
}

impl Axis {
    /// All axes, lowest in a composition first.
    pub const ALL: [Self; 3] = [Self::Base, Self::Workspace, Self::Toolkit];

    /// `base`, `workspace` or `toolkit`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Workspace => "workspace",
            Self::Toolkit => "toolkit",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Axis {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL
            .into_iter()
            .find(|axis| axis.as_str() == text)
            .ok_or_else(|| IdError::Axis(text.chars().take(80).collect()))
    }
}

/// The mutable name of a layer: `axis/name:version`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TagName {
    axis: Axis,
    name: String,
    version: String,
}

fn check_part(text: &str, what: &'static str) -> Result<(), IdError> {
    let first = text
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric());
    let rest = text
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"._+-".contains(&b));
    if first && rest && text.len() <= 128 {
        Ok(())
    } else {
        Err(IdError::Part(text.chars().take(140).collect(), what))
    }
}

impl TagName {
    /// Checks and joins the parts.
    ///
    /// # Errors
    /// [`IdError::Part`] when name or version could not be a file name on every origin.
    pub fn new(axis: Axis, name: &str, version: &str) -> Result<Self, IdError> {
        check_part(name, "layer name")?;
        check_part(version, "version")?;
        Ok(Self {
            axis,
            name: name.to_owned(),
            version: version.to_owned(),
        })
    }

    /// The axis.
    pub const fn axis(&self) -> Axis {
        self.axis
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version.
    pub fn version(&self) -> &str {
        &self.version
    }
}

impl fmt::Display for TagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.axis, self.name, self.version)
    }
}

impl FromStr for TagName {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let bad = || IdError::Reference(text.chars().take(200).collect());
        let (axis, rest) = text.split_once('/').ok_or_else(bad)?;
        let (name, version) = rest.split_once(':').ok_or_else(bad)?;
        Self::new(axis.parse()?, name, version)
    }
}

/// What a user writes to name a layer: a tag or a digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LayerRef {
    /// A tag, resolved on the origin.
    Tag(TagName),
    /// The layer itself.
    Layer(Digest),
}

impl fmt::Display for LayerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => tag.fmt(f),
            Self::Layer(digest) => digest.fmt(f),
        }
    }
}

impl FromStr for LayerRef {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        if text.contains('/') {
            text.parse().map(Self::Tag)
        } else {
            match text.parse() {
                Ok(digest) => Ok(Self::Layer(digest)),
                Err(_) => Err(IdError::Reference(text.chars().take(200).collect())),
            }
        }
    }
}

/// `n` as an index into memory. Only for values already bounded by the length of something in memory.
pub fn to_usize(n: u64) -> usize {
    usize::try_from(n).expect("a value bounded by memory fits usize")
}

/// A length in memory as a file offset.
pub fn to_u64(n: usize) -> u64 {
    u64::try_from(n).expect("usize fits u64 on every supported machine")
}

/// `n` rounded up to whole blocks; saturates at the last whole block.
pub const fn round_up_to_block(n: u64) -> u64 {
    match n.checked_next_multiple_of(BLOCK_SIZE) {
        Some(rounded) => rounded,
        None => u64::MAX - (BLOCK_SIZE - 1),
    }
}
