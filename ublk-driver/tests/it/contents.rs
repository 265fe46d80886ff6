//! What the tests serve.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use imgstore::disk::device::BlockDevice;
use imgstore::image::{BlockImage, ReadDone, ReadError};

/// Bytes that tell where they are.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let words = (0_u64..).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed).to_le_bytes());
    words.flatten().take(len).collect()
}

/// How a [`MemImage`] answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// On the thread that asks.
    AtOnce,
    /// On another thread.
    Later,
    /// An error.
    Fail,
    /// A byte less than wanted.
    Short,
    /// Forgets the question.
    Forget,
    /// Keeps the question.
    Hang,
}

type Question = (u64, u32, ReadDone);

/// An image in memory.
pub(crate) struct MemImage {
    bytes: Arc<Vec<u8>>,
    how: Mutex<How>,
    later: mpsc::Sender<Question>,
    kept: Mutex<Vec<ReadDone>>,
    questions: AtomicU64,
}

impl std::fmt::Debug for MemImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemImage").finish_non_exhaustive()
    }
}

impl MemImage {
    pub(crate) fn new(bytes: Vec<u8>, how: How) -> Arc<Self> {
        let bytes = Arc::new(bytes);
        let (later, questions) = mpsc::channel::<Question>();
        let its = Arc::clone(&bytes);
        std::thread::Builder::new()
            .spawn(move || {
                for (offset, len, done) in questions {
                    let at = usize::try_from(offset).unwrap();
                    done(Ok(&its[at..at + usize::try_from(len).unwrap()]));
                }
            })
            .unwrap();
        Arc::new(Self {
            bytes,
            how: Mutex::new(how),
            later,
            kept: Mutex::default(),
            questions: AtomicU64::new(0),
        })
    }

    pub(crate) fn answer(&self, how: How) {
        *self.how.lock().unwrap() = how;
    }

    pub(crate) fn kept(&self) -> Vec<ReadDone> {
        std::mem::take(&mut *self.kept.lock().unwrap())
    }

    pub(crate) fn questions(&self) -> u64 {
        self.questions.load(Ordering::SeqCst)
    }

    pub(crate) fn hanging(&self) -> usize {
        self.kept.lock().unwrap().len()
    }
}

impl BlockImage for MemImage {
    fn len(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap()
    }

    fn read_at(&self, offset: u64, len: u32, done: ReadDone) {
        self.questions.fetch_add(1, Ordering::SeqCst);
        let at = usize::try_from(offset).unwrap();
        let bytes = &self.bytes[at..at + usize::try_from(len).unwrap()];
        match *self.how.lock().unwrap() {
            How::AtOnce => done(Ok(bytes)),
            How::Later => self.later.send((offset, len, done)).unwrap(),
            How::Fail => done(Err(ReadError("as asked".to_owned()))),
            How::Short => done(Ok(&bytes[1..])),
            How::Forget => drop(done),
            How::Hang => self.kept.lock().unwrap().push(done),
        }
    }
}

/// A disk in a file, which outlives its server.
#[derive(Debug)]
pub(crate) struct FileDisk {
    file: File,
    bytes: u64,
    /// The next writes fail with this error number, if it is not 0.
    pub(crate) failure: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) discarded: AtomicU64,
}

impl FileDisk {
    pub(crate) fn open(path: &Path, bytes: u64) -> Arc<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .unwrap();
        file.set_len(bytes).unwrap();
        Arc::new(Self {
            file,
            bytes,
            failure: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            discarded: AtomicU64::new(0),
        })
    }

    fn fail(&self) -> io::Result<()> {
        match self.failure.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(i32::try_from(code).unwrap())),
        }
    }
}

impl BlockDevice for FileDisk {
    fn size(&self) -> u64 {
        self.bytes
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.fail()?;
        self.file.read_exact_at(buffer, offset)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.fail()?;
        self.file.write_all_at(bytes, offset)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.fail()?;
        self.discarded.fetch_add(len, Ordering::SeqCst);
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, punch, offset, len)?)
    }

    fn flush(&self) -> io::Result<()> {
        self.fail()?;
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.file.sync_data()
    }
}
