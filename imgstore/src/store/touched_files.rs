//! A trace in words: which files a start reads, in the order of first reads.

use std::collections::BTreeMap;

use super::layer::{self, LayerError};
use super::reader::{LayerReader, ReaderError};
use crate::build::hot;
use crate::format::FormatError;
use crate::format::erofs::extents::{ChunkIndex, chunk_index};
use crate::format::trace::{Blocks, segments_of};
use crate::ids::{BLOCK_SIZE, Digest, to_u64};
use crate::origin::Origin;
use crate::tree::{InodeId, Kind};

/// A file that a trace touches.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TouchedFile {
    /// Its first name in the layer; bytes that are no text are escaped.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of its blocks that are read.
    pub bytes_read: u64,
}

/// Why a trace cannot be put into words.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TouchedError {
    /// The layer cannot be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Its metadata cannot be read.
    #[error("layer `{layer}`: {source}")]
    Reader {
        /// The layer.
        layer: Digest,
        /// What is wrong.
        #[source]
        source: ReaderError,
    },
    /// The trace does not fit it.
    #[error("layer `{layer}`: {source}")]
    Format {
        /// The layer.
        layer: Digest,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
}

/// The files of a layer that `runs` touch.
///
/// # Errors
/// [`TouchedError`] when the layer is missing or damaged, or the trace is not of it.
pub fn touched_files(
    origin: &dyn Origin,
    layer: &Digest,
    runs: &[Blocks],
) -> Result<Vec<TouchedFile>, TouchedError> {
    let of_format = |source| TouchedError::Format {
        layer: *layer,
        source,
    };
    let of_reader = |source| TouchedError::Reader {
        layer: *layer,
        source,
    };
    let manifest = layer::read_manifest(origin, layer)?;
    segments_of(&manifest, runs).map_err(of_format)?;
    let meta = layer::read_meta(origin, &manifest)?;
    let none = |_: usize| Err("no data is read".to_owned());
    let reader = LayerReader::open(&meta, &manifest, &none).map_err(of_reader)?;
    let tree = reader.tree().map_err(of_reader)?;
    let mut paths: Vec<String> = Vec::new();
    let mut files: Vec<(InodeId, ChunkIndex)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (path, id) in tree.tree.walk() {
        if matches!(tree.tree.inode(id).kind, Kind::File(_))
            && seen.insert(id)
            && let Some(nid) = tree.nid(id)
        {
            files.push((id, chunk_index(&meta, nid).map_err(of_format)?));
            paths.push(path.escape_ascii().to_string());
        }
    }
    let first = u32::try_from(manifest.meta.size / BLOCK_SIZE).unwrap_or(u32::MAX);
    let mut by_rank = BTreeMap::new();
    for (number, touched) in hot::touched(&files, runs, first) {
        let (Some(path), Some((_, index))) = (paths.get(number), files.get(number)) else {
            continue;
        };
        let file = TouchedFile {
            path: path.clone(),
            bytes: index.size,
            bytes_read: to_u64(touched.len()) * BLOCK_SIZE,
        };
        by_rank.insert((touched.values().min().copied(), number), file);
    }
    Ok(by_rank.into_values().collect())
}
