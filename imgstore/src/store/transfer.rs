//! Moving one object from an origin to another through a staging file, hashed on the way.
//!
//! Objects are fetched in ranges, a few at a time, and never held whole in memory: packs have up to 1 GiB, and so may
//! metadata images. What an object should be is known beforehand (its name is a digest), so nothing is published unverified.

use std::cell::RefCell;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;

use tempfile::NamedTempFile;

use super::runs::{RANGE_BYTES_MAX, THREADS, or_damaged};
use crate::build::BuildError;
use crate::format::frame::{check_claim, frame_len_max};
use crate::format::manifest::Blob;
use crate::ids::{Digest, to_u64, to_usize};
use crate::origin::{ByteRange, Created, Origin, OriginError};
use crate::process::Process;

/// A finished file in staging, and what is in it.
#[derive(Debug)]
pub(crate) struct StagedObject {
    pub(crate) file: NamedTempFile,
    pub(crate) size: u64,
    /// BLAKE3 of the file.
    pub(crate) digest: Digest,
}

/// Where files for `to` are staged, and what can go wrong there.
#[derive(Debug, Clone)]
pub(crate) struct Staging(PathBuf);

impl Staging {
    /// The folder, made if it is missing.
    ///
    /// # Errors
    /// [`BuildError::Staging`].
    pub(crate) fn of(to: &dyn Origin) -> Result<Self, BuildError> {
        let staging = Self(to.staging().unwrap_or_else(std::env::temp_dir));
        std::fs::create_dir_all(&staging.0).map_err(|e| staging.error(e))?;
        Ok(staging)
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.0.clone()
    }

    pub(crate) fn error(&self, source: io::Error) -> BuildError {
        BuildError::Staging {
            path: self.0.display().to_string(),
            source,
        }
    }

    pub(crate) fn file(&self) -> Result<NamedTempFile, BuildError> {
        tempfile::Builder::new()
            .prefix(&format!("{}copy-", Process::file_prefix()))
            // It becomes an object as it is: as readable as every other.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(&self.0)
            .map_err(|e| self.error(e))
    }
}

/// Calls `take` with all bytes of an object of `size` bytes, in order; `Ok(Err)` when it is missing or shorter.
///
/// # Errors
/// The first failure of the origin or of `take`.
pub(crate) fn stream<E: From<OriginError>>(
    from: &dyn Origin,
    object: &str,
    size: u64,
    take: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<Result<(), String>, E> {
    let ranges: Vec<ByteRange> = (0..size.div_ceil(RANGE_BYTES_MAX))
        .map(|n| n * RANGE_BYTES_MAX)
        .map(|start| ByteRange {
            start,
            len: RANGE_BYTES_MAX.min(size - start),
        })
        .collect();
    for batch in ranges.chunks(THREADS) {
        let fetched: Vec<_> = std::thread::scope(|scope| {
            let fetches: Vec<_> = batch
                .iter()
                .map(|range| scope.spawn(|| from.fetch(object, *range)))
                .collect();
            let join = |fetch: std::thread::ScopedJoinHandle<'_, _>| {
                fetch
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            fetches.into_iter().map(join).collect()
        });
        for bytes in fetched {
            match or_damaged(bytes)? {
                Ok(bytes) => take(&bytes)?,
                Err(what) => return Ok(Err(what)),
            }
        }
    }
    Ok(Ok(()))
}

/// Copies an object into staging.
///
/// # Errors
/// When the origin or staging fails. A missing or short object is `Ok(Err)` with what is wrong.
pub(crate) fn stage(
    from: &dyn Origin,
    object: &str,
    size: u64,
    staging: &Staging,
) -> Result<Result<StagedObject, String>, BuildError> {
    let mut file = staging.file()?;
    let mut hasher = blake3::Hasher::new();
    let streamed = stream::<BuildError>(from, object, size, &mut |bytes| {
        hasher.update(bytes);
        file.write_all(bytes).map_err(|e| staging.error(e))
    })?;
    Ok(streamed.map(|()| StagedObject {
        file,
        size,
        digest: hasher.finalize().into(),
    }))
}

/// Bytes of an object, read in ranges.
struct ObjectReader<'a> {
    origin: &'a dyn Origin,
    object: &'a str,
    size: u64,
    at: u64,
    buf: Vec<u8>,
    used: usize,
    failed: &'a RefCell<Option<OriginError>>,
}

impl Read for ObjectReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.used == self.buf.len() {
            let len = RANGE_BYTES_MAX.min(self.size - self.at);
            if len == 0 {
                return Ok(0);
            }
            let range = ByteRange {
                start: self.at,
                len,
            };
            self.buf = self.origin.fetch(self.object, range).map_err(|e| {
                let text = e.to_string();
                *self.failed.borrow_mut() = Some(e);
                io::Error::other(text)
            })?;
            self.at += len;
            self.used = 0;
        }
        let left = self.buf.get(self.used..).unwrap_or_default();
        let n = left.len().min(out.len());
        out.get_mut(..n)
            .unwrap_or_default()
            .copy_from_slice(left.get(..n).unwrap_or_default());
        self.used += n;
        Ok(n)
    }
}

/// Decompresses a frame from `reader` and says how it differs from `blob`. The window is bounded by the blob's size.
fn check_blob(reader: impl Read, blob: Blob) -> io::Result<Result<(), String>> {
    let mut decoder = zstd::stream::read::Decoder::new(reader)?.single_frame();
    // A frame may ask for a window as large as its content, and not for more.
    let window = 64 - blob.size.max(1).leading_zeros();
    decoder.window_log_max(window.clamp(10, 31))?;
    let mut hasher = blake3::Hasher::new();
    let mut plain = decoder.take(blob.size.saturating_add(1));
    let copied = io::copy(&mut plain, &mut HashWriter(&mut hasher))?;
    let found = Digest::from(hasher.finalize());
    Ok(if copied != blob.size {
        Err(format!(
            "plain bytes: expected {}, found {}",
            blob.size,
            if copied > blob.size {
                "more".to_owned()
            } else {
                copied.to_string()
            }
        ))
    } else if found != blob.digest {
        Err(format!(
            "digest of the plain bytes: expected {}, found {found}",
            blob.digest
        ))
    } else {
        Ok(())
    })
}

struct HashWriter<'a>(&'a mut blake3::Hasher);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.update(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether `object` on `origin` is one frame of exactly `blob`; `Ok(Err)` says how it is not.
///
/// # Errors
/// When the origin fails.
pub(crate) fn check_frame_object(
    origin: &dyn Origin,
    object: &str,
    blob: Blob,
) -> Result<Result<u64, String>, OriginError> {
    let size = match or_damaged(origin.size(object))? {
        Ok(size) => size,
        Err(what) => return Ok(Err(what)),
    };
    if size > frame_len_max(blob.size) {
        let max = frame_len_max(blob.size);
        return Ok(Err(format!(
            "stored bytes: expected at most {max}, found {size}"
        )));
    }
    if let Err(absurd) = check_claim(size, blob.size) {
        return Ok(Err(absurd.to_string()));
    }
    let failed = RefCell::new(None);
    let reader = ObjectReader {
        origin,
        object,
        size,
        at: 0,
        buf: Vec::new(),
        used: 0,
        failed: &failed,
    };
    let checked = check_blob(reader, blob);
    match failed.into_inner() {
        Some(error) => Ok(or_damaged(Err(error))?),
        None => Ok(checked
            .unwrap_or_else(|e| {
                Err(format!(
                    "zstd frame: expected {} plain bytes, found {e}",
                    blob.size
                ))
            })
            .map(|()| size)),
    }
}

/// Copies an object that is one frame of `blob` from `from` to `to`, where it is missing or damaged.
/// Gives the bytes written, 0 when it was right; `Ok(Err)` says what is wrong with the one on `from`.
///
/// # Errors
/// When an origin or staging fails.
pub(crate) fn copy_frame_object(
    from: &dyn Origin,
    to: &dyn Origin,
    (object, blob): (&str, Blob),
    staging: &Staging,
) -> Result<Result<u64, String>, BuildError> {
    if check_frame_object(to, object, blob)?.is_ok() {
        return Ok(Ok(0));
    }
    let size = match or_damaged(from.size(object))? {
        Ok(size) if size <= frame_len_max(blob.size) => size,
        Ok(size) => {
            return Ok(Err(format!(
                "stored bytes: expected at most {}, found {size}",
                frame_len_max(blob.size)
            )));
        }
        Err(what) => return Ok(Err(what)),
    };
    if let Err(absurd) = check_claim(size, blob.size) {
        return Ok(Err(absurd.to_string()));
    }
    let staged = match stage(from, object, size, staging)? {
        Ok(staged) => staged,
        Err(what) => return Ok(Err(what)),
    };
    let file = File::open(staged.file.path()).map_err(|e| staging.error(e))?;
    match check_blob(file, blob) {
        Ok(Ok(())) => {}
        Ok(Err(what)) => return Ok(Err(what)),
        Err(e) => {
            return Ok(Err(format!(
                "zstd frame: expected {} plain bytes, found {e}",
                blob.size
            )));
        }
    }
    if to.create_from_file(object, staged.file.path())? == Created::Existed {
        // What was there is damaged, or was a moment ago: ours has just been checked.
        to.replace_from_file(object, staged.file.path())?;
    }
    Ok(Ok(size))
}

/// `len` bytes of a staged file at `offset`.
pub(crate) fn read_staged(file: &File, range: ByteRange) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; to_usize(range.len)];
    file.read_exact_at(&mut bytes, range.start)?;
    debug_assert_eq!(to_u64(bytes.len()), range.len);
    Ok(bytes)
}
