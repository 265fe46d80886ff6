//! A layer's metadata image from an origin into a file, whatever its size.
//!
//! An image may have 1 GiB, and a daemon of some 40 MB must not grow by that for a mount. So a large object is fetched in
//! ranges, decompressed as a stream, hashed and written as it comes; nothing of it is used before the whole image had its
//! digest. Small ones, the usual case, are fetched with one request and decompressed in memory.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;

use super::layer::{LayerError, read_meta};
use crate::format::erofs::check;
use crate::format::manifest::Manifest;
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, to_u64, to_usize};
use crate::origin::{ByteRange, Origin, OriginError};

/// Larger images are streamed.
pub const WHOLE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of a range.
const RANGE_BYTES: u64 = 4 << 20;
/// Plain bytes that are hashed and written together.
const STEP_BYTES: usize = 256 << 10;
/// log2 of the largest window of a frame (128 MiB): what decompressing may need. Frames of raw blocks have a window of
/// their whole length; such an image is decompressed in memory.
const WINDOW_LOG_MAX: u32 = 27;

/// Why an image is not in its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetaFileError {
    /// The origin failed, or its object is damaged.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The file cannot be written.
    #[error("cannot write a metadata image: {0}")]
    Write(#[source] io::Error),
}

impl From<OriginError> for MetaFileError {
    fn from(error: OriginError) -> Self {
        Self::Layer(error.into())
    }
}

/// An object of an origin, read in ranges.
struct Ranges<'a> {
    origin: &'a dyn Origin,
    object: &'a str,
    len: u64,
    at: u64,
    range: Vec<u8>,
    used: usize,
    /// What the origin said when it failed: an `io::Error` would be all that is left of it.
    failure: Option<OriginError>,
}

impl Read for Ranges<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.used == self.range.len() && self.at < self.len {
            let range = ByteRange {
                start: self.at,
                len: RANGE_BYTES.min(self.len - self.at),
            };
            self.range = self.origin.fetch(self.object, range).map_err(|error| {
                let text = io::Error::other(error.to_string());
                self.failure = Some(error);
                text
            })?;
            self.at += range.len;
            self.used = 0;
        }
        let rest = self.range.get(self.used..).unwrap_or_default();
        let len = rest.len().min(out.len());
        if let (Some(from), Some(to)) = (rest.get(..len), out.get_mut(..len)) {
            to.copy_from_slice(from);
        }
        self.used += len;
        Ok(len)
    }
}

fn damaged(origin: &dyn Origin, object: &str, source: FormatError) -> MetaFileError {
    let (object, origin) = (object.to_owned(), origin.address());
    MetaFileError::Layer(LayerError::Damaged {
        object,
        origin,
        source,
    })
}

/// Writes the metadata image of a layer into `file`, which is empty. It has the manifest's digest and names its segments.
///
/// # Errors
/// [`LayerError::Damaged`] when it has not; what is in the file then is of no use.
pub fn write_meta(
    origin: &dyn Origin,
    manifest: &Manifest,
    file: &File,
) -> Result<(), MetaFileError> {
    if manifest.meta.size <= WHOLE_BYTES_MAX {
        return write_whole(origin, manifest, file);
    }
    stream(origin, manifest, file)
}

fn write_whole(origin: &dyn Origin, manifest: &Manifest, file: &File) -> Result<(), MetaFileError> {
    let meta = read_meta(origin, manifest)?;
    let object = names::meta(&manifest.meta.digest);
    check::check(&meta, manifest).map_err(|source| damaged(origin, &object, source))?;
    file.write_all_at(&meta, 0).map_err(MetaFileError::Write)
}

fn stream(origin: &dyn Origin, manifest: &Manifest, file: &File) -> Result<(), MetaFileError> {
    let blob = manifest.meta;
    let object = names::meta(&blob.digest);
    let len = origin.size(&object)?;
    let len_max = frame::frame_len_max(blob.size);
    if len > len_max {
        let wrong = FormatError::new("stored length", format!("at most {len_max} bytes"), len);
        return Err(damaged(origin, &object, wrong));
    }
    let mut ranges = Ranges {
        origin,
        object: &object,
        len,
        at: 0,
        range: Vec::new(),
        used: 0,
        failure: None,
    };
    match copy(&mut ranges, blob.size, file) {
        Ok(found) if found == blob.digest => {}
        Ok(found) => {
            let wrong = FormatError::new("digest of the plain bytes", blob.digest.to_hex(), found);
            return Err(damaged(origin, &object, wrong));
        }
        Err(Stop::Write(error)) => return Err(MetaFileError::Write(error)),
        Err(Stop::Frame(error)) => {
            if let Some(failure) = ranges.failure {
                return Err(failure.into());
            }
            tracing::debug!(object, %error, "not a frame that can be streamed");
            file.set_len(0).map_err(MetaFileError::Write)?;
            return write_whole(origin, manifest, file);
        }
    }
    let start_len = check::start_len(manifest).min(blob.size);
    let mut start = vec![0; to_usize(start_len)];
    file.read_exact_at(&mut start, 0)
        .map_err(MetaFileError::Write)?;
    check::check_start(&start, blob.size, manifest)
        .map_err(|source| damaged(origin, &object, source))
}

/// Who stopped a copy.
enum Stop {
    Frame(io::Error),
    Write(io::Error),
}

/// Decompresses into a file; the digest of what came out, which has exactly `size` bytes.
fn copy(ranges: &mut Ranges<'_>, size: u64, file: &File) -> Result<Digest, Stop> {
    let mut plain = zstd::stream::read::Decoder::new(ranges)
        .map_err(Stop::Frame)?
        .single_frame();
    plain.window_log_max(WINDOW_LOG_MAX).map_err(Stop::Frame)?;
    let mut out = BufWriter::with_capacity(STEP_BYTES, file);
    let mut hasher = blake3::Hasher::new();
    let mut step = vec![0; STEP_BYTES];
    let mut written = 0;
    loop {
        let len = plain.read(&mut step).map_err(Stop::Frame)?;
        let bytes = step.get(..len).unwrap_or_default();
        written += to_u64(len);
        if len == 0 || written > size {
            break;
        }
        hasher.update(bytes);
        out.write_all(bytes).map_err(Stop::Write)?;
    }
    if written != size {
        let text = format!("expected {size} plain bytes, found {written} or more");
        return Err(Stop::Frame(io::Error::other(text)));
    }
    out.flush().map_err(Stop::Write)?;
    Ok(Digest::from(hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::format::erofs::write;
    use crate::format::manifest::{Blob, FORMAT, Segment, Totals};
    use crate::origin::counting::{CountingOrigin, Traffic};
    use crate::origin::mem::MemOrigin;
    use crate::tree::{Inode, Kind, Meta, ROOT, Tree};

    /// The metadata of a tree with many symbolic links, compressed, on an origin.
    fn fixture() -> (Arc<MemOrigin>, Manifest, Vec<u8>) {
        let mut tree = Tree::new(Meta::default());
        for n in 0..600_u32 {
            let target = Digest::of(&n.to_le_bytes())
                .to_hex()
                .repeat(60)
                .into_bytes();
            let id = tree.add(Inode {
                meta: Meta::default(),
                kind: Kind::Symlink(target),
            });
            if let Kind::Dir(entries) = &mut tree.inodes[ROOT.0].kind {
                entries.insert(format!("{n}").into_bytes(), id);
            }
        }
        let segments = vec![
            Segment(Digest::of(b"one"), 4096),
            Segment(Digest::of(b"two"), 8192),
        ];
        let meta = write::image(&tree, &Default::default(), &segments).unwrap();
        let blob = Blob {
            digest: Digest::of(&meta),
            size: to_u64(meta.len()),
        };
        let manifest = Manifest {
            chunks: blob,
            features_compat: Vec::new(),
            features_incompat: Vec::new(),
            format: FORMAT,
            meta: blob,
            segments,
            totals: Totals::default(),
        };
        let origin = Arc::new(MemOrigin::default());
        put(&origin, &manifest, &frame::encode(&meta, 3));
        (origin, manifest, meta)
    }

    fn put(origin: &MemOrigin, manifest: &Manifest, stored: &[u8]) {
        origin
            .replace(&names::meta(&manifest.meta.digest), stored)
            .unwrap();
    }

    fn streamed(origin: &dyn Origin, manifest: &Manifest) -> Result<Vec<u8>, MetaFileError> {
        let file = tempfile::tempfile().unwrap();
        stream(origin, manifest, &file)?;
        let mut out = vec![0; to_usize(file.metadata().unwrap().len())];
        file.read_exact_at(&mut out, 0).unwrap();
        Ok(out)
    }

    #[test]
    fn what_is_streamed_is_the_image_whatever_kind_of_frame_it_is() {
        let (origin, manifest, meta) = fixture();
        assert!(streamed(&*origin, &manifest).unwrap() == meta);
        // A window as large as the image, as frames of raw blocks have: level 1 of the size's own frame would not do.
        let noise = frame::encode(&meta, 19);
        put(&origin, &manifest, &noise);
        assert!(streamed(&*origin, &manifest).unwrap() == meta);
        let file = tempfile::tempfile().unwrap();
        write_meta(&*origin, &manifest, &file).unwrap();
        assert_eq!(file.metadata().unwrap().len(), manifest.meta.size);
    }

    /// Mutation: without the comparison of the digest, the first of these passes.
    #[test]
    fn damage_of_every_kind_is_found() {
        let (origin, mut manifest, meta) = fixture();
        let mut other = meta.clone();
        let last = other.len() - 1;
        other[last] ^= 1;
        let good = frame::encode(&meta, 3);
        let longer = frame::encode(&[&*meta, &[0; 4096]].concat(), 3);
        let cut = &good[..good.len() / 2];
        for stored in [
            &frame::encode(&other, 3),
            &longer,
            cut,
            b"",
            &vec![0; 1 << 23],
        ] {
            put(&origin, &manifest, stored);
            let error = streamed(&*origin, &manifest).unwrap_err();
            assert!(
                matches!(error, MetaFileError::Layer(LayerError::Damaged { .. })),
                "{error}"
            );
        }
        put(&origin, &manifest, &good);
        manifest.segments.swap(0, 1);
        let error = streamed(&*origin, &manifest).unwrap_err().to_string();
        assert!(error.contains("device slot 1"), "{error}");
    }

    /// Whichever bound stops it: a frame whose header does not say its length is not streamed, and `copy` ends behind the size.
    #[test]
    fn a_frame_that_grows_without_end_is_cut_off_near_the_size_of_the_image() {
        let (origin, manifest, _) = fixture();
        // Its header does not say how long it is.
        let mut bomb = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
        io::copy(&mut io::repeat(0).take(64 << 20), &mut bomb).unwrap();
        put(&origin, &manifest, &bomb.finish().unwrap());
        let file = tempfile::tempfile().unwrap();
        let error = stream(&*origin, &manifest, &file).unwrap_err();
        assert!(
            matches!(error, MetaFileError::Layer(LayerError::Damaged { .. })),
            "{error}"
        );
        let bound = manifest.meta.size + 2 * to_u64(STEP_BYTES);
        assert!(file.metadata().unwrap().len() <= bound);
    }

    #[test]
    fn a_small_image_costs_one_request_and_a_missing_one_is_said_to_be_missing() {
        let (origin, manifest, _) = fixture();
        let traffic = Arc::new(Traffic::default());
        let inner: Arc<dyn Origin> = origin;
        let counting = CountingOrigin::new(inner, Arc::clone(&traffic));
        write_meta(&counting, &manifest, &tempfile::tempfile().unwrap()).unwrap();
        assert_eq!(traffic.requests(), 1);
        let error = streamed(&MemOrigin::default(), &manifest).unwrap_err();
        assert!(
            matches!(
                error,
                MetaFileError::Layer(LayerError::Origin(OriginError::NotFound { .. }))
            ),
            "{error}"
        );
    }
}
