//! The bundle: manifest, placement and metadata image of a layer in one object, so that a mount that does not know the layer
//! asks once and not three times.
//!
//! It is a copy: nothing in it is trusted more than in the separate objects, and whoever finds one missing or damaged reads
//! those. `docs/format.md` shows the layout.

use super::erofs::check::check;
use super::manifest::{MANIFEST_BYTES_MAX, Manifest};
use super::placement::{PLACEMENT_BYTES_MAX, Placement};
use super::{FormatError, frame};
use crate::ids::{Digest, to_u64};

/// Largest bundle in bytes. Layers that would need a larger one have none: their three requests do not matter beside their bytes.
pub const BUNDLE_BYTES_MAX: u64 = 8 << 20;
/// Largest metadata image, in plain bytes, that is put into one.
pub const BUNDLE_META_MAX: u64 = 16 << 20;

const MAGIC: &[u8; 8] = b"dsecbndl";
const VERSION: u32 = 1;
/// Magic, version, digest, and five lengths.
const HEADER_BYTES: usize = 64;
/// Manifests and placements are mostly digests and numbers; more is not worth the time.
const LEVEL: i32 = 9;

/// A bundle that was read: every part checked as its own object would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// The manifest's own bytes, which have the layer's digest.
    pub manifest_bytes: Vec<u8>,
    /// What they say.
    pub manifest: Manifest,
    /// Where the segments are.
    pub placement: Placement,
    /// The plain metadata image.
    pub meta: Vec<u8>,
}

/// The bundle of a layer; none if it would be too large. `meta` is the image's frame of `meta_plain_len` plain bytes.
pub fn encode(
    manifest: &[u8],
    placement: &Placement,
    meta: &[u8],
    meta_plain_len: u64,
) -> Option<Vec<u8>> {
    if meta_plain_len > BUNDLE_META_MAX || to_u64(meta.len()) > BUNDLE_BYTES_MAX {
        return None;
    }
    let placement = placement.to_bytes();
    let mut encoder = frame::Encoder::new(LEVEL);
    let (manifest_frame, placement_frame) = (encoder.encode(manifest), encoder.encode(&placement));
    let mut out = Vec::with_capacity(
        HEADER_BYTES + manifest_frame.len() + placement_frame.len() + meta.len(),
    );
    for len in [
        manifest.len(),
        manifest_frame.len(),
        placement.len(),
        placement_frame.len(),
        meta.len(),
    ] {
        out.extend_from_slice(&u32::try_from(len).ok()?.to_le_bytes());
    }
    out.extend_from_slice(&manifest_frame);
    out.extend_from_slice(&placement_frame);
    out.extend_from_slice(meta);
    // The placement has no digest elsewhere.
    let digest = *Digest::of(&out).as_bytes();
    let head = [&MAGIC[..], &VERSION.to_le_bytes(), &digest].concat();
    out.splice(..0, head);
    (to_u64(out.len()) <= BUNDLE_BYTES_MAX).then_some(out)
}

/// Cuts the first `len` bytes off.
fn cut<'a>(bytes: &mut &'a [u8], len: usize, what: &str) -> Result<&'a [u8], FormatError> {
    let Some((head, rest)) = bytes.split_at_checked(len) else {
        return Err(FormatError::new(
            format!("bytes of the {what} in a bundle"),
            len.to_string(),
            bytes.len(),
        ));
    };
    *bytes = rest;
    Ok(head)
}

fn number(bytes: &mut &[u8], what: &str) -> Result<u32, FormatError> {
    let head = cut(bytes, 4, what)?;
    Ok(head
        .iter()
        .rev()
        .fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
}

fn at_most(what: &str, len: u32, max: u64) -> Result<u64, FormatError> {
    let len = u64::from(len);
    if len <= max {
        return Ok(len);
    }
    Err(FormatError::new(
        format!("plain bytes of the {what} in a bundle"),
        format!("at most {max}"),
        len,
    ))
}

fn size(len: u32) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

impl Bundle {
    /// Parses the bundle of `layer`.
    ///
    /// # Errors
    /// Names the part that is wrong; nothing of the bundle may be used then.
    pub fn parse(bytes: &[u8], layer: &Digest) -> Result<Self, FormatError> {
        let mut rest = bytes;
        let magic = cut(&mut rest, MAGIC.len(), "magic")?;
        if magic != MAGIC {
            let found = String::from_utf8_lossy(magic).into_owned();
            return Err(FormatError::new("magic of a bundle", "`dsecbndl`", found));
        }
        let version = number(&mut rest, "version")?;
        if version != VERSION {
            return Err(FormatError::new("version of a bundle", "1", version));
        }
        let digest = cut(&mut rest, 32, "digest")?;
        let found = Digest::of(rest);
        if found.as_bytes().as_slice() != digest {
            return Err(FormatError::new(
                "digest of a bundle",
                "the one in its header",
                found,
            ));
        }
        let mut lens = [0; 5];
        for len in &mut lens {
            *len = number(&mut rest, "header")?;
        }
        let [manifest_plain, manifest, placement_plain, placement, meta] = lens;
        let manifest_plain = at_most("manifest", manifest_plain, MANIFEST_BYTES_MAX)?;
        let placement_plain = at_most("placement", placement_plain, PLACEMENT_BYTES_MAX)?;
        let manifest = cut(&mut rest, size(manifest), "manifest")?;
        let placement = cut(&mut rest, size(placement), "placement")?;
        let meta = cut(&mut rest, size(meta), "metadata image")?;
        if !rest.is_empty() {
            let found = format!("{} more", rest.len());
            return Err(FormatError::new("end of a bundle", "no bytes", found));
        }
        let manifest_bytes = frame::decode(manifest, manifest_plain)?;
        let manifest = Manifest::parse(&manifest_bytes, layer)?;
        let placement = frame::decode(placement, placement_plain)?;
        let placement = Placement::parse(&placement, layer, &manifest)?;
        let blob = manifest.meta;
        if blob.size > BUNDLE_META_MAX {
            return Err(FormatError::new(
                "plain bytes of the metadata image in a bundle",
                format!("at most {BUNDLE_META_MAX}"),
                blob.size,
            ));
        }
        let meta = frame::verified(meta, &blob.digest, blob.size)?;
        check(&meta, &manifest)?;
        Ok(Self {
            manifest_bytes,
            manifest,
            placement,
            meta,
        })
    }
}
