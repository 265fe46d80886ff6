//! Readers whose cache is on a disk that answers every read with an error.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use imgstore::store::cache::disk::{CacheDisk, RealDisk, Space, Stat};
use imgstore::store::cache::health::ERRORS_MAX;
use imgstore::store::layer;

use super::tests::{SOON, World};
use super::*;

/// It has every file and can read none.
#[derive(Debug, Default)]
struct FailingDisk {
    reads: AtomicU32,
}

impl CacheDisk for FailingDisk {
    fn create(&self, _: &Path, _: &[u8]) -> io::Result<u64> {
        Err(io::ErrorKind::Other.into())
    }
    fn sync(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn remove(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn create_folder(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn remove_folder(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn list(&self, _: &Path, _: &mut dyn FnMut(&str)) -> io::Result<()> {
        Err(io::ErrorKind::Other.into())
    }
    fn stat(&self, _: &Path) -> io::Result<Option<Stat>> {
        RealDisk.stat(Path::new("/"))
    }
    fn read(&self, _: &Path, _: u64) -> io::Result<Option<Vec<u8>>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        Err(io::ErrorKind::Other.into())
    }
    fn space(&self, _: &Path) -> io::Result<Space> {
        Err(io::ErrorKind::Other.into())
    }
}

/// Mutation: `SegmentFiles::read` that asks the disk whatever it said before: red.
#[test]
fn s64_reads_go_on_and_a_disk_that_cannot_be_read_is_soon_left_alone() {
    let disk = Arc::new(FailingDisk::default());
    let files = SegmentFiles::on(Path::new("/cache"), Arc::clone(&disk) as Arc<dyn CacheDisk>);
    let mut world = World::on(SOON, files);
    let origin = layer::open(&world.origin, &world.layer.digest).unwrap();
    for round in 0..20 {
        let index = round % world.layer.segments.len();
        let answer = world.read(index);
        let wish = world.wish();
        assert!(
            matches!(wish, ToControl::Need { first, .. } if first == index),
            "{wish:?}"
        );
        let plain = layer::read_segment(&world.origin, &origin, index).unwrap();
        let from = Provenance {
            origin: "here".to_owned(),
            pack: Digest::of(b""),
            offset: 0,
        };
        let stored = frame::encode(&plain, 1);
        world.loader.frame(world.digest(index), stored, from, false);
        assert_eq!(answer.recv_timeout(SOON).unwrap(), Ok(plain.len()));
    }
    assert_eq!(disk.reads.load(Ordering::Relaxed), ERRORS_MAX);
}
