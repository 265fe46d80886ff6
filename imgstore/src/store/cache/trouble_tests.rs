//! The cache on a disk that is full or fails on demand.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::disk::{CacheDisk, RealDisk, Space, Stat};
use super::health::{DiskState, ERRORS_MAX};
use super::tests::{frame, open_on};
use super::*;

/// A real folder whose disk says how full it is, and fails, on demand.
#[derive(Debug, Default)]
struct MoodyDisk {
    /// Free bytes; negative: as the real disk says.
    free: AtomicI64,
    fails: Mutex<Option<io::ErrorKind>>,
    creates: AtomicU64,
    removes: AtomicU64,
}

impl MoodyDisk {
    fn new(free: i64) -> Arc<Self> {
        let disk = Self::default();
        disk.free.store(free, Ordering::Relaxed);
        Arc::new(disk)
    }

    fn fail(&self, how: Option<io::ErrorKind>) {
        *self.fails.lock().unwrap() = how;
    }

    fn check(&self) -> io::Result<()> {
        self.fails
            .lock()
            .unwrap()
            .map_or(Ok(()), |kind| Err(kind.into()))
    }
}

impl CacheDisk for MoodyDisk {
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<u64> {
        self.creates.fetch_add(1, Ordering::Relaxed);
        self.check()?;
        let taken = RealDisk.create(path, bytes)?;
        self.free
            .fetch_sub(i64::try_from(taken).unwrap(), Ordering::Relaxed);
        Ok(taken)
    }
    fn sync(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.removes.fetch_add(1, Ordering::Relaxed);
        let bytes = RealDisk.stat(path)?.map_or(0, |stat| stat.bytes);
        RealDisk.remove(path)?;
        self.free
            .fetch_add(i64::try_from(bytes).unwrap(), Ordering::Relaxed);
        Ok(())
    }
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_folder(path)
    }
    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove_folder(path)
    }
    fn list(&self, folder: &Path, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        RealDisk.list(folder, each)
    }
    fn stat(&self, path: &Path) -> io::Result<Option<Stat>> {
        RealDisk.stat(path)
    }
    fn read(&self, path: &Path, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        self.check()?;
        RealDisk.read(path, len_max)
    }
    fn space(&self, _: &Path) -> io::Result<Space> {
        let free = u64::try_from(self.free.load(Ordering::Relaxed)).unwrap_or(0);
        Ok(Space { free, all: 1 << 40 })
    }
}

/// Others fill the disk: the reserve is given back, and when nothing is left to give the work is bounded.
#[test]
fn s60_a_reserve_that_cannot_be_met_costs_bounded_work() {
    let root = tempfile::tempdir().unwrap();
    let disk = MoodyDisk::new(2_000_000);
    let settings = CacheSettings::new(10 << 20).with_reserve(Some(1_000_000));
    let cache = open_on(
        root.path(),
        settings,
        Arc::clone(&disk) as Arc<dyn CacheDisk>,
    );
    cache.scan().unwrap();
    for n in 0..200 {
        let (digest, bytes) = frame(n, 40_000);
        cache.put(&digest, &bytes).unwrap();
        assert!(disk.free.load(Ordering::Relaxed) >= 1_000_000);
    }
    assert!(cache.usage().segments > 10);
    // Others take 500,000 more; the cache gives them back although nobody writes to it.
    disk.free.fetch_sub(500_000, Ordering::Relaxed);
    cache.keep_reserve();
    assert!(disk.free.load(Ordering::Relaxed) >= 1_000_000);
    let kept = cache.usage().segments;
    assert!(kept > 5, "{kept}");
    disk.free.store(0, Ordering::Relaxed);
    let before = (
        disk.creates.load(Ordering::Relaxed),
        disk.removes.load(Ordering::Relaxed),
    );
    for n in 0..200 {
        let (digest, bytes) = frame(n, 40_000);
        assert!(cache.put(&digest, &bytes).is_err());
        cache.keep_reserve();
    }
    let after = (
        disk.creates.load(Ordering::Relaxed),
        disk.removes.load(Ordering::Relaxed),
    );
    assert_eq!(after.0, before.0, "nothing is written");
    assert_eq!(after.1, before.1 + kept, "everything goes once");
    assert_eq!(
        (cache.deeds().disk, cache.usage().segments),
        (DiskState::Full, 0)
    );
    disk.free.store(2_000_000, Ordering::Relaxed);
    cache.keep_reserve();
    let (digest, bytes) = frame(1, 40_000);
    assert_eq!(cache.put(&digest, &bytes).unwrap(), Kept::Yes);
    assert_eq!(cache.deeds().disk, DiskState::Fine);
}

/// Mutation: `may_ask` that is always true makes the disk be asked 1,000 times.
#[test]
fn s64_a_disk_that_cannot_be_written_is_left_alone_after_some_errors() {
    let root = tempfile::tempdir().unwrap();
    let disk = MoodyDisk::new(1 << 40);
    let settings = CacheSettings::new(1 << 20);
    let cache = open_on(
        root.path(),
        settings,
        Arc::clone(&disk) as Arc<dyn CacheDisk>,
    );
    cache.scan().unwrap();
    disk.fail(Some(io::ErrorKind::Other));
    let before = disk.creates.load(Ordering::Relaxed);
    for n in 0..1000 {
        let (digest, bytes) = frame(n, 4000);
        assert!(cache.put(&digest, &bytes).is_err());
    }
    assert_eq!(
        disk.creates.load(Ordering::Relaxed) - before,
        u64::from(ERRORS_MAX)
    );
    assert_eq!(
        (cache.deeds().disk, cache.deeds().not_kept),
        (DiskState::Failing, 1000)
    );
    assert_eq!(cache.usage().segments, 0);
}

/// Mutation: `SegmentFiles::read` without `may_ask`: red.
#[test]
fn s64_a_disk_that_cannot_be_read_is_left_alone_after_some_errors() {
    let root = tempfile::tempdir().unwrap();
    let disk = MoodyDisk::new(1 << 40);
    let files = SegmentFiles::on(root.path(), Arc::clone(&disk) as Arc<dyn CacheDisk>);
    let (digest, _) = frame(1, 10);
    disk.fail(Some(io::ErrorKind::Other));
    for _ in 0..ERRORS_MAX {
        assert!(files.contains(&digest).is_ok());
        assert!(files.read(&digest, 10).is_err());
    }
    for _ in 0..1000 {
        assert_eq!(files.read(&digest, 10).unwrap(), None);
        assert!(!files.contains(&digest).unwrap());
    }
}

#[test]
fn s59_a_full_disk_evicts_once_and_is_then_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let disk = MoodyDisk::new(1 << 40);
    let settings = CacheSettings::new(1 << 20);
    let cache = open_on(
        root.path(),
        settings,
        Arc::clone(&disk) as Arc<dyn CacheDisk>,
    );
    cache.scan().unwrap();
    disk.fail(Some(io::ErrorKind::StorageFull));
    let before = disk.creates.load(Ordering::Relaxed);
    for n in 0..1000 {
        let (digest, bytes) = frame(n, 4000);
        let error = cache.put(&digest, &bytes).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(
        disk.creates.load(Ordering::Relaxed) - before,
        2,
        "one try and one after evicting"
    );
    assert_eq!(cache.deeds().disk, DiskState::Full);
    assert_eq!(cache.deeds().errors, 0);
}
