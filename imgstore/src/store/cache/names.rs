//! Which files in a cache folder are ours. Everything else is foreign: never counted, never removed.
//!
//! ```text
//! ROOT/cache.json                 marker: the format of this folder (`marker`)
//! ROOT/lock                       held by whoever writes here (`lock`)
//! ROOT/segments/ab/ab12…          64 lower-case hex digits in the folder named by the first two
//! ROOT/layers/<digest>/           manifest.json, placement.json, meta.erofs
//! ROOT/pins/<digest>.json         a pinned layer (`pins`)
//! ROOT/tmp/dsec-<run>-<n>         being written by the run with that number
//! ```
//! A name is ours only if it is exactly what we would have written: `AB12…` or `ab12….bak` is somebody else's.

use std::path::{Path, PathBuf};

use crate::ids::Digest;

/// Folder of cached frames below the cache's root.
pub const SEGMENTS: &str = "segments";
/// Folder of files being written.
pub const TMP: &str = "tmp";
/// Folder of what describes layers.
pub const LAYERS: &str = "layers";
/// Folder of pins.
pub const PINS: &str = "pins";
/// The marker.
pub const MARKER: &str = "cache.json";
/// The lock.
pub const LOCK: &str = "lock";
/// A layer's manifest in its folder.
pub const MANIFEST: &str = "manifest.json";
/// A layer's placement.
pub const PLACEMENT: &str = "placement.json";
/// A layer's metadata image.
pub const META: &str = "meta.erofs";
/// The files of a layer's folder.
pub const LAYER_FILES: [&str; 3] = [MANIFEST, PLACEMENT, META];

/// A digest written exactly as we write it.
pub fn digest(name: &str) -> Option<Digest> {
    let digest: Digest = name.parse().ok()?;
    (digest.to_hex() == name).then_some(digest)
}

/// The first byte of the digests in a folder of segments.
pub fn shard(name: &str) -> Option<u8> {
    let byte = u8::from_str_radix(name, 16).ok()?;
    (shard_name(byte) == name).then_some(byte)
}

/// The folder of the segments whose digests start with this byte.
pub fn shard_name(byte: u8) -> String {
    format!("{byte:02x}")
}

/// The segment of a file in a shard's folder.
pub fn segment(shard: u8, name: &str) -> Option<Digest> {
    digest(name).filter(|digest| digest.as_bytes().first() == Some(&shard))
}

/// The file of a segment below `root/segments`.
pub fn segment_path(segments: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.to_hex();
    let (folder, _) = hex.split_at(2);
    segments.join(folder).join(&hex)
}

/// The pinned layer of a file in the folder of pins.
pub fn pin(name: &str) -> Option<Digest> {
    name.strip_suffix(".json").and_then(digest)
}

/// The name of a file being written.
pub fn tmp_name(run: u64, number: u64) -> String {
    format!("dsec-{run:016x}-{number}")
}

/// The run that wrote a temporary file; `None` when it is not ours.
pub fn tmp_run(name: &str) -> Option<u64> {
    let (run, number) = name.strip_prefix("dsec-")?.split_once('-')?;
    let (run, number) = (
        u64::from_str_radix(run, 16).ok()?,
        number.parse::<u64>().ok()?,
    );
    (tmp_name(run, number) == name).then_some(run)
}

/// Whether a name is one that layerd gave its temporary files before folders had a marker: `PID-N` or `layer-PID-N`.
pub fn is_old_tmp(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let rest = name.strip_prefix("layer-").unwrap_or(name);
    rest.split_once('-')
        .is_some_and(|(pid, n)| number(pid) && number(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_we_would_have_written_are_ours() {
        let d = Digest::of(b"x");
        let hex = d.to_hex();
        let first = d.as_bytes()[0];
        assert_eq!(segment(first, &hex), Some(d));
        assert_eq!(segment(first ^ 1, &hex), None);
        for foreign in [
            hex.to_uppercase(),
            format!("{hex}.bak"),
            format!("{hex}~"),
            hex[..63].to_owned(),
            "notes".to_owned(),
        ] {
            assert_eq!(segment(first, &foreign), None, "{foreign}");
        }
        assert_eq!(shard("0a"), Some(10));
        for foreign in ["a", "0A", "0aa", "+a", "zz", ""] {
            assert_eq!(shard(foreign), None, "{foreign}");
        }
        assert_eq!(tmp_run(&tmp_name(7, 12)), Some(7));
        for foreign in ["dsec-7-1", "dsec-", "1-1", "dsec-0000000000000007-+1", "x"] {
            assert_eq!(tmp_run(foreign), None, "{foreign}");
        }
        assert!(is_old_tmp("12-3") && is_old_tmp("layer-12-3"));
        for foreign in ["12-", "-", "a-1", "layer-1", "1-1-1", "notes"] {
            assert!(!is_old_tmp(foreign), "{foreign}");
        }
        assert_eq!(pin(&format!("{hex}.json")), Some(d));
        assert_eq!(pin("x.json"), None);
    }
}
