//! The transmission phase: one thread reads requests, a few carry them out, replies go out as they are done.
//!
//! Bounded: bytes of a request, bytes in flight, requests in flight, time in the middle of a message.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, PoisonError};

use imgstore::disk::bytewise::Bytewise;

use super::wire::{
    CMD_DISC, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, EIO, ENOSPC,
    EPERM, FLAG_FUA, FLAG_NO_HOLE, REQUEST_BYTES, Request, reply,
};
use super::{Export, NbdError, is_loud};

/// Most bytes of one read or write: what clients may send that did not ask.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// What clients should send.
pub const PREFERRED_BYTES: u32 = 4096;
/// Most bytes of requests of one connection in memory.
const BYTES_IN_FLIGHT_MAX: u64 = 64 << 20;
/// Requests that wait for a thread.
const WAITING_MAX: usize = 16;
/// Requests of one connection that are carried out at a time.
const WORKERS: usize = 4;
/// Longest wait in the middle of a message. The socket's own limit is set to it by the server.
pub const STALL_SECONDS: u64 = 30;

/// Requests that failed.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Bytes in flight, with a limit.
#[derive(Debug, Default)]
struct Budget {
    used: Mutex<u64>,
    freed: Condvar,
}

impl Budget {
    fn take(&self, bytes: u64) {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |used: &mut u64| *used > 0 && *used + bytes > BYTES_IN_FLIGHT_MAX;
        // Workers never wait for this, so it ends.
        let waited = self.freed.wait_while(used, fits);
        *waited.unwrap_or_else(PoisonError::into_inner) += bytes;
    }

    fn give_back(&self, bytes: u64) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
        self.freed.notify_one();
    }
}

/// A request with its data.
struct Job {
    request: Request,
    data: Vec<u8>,
    /// Bytes it holds of the budget.
    bytes: u64,
}

/// Reads all of `buffer`; `Ok(false)` when the stream ends before its first byte. Between messages the client may take its
/// time, as long as `go_on`.
fn read_message(
    stream: &mut impl Read,
    buffer: &mut [u8],
    go_on: &dyn Fn() -> bool,
) -> Result<bool, NbdError> {
    let mut have = 0;
    while have < buffer.len() {
        match stream.read(buffer.get_mut(have..).unwrap_or_default()) {
            Ok(0) if have == 0 => return Ok(false),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && have == 0 => {
                if !go_on() {
                    return Ok(false);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(NbdError::Stalled(STALL_SECONDS));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

fn code(error: &io::Error) -> u32 {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => EPERM,
        io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => EINVAL,
        io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge | io::ErrorKind::QuotaExceeded => {
            ENOSPC
        }
        _ => EIO,
    }
}

/// What is wrong with a request before the disk is asked.
fn check(request: &Request, disk: &Bytewise) -> Result<(), u32> {
    let (allowed, writes) = match request.command {
        CMD_READ | CMD_FLUSH => (FLAG_FUA, false),
        CMD_WRITE | CMD_TRIM => (FLAG_FUA, true),
        CMD_WRITE_ZEROES => (FLAG_FUA | FLAG_NO_HOLE, true),
        _ => return Err(EINVAL),
    };
    if request.flags & !allowed != 0 {
        return Err(EINVAL);
    }
    if writes && disk.is_read_only() {
        return Err(EPERM);
    }
    let end = request.offset.checked_add(u64::from(request.len));
    let inside = end.is_some_and(|end| end <= disk.size());
    match request.command {
        CMD_FLUSH => Ok(()),
        CMD_READ if request.len > PAYLOAD_MAX => Err(EINVAL),
        CMD_WRITE | CMD_WRITE_ZEROES if !inside => Err(ENOSPC),
        _ if !inside => Err(EINVAL),
        _ => Ok(()),
    }
}

/// Carries a request out; the data of a read.
fn carry_out(job: Job, disk: &Bytewise) -> Result<Vec<u8>, u32> {
    let Job { request, data, .. } = job;
    check(&request, disk)?;
    let len = u64::from(request.len);
    let told = |error: io::Error| {
        if is_loud(&FAILED) {
            tracing::error!(?request, %error, "a request failed");
        }
        code(&error)
    };
    let mut answer = Vec::new();
    match request.command {
        CMD_READ => {
            answer.resize(usize::try_from(request.len).unwrap_or(0), 0);
            disk.read(&mut answer, request.offset).map_err(told)?;
        }
        CMD_WRITE => disk.write(&data, request.offset).map_err(told)?,
        CMD_TRIM | CMD_WRITE_ZEROES => disk.zero(request.offset, len).map_err(told)?,
        _ => disk.flush().map_err(told)?,
    }
    if request.flags & FLAG_FUA != 0 && request.command != CMD_READ {
        disk.flush().map_err(told)?;
    }
    Ok(answer)
}

/// The half that answers.
struct Replies<'a, W> {
    out: Mutex<W>,
    /// Ends the connection: called when an answer could not be sent.
    shut: &'a (dyn Fn() + Sync),
    broken: AtomicBool,
    budget: Budget,
}

impl<W: Write> Replies<'_, W> {
    fn send(&self, cookie: u64, answer: Result<Vec<u8>, u32>) {
        let (error, data) = match answer {
            Ok(data) => (0, data),
            Err(error) => (error, Vec::new()),
        };
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if self.broken.load(Ordering::SeqCst) {
            return;
        }
        let sent = out
            .write_all(&reply(cookie, error))
            .and_then(|()| out.write_all(&data))
            .and_then(|()| out.flush());
        if let Err(error) = sent {
            // A part of a reply may be out: nothing that follows would be understood.
            if is_loud(&FAILED) {
                tracing::warn!(%error, "cannot answer an NBD client");
            }
            self.broken.store(true, Ordering::SeqCst);
            (self.shut)();
        }
    }

    fn work(&self, jobs: &Mutex<Receiver<Job>>, disk: &Bytewise) {
        loop {
            let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(job) = next else { return };
            let (cookie, bytes) = (job.request.cookie, job.bytes);
            self.send(cookie, carry_out(job, disk));
            self.budget.give_back(bytes);
        }
    }

    /// Reads requests until the client goes or errs.
    fn take_requests(
        &self,
        stream: &mut impl Read,
        jobs: &SyncSender<Job>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), NbdError> {
        let go_on = || go_on() && !self.broken.load(Ordering::SeqCst);
        let mut head = [0; REQUEST_BYTES];
        while go_on() && read_message(stream, &mut head, &go_on)? {
            let Some(request) = Request::parse(&head) else {
                let start = head.get(..4).unwrap_or_default();
                let found = format!("{start:02x?}");
                return Err(NbdError::malformed("request magic", "25 60 95 13", found));
            };
            if request.command == CMD_DISC {
                return Ok(());
            }
            let mut data = Vec::new();
            let mut bytes = 0;
            if matches!(request.command, CMD_READ | CMD_WRITE) && request.len <= PAYLOAD_MAX {
                bytes = u64::from(request.len);
                self.budget.take(bytes);
            }
            if request.command == CMD_WRITE {
                if request.len > PAYLOAD_MAX {
                    let expected = format!("at most {PAYLOAD_MAX} bytes");
                    return Err(NbdError::malformed(
                        "length of a write",
                        expected,
                        request.len,
                    ));
                }
                data.resize(usize::try_from(request.len).unwrap_or(0), 0);
                if !read_message(stream, &mut data, &|| false)? && !data.is_empty() {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
            }
            let job = Job {
                request,
                data,
                bytes,
            };
            // Blocks while many wait: the client is not read from meanwhile.
            if jobs.send(job).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Answers requests until the client goes, `go_on` says no, or something is wrong. Everything that was taken is answered
/// before this returns. Reads of `stream` must time out after [`STALL_SECONDS`] with [`io::ErrorKind::WouldBlock`].
///
/// # Errors
/// [`NbdError::Malformed`] for what the protocol does not allow; what the socket said.
pub fn serve(
    stream: &mut impl Read,
    out: impl Write + Send,
    export: &Export,
    shut: &(dyn Fn() + Sync),
    go_on: &dyn Fn() -> bool,
) -> Result<(), NbdError> {
    let replies = Replies {
        out: Mutex::new(out),
        shut,
        broken: AtomicBool::new(false),
        budget: Budget::default(),
    };
    let (sender, receiver) = sync_channel(WAITING_MAX);
    let receiver = Mutex::new(receiver);
    std::thread::scope(|scope| {
        // Gone when this ends, however it ends: the workers wait for that.
        let sender = sender;
        for number in 0..WORKERS {
            let work = || replies.work(&receiver, &export.disk);
            std::thread::Builder::new()
                .name(format!("nbd-work-{number}"))
                .spawn_scoped(scope, work)?;
        }
        replies.take_requests(stream, &sender, go_on)
    })
}
