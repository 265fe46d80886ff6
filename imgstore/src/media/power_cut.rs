//! A medium for tests whose power fails: after a given number of writes everything fails, and of what was not synced any
//! part may be gone.
//!
//! All media of one [`Power`] fail together, as files of one disk do. What survives is decided by a seed: each unsynced
//! write is kept, dropped, or kept in part (whole sectors, not necessarily the first), and the length follows.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Media;
use super::mem::MemMedia;
use crate::ids::{to_u64, to_usize};

const SECTOR: usize = 512;

/// Counts down to the failure.
#[derive(Debug)]
pub struct Power {
    left: AtomicU64,
    done: AtomicU64,
    failed: AtomicBool,
}

impl Power {
    /// Fails at the operation after `operations` writes, cuts and syncs.
    pub fn failing_after(operations: u64) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicU64::new(operations),
            done: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        })
    }

    /// Operations that were done before the failure.
    pub fn operations(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    /// Whether it has failed.
    pub fn is_out(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    fn spend(&self) -> io::Result<()> {
        let spent = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            });
        match spent {
            Ok(_) => {
                self.done.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
            Err(_) => {
                self.failed.store(true, Ordering::SeqCst);
                Err(out())
            }
        }
    }
}

fn out() -> io::Error {
    io::Error::other("the power is out")
}

#[derive(Debug)]
enum Unsynced {
    Write { offset: u64, bytes: Vec<u8> },
    Cut(u64),
}

/// See the head of this file.
#[derive(Debug)]
pub struct PowerCutMedia {
    power: Arc<Power>,
    /// What a reader sees.
    seen: MemMedia,
    /// What is on the platter, and what is on its way there.
    platter: Mutex<(Vec<u8>, Vec<Unsynced>)>,
}

impl PowerCutMedia {
    /// A medium of durable bytes.
    pub fn new(power: Arc<Power>, bytes: Vec<u8>) -> Self {
        Self {
            power,
            seen: MemMedia::new(bytes.clone()),
            platter: Mutex::new((bytes, Vec::new())),
        }
    }

    fn platter(&self) -> MutexGuard<'_, (Vec<u8>, Vec<Unsynced>)> {
        self.platter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What others see when only the process that wrote is gone.
    pub fn after_kill(&self) -> Vec<u8> {
        self.seen.snapshot()
    }

    /// What is found when the power is back. `random` gives 64 bits a call.
    pub fn after_failure(&self, random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        let platter = self.platter();
        let mut bytes = platter.0.clone();
        for operation in &platter.1 {
            match operation {
                // A cut is metadata; it may be there or not.
                Unsynced::Cut(len) if random().is_multiple_of(2) => bytes.resize(to_usize(*len), 0),
                Unsynced::Cut(_) => {}
                Unsynced::Write { offset, bytes: new } => {
                    let fate = random() % 4;
                    if fate == 0 {
                        continue;
                    }
                    for (number, sector) in new.chunks(SECTOR).enumerate() {
                        if fate == 1 && random().is_multiple_of(2) {
                            continue;
                        }
                        let start = to_usize(*offset) + number * SECTOR;
                        let end = start + sector.len();
                        if bytes.len() < end {
                            bytes.resize(end, 0);
                        }
                        if let Some(place) = bytes.get_mut(start..end) {
                            place.copy_from_slice(sector);
                        }
                    }
                }
            }
        }
        bytes
    }
}

impl Media for PowerCutMedia {
    fn size(&self) -> io::Result<u64> {
        self.seen.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if self.power.is_out() {
            return Err(out());
        }
        self.seen.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut platter = self.platter();
        platter.1.push(Unsynced::Write {
            offset,
            bytes: bytes.to_vec(),
        });
        // The failing write itself may reach the platter in part.
        self.power.spend()?;
        self.seen.write_at(bytes, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut platter = self.platter();
        platter.1.push(Unsynced::Cut(len));
        self.power.spend()?;
        self.seen.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        let mut platter = self.platter();
        self.power.spend()?;
        platter.0 = self.seen.snapshot();
        debug_assert_eq!(to_u64(platter.0.len()), self.seen.size().unwrap_or(0));
        platter.1.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_synced_stays_and_the_rest_is_up_to_chance() {
        let power = Power::failing_after(4);
        let media = PowerCutMedia::new(Arc::clone(&power), vec![0; 512]);
        media.write_at(&[1; 512], 0).unwrap();
        media.sync().unwrap();
        media.write_at(&[2; 1024], 512).unwrap();
        media.write_at(&[3; 512], 0).unwrap();
        media.write_at(&[4; 512], 0).unwrap_err();
        media.sync().unwrap_err();
        assert!(power.is_out());
        assert_eq!(power.operations(), 4);
        media.read_at(&mut [0; 1], 0).unwrap_err();
        let seen: std::collections::BTreeSet<_> = (0..64_u64)
            .map(|seed| {
                let mut state = seed;
                let mut random = || {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    state >> 33
                };
                let bytes = media.after_failure(&mut random);
                (bytes[0], bytes.get(512).copied(), bytes.get(1024).copied())
            })
            .collect();
        assert!(seen.iter().all(|(first, ..)| matches!(first, 1 | 3 | 4)));
        assert!(seen.contains(&(1, None, None)));
        assert!(seen.len() > 6, "{seen:?}");
    }
}
