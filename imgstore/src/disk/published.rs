//! A disk's layer as a published layer: a tree of two files, `disk.lsmt` and `disk.json`, which names what lies below it.

use serde::{Deserialize, Serialize};

use super::DiskError;
use super::stack::LAYERS_MAX;
use super::state::{Form, Lower};
use crate::format::FormatError;
use crate::ids::Digest;

/// Format of `disk.json`.
const FORMAT: u32 = 1;

/// A layer below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// The published layer.
    pub layer: Digest,
    /// What is read of it.
    pub form: Form,
}

/// `disk.json` in the tree of a published disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedDisk {
    /// 1.
    pub format: u32,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Layers below this one, bottom to top.
    pub parents: Vec<Parent>,
}

impl PublishedDisk {
    /// Its name in the tree.
    pub const FILE: &str = "disk.json";
    /// Longest file that is read.
    pub const BYTES_MAX: u64 = 64 << 10;

    /// Of a disk over these layers, of which those that are published are named.
    pub fn new(virtual_size: u64, below: &[Lower]) -> Self {
        let parent = |lower: &Lower| match lower {
            Lower::Published { layer, form } => Some(Parent {
                layer: *layer,
                form: *form,
            }),
            Lower::Lsmt(_) | Lower::Raw(_) | Lower::Pair(_) => None,
        };
        Self {
            format: FORMAT,
            virtual_size,
            parents: below.iter().filter_map(parent).collect(),
        }
    }

    /// The file's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and digests are JSON")
    }

    /// Reads the file; `name` is for messages.
    ///
    /// # Errors
    /// When it is of another format, names too many layers, or an image that is not the lowest.
    pub fn parse(bytes: &[u8], name: &str) -> Result<Self, DiskError> {
        let wrong = |expected: &str, found: String| {
            DiskError::damaged(name)(FormatError::new(Self::FILE, expected, found))
        };
        let parsed: Self = serde_json::from_slice(bytes)
            .map_err(|error| wrong("a published disk of format 1", error.to_string()))?;
        if parsed.format != FORMAT {
            return Err(wrong("format 1", parsed.format.to_string()));
        }
        if parsed.parents.len() + 1 >= LAYERS_MAX {
            return Err(wrong(
                "fewer than 254 layers",
                parsed.parents.len().to_string(),
            ));
        }
        let mut above = parsed.parents.iter().skip(1);
        if above.any(|parent| parent.form == Form::Image) {
            return Err(wrong(
                "an image as the lowest layer only",
                "one above".to_owned(),
            ));
        }
        Ok(parsed)
    }
}
