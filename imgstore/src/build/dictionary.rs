//! Layers that a build may refer to by chunk (`--dict`).

use std::collections::HashMap;

use super::error::BuildError;
use crate::format::chunk_table;
use crate::format::names;
use crate::ids::{BLOCK_SIZE, Digest};
use crate::origin::Origin;
use crate::store::layer::{self, Layer};

/// A chunk that a dictionary has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DictChunk {
    /// Index into [`Dictionary::layers`].
    pub layer: usize,
    /// Segment of that layer.
    pub segment: usize,
    /// First block in the segment.
    pub block: u32,
    /// Blocks.
    pub blocks: u32,
}

/// The chunks of all dictionaries; an earlier dictionary wins.
#[derive(Debug, Default)]
pub struct Dictionary {
    /// The layers in the order given.
    pub layers: Vec<Layer>,
    /// Chunk to place.
    pub chunks: HashMap<Digest, DictChunk>,
}

impl Dictionary {
    /// Loads the chunk tables of `layers`.
    ///
    /// # Errors
    /// A dictionary that is missing or damaged is an error: leaving it out would give the layer another name.
    pub fn load(origin: &dyn Origin, layers: &[Digest]) -> Result<Self, BuildError> {
        let mut out = Self::default();
        for digest in layers {
            let layer = layer::open(origin, digest)?;
            let blob = layer.manifest.chunks;
            let table =
                layer::read_frame(origin, &names::chunks(&blob.digest), blob.digest, blob.size)?;
            let wrong = |source| BuildError::Dictionary {
                layer: digest.to_hex(),
                source,
            };
            for r in chunk_table::parse(&table).map_err(wrong)? {
                let segment = layer.manifest.segments.get(usize::from(r.segment));
                let end = (u64::from(r.block) + u64::from(r.blocks)) * BLOCK_SIZE;
                if segment.is_none_or(|s| end > s.len()) || r.blocks == 0 {
                    let found = format!("{r:?}");
                    return Err(wrong(crate::format::FormatError::new(
                        "chunk record",
                        "a place inside a segment",
                        found,
                    )));
                }
                out.chunks.entry(r.digest).or_insert(DictChunk {
                    layer: out.layers.len(),
                    segment: usize::from(r.segment),
                    block: u32::from(r.block),
                    blocks: u32::from(r.blocks),
                });
            }
            out.layers.push(layer);
        }
        Ok(out)
    }
}
