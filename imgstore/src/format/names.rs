//! Object names on an origin: one function a kind, so that the layout is written down once.

use crate::ids::{Axis, Digest, TagName};

/// The folder that holds temporary files while objects are published.
pub const TMP: &str = "tmp";
/// The object that lists all tags, for origins that cannot list.
pub const INDEX: &str = "index.json";
/// Folder of manifests.
pub const MANIFESTS: &str = "manifests/";
/// Folder of placements.
pub const PLACEMENTS: &str = "placements/";
/// Folder of bundles.
pub const BUNDLES: &str = "bundles/";
/// Folder of tags.
pub const TAGS: &str = "tags/";
/// Folder of traces.
pub const TRACES: &str = "traces/";
/// Folder of leases.
pub const LEASES: &str = "leases/";
/// Folder of the collector's records.
pub const GC: &str = "gc/";
/// How the names of the collector's records start.
pub const GC_RECORD: &str = "gc/record-";
/// How the names of objects start that are written to see the origin's clock.
pub const GC_CLOCK: &str = "gc/clock-";
/// The folders of immutable objects, placements and bundles with the ending of their names, in the order in which an unneeded layer
/// goes away: what names the rest first.
pub const COLLECTED: [(&str, &str); 6] = [
    (MANIFESTS, ".json"),
    (PLACEMENTS, ".json"),
    (BUNDLES, ".bundle"),
    ("meta/", ".erofs.zst"),
    ("chunks/", ".zst"),
    ("packs/", ".zst"),
];

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

/// A layer's bundle: a copy of manifest, placement and metadata image.
pub fn bundle(layer: &Digest) -> String {
    fan_out("bundles", layer, ".bundle")
}

/// A chunk table, named by the digest of its plain bytes, stored as one zstd frame.
pub fn chunks(digest: &Digest) -> String {
    fan_out("chunks", digest, ".zst")
}

/// A published trace, named by its own digest.
pub fn trace(digest: &Digest) -> String {
    fan_out("traces", digest, ".json")
}

/// The digest in the name of a trace; `None` for whatever else lies there.
pub fn parse_trace(object: &str) -> Option<Digest> {
    let hex = object.strip_prefix(TRACES)?.strip_suffix(".json")?;
    let digest: Digest = hex.split_once('/')?.1.parse().ok()?;
    (trace(&digest) == object).then_some(digest)
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

/// The digest in the name of an object of [`COLLECTED`]; `None` for whatever else lies there.
pub fn parse_collected(object: &str) -> Option<Digest> {
    COLLECTED.iter().find_map(|(folder, ending)| {
        let hex = object.strip_prefix(folder)?.strip_suffix(ending)?;
        let (fan, hex) = hex.split_once('/')?;
        let digest: Digest = hex.parse().ok()?;
        (hex.get(..2) == Some(fan)).then_some(digest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_collected() {
        let digest = Digest::of(b"x");
        let ours = [
            pack(&digest),
            meta(&digest),
            manifest(&digest),
            placement(&digest),
            chunks(&digest),
            bundle(&digest),
        ];
        for name in &ours {
            assert_eq!(parse_collected(name), Some(digest), "{name}");
            for other in [
                format!("{name}.bak"),
                name.replacen('/', "/x", 1),
                format!("x{name}"),
                name.to_uppercase(),
            ] {
                assert_eq!(parse_collected(&other), None, "{other}");
            }
        }
        assert_eq!(parse_trace(&trace(&digest)), Some(digest));
        assert_eq!(parse_trace(&trace(&digest).replacen('/', "/0/", 1)), None);
        assert_eq!(parse_collected(&trace(&digest)), None);
        assert_eq!(parse_collected("packs/ab/README"), None);
        assert_eq!(parse_collected(INDEX), None);
    }
}
