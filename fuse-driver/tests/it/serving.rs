//! What the kernel sees of images that come, answer late, fail and go.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::SystemTime;

use fuse_driver::mount::{FuseError, FuseMount};
use imgstore::image::{BlockImage, ReadDone, ReadError};

/// Byte `i` is `i % 251 ^ salt`; counts reads; answers from another thread; fails from `bad_from` on.
#[derive(Debug)]
struct Pattern {
    len: u64,
    salt: u8,
    bad_from: u64,
    reads: AtomicUsize,
}

impl Pattern {
    fn new(len: u64, salt: u8) -> Arc<Self> {
        Arc::new(Self {
            len,
            salt,
            bad_from: u64::MAX,
            reads: AtomicUsize::new(0),
        })
    }

    fn bytes(salt: u8, offset: u64, len: usize) -> Vec<u8> {
        (offset..)
            .take(len)
            .map(|i| u8::try_from(i % 251).expect("below 251") ^ salt)
            .collect()
    }
}

impl BlockImage for Pattern {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, len: u32, done: ReadDone) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let end = (offset + u64::from(len)).min(self.len);
        let salt = self.salt;
        let bad = end > self.bad_from;
        std::thread::Builder::new()
            .spawn(move || {
                if bad {
                    done(Err(ReadError("told to fail".to_owned())));
                } else {
                    let len = usize::try_from(end.saturating_sub(offset)).expect("small");
                    done(Ok(&Pattern::bytes(salt, offset, len)));
                }
            })
            .expect("a thread");
    }
}

struct Mounted {
    fuse: Option<FuseMount>,
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let fuse = FuseMount::new(dir.path(), SystemTime::UNIX_EPOCH).expect("a FUSE mount");
        Self {
            fuse: Some(fuse),
            dir,
        }
    }

    fn fuse(&self) -> &FuseMount {
        self.fuse.as_ref().expect("mounted")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(fuse) = self.fuse.take() {
            fuse.unmount().expect("unmount");
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let path = self.dir.path().to_str().expect("utf-8").to_owned();
        if !std::thread::panicking() {
            assert!(!mounts.contains(&path), "`{path}` is still mounted");
        }
    }
}

#[test]
fn whole_files_and_pieces_read_back_exactly() {
    let mounted = Mounted::new();
    let len = 3 * (1 << 20) + 4096;
    mounted.fuse().add("a", Pattern::new(len, 1), 0).unwrap();
    let path = mounted.dir.path().join("a");
    assert_eq!(fs::metadata(&path).unwrap().len(), len);
    let whole = fs::read(&path).unwrap();
    assert!(whole == Pattern::bytes(1, 0, usize::try_from(len).unwrap()));
    let file = File::open(&path).unwrap();
    let mut piece = [0; 1000];
    file.read_exact_at(&mut piece, 1_234_567).unwrap();
    assert_eq!(piece.to_vec(), Pattern::bytes(1, 1_234_567, 1000));
    assert_eq!(file.read_at(&mut piece, len).unwrap(), 0);
}

#[test]
fn many_readers_get_their_own_bytes() {
    let mounted = Mounted::new();
    for salt in 0..4 {
        let image = Pattern::new(1 << 20, salt);
        mounted.fuse().add(&salt.to_string(), image, 0).unwrap();
    }
    let start = Barrier::new(16);
    std::thread::scope(|scope| {
        for n in 0_u8..16 {
            let (start, dir) = (&start, mounted.dir.path());
            scope.spawn(move || {
                start.wait();
                let salt = n % 4;
                let read = fs::read(dir.join(salt.to_string())).unwrap();
                assert!(read == Pattern::bytes(salt, 0, 1 << 20), "image {salt}");
            });
        }
    });
}

#[test]
fn a_failed_read_is_eio_and_its_neighbours_are_fine() {
    let mounted = Mounted::new();
    let image = Arc::new(Pattern {
        len: 1 << 20,
        salt: 0,
        bad_from: 512 << 10,
        reads: AtomicUsize::new(0),
    });
    mounted.fuse().add("a", image, 0).unwrap();
    let file = File::open(mounted.dir.path().join("a")).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut block = [0; 4096];
    let error = file.read_at(&mut block, 600 << 10).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    file.read_exact_at(&mut block, 0).unwrap();
    assert_eq!(block.to_vec(), Pattern::bytes(0, 0, 4096));
}

#[test]
fn preloaded_bytes_are_read_without_a_request() {
    let mounted = Mounted::new();
    let image = Pattern::new(4 << 20, 3);
    let preload = 1 << 20;
    mounted
        .fuse()
        .add("a", Arc::clone(&image) as Arc<dyn BlockImage>, preload)
        .unwrap();
    let file = File::open(mounted.dir.path().join("a")).unwrap();
    let after_open = image.reads.load(Ordering::Relaxed);
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut bytes = vec![0; 1 << 20];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == Pattern::bytes(3, 0, 1 << 20));
    assert_eq!(image.reads.load(Ordering::Relaxed), after_open);
    file.read_exact_at(&mut bytes, preload).unwrap();
    assert!(image.reads.load(Ordering::Relaxed) > after_open);
}

#[test]
fn a_removed_image_is_gone_and_its_name_can_be_used_again() {
    let mounted = Mounted::new();
    let path = mounted.dir.path().join("a");
    let fuse = mounted.fuse();
    fuse.add("a", Pattern::new(8192, 1), 0).unwrap();
    assert!(matches!(
        fuse.add("a", Pattern::new(8192, 1), 0),
        Err(FuseError::Exists(_))
    ));
    let old = File::open(&path).unwrap();
    fuse.remove("a").unwrap();
    assert_eq!(
        File::open(&path).unwrap_err().kind(),
        std::io::ErrorKind::NotFound
    );
    assert!(matches!(fuse.remove("a"), Err(FuseError::Missing(_))));
    fuse.add("a", Pattern::new(4096, 2), 0).unwrap();
    assert_eq!(fs::read(&path).unwrap(), Pattern::bytes(2, 0, 4096));
    let mut bytes = [0; 4096];
    old.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes.to_vec(), Pattern::bytes(1, 0, 4096));
    let names: Vec<_> = fs::read_dir(mounted.dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["a"]);
}
