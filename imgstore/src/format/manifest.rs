//! The manifest: what a layer contains, and nothing about where or when.
//!
//! Canonical JSON: one line, fields in byte order, integers only, no optional white space; the layer's name is the
//! BLAKE3 of these bytes. A reader checks the digest first, so whatever it then parses is what the writer wrote.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::chunk_table::TABLE_BYTES_MAX;
use crate::ids::{BLOCK_SIZE, Digest};

/// The format version this code writes and reads.
pub const FORMAT: u32 = 1;
/// Most segments a layer can have: the device table has 16-bit ids (EROFS `extra_devices`).
pub const SEGMENTS_MAX: usize = 65_535;
/// Longest segment in bytes.
pub const SEGMENT_BYTES_MAX: u64 = 4 << 20;
/// Largest metadata image a reader accepts (bytes): it is decompressed in memory. 1 GiB describes some 8 million inodes.
pub const META_BYTES_MAX: u64 = 1 << 30;
/// Largest manifest a reader accepts: 65,535 segments of 80 bytes and the rest.
pub const MANIFEST_BYTES_MAX: u64 = 8 << 20;
/// Incompatible features this code knows (none yet).
const KNOWN_INCOMPAT: [&str; 0] = [];
/// The compatible feature that says how many of the first segments hold what a start reads first: `hot:N`.
const HOT: &str = "hot:";

/// An object's digest and plain size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// BLAKE3 of the plain bytes.
    pub digest: Digest,
    /// Plain bytes.
    pub size: u64,
}

/// One segment: its digest and plain length in bytes (a multiple of 4,096). Written as `["hex", len]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment(pub Digest, pub u64);

impl Segment {
    /// BLAKE3 of the plain bytes.
    pub const fn digest(&self) -> Digest {
        self.0
    }

    /// Plain length in bytes.
    pub const fn len(&self) -> u64 {
        self.1
    }

    /// Never true in a checked manifest.
    pub const fn is_empty(&self) -> bool {
        self.1 == 0
    }
}

/// Sums over the tree, for people and progress bars.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Totals {
    /// Bytes of all regular files, holes included, hard links once.
    pub file_bytes: u64,
    /// Regular files.
    pub files: u64,
    /// Inodes of all types.
    pub inodes: u64,
}

/// A layer's manifest. Field order is byte order: the canonical form depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The chunk table, by which other layers refer to pieces of this one.
    pub chunks: Blob,
    /// Features a reader may ignore.
    pub features_compat: Vec<String>,
    /// Features a reader must know.
    pub features_incompat: Vec<String>,
    /// [`FORMAT`].
    pub format: u32,
    /// The EROFS metadata image.
    pub meta: Blob,
    /// Segments in device-table order: device id n is entry n-1.
    pub segments: Vec<Segment>,
    /// Sums.
    pub totals: Totals,
}

impl Manifest {
    /// The canonical bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest has only strings and integers")
    }

    /// The layer's name.
    pub fn layer(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// The entry of `features_compat` that says that the first `segments` segments are hot.
    pub fn hot_feature(segments: usize) -> String {
        format!("{HOT}{segments}")
    }

    /// How many of the first segments hold, in order, what a start reads first (written by `dsec optimize`); 0 where nothing
    /// is known of it. A number that cannot be is no error: a reader may ignore the feature.
    pub fn hot_segments(&self) -> usize {
        let number = |f: &String| {
            let n: usize = f.strip_prefix(HOT)?.parse().ok()?;
            (n <= self.segments.len() && Self::hot_feature(n) == *f).then_some(n)
        };
        self.features_compat.iter().find_map(number).unwrap_or(0)
    }

    /// Plain bytes of all segments.
    pub fn segment_bytes(&self) -> u64 {
        self.segments.iter().map(Segment::len).sum()
    }

    /// Parses and checks bytes whose digest must be `layer`.
    ///
    /// # Errors
    /// Says which field is wrong: a digest that differs, an unknown version or incompatible feature, a length out of bounds.
    pub fn parse(bytes: &[u8], layer: &Digest) -> Result<Self, FormatError> {
        let found = Digest::of(bytes);
        if found != *layer {
            return Err(FormatError::new("manifest digest", layer.to_hex(), found));
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("manifest", "JSON of format version 1", e))?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), FormatError> {
        if self.format != FORMAT {
            return Err(FormatError::new(
                "manifest field `format`",
                "1 (use a newer dsec)",
                self.format,
            ));
        }
        if let Some(unknown) = self
            .features_incompat
            .iter()
            .find(|f| !KNOWN_INCOMPAT.contains(&f.as_str()))
        {
            let short: String = unknown.chars().take(80).collect();
            return Err(FormatError::new(
                "manifest field `features_incompat`",
                "known features only (use a newer dsec)",
                short,
            ));
        }
        if self.segments.len() > SEGMENTS_MAX {
            return Err(FormatError::new(
                "number of segments",
                "at most 65535",
                self.segments.len(),
            ));
        }
        let whole = |n: u64| n > 0 && n.is_multiple_of(BLOCK_SIZE);
        if !whole(self.meta.size) || self.meta.size > META_BYTES_MAX {
            return Err(FormatError::new(
                "metadata size",
                "a multiple of 4096 up to 1 GiB",
                self.meta.size,
            ));
        }
        if self.chunks.size > TABLE_BYTES_MAX {
            return Err(FormatError::new(
                "chunk table size",
                format!("at most {TABLE_BYTES_MAX}"),
                self.chunks.size,
            ));
        }
        for (i, segment) in self.segments.iter().enumerate() {
            if !whole(segment.len()) || segment.len() > SEGMENT_BYTES_MAX {
                return Err(FormatError::new(
                    format!("length of segment {i}"),
                    "a multiple of 4096 up to 4 MiB",
                    segment.len(),
                ));
            }
        }
        Ok(())
    }
}
