//! Counting what earlier runs left, in the background: reads are served meanwhile, and when it is done the limit holds.
//!
//! One folder at a time, in batches, so that a million files take the memory of the ledger and no more. The evictor stands
//! still during a batch: what is counted is there.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use super::ledger::{Entry, Wanted};
use super::names;
use super::writer::{Evicting, SegmentCache, lock};
use crate::ids::Digest;

/// Files that are counted at a time.
const BATCH: usize = 16 << 10;

impl SegmentCache {
    /// Removes what earlier runs left half written, counts their files in the order in which they were written or read,
    /// and evicts what is too much. Files with other names are not ours and stay. Run it in the background, and again if it
    /// failed.
    ///
    /// # Errors
    /// What the disk said about a folder; all the others are counted. Files that vanish meanwhile are no error.
    pub fn scan(&self) -> io::Result<()> {
        let mut failed = self.clear_tmp();
        for byte in 0..=u8::MAX {
            let scanned = self.scan_shard(byte);
            failed = failed.and(scanned);
        }
        failed = failed.and(self.scan_layers());
        self.measure();
        // Still before anybody waits for the evictor: this may take long.
        self.evict_all();
        if failed.is_ok() {
            self.deeds.scanned.store(true, Ordering::Relaxed);
        }
        failed
    }

    /// Removes temporary files of earlier runs.
    fn clear_tmp(&self) -> io::Result<()> {
        let folder = self.root.join(names::TMP);
        let mut left = Vec::new();
        let is_left = |name: &str| match names::tmp_run(name) {
            Some(run) => run != self.run,
            None => self.old_tmp && names::is_old_tmp(name),
        };
        self.disk.list(&folder, &mut |name| {
            if is_left(name) {
                left.push(folder.join(name));
            }
        })?;
        for path in left {
            if self.disk.stat(&path)?.is_some_and(|stat| stat.is_file) {
                self.unlink(&path)?;
            }
        }
        Ok(())
    }

    pub(super) fn scan_shard(&self, byte: u8) -> io::Result<()> {
        let folder = self.shard_path(byte);
        let is_folder = self.disk.stat(&folder)?.is_some_and(|stat| stat.is_folder);
        if !is_folder {
            return Ok(());
        }
        let evicting = lock_evictor(self);
        let mut batch: Vec<Entry> = Vec::new();
        let listed = self.disk.list(&folder, &mut |name| {
            let Some(digest) = names::segment(byte, name) else {
                return;
            };
            // What cannot be looked at is not counted; it cannot be read either.
            if let Ok(Some(stat)) = self.disk.stat(&folder.join(name))
                && stat.is_file
            {
                batch.push(Entry::new(digest, stat.bytes, stat.used));
            }
            if batch.len() >= BATCH {
                self.count(&evicting, &mut batch);
            }
        });
        self.count(&evicting, &mut batch);
        listed
    }

    /// Takes a batch over, and evicts what are too many files to be counted.
    fn count(&self, evicting: &Evicting<'_>, batch: &mut Vec<Entry>) {
        let mut ledger = self.ledger();
        ledger.found(batch.drain(..));
        let files = ledger.files_over();
        drop(ledger);
        self.evict(evicting, Wanted { bytes: 0, files });
    }

    fn scan_layers(&self) -> io::Result<()> {
        let folder = self.root.join(names::LAYERS);
        let mut layers: Vec<Digest> = Vec::new();
        self.disk
            .list(&folder, &mut |name| layers.extend(names::digest(name)))?;
        let _evicting = lock_evictor(self);
        for layer in layers {
            if let Some((bytes, used)) = self.measure_layer(&folder.join(layer.to_hex()))? {
                self.ledger().found_layer(layer, bytes, used);
            }
        }
        Ok(())
    }

    /// Bytes that a layer's folder and our files in it take, and when they were used; `None` when there is no such folder.
    pub(super) fn measure_layer(&self, folder: &Path) -> io::Result<Option<(u64, u64)>> {
        let Some(own) = self.disk.stat(folder)?.filter(|stat| stat.is_folder) else {
            return Ok(None);
        };
        // At least something, so that also an empty folder is seen and goes.
        let (mut bytes, mut used) = (own.bytes.max(512), 0);
        for name in names::LAYER_FILES {
            if let Some(stat) = self.disk.stat(&folder.join(name))? {
                bytes += stat.bytes;
                used = used.max(stat.used);
            }
        }
        Ok(Some((bytes, used)))
    }
}

fn lock_evictor(cache: &SegmentCache) -> Evicting<'_> {
    lock(&cache.evictor)
}
