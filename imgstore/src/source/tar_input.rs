//! Where the bytes of a tar come from: a seekable file, whose contents stay where they are, or a stream, whose contents
//! go to the spool.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::SourceError;
use super::decompress::{Bomb, RATIO_MAX};
use super::error::TarFault;
use super::spool::Spool;
use super::tar_header::BLOCK;
use crate::ids::{to_u64, to_usize};

/// Bytes copied at a time.
const COPY_BYTES: usize = 128 << 10;

/// A part of a file: the whole of a tar file, or a layer inside an archive.
#[derive(Debug, Clone)]
pub(super) struct FilePart {
    pub(super) file: Arc<OwnedFd>,
    /// First byte in the file.
    pub(super) base: u64,
    pub(super) len: u64,
}

/// Reads a [`FilePart`] from its start.
#[derive(Debug)]
pub(super) struct PartReader {
    file: std::fs::File,
    part: FilePart,
    at: u64,
}

impl FilePart {
    pub(super) fn reader(&self) -> io::Result<PartReader> {
        Ok(PartReader {
            file: self.file.try_clone()?.into(),
            part: self.clone(),
            at: 0,
        })
    }
}

impl Read for PartReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.part.len - self.at;
        let n = to_u64(buf.len()).min(left);
        let buf = buf.get_mut(..to_usize(n)).unwrap_or_default();
        let n = self.file.read_at(buf, self.part.base + self.at)?;
        self.at += to_u64(n);
        Ok(n)
    }
}

enum From<'r> {
    File(PartReader),
    Stream(Box<dyn Read + 'r>, &'r mut Spool),
}

/// The bytes of one tar, front to back.
pub(super) struct TarInput<'r> {
    from: From<'r>,
    name: String,
    /// Bytes of the tar that were passed.
    at: u64,
    buf: Vec<u8>,
}

impl<'r> TarInput<'r> {
    pub(super) fn file(part: &FilePart, name: &str) -> Result<Self, SourceError> {
        let reader = part
            .reader()
            .map_err(|e| SourceError::io(name, "read", e))?;
        Ok(Self::new(From::File(reader), name))
    }

    pub(super) fn stream(stream: Box<dyn Read + 'r>, name: &str, spool: &'r mut Spool) -> Self {
        Self::new(From::Stream(stream, spool), name)
    }

    fn new(from: From<'r>, name: &str) -> Self {
        Self {
            from,
            name: name.to_owned(),
            at: 0,
            buf: vec![0; COPY_BYTES],
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) const fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn fault(&self, offset: u64, fault: TarFault) -> SourceError {
        SourceError::Archive {
            archive: self.name.clone(),
            offset,
            fault,
        }
    }

    fn failed(&self, source: io::Error) -> SourceError {
        if let Some(bomb) = Bomb::of(&source) {
            return SourceError::Expansion {
                archive: self.name.clone(),
                plain: bomb.plain,
                compressed: bomb.compressed,
                ratio: RATIO_MAX,
            };
        }
        SourceError::ArchiveRead {
            archive: self.name.clone(),
            offset: self.at,
            source,
        }
    }

    /// Reads up to `buf.len()` bytes, fewer only at the end.
    fn fill(&mut self, buf: &mut [u8]) -> Result<usize, SourceError> {
        let mut filled = 0;
        while let Some(rest) = buf.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let read = match &mut self.from {
                From::File(reader) => reader.read(rest),
                From::Stream(reader, _) => reader.read(rest),
            };
            match read {
                Ok(0) => break,
                Ok(n) => {
                    filled += n;
                    self.at += to_u64(n);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        Ok(filled)
    }

    /// The next block; `None` at the end.
    pub(super) fn block(&mut self) -> Result<Option<[u8; BLOCK]>, SourceError> {
        let start = self.at;
        let mut block = [0; BLOCK];
        match self.fill(&mut block)? {
            0 => Ok(None),
            BLOCK => Ok(Some(block)),
            found => Err(self.truncated(start, to_u64(BLOCK), to_u64(found))),
        }
    }

    fn truncated(&self, start: u64, expected: u64, found: u64) -> SourceError {
        self.fault(start, TarFault::Truncated { expected, found })
    }

    /// The next `len` bytes, and the padding behind them. The caller has bounded `len`.
    pub(super) fn bytes(&mut self, len: u64) -> Result<Vec<u8>, SourceError> {
        let start = self.at;
        let mut out = Vec::new();
        let mut left = len;
        // By pieces: memory grows with what is really there, not with what a header claims.
        while left > 0 {
            let from = out.len();
            let piece = left.min(to_u64(COPY_BYTES));
            out.resize(from + to_usize(piece), 0);
            let n = self.fill(out.get_mut(from..).unwrap_or_default())?;
            if to_u64(n) < piece {
                return Err(self.truncated(start, len, len - left + to_u64(n)));
            }
            left -= piece;
        }
        self.padding(len, start)?;
        Ok(out)
    }

    /// Puts the next `len` bytes where contents are kept: gives the file and the offset there. Passes the padding.
    pub(super) fn place(&mut self, len: u64) -> Result<(Arc<OwnedFd>, u64), SourceError> {
        let start = self.at;
        let placed = match &self.from {
            From::File(reader) => (Arc::clone(&reader.part.file), reader.part.base + reader.at),
            From::Stream(_, spool) => (spool.file(), spool.len()),
        };
        self.pass(len, start, true)?;
        self.padding(len, start)?;
        Ok(placed)
    }

    /// Passes `len` bytes and their padding.
    pub(super) fn skip(&mut self, len: u64) -> Result<(), SourceError> {
        let start = self.at;
        self.pass(len, start, false)?;
        self.padding(len, start)
    }

    fn padding(&mut self, len: u64, start: u64) -> Result<(), SourceError> {
        let block = to_u64(BLOCK);
        let pad = (block - len % block) % block;
        self.pass(pad, start, false)
    }

    fn pass(&mut self, len: u64, start: u64, keep: bool) -> Result<(), SourceError> {
        if let From::File(reader) = &mut self.from {
            let left = reader.part.len - reader.at;
            if len > left {
                return Err(self.truncated(start, len, left));
            }
            reader.at += len;
            self.at += len;
            return Ok(());
        }
        let mut buf = std::mem::take(&mut self.buf);
        let mut left = len;
        while left > 0 {
            let want = left.min(to_u64(buf.len()));
            let piece = buf.get_mut(..to_usize(want)).unwrap_or_default();
            let n = self.fill(piece)?;
            let got = piece.get(..n).unwrap_or_default();
            if let (From::Stream(_, spool), true) = (&mut self.from, keep) {
                spool.append(got)?;
            }
            if to_u64(n) < want {
                return Err(self.truncated(start, len, len - left + to_u64(n)));
            }
            left -= want;
        }
        self.buf = buf;
        Ok(())
    }

    /// Reads a stream to its end, so that the checksums of compressions and blobs are seen. Files are left alone.
    pub(super) fn drain(&mut self) -> Result<(), SourceError> {
        if matches!(self.from, From::File(_)) {
            return Ok(());
        }
        let mut buf = std::mem::take(&mut self.buf);
        while self.fill(&mut buf)? > 0 {}
        self.buf = buf;
        Ok(())
    }
}
