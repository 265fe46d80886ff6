//! The flat address space: metadata first, then every segment in order. What FUSE and ublk serve as one image.
//!
//! Pure arithmetic over a manifest. The device table's `uniaddr` fields hold the same numbers, so a kernel that mounts
//! the image without `device=` finds segment n where [`FlatLayout`] puts it (`docs/format.md`).

use super::manifest::Manifest;

/// What a piece of a flat range is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// `len` bytes of the metadata image from `offset`.
    Meta {
        /// Offset in the metadata image.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// `len` bytes of segment `index` from `offset`.
    Segment {
        /// Index into the manifest's segments.
        index: usize,
        /// Offset in the plain segment.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Where every segment starts in the flat image.
#[derive(Debug, Clone)]
pub struct FlatLayout {
    meta_len: u64,
    /// Start of segment n, and one more entry: the end of the image.
    starts: Vec<u64>,
}

impl FlatLayout {
    /// The layout of a checked manifest.
    pub fn new(manifest: &Manifest) -> Self {
        let mut starts = Vec::with_capacity(manifest.segments.len() + 1);
        let mut at = manifest.meta.size;
        starts.push(at);
        for segment in &manifest.segments {
            at += segment.len();
            starts.push(at);
        }
        Self {
            meta_len: manifest.meta.size,
            starts,
        }
    }

    /// Bytes of the flat image.
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(self.meta_len)
    }

    /// Never true: there is always metadata.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First byte of segment `index` in the flat image.
    pub fn segment_start(&self, index: usize) -> Option<u64> {
        self.starts.get(index).copied()
    }

    /// The pieces of `[offset, offset + len)`, cut off at the end of the image.
    pub fn pieces(&self, offset: u64, len: u64) -> Vec<Piece> {
        let end = offset.saturating_add(len).min(self.len());
        let mut at = offset;
        let mut out = Vec::new();
        if at < end && at < self.meta_len {
            let stop = end.min(self.meta_len);
            out.push(Piece::Meta {
                offset: at,
                len: stop - at,
            });
            at = stop;
        }
        let mut index = self
            .starts
            .partition_point(|start| *start <= at)
            .saturating_sub(1);
        while at < end {
            let (Some(start), Some(next)) = (self.starts.get(index), self.starts.get(index + 1))
            else {
                break;
            };
            let stop = end.min(*next);
            out.push(Piece::Segment {
                index,
                offset: at - start,
                len: stop - at,
            });
            at = stop;
            index += 1;
        }
        out
    }
}
