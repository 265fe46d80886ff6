//! A layer as a tar: its tree from the metadata image, its contents segment by segment from the origin, all verified.

use std::cell::Cell;
use std::io::Write;

use super::layer::{self, Layer, LayerError};
use super::reader::{LayerReader, ReaderError};
use super::tar_export::{
    ContentError, ExportError, ExportOptions, ExportReport, OpenFile, write_tar,
};
use crate::format::erofs;
use crate::ids::{Digest, to_u64};
use crate::origin::Origin;
use crate::tree::InodeId;

/// Why a layer could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerExportError {
    /// The layer cannot be loaded.
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
    /// The metadata does not belong to the manifest.
    #[error("layer `{layer}`: {source}")]
    Format {
        /// The layer.
        layer: Digest,
        /// What is wrong.
        #[source]
        source: crate::format::FormatError,
    },
    /// The tar could not be written, or a content read.
    #[error(transparent)]
    Export(#[from] ExportError),
}

/// Writes `layer` to `out`. `progress` is called with file bytes done and in all.
///
/// # Errors
/// As [`LayerExportError`] says; what was written so far is not a whole tar then.
pub fn export(
    origin: &dyn Origin,
    layer: &Digest,
    out: &mut dyn Write,
    options: &ExportOptions,
    progress: &dyn Fn(u64, u64),
) -> Result<ExportReport, LayerExportError> {
    let layer = layer::open(origin, layer)?;
    let meta = layer::read_meta(origin, &layer.manifest)?;
    erofs::check::check(&meta, &layer.manifest).map_err(|source| LayerExportError::Format {
        layer: layer.digest,
        source,
    })?;
    let reader_error = |source| LayerExportError::Reader {
        layer: layer.digest,
        source,
    };
    let read_segment = |index: usize| segment(origin, &layer, index);
    let reader = LayerReader::open(&meta, &layer.manifest, &read_segment).map_err(reader_error)?;
    let tree = reader.tree().map_err(reader_error)?;
    let done = Cell::new(0);
    let total = layer.manifest.totals.file_bytes;
    let open = |id: InodeId| -> Result<OpenFile<'_>, ContentError> {
        let nid = tree.nid(id).ok_or("no regular file")?;
        let (reader, tree, done) = (&reader, &tree, &done);
        let read_at = Box::new(move |offset: u64, buf: &mut [u8]| {
            reader.read_exact_at(tree, id, buf, offset)?;
            done.set(done.get() + to_u64(buf.len()));
            progress(done.get(), total);
            Ok(())
        });
        Ok(OpenFile {
            runs: erofs::extents::data_runs(&meta, nid)?,
            read_at,
        })
    };
    Ok(write_tar(&tree.tree, &open, out, options)?)
}

fn segment(origin: &dyn Origin, layer: &Layer, index: usize) -> Result<Vec<u8>, String> {
    layer::read_segment(origin, layer, index).map_err(|e| e.to_string())
}
