//! A layer's metadata image on disk, verified at every read.
//!
//! The whole file is hashed when the layer is added, and must have the manifest's digest. In the same pass every
//! 64 KiB block gets a digest of its own, kept in memory (32 bytes each): a later read verifies the blocks it touches, so a
//! bit that flips on disk after the start is an error and never a wrong inode.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use imgstore::format::manifest::Blob;
use imgstore::ids::{Digest, to_u64};

/// Bytes that are verified together.
const BLOCK_BYTES: usize = 64 << 10;

/// Why metadata cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetaError {
    #[error("cannot read metadata image `{path}`: {source}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("metadata image `{path}` is damaged: expected {expected}, found {found}")]
    Damaged {
        path: PathBuf,
        expected: String,
        found: String,
    },
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct VerifiedMeta {
    file: File,
    path: PathBuf,
    len: u64,
    blocks: Vec<Digest>,
}

impl VerifiedMeta {
    /// Opens the file and verifies all of it.
    ///
    /// # Errors
    /// [`MetaError::Damaged`] when it is not the image that `blob` names.
    pub(crate) fn open(path: &Path, blob: &Blob) -> Result<Self, MetaError> {
        let io = |source| MetaError::Io {
            path: path.to_owned(),
            source,
        };
        let damaged = |expected: String, found: String| MetaError::Damaged {
            path: path.to_owned(),
            expected,
            found,
        };
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        if len != blob.size {
            return Err(damaged(
                format!("{} bytes", blob.size),
                format!("{len} bytes"),
            ));
        }
        let mut whole = blake3::Hasher::new();
        let mut blocks = Vec::new();
        let mut buffer = vec![0; BLOCK_BYTES];
        let mut at = 0;
        while at < len {
            let step = usize::try_from(len - at).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
            let block = buffer.get_mut(..step).unwrap_or_default();
            file.read_exact_at(block, at).map_err(io)?;
            whole.update(block);
            blocks.push(Digest::of(block));
            at += to_u64(step);
        }
        let found = Digest::from(whole.finalize());
        if found != blob.digest {
            return Err(damaged(blob.digest.to_hex(), found.to_hex()));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            len,
            blocks,
        })
    }

    /// Bytes.
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Appends `len` verified bytes from `offset`, which lie inside the image.
    ///
    /// # Errors
    /// [`MetaError::Damaged`] names the block; nothing was appended then.
    pub(crate) fn read(&self, offset: u64, len: u64, out: &mut Vec<u8>) -> Result<(), MetaError> {
        let block_bytes = to_u64(BLOCK_BYTES);
        let end = offset.saturating_add(len).min(self.len);
        let before = out.len();
        let mut at = offset;
        let mut block = Vec::new();
        while at < end {
            let start = at - at % block_bytes;
            let stop = (start + block_bytes).min(self.len);
            block.resize(usize::try_from(stop - start).unwrap_or(0), 0);
            let read = self
                .file
                .read_exact_at(&mut block, start)
                .map_err(|source| MetaError::Io {
                    path: self.path.clone(),
                    source,
                })
                .and_then(|()| self.verify(start, &block));
            if let Err(error) = read {
                out.truncate(before);
                return Err(error);
            }
            let from = usize::try_from(at - start).unwrap_or(usize::MAX);
            let to = usize::try_from(end.min(stop) - start).unwrap_or(0);
            out.extend_from_slice(block.get(from..to).unwrap_or_default());
            at = stop;
        }
        Ok(())
    }

    fn verify(&self, start: u64, block: &[u8]) -> Result<(), MetaError> {
        let index = usize::try_from(start / to_u64(BLOCK_BYTES)).unwrap_or(usize::MAX);
        let found = Digest::of(block);
        match self.blocks.get(index) {
            Some(expected) if *expected == found => Ok(()),
            expected => Err(MetaError::Damaged {
                path: self.path.clone(),
                expected: format!("{expected:?} at offset {start}"),
                found: found.to_hex(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(len: usize) -> (tempfile::NamedTempFile, Vec<u8>, Blob) {
        let bytes: Vec<u8> = (0..251).cycle().take(len).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let blob = Blob {
            digest: Digest::of(&bytes),
            size: to_u64(len),
        };
        (file, bytes, blob)
    }

    #[test]
    fn any_piece_reads_back() {
        let (file, bytes, blob) = image(3 * BLOCK_BYTES + 4096);
        let meta = VerifiedMeta::open(file.path(), &blob).unwrap();
        assert_eq!(meta.len(), blob.size);
        for (offset, len) in [(0, 1), (65_535, 2), (4096, 131_072), (196_608, 9000)] {
            let mut out = Vec::new();
            meta.read(offset, len, &mut out).unwrap();
            let from = usize::try_from(offset).unwrap();
            let to = (from + usize::try_from(len).unwrap()).min(bytes.len());
            assert!(out == bytes[from..to], "{offset} {len}");
        }
    }

    #[test]
    fn damage_before_and_after_opening_is_found() {
        let (file, mut bytes, blob) = image(2 * BLOCK_BYTES);
        let meta = VerifiedMeta::open(file.path(), &blob).unwrap();
        bytes[BLOCK_BYTES + 5] ^= 1;
        std::fs::write(file.path(), &bytes).unwrap();
        let mut out = vec![7];
        let error = meta.read(BLOCK_BYTES as u64 - 1, 2, &mut out).unwrap_err();
        assert!(matches!(error, MetaError::Damaged { .. }));
        assert_eq!(out, [7]);
        meta.read(0, 4096, &mut out).unwrap();
        assert!(VerifiedMeta::open(file.path(), &blob).is_err());
        std::fs::write(file.path(), b"short").unwrap();
        assert!(VerifiedMeta::open(file.path(), &blob).is_err());
    }
}
