//! Reading the content of regular files while a layer is built, wherever it is.
//!
//! A host file is opened without following links and its stamp compared, so that a file which is replaced or written to
//! while the layer is built is an error and never a mixture.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

use super::host_file;
use crate::ids::{to_u64, to_usize};
use crate::tree::{Content, DataRun, Place, Stamp};

/// Why a file's content could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContentError {
    /// The file cannot be opened or read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is not what it was when the tree was read.
    #[error("`{}` changed while the layer was built (expected {expected:?}, found {found:?}); stop what writes to it and build again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The stamp in the tree.
        expected: Box<Stamp>,
        /// The stamp now.
        found: Box<Stamp>,
    },
}

#[derive(Debug)]
enum Handle {
    Host(File, PathBuf, Stamp),
    Shared(Arc<OwnedFd>),
}

/// An open file content.
#[derive(Debug)]
pub struct ContentReader {
    handle: Handle,
    runs: Vec<DataRun>,
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> ContentError {
    move |source| ContentError::Io {
        path: path.to_owned(),
        source,
    }
}

/// The data runs of an open file, by `SEEK_DATA` and `SEEK_HOLE`; one run where the file system cannot tell.
fn seek_runs(file: &File, len: u64) -> io::Result<Vec<DataRun>> {
    let whole = vec![DataRun {
        file_offset: 0,
        len,
        stored_offset: 0,
    }];
    let mut runs = Vec::new();
    let mut at = 0;
    while at < len {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(len),
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(whole),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(len);
        if end > start {
            runs.push(DataRun {
                file_offset: start,
                len: end - start,
                stored_offset: start,
            });
        }
        at = end.max(at + 1);
    }
    Ok(runs)
}

impl ContentReader {
    /// Opens a content.
    ///
    /// # Errors
    /// [`ContentError::Changed`] when a host file is not the one the tree was read from.
    pub fn open(content: &Content) -> Result<Self, ContentError> {
        match &content.place {
            Place::Runs(fd, runs) => Ok(Self {
                handle: Handle::Shared(Arc::clone(fd)),
                runs: runs.clone(),
            }),
            Place::Layer => {
                let other = io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the layer's own reader has the bytes",
                );
                Err(io_error(Path::new("layer"))(other))
            }
            Place::Path(path, stamp) => {
                // NONBLOCK: a file that became a named pipe must not hang the build.
                let flags = OFlags::RDONLY | OFlags::NONBLOCK;
                let file = host_file::open_path(path.as_os_str().as_bytes(), flags)
                    .map(File::from)
                    .map_err(io_error(path))?;
                let mut reader = Self {
                    handle: Handle::Host(file, path.clone(), *stamp),
                    runs: Vec::new(),
                };
                reader.check_unchanged()?;
                if let Handle::Host(file, path, _) = &reader.handle {
                    reader.runs = seek_runs(file, content.len).map_err(io_error(path))?;
                }
                Ok(reader)
            }
        }
    }

    /// Where there may be data, in order.
    pub fn runs(&self) -> &[DataRun] {
        &self.runs
    }

    /// Whether `[offset, offset + len)` touches no data run.
    pub fn is_hole(&self, offset: u64, len: u64) -> bool {
        let next = self
            .runs
            .partition_point(|run| run.file_offset + run.len <= offset);
        self.runs
            .get(next)
            .is_none_or(|run| run.file_offset >= offset + len)
    }

    /// Fills `buf` with the bytes at `offset`; holes and everything behind the last run are zeros.
    ///
    /// # Errors
    /// [`ContentError::Io`] also when the file ends inside a run.
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<(), ContentError> {
        buf.fill(0);
        let end = offset + to_u64(buf.len());
        let first = self
            .runs
            .partition_point(|run| run.file_offset + run.len <= offset);
        for run in self.runs.get(first..).unwrap_or_default() {
            let start = run.file_offset.max(offset);
            let stop = (run.file_offset + run.len).min(end);
            if start >= stop {
                break;
            }
            let part = buf
                .get_mut(to_usize(start - offset)..to_usize(stop - offset))
                .expect("start and stop lie between offset and end");
            self.pread(part, run.stored_offset + (start - run.file_offset))?;
        }
        Ok(())
    }

    fn pread(&self, buf: &mut [u8], offset: u64) -> Result<(), ContentError> {
        match &self.handle {
            Handle::Host(file, path, _) => file.read_exact_at(buf, offset).map_err(io_error(path)),
            Handle::Shared(fd) => {
                let mut done = 0;
                while done < buf.len() {
                    let rest = buf.get_mut(done..).unwrap_or_default();
                    match rustix::io::pread(fd.as_fd(), rest, offset + to_u64(done)) {
                        Ok(0) => {
                            let eof = io::Error::from(io::ErrorKind::UnexpectedEof);
                            return Err(io_error(Path::new("spool of the source"))(eof));
                        }
                        Ok(n) => done += n,
                        Err(Errno::INTR) => {}
                        Err(e) => return Err(io_error(Path::new("spool of the source"))(e.into())),
                    }
                }
                Ok(())
            }
        }
    }

    /// Compares the stamp again, after the last read.
    ///
    /// # Errors
    /// [`ContentError::Changed`] when the file was written to or replaced.
    pub fn check_unchanged(&self) -> Result<(), ContentError> {
        let Handle::Host(file, path, stamp) = &self.handle else {
            return Ok(());
        };
        let found = Stamp::of(&file.metadata().map_err(io_error(path))?);
        if found == *stamp {
            return Ok(());
        }
        Err(ContentError::Changed {
            path: path.clone(),
            expected: Box::new(*stamp),
            found: Box::new(found),
        })
    }
}
