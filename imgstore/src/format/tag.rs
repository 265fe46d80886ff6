//! Tags and the index: the mutable, tiny objects that give layers names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::manifest::FORMAT;
use crate::ids::{Digest, TagName};

/// Largest tag a reader accepts, in bytes.
pub const TAG_BYTES_MAX: u64 = 1 << 20;
/// Largest index a reader accepts, in bytes (some 500,000 tags).
pub const INDEX_BYTES_MAX: u64 = 64 << 20;

/// What a tag says: the layer, and all that is known of it besides its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// How the layer was built: tool, source kind, dictionaries. Free text for people.
    pub build: BTreeMap<String, String>,
    /// Whether the layer had a bundle when the tag was written.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bundled: bool,
    /// Seconds since 1970 when the tag was written.
    pub created: u64,
    /// [`FORMAT`].
    pub format: u32,
    /// The user's labels, and the image's configuration where the source had one.
    pub labels: BTreeMap<String, String>,
    /// The layer.
    pub layer: Digest,
    /// The tag's own name, so that a misplaced object is noticed.
    pub tag: String,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde wants"
)]
const fn is_false(value: &bool) -> bool {
    !*value
}

impl Tag {
    /// The bytes to store.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a tag has only strings and integers")
    }

    /// Parses a tag that was stored under `name`.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(bytes: &[u8], name: &TagName) -> Result<Self, FormatError> {
        let tag: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("tag", "JSON of format version 1", e))?;
        if tag.format != FORMAT {
            return Err(FormatError::new("tag field `format`", "1", tag.format));
        }
        if tag.tag != name.to_string() {
            return Err(FormatError::new(
                "tag field `tag`",
                name.to_string(),
                tag.tag,
            ));
        }
        Ok(tag)
    }
}

/// All tags of an origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// [`FORMAT`].
    pub format: u32,
    /// Tag to layer.
    pub tags: BTreeMap<String, Digest>,
}

impl Index {
    /// The bytes to store.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("an index has only strings and integers")
    }

    /// Parses an index.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let index: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("index", "JSON of format version 1", e))?;
        if index.format != FORMAT {
            return Err(FormatError::new("index field `format`", "1", index.format));
        }
        Ok(index)
    }
}
