//! Pinned layers: what is cached of them stays, whatever else wants the room.
//!
//! One sealed file a pin, `ROOT/pins/<layer>.json`, made durable before it counts and read at every start. It lists the
//! segments, so that a pin holds without an origin and before the folder has been scanned:
//! ```text
//! {"format":1,"layer":"…","pinned":1764000000,"reference":"base/python:3.11","segments":[["<digest>",<stored bytes>],…]}
//! ```
//! Pins beyond the limit are refused when they are made. Where the limit has become smaller since, the pins made first hold
//! and the others are reported and do not.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::CacheDisk;
use super::{kept, names};
use crate::format::FormatError;
use crate::ids::Digest;

/// Most pinned layers.
pub const PINS_MAX: usize = 1024;
/// Longest file of a pin: a layer has at most 65,535 segments.
const PIN_BYTES_MAX: u64 = 8 << 20;
/// The format written here.
const FORMAT: u32 = 1;

/// One pinned layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Pin {
    /// Of this file.
    format: u32,
    /// The layer.
    pub layer: Digest,
    /// When it was pinned, in seconds since 1970.
    pub pinned: u64,
    /// What it was called then.
    pub reference: String,
    /// Its segments, and the bytes of disk that each can take.
    pub segments: Vec<(Digest, u64)>,
}

impl Pin {
    /// A pin of a layer with these segments.
    pub fn new(layer: Digest, reference: &str, pinned: u64, segments: Vec<(Digest, u64)>) -> Self {
        Self {
            format: FORMAT,
            layer,
            pinned,
            reference: reference.to_owned(),
            segments,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        kept::seal(&serde_json::to_vec(self).expect("numbers and strings are JSON"))
    }

    fn parse(sealed: &[u8], layer: &Digest) -> Result<Self, FormatError> {
        let line = kept::unseal(sealed, "digest of a pin")?;
        let pin: Self = serde_json::from_slice(line)
            .map_err(|e| FormatError::new("pin", "a pin in JSON", e))?;
        if pin.layer != *layer || pin.format != FORMAT {
            let found = format!("layer {}, format {}", pin.layer, pin.format);
            let expected = format!("layer {layer}, format {FORMAT}");
            return Err(FormatError::new("pin", expected, found));
        }
        Ok(pin)
    }
}

/// All pins of a folder, oldest first. One that cannot be read is reported and pins nothing.
///
/// # Errors
/// When the folder cannot be listed.
pub(super) fn load(disk: &dyn CacheDisk, root: &Path) -> io::Result<Vec<Pin>> {
    let folder = root.join(names::PINS);
    let mut layers = Vec::new();
    disk.list(&folder, &mut |name| layers.extend(names::pin(name)))?;
    let mut pins = Vec::new();
    for layer in layers.iter().take(PINS_MAX) {
        let path = folder.join(format!("{layer}.json"));
        let read = disk.read(&path, PIN_BYTES_MAX)?.unwrap_or_default();
        match Pin::parse(&read, layer) {
            Ok(pin) => pins.push(pin),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "a pin cannot be read; its layer is not pinned");
            }
        }
    }
    pins.sort_by_key(|pin| (pin.pinned, pin.layer));
    Ok(pins)
}
