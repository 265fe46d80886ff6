//! Object names on an origin: one function a kind, so that the layout is written down once.

use crate::ids::{Axis, Digest, TagName};

/// The folder that holds temporary files while objects are published.
pub const TMP: &str = "tmp";
/// The object that lists all tags, for origins that cannot list.
pub const INDEX: &str = "index.json";
/// Folder of placements.
pub const PLACEMENTS: &str = "placements/";
/// Folder of tags.
pub const TAGS: &str = "tags/";

fn fan_out(folder: &str, digest: &Digest, ending: &str) -> String {
    let hex = digest.to_hex();
    let (first, _) = hex.split_at(2);
    format!("{folder}/{first}/{hex}{ending}")
}

/// A pack, named by the digest of the whole object.
pub fn pack(digest: &Digest) -> String {
    fan_out("packs", digest, ".zst")
}

/// A metadata image, named by the digest of its plain bytes, stored as one zstd frame.
pub fn meta(digest: &Digest) -> String {
    fan_out("meta", digest, ".erofs.zst")
}

/// A manifest, named by its own digest, which is the layer's name.
pub fn manifest(layer: &Digest) -> String {
    fan_out("manifests", layer, ".json")
}

/// A layer's placement.
pub fn placement(layer: &Digest) -> String {
    fan_out("placements", layer, ".json")
}

/// A chunk table, named by the digest of its plain bytes, stored as one zstd frame.
pub fn chunks(digest: &Digest) -> String {
    fan_out("chunks", digest, ".zst")
}

/// A tag.
pub fn tag(tag: &TagName) -> String {
    format!("{TAGS}{}/{}/{}.json", tag.axis(), tag.name(), tag.version())
}

/// The tag whose object has this name, if it is one.
pub fn parse_tag(object: &str) -> Option<TagName> {
    let rest = object.strip_prefix(TAGS)?.strip_suffix(".json")?;
    let mut parts = rest.splitn(3, '/');
    let (axis, name, version) = (parts.next()?, parts.next()?, parts.next()?);
    TagName::new(axis.parse::<Axis>().ok()?, name, version).ok()
}
