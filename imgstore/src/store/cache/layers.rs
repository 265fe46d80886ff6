//! Descriptions of layers (manifest, placement, metadata image) as part of the cache: counted like segments, evicted like
//! them when nobody holds the layer, and pinned with it.
//!
//! A layer that is mounted cannot do without its description, so that is written whatever the limit says: segments
//! go first, and what mounted layers describe is the least that a cache can shrink to.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::CacheError;
use super::pins::{PINS_MAX, Pin};
use super::writer::{SegmentCache, lock};
use super::{marker, names};
use crate::ids::{Digest, round_up_to_block, to_u64};

/// While this lives, the layer's files stay.
#[derive(Debug)]
pub struct LayerHold {
    cache: Arc<SegmentCache>,
    layer: Digest,
}

impl Drop for LayerHold {
    fn drop(&mut self) {
        self.cache.ledger().release(&self.layer);
    }
}

/// One layer in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DescribedLayer {
    /// The layer.
    pub layer: Digest,
    /// Bytes that its description takes.
    pub bytes: u64,
    /// Whether somebody holds it, because it is mounted.
    pub held: bool,
}

impl SegmentCache {
    /// Keeps a layer's files from being evicted for as long as the result lives.
    pub fn hold_layer(self: &Arc<Self>, layer: Digest) -> LayerHold {
        // Reserving nothing waits until nobody unlinks these files.
        self.reserve(layer, 0);
        let mut ledger = self.ledger();
        ledger.hold(layer);
        ledger.settle(&layer, 0, None);
        drop(ledger);
        LayerHold {
            cache: Arc::clone(self),
            layer,
        }
    }

    /// Keeps one of [`names::LAYER_FILES`] of a layer, replacing the one that is there.
    ///
    /// # Errors
    /// [`CacheError::Write`]; nothing is left behind then.
    pub fn put_layer_file(
        &self,
        layer: &Digest,
        name: &str,
        contents: &[u8],
    ) -> Result<(), CacheError> {
        assert!(
            names::LAYER_FILES.contains(&name),
            "`{name}` is no file of a layer"
        );
        let folder = self.root.join(names::LAYERS).join(layer.to_hex());
        let bytes = round_up_to_block(to_u64(contents.len()));
        self.reserve(*layer, bytes);
        if !self.make_room(bytes) {
            tracing::debug!(%layer, "the descriptions of mounted and pinned layers pass the limit of the cache");
        }
        let written = self.write(&folder.join(name), contents, bytes);
        let total = self.measure_layer(&folder).ok().flatten();
        let total = total.map(|(bytes, _)| bytes);
        self.ledger().settle_layer(layer, bytes, total);
        written.map(drop)
    }

    /// As [`SegmentCache::put_layer_file`], for a file of `len` bytes that the caller writes as they come: it is not all in memory
    /// at a time. The file appears when it is whole.
    ///
    /// # Errors
    /// What `write` said, or [`CacheError::Write`]; nothing is left behind then.
    pub fn write_layer_file<E: From<CacheError>>(
        &self,
        layer: &Digest,
        name: &str,
        len: u64,
        write: impl FnOnce(&File) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(
            names::LAYER_FILES.contains(&name),
            "`{name}` is no file of a layer"
        );
        let folder = self.root.join(names::LAYERS).join(layer.to_hex());
        let path = folder.join(name);
        let bytes = round_up_to_block(len);
        self.reserve(*layer, bytes);
        if !self.make_room(bytes) {
            tracing::debug!(%layer, "the descriptions of mounted and pinned layers pass the limit of the cache");
        }
        let tmp = self.tmp();
        let failed = |source| {
            E::from(CacheError::Write {
                path: path.clone(),
                source,
            })
        };
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true);
        let opened = options.open(&tmp).map_err(failed);
        let written = opened
            .and_then(|file| write(&file))
            .and_then(|()| self.rename(&tmp, &path).map_err(failed));
        if written.is_err()
            && let Err(error) = self.unlink(&tmp)
        {
            tracing::debug!(path = %tmp.display(), %error, "a temporary file stays until the next start");
        }
        let total = self.measure_layer(&folder).ok().flatten();
        let total = total.map(|(bytes, _)| bytes);
        self.ledger().settle_layer(layer, bytes, total);
        written
    }

    /// Removes a layer's files because they are damaged. Foreign files in its folder stay, and the folder then.
    ///
    /// # Errors
    /// What the disk said.
    pub fn drop_layer(&self, layer: &Digest) -> io::Result<()> {
        self.reserve(*layer, 0);
        let removed = self.unlink_layer(layer);
        let mut ledger = self.ledger();
        ledger.settle(layer, 0, None);
        ledger.forget_layer(layer);
        removed.map(drop)
    }

    /// Removes our files of a layer; whether there were any.
    pub(super) fn unlink_layer(&self, layer: &Digest) -> io::Result<bool> {
        let folder = self.root.join(names::LAYERS).join(layer.to_hex());
        let mut any = false;
        // The manifest last: without it the others cannot be checked.
        for name in names::LAYER_FILES.iter().rev() {
            any |= self.unlink(&folder.join(name))?;
        }
        match self.disk.remove_folder(&folder) {
            Err(e)
                if !matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
                ) =>
            {
                Err(e)
            }
            // Somebody else's file is in it.
            _ => Ok(any),
        }
    }

    /// All layers that are described here.
    pub fn described_layers(&self) -> Vec<DescribedLayer> {
        let described = self.ledger().described();
        let layers = described.into_iter();
        layers
            .map(|(layer, bytes, held)| DescribedLayer { layer, bytes, held })
            .collect()
    }

    /// The pinned layers, oldest pin first.
    pub fn pins(&self) -> Vec<Pin> {
        lock(&self.pins).clone()
    }

    /// Pins a layer with these segments and the bytes each can take: what is in the cache of it, now or later, stays.
    /// Pinning a pinned layer again is fine.
    ///
    /// # Errors
    /// [`CacheError::PinTooLarge`] when it does not fit the limit beside what must stay already; [`CacheError::Write`] when the
    /// pin cannot be made durable. It is not pinned then.
    pub fn pin(
        &self,
        layer: &Digest,
        reference: &str,
        segments: Vec<(Digest, u64)>,
    ) -> Result<(), CacheError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let pin = Pin::new(*layer, reference, now.map_or(0, |t| t.as_secs()), segments);
        let mut pins = lock(&self.pins);
        if pins.iter().any(|pin| pin.layer == *layer) {
            return Ok(());
        }
        if pins.len() >= PINS_MAX {
            return Err(CacheError::TooManyPins {
                layer: *layer,
                count: pins.len(),
            });
        }
        self.check_pin(&pin)?;
        let path = self.pin_path(layer);
        marker::replace(&*self.disk, &self.tmp(), &path, &pin.to_bytes())
            .map_err(|source| CacheError::Write { path, source })?;
        self.ledger().pin(*layer, &pin.segments);
        pins.push(pin);
        drop(pins);
        self.measure();
        Ok(())
    }

    /// Whether a pin fits the limit beside what must stay already.
    fn check_pin(&self, pin: &Pin) -> Result<(), CacheError> {
        let ledger = self.ledger();
        let file = round_up_to_block(to_u64(pin.to_bytes().len()));
        let needed = ledger.pin_cost(&pin.segments) + file;
        let sure = ledger.sure_bytes();
        drop(ledger);
        if sure.saturating_add(needed) > self.bytes_max() {
            return Err(CacheError::PinTooLarge {
                layer: pin.layer,
                needed,
                pinned: sure,
                limit: self.bytes_max(),
            });
        }
        Ok(())
    }

    /// Takes over a pin of an earlier run.
    pub(super) fn hold_pin(&self, pin: Pin) {
        if let Err(error) = self.check_pin(&pin) {
            tracing::error!(reference = pin.reference, %error, "a pin of an earlier run does not hold");
            return;
        }
        self.ledger().pin(pin.layer, &pin.segments);
        lock(&self.pins).push(pin);
    }

    /// Takes a pin away; whether there was one.
    ///
    /// # Errors
    /// [`CacheError::Write`] when its file cannot be removed; it stays pinned then.
    pub fn unpin(&self, layer: &Digest) -> Result<bool, CacheError> {
        let mut pins = lock(&self.pins);
        let path = self.pin_path(layer);
        let removed = self.unlink(&path).and_then(|removed| {
            // Without this it may be back after a power cut.
            self.disk.sync(&self.root.join(names::PINS))?;
            Ok(removed)
        });
        let removed = removed.map_err(|source| CacheError::Write { path, source })?;
        let Some(at) = pins.iter().position(|pin| pin.layer == *layer) else {
            return Ok(removed);
        };
        let pin = pins.remove(at);
        self.ledger().unpin(layer, &pin.segments);
        drop(pins);
        self.measure();
        Ok(true)
    }

    fn pin_path(&self, layer: &Digest) -> std::path::PathBuf {
        self.root.join(names::PINS).join(format!("{layer}.json"))
    }
}
