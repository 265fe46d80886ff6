//! One ring and its memory: reads of pieces, however the library answers.
//!
//! The memory has a slot for each read that can be under way. A read has a ticket that was never used before; a finished
//! read is known by it, in any order. Results count only when all are there: fewer bytes than asked for, none, or a
//! negated error fail the range. What the ring must never do is reuse a slot that a late read may still fill: as
//! long as a read is under way ([`Worker::is_quiet`]), or an answer came that nobody asked for ([`Worker::is_sound`]),
//! nobody may use it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::time::Timespec;

use super::CHUNK_BYTES;
use super::chunks::Piece;
use super::files::RegisteredFile;
use super::sys::{Completion, Library, Ring};
use crate::ids::to_usize;

/// Reads under way at a time, and slots.
pub(super) const SLOTS: u16 = 4;
/// Longest single wait: the library waits by the wall clock, which may be set back meanwhile.
const WAIT_MAX: Duration = Duration::from_millis(500);

/// Why a range was not read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RingError {
    #[error("a chunk of the object is lost: the read of {len} bytes at offset {offset} met a hole")]
    Hole { offset: u64, len: usize },
    #[error(
        "a read of {got} bytes in place of {len} at offset {offset}: the object ends there, or a chunk of it is lost"
    )]
    Short { offset: u64, len: usize, got: i64 },
    #[error("the read of {len} bytes at offset {offset} failed: {errno}")]
    Failed {
        offset: u64,
        len: usize,
        errno: Errno,
    },
    #[error("`{call}` of the 3FS library failed: {errno}")]
    Call { call: &'static str, errno: Errno },
    #[error("no answer from the 3FS client within {0:?}; is `hf3fs_fuse_main` running?")]
    Silent(Duration),
    #[error("the 3FS library answered something that nobody asked: {0}")]
    Confused(&'static str),
}

#[derive(Debug)]
struct Read {
    ticket: usize,
    piece: Piece,
    /// Stays registered as long as the read may be under way.
    file: Arc<RegisteredFile>,
    result: Option<i64>,
}

/// A ring that one thread at a time uses.
#[derive(Debug)]
pub(super) struct Worker {
    ring: Ring,
    slots: Vec<Option<Read>>,
    next_ticket: usize,
    sound: bool,
}

impl Worker {
    /// A new ring below this mount point.
    pub(super) fn create(
        library: &'static Library,
        mount: &std::path::Path,
    ) -> Result<Self, Errno> {
        let bytes = usize::from(SLOTS) * to_usize(CHUNK_BYTES);
        Ok(Self {
            ring: Ring::create(library, mount, SLOTS, bytes)?,
            slots: (0..SLOTS).map(|_| None).collect(),
            next_ticket: 1,
            sound: true,
        })
    }

    /// The ids of its shared memory.
    pub(super) fn ids(&self) -> [[u8; 16]; 2] {
        self.ring.ids()
    }

    /// Whether no read is under way.
    pub(super) fn is_quiet(&self) -> bool {
        self.under_way() == 0
    }

    /// Whether every answer so far belonged to a question.
    pub(super) fn is_sound(&self) -> bool {
        self.sound
    }

    fn under_way(&self) -> usize {
        let reads = self.slots.iter().flatten();
        reads.filter(|read| read.result.is_none()).count()
    }

    /// Takes what has finished, without waiting; forgets it.
    pub(super) fn sweep(&mut self) {
        while !self.is_quiet() && self.sound {
            let before = self.under_way();
            match self.collect(Duration::ZERO) {
                Ok(()) if self.under_way() < before => {}
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%error, "a ring stays aside");
                    return;
                }
            }
        }
        self.forget_finished();
    }

    fn forget_finished(&mut self) {
        for slot in &mut self.slots {
            slot.take_if(|read| read.result.is_some());
        }
    }

    /// Appends the wanted bytes of all pieces to `out`.
    pub(super) fn read(
        &mut self,
        file: &Arc<RegisteredFile>,
        pieces: &[Piece],
        patience: Duration,
        out: &mut Vec<u8>,
    ) -> Result<(), RingError> {
        assert!(
            self.is_quiet() && self.sound,
            "only such a ring is given out"
        );
        let deadline = Instant::now() + patience;
        for batch in pieces.chunks(self.slots.len()) {
            let read = self.read_batch(file, batch, (deadline, patience));
            let copied = read.and_then(|()| self.copy(out));
            self.forget_finished();
            copied?;
        }
        Ok(())
    }

    fn read_batch(
        &mut self,
        file: &Arc<RegisteredFile>,
        batch: &[Piece],
        (deadline, patience): (Instant, Duration),
    ) -> Result<(), RingError> {
        let mut next = 0;
        let mut refused = None;
        loop {
            let prepared = next;
            while let (Some(piece), None) = (batch.get(next), &refused) {
                match self.prepare(next, file, *piece) {
                    Ok(()) => next += 1,
                    // The ring is full: the rest comes when some of its reads have finished.
                    Err(Errno::AGAIN) if !self.is_quiet() => break,
                    Err(errno) => {
                        let call = "hf3fs_prep_io";
                        refused = Some(RingError::Call { call, errno });
                    }
                }
            }
            // Also when one was refused: the client may do prepared reads without being told to.
            if next > prepared {
                self.ring.submit().map_err(|errno| {
                    let call = "hf3fs_submit_ios";
                    RingError::Call { call, errno }
                })?;
            }
            if self.is_quiet() {
                match refused {
                    Some(error) => return Err(error),
                    None if next == batch.len() => return Ok(()),
                    None => continue,
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RingError::Silent(patience));
            }
            self.collect(left.min(WAIT_MAX))?;
        }
    }

    fn prepare(
        &mut self,
        index: usize,
        file: &Arc<RegisteredFile>,
        piece: Piece,
    ) -> Result<(), Errno> {
        let ticket = self.next_ticket;
        let memory = (index * to_usize(CHUNK_BYTES), piece.len);
        self.ring.prepare(memory, file.fd(), piece.start, ticket)?;
        self.next_ticket += 1;
        let slot = self.slots.get_mut(index).expect("a batch fits the slots");
        *slot = Some(Read {
            ticket,
            piece,
            file: Arc::clone(file),
            result: None,
        });
        Ok(())
    }

    /// Waits for finished reads and notes their results.
    fn collect(&mut self, patience: Duration) -> Result<(), RingError> {
        let mut done: Vec<Completion> = Vec::new();
        let patience = Timespec::try_from(patience).unwrap_or_default();
        self.ring
            .wait(&mut done, SLOTS, patience)
            .map_err(|errno| RingError::Call {
                call: "hf3fs_wait_for_ios",
                errno,
            })?;
        for completion in done {
            let mut reads = self.slots.iter_mut().flatten();
            let read = reads.find(|read| read.ticket == completion.ticket);
            match read {
                Some(read) if read.result.is_none() => {
                    let most = i64::try_from(read.piece.len).unwrap_or(i64::MAX);
                    if completion.result > most {
                        self.sound = false;
                        return Err(RingError::Confused("more bytes than asked for"));
                    }
                    read.result = Some(completion.result);
                }
                Some(_) => {
                    self.sound = false;
                    return Err(RingError::Confused("the same read twice"));
                }
                None => {
                    self.sound = false;
                    return Err(RingError::Confused("an unknown read"));
                }
            }
        }
        Ok(())
    }

    /// Copies the bytes of finished reads, in the order of the slots; fails if one of them is not whole.
    fn copy(&self, out: &mut Vec<u8>) -> Result<(), RingError> {
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(read) = slot else { continue };
            let (offset, len) = (read.piece.start, read.piece.len);
            let result = read.result.expect("all reads of the batch have finished");
            if let Ok(errno) = i32::try_from(result.saturating_neg())
                && errno > 0
            {
                let errno = Errno::from_raw_os_error(errno);
                return Err(match errno {
                    Errno::NODATA => RingError::Hole { offset, len },
                    errno => RingError::Failed { offset, len, errno },
                });
            }
            if usize::try_from(result) != Ok(len) {
                let got = result;
                return Err(RingError::Short { offset, len, got });
            }
            let at = index * to_usize(CHUNK_BYTES) + read.piece.skip;
            let copied = self.ring.copy_to(at, len - read.piece.skip, out);
            copied.map_err(|errno| RingError::Call {
                call: "copy from the ring's memory",
                errno,
            })?;
            debug_assert!(read.file.size() >= offset, "read inside of the file");
        }
        Ok(())
    }
}
