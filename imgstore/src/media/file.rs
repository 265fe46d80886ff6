//! A file.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::SeekFrom;

use super::Media;

/// A file, and its name for error messages.
#[derive(Debug)]
pub struct FileMedia {
    file: File,
    path: PathBuf,
}

impl FileMedia {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// What the disk said, with the name.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::with(path, OpenOptions::new().read(true))
    }

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// What the disk said, with the name.
    pub fn open_writable(path: &Path) -> io::Result<Self> {
        Self::with(path, OpenOptions::new().read(true).write(true))
    }

    /// Makes a file that was not there.
    ///
    /// # Errors
    /// What the disk said, with the name.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::with(
            path,
            OpenOptions::new().read(true).write(true).create_new(true),
        )
    }

    /// Opens a file for reading and writing, or makes it.
    ///
    /// # Errors
    /// What the disk said, with the name.
    pub fn open_or_create(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Self::with(path, &options)
    }

    /// Makes an empty file; one that was there loses what it had.
    ///
    /// # Errors
    /// What the disk said, with the name.
    pub fn replace(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        Self::with(path, &options)
    }

    /// The same open file once more.
    ///
    /// # Errors
    /// What the system said.
    pub fn again(&self) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            file: self.file.try_clone()?,
            path: self.path.clone(),
        }))
    }

    /// The first range from `from` on that is no hole; `None` if there are only holes.
    ///
    /// # Errors
    /// What the disk said.
    pub fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        let seek = |to| rustix::fs::seek(&self.file, to);
        match seek(SeekFrom::Data(from)) {
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(named(&self.path, &error.into())),
            Ok(start) => match seek(SeekFrom::Hole(start)) {
                Ok(end) => Ok(Some(start..end)),
                Err(error) => Err(named(&self.path, &error.into())),
            },
        }
    }

    fn with(path: &Path, options: &OpenOptions) -> io::Result<Self> {
        let file = options.open(path).map_err(|error| named(path, &error))?;
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

impl Media for FileMedia {
    fn size(&self) -> io::Result<u64> {
        let meta = self.file.metadata();
        Ok(meta.map_err(|error| named(&self.path, &error))?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let len = self.file.metadata().map_or(0, |meta| meta.len());
                named(&self.path, &super::past_end(offset, buffer.len(), len))
            }
            _ => named(&self.path, &error),
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|error| named(&self.path, &error))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let set = self.file.set_len(len);
        set.map_err(|error| named(&self.path, &error))
    }

    fn sync(&self) -> io::Result<()> {
        let synced = self.file.sync_data();
        synced.map_err(|error| named(&self.path, &error))
    }
}
