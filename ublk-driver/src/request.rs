//! One request of the kernel, from the moment it is handed out until it is answered, exactly once.
//!
//! Bytes are copied straight into (or out of) the request's pages by `pwrite` and `pread` on the device's character file, by
//! whatever thread has them: there is no buffer per tag. A tag is used again and again, so an answer that comes too late, after the
//! device gave up on it, must not touch the next request of its tag: every copy is made under the tag's lock, if the tag's
//! turn is still the request's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::content::Content;
use crate::event_loop::Mailbox;
use crate::wire::{self, IoDesc, Op, SECTOR};

/// A failed request's answer.
pub(crate) const EIO: i32 = -nix::libc::EIO;

/// What all queues of a device share.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) id: u32,
    /// `/dev/ublkcN`.
    pub(crate) file: File,
    pub(crate) content: Content,
    pub(crate) read_only: bool,
    pub(crate) bytes: u64,
    /// Every request fails from now on.
    pub(crate) given_up: AtomicBool,
}

/// One queue of a device.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) served: Arc<Served>,
    pub(crate) number: u16,
    /// Names the queue in its thread; never used again.
    pub(crate) key: u64,
    /// Where answers go.
    pub(crate) mailbox: Arc<Mailbox>,
    turns: Vec<Mutex<Turn>>,
}

/// The use of a tag.
#[derive(Debug, Default)]
struct Turn {
    number: u64,
    /// A request of this turn is not answered yet.
    open: bool,
}

impl Queue {
    pub(crate) fn new(
        served: Arc<Served>,
        number: u16,
        depth: u16,
        mailbox: Arc<Mailbox>,
    ) -> Arc<Self> {
        static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
        let turns = (0..depth).map(|_| Mutex::default()).collect();
        Arc::new(Self {
            served,
            number,
            key: NEXT_KEY.fetch_add(1, Ordering::Relaxed),
            mailbox,
            turns,
        })
    }

    pub(crate) fn depth(&self) -> u16 {
        u16::try_from(self.turns.len()).unwrap_or(u16::MAX)
    }

    fn turn(&self, tag: u16) -> Option<MutexGuard<'_, Turn>> {
        let turn = self.turns.get(usize::from(tag))?;
        Some(turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The kernel has handed out a request.
    pub(crate) fn begin(self: &Arc<Self>, tag: u16, desc: IoDesc) -> Option<Request> {
        let mut turn = self.turn(tag)?;
        turn.number += 1;
        turn.open = true;
        let number = turn.number;
        drop(turn);
        Some(Request {
            queue: Arc::clone(self),
            tag,
            turn: number,
            desc,
        })
    }

    /// Answers everything that is open with EIO.
    pub(crate) fn give_up(&self) {
        for tag in 0..self.depth() {
            let Some(mut turn) = self.turn(tag) else {
                continue;
            };
            if std::mem::take(&mut turn.open) {
                drop(turn);
                self.mailbox.answer(self.key, tag, EIO);
            }
        }
    }
}

/// See the head of this file. Dropping one that is not answered answers EIO.
#[derive(Debug)]
pub(crate) struct Request {
    queue: Arc<Queue>,
    tag: u16,
    turn: u64,
    desc: IoDesc,
}

impl Request {
    pub(crate) fn served(&self) -> &Arc<Served> {
        &self.queue.served
    }

    pub(crate) const fn op(&self) -> Op {
        self.desc.op
    }

    pub(crate) const fn is_fua(&self) -> bool {
        self.desc.fua
    }

    /// Position in bytes.
    pub(crate) const fn offset(&self) -> u64 {
        self.desc.start.saturating_mul(SECTOR)
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        u64::from(self.desc.sectors) * SECTOR
    }

    /// Whether all of it is inside of the device. A flush is nowhere: its position means nothing.
    pub(crate) fn is_inside(&self) -> bool {
        if self.op() == Op::Flush {
            return true;
        }
        let end = self.offset().checked_add(self.len());
        end.is_some_and(|end| end <= self.served().bytes)
    }

    /// The turn, locked, if the request is not answered yet.
    fn open(&self) -> Option<MutexGuard<'_, Turn>> {
        let turn = self.queue.turn(self.tag)?;
        (turn.number == self.turn && turn.open).then_some(turn)
    }

    /// Answers with a number: what was done, or a negative error.
    pub(crate) fn answer(&self, result: i32) {
        let Some(mut turn) = self.open() else { return };
        turn.open = false;
        drop(turn);
        self.queue.mailbox.answer(self.queue.key, self.tag, result);
    }

    fn file_offset(&self) -> u64 {
        wire::bytes_at(self.queue.number, self.tag)
    }

    /// Answers a read with exactly the bytes that it wants; anything else is EIO.
    pub(crate) fn answer_bytes(&self, bytes: &[u8]) {
        let wanted = self.len();
        if u64::try_from(bytes.len()) != Ok(wanted) {
            tracing::error!(
                device = self.served().id,
                offset = self.offset(),
                expected = wanted,
                found = bytes.len(),
                "a read came with another number of bytes; the reader gets EIO"
            );
            return self.answer(EIO);
        }
        let Some(turn) = self.open() else { return };
        let copied = self.served().file.write_all_at(bytes, self.file_offset());
        drop(turn);
        match copied {
            Ok(()) => self.answer(i32::try_from(wanted).unwrap_or(EIO)),
            Err(error) => {
                tracing::error!(device = self.served().id, offset = self.offset(), %error,
                    "a read's bytes cannot be given to the kernel; the reader gets EIO");
                self.answer(EIO);
            }
        }
    }

    /// The bytes that a write brings, into `buffer`, which is as long as the request. Whether they are there.
    pub(crate) fn fetch_bytes(&self, buffer: &mut [u8]) -> bool {
        let Some(turn) = self.open() else {
            return false;
        };
        let copied = self.served().file.read_exact_at(buffer, self.file_offset());
        drop(turn);
        if let Err(error) = &copied {
            tracing::error!(device = self.served().id, offset = self.offset(), %error,
                "a write's bytes cannot be had from the kernel; the writer gets EIO");
        }
        copied.is_ok()
    }

    /// Whether the device has given up.
    pub(crate) fn is_given_up(&self) -> bool {
        self.served().given_up.load(Ordering::Acquire)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // Does nothing where it is answered. A handler that forgets a request must not hang its reader.
        self.answer(EIO);
    }
}
