//! What the cache does to its disk, as few operations as it needs: a seam, so that a test can stop after each of them, let
//! the power fail, or have the disk answer with errors.
//!
//! Frames are never synced: their digest is their state. Only the marker and pins are, which are small and rarely written.

use std::fs::{self, File};
use std::io::{self, IoSlice, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::Advice;
use rustix::io::{Errno, ReadWriteFlags};

use crate::ids::{round_up_to_block, to_u64};

/// A file as the disk counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// A plain file: not a folder, link or device.
    pub is_file: bool,
    /// A folder.
    pub is_folder: bool,
    /// Bytes that it takes on disk: its blocks, and at least its length.
    pub bytes: u64,
    /// When it was last written or read, in microseconds since 1970.
    pub used: u64,
}

impl Stat {
    fn new(meta: &fs::Metadata) -> Self {
        let micros = |time: io::Result<SystemTime>| {
            let since = time.ok()?.duration_since(UNIX_EPOCH).ok()?;
            u64::try_from(since.as_micros()).ok()
        };
        let used = micros(meta.modified()).max(micros(meta.accessed()));
        // A file system that has not decided yet where the blocks go may say that there are none.
        let length = if meta.is_file() {
            round_up_to_block(meta.len())
        } else {
            0
        };
        Self {
            is_file: meta.is_file(),
            is_folder: meta.is_dir(),
            bytes: (meta.blocks() * 512).max(length),
            used: used.unwrap_or_default(),
        }
    }
}

/// Room on a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What we may still write.
    pub free: u64,
    /// Its size.
    pub all: u64,
}

/// The operations. Paths are absolute.
pub trait CacheDisk: Send + Sync + std::fmt::Debug {
    /// Creates a new file with these bytes; how many bytes of disk it takes.
    ///
    /// # Errors
    /// What the disk said; there may be a part of the file.
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<u64>;

    /// Makes a file's bytes, or a folder's names, durable.
    ///
    /// # Errors
    /// What the disk said.
    fn sync(&self, path: &Path) -> io::Result<()>;

    /// Gives a file another name, replacing what has it.
    ///
    /// # Errors
    /// What the disk said.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// What the disk said.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder and those above it; one that is there already is fine.
    ///
    /// # Errors
    /// What the disk said.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    ///
    /// # Errors
    /// What the disk said.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// Calls `each` with every name in a folder that is UTF-8 (the others are none of ours).
    ///
    /// # Errors
    /// What the disk said; a missing folder is an error.
    fn list(&self, folder: &Path, each: &mut dyn FnMut(&str)) -> io::Result<()>;

    /// Looks at a file without following links; `None` when it is not there.
    ///
    /// # Errors
    /// What the disk said.
    fn stat(&self, path: &Path) -> io::Result<Option<Stat>>;

    /// Reads a file, at most `len_max` bytes of it; `None` when it is not there.
    ///
    /// # Errors
    /// What the disk said.
    fn read(&self, path: &Path, len_max: u64) -> io::Result<Option<Vec<u8>>>;

    /// Room on the file system of `path`.
    ///
    /// # Errors
    /// What the disk said.
    fn space(&self, path: &Path) -> io::Result<Space>;
}

/// The file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

fn missing_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

impl CacheDisk for RealDisk {
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<u64> {
        let file = File::create_new(path)?;
        write_past_page_cache(&file, bytes)?;
        Ok(Stat::new(&file.metadata()?).bytes)
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn list(&self, folder: &Path, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            if let Some(name) = entry?.file_name().to_str() {
                each(name);
            }
        }
        Ok(())
    }

    fn stat(&self, path: &Path) -> io::Result<Option<Stat>> {
        let meta = missing_is_none(fs::symlink_metadata(path))?;
        Ok(meta.map(|meta| Stat::new(&meta)))
    }

    /// The file's pages leave the page cache again, for the plain bytes go there.
    fn read(&self, path: &Path, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = missing_is_none(File::open(path))? else {
            return Ok(None);
        };
        let len = file.metadata()?.len().min(len_max);
        let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
        (&file).take(len).read_to_end(&mut bytes)?;
        if let Err(error) = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed) {
            // Advice only: where it is refused, the page cache holds a second, compressed copy.
            tracing::trace!(%error, "cached frames stay in the page cache");
        }
        Ok(Some(bytes))
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        let stat = rustix::fs::statvfs(path)?;
        Ok(Space {
            free: stat.f_bavail.saturating_mul(stat.f_frsize),
            all: stat.f_blocks.saturating_mul(stat.f_frsize),
        })
    }
}

/// `RWF_DONTCACHE` (Linux 6.14): the pages leave the page cache as soon as they are on disk.
const DONT_CACHE: u32 = 0x80;

/// Writes the whole of `bytes`. The frame is in the data plane's memory by now; a copy in the page cache would only take
/// the place of file data. Where the kernel or the file system cannot do that, the copy stays until memory is short.
fn write_past_page_cache(mut file: &File, bytes: &[u8]) -> io::Result<()> {
    let flags = ReadWriteFlags::from_bits_retain(DONT_CACHE);
    let written = match rustix::io::pwritev2(file, &[IoSlice::new(bytes)], 0, flags) {
        Ok(written) => written,
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => 0,
        Err(e) => return Err(e.into()),
    };
    let rest = bytes.get(written..).unwrap_or_default();
    if rest.is_empty() {
        return Ok(());
    }
    file.seek(SeekFrom::Start(to_u64(written)))?;
    file.write_all(rest)
}
