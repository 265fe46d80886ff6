//! Plain, verified segments in memory: the ones used last, bounded in bytes.
//!
//! Neighbouring reads hit the same segment again and again (a read is at most 128 KiB, a segment is longer), so a small
//! memory saves most decoding. There are a few hundred entries at most: looking through all of them to find the oldest is
//! cheaper than keeping a list in order.
//!
//! What leaves is not freed but filled again: most segments have one length, so in steady state decoding takes no memory
//! from the allocator, and none of the kernel's time to clear fresh pages.

use std::collections::HashMap;
use std::sync::Arc;

use imgstore::ids::{Digest, to_u64};

/// Most buffers kept to be filled again: one for each thread that decodes.
const SPARE_MAX: usize = 4;

/// A segment's plain bytes.
pub(crate) type Plain = Arc<Box<[u8]>>;

#[derive(Debug)]
struct Entry {
    plain: Plain,
    used: u64,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PlainLru {
    entries: HashMap<Digest, Entry>,
    bytes: u64,
    bytes_max: u64,
    clock: u64,
    spare: Vec<Box<[u8]>>,
}

impl PlainLru {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            entries: HashMap::new(),
            bytes: 0,
            bytes_max,
            clock: 0,
            spare: Vec::new(),
        }
    }

    /// Bytes kept now.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A buffer of `len` bytes that nobody reads any more, with old bytes in it.
    pub(crate) fn take_spare(&mut self, len: u64) -> Option<Box<[u8]>> {
        let mut lengths = self.spare.iter().map(|buffer| to_u64(buffer.len()));
        let at = lengths.position(|found| found == len)?;
        Some(self.spare.swap_remove(at))
    }

    /// The segment, if it is here; it is then the last used.
    pub(crate) fn get(&mut self, digest: &Digest) -> Option<Plain> {
        self.clock += 1;
        let entry = self.entries.get_mut(digest)?;
        entry.used = self.clock;
        Some(Arc::clone(&entry.plain))
    }

    /// Whether the segment is here; its age does not change.
    pub(crate) fn contains(&self, digest: &Digest) -> bool {
        self.entries.contains_key(digest)
    }

    /// Keeps a segment and lets go of the oldest beyond the bound. A segment longer than the bound is not kept.
    pub(crate) fn insert(&mut self, digest: Digest, plain: &Plain) {
        let len = to_u64(plain.len());
        if len > self.bytes_max {
            return;
        }
        self.clock += 1;
        let entry = Entry {
            plain: Arc::clone(plain),
            used: self.clock,
        };
        self.bytes += len;
        if let Some(old) = self.entries.insert(digest, entry) {
            self.bytes -= to_u64(old.plain.len());
        }
        while self.bytes > self.bytes_max {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used);
            let Some(oldest) = oldest.map(|(digest, _)| *digest) else {
                break;
            };
            if let Some(gone) = self.entries.remove(&oldest) {
                self.bytes -= to_u64(gone.plain.len());
                self.recycle(gone.plain);
            }
        }
    }
}

impl PlainLru {
    fn recycle(&mut self, plain: Plain) {
        // A reader may still copy from it; then it is freed when that is done.
        if let Ok(buffer) = Arc::try_unwrap(plain) {
            if self.spare.len() >= SPARE_MAX {
                self.spare.remove(0);
            }
            self.spare.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n: u8, len: usize) -> (Digest, Plain) {
        let bytes = vec![n; len].into_boxed_slice();
        (Digest::of(&bytes), Arc::new(bytes))
    }

    #[test]
    fn the_oldest_goes_when_the_bound_is_passed() {
        let mut lru = PlainLru::new(100);
        let all: Vec<_> = (0..3).map(|n| plain(n, 40)).collect();
        lru.insert(all[0].0, &all[0].1);
        lru.insert(all[1].0, &all[1].1);
        assert!(lru.get(&all[0].0).is_some());
        lru.insert(all[2].0, &all[2].1);
        let here: Vec<bool> = all.iter().map(|(d, _)| lru.contains(d)).collect();
        assert_eq!(here, [true, false, true]);
        assert_eq!(lru.bytes, 80);
    }

    #[test]
    fn what_leaves_is_used_again_unless_somebody_reads_it() {
        let mut lru = PlainLru::new(100);
        let (first, bytes) = plain(1, 60);
        lru.insert(first, &bytes);
        drop(bytes);
        let (second, read) = plain(2, 60);
        lru.insert(second, &read);
        assert_eq!(lru.take_spare(61), None);
        assert_eq!(lru.take_spare(60).unwrap()[0], 1);
        assert_eq!(lru.take_spare(60), None);
        let (third, bytes) = plain(3, 60);
        lru.insert(third, &bytes);
        assert_eq!(lru.take_spare(60), None, "`read` is still held");
        assert!(read.iter().all(|b| *b == 2));
    }

    #[test]
    fn the_same_segment_counts_once_and_a_giant_is_not_kept() {
        let mut lru = PlainLru::new(100);
        let (digest, bytes) = plain(1, 60);
        lru.insert(digest, &bytes);
        lru.insert(digest, &bytes);
        assert_eq!(lru.bytes, 60);
        let (giant, bytes) = plain(2, 101);
        lru.insert(giant, &bytes);
        assert!(!lru.contains(&giant) && lru.contains(&digest));
    }
}
