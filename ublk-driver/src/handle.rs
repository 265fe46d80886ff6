//! What is done with a request.

use std::io;
use std::sync::Arc;

use imgstore::disk::device::BlockDevice;
use imgstore::ids::to_usize;

use crate::content::Content;
use crate::request::{EIO, Request};
use crate::wire::Op;
use crate::workers::Workers;

/// Called by the loop thread: asks an image, which answers in its own time, or leaves the request to a worker.
pub(crate) fn hand_out(request: Request, workers: Option<&Arc<Workers>>) {
    match &request.served().content {
        Content::Image(image) => {
            if request.op() != Op::Read {
                return request.answer(without_bytes(&request, Ok(())));
            }
            let image = Arc::clone(image);
            let (offset, len) = (request.offset(), request.len());
            let Ok(len) = u32::try_from(len) else {
                return request.answer(EIO);
            };
            image.read_at(
                offset,
                len,
                Box::new(move |result| match result {
                    Ok(bytes) => request.answer_bytes(bytes),
                    Err(error) => {
                        tracing::warn!(device = request.served().id, offset, len, %error, "a read failed; the reader gets EIO");
                        request.answer(EIO);
                    }
                }),
            );
        }
        // Without workers the request is dropped, which answers it.
        Content::Disk(_) => {
            if let Some(workers) = workers {
                workers.put(request);
            }
        }
    }
}

/// The answer to a request whose bytes do not count. An image takes a flush, which does nothing, and no change.
fn without_bytes(request: &Request, flushed: io::Result<()>) -> i32 {
    match request.op() {
        Op::Flush => flushed.map_or_else(|e| number(&e), |()| 0),
        _ => EIO,
    }
}

/// Called by a worker: carries the request out. `buffer` is the worker's own and keeps its memory.
pub(crate) fn carry_out(request: &Request, buffer: &mut Vec<u8>) {
    let Content::Disk(disk) = &request.served().content else {
        return request.answer(EIO);
    };
    if request.is_given_up() {
        return request.answer(EIO);
    }
    match request.op() {
        Op::Read => {
            buffer.resize(to_usize(request.len()), 0);
            match disk.read(buffer, request.offset()) {
                Ok(()) => request.answer_bytes(buffer),
                Err(error) => refuse(request, &error),
            }
        }
        Op::Write => {
            buffer.resize(to_usize(request.len()), 0);
            let written = change(request, |disk| {
                if !request.fetch_bytes(buffer) {
                    return Err(io::Error::other("the bytes are not there"));
                }
                disk.write(buffer, request.offset())
            });
            let len = i32::try_from(request.len()).unwrap_or(EIO);
            match written {
                Ok(()) => request.answer(len),
                Err(error) => refuse(request, &error),
            }
        }
        Op::Flush => settle(request, disk.flush()),
        Op::Discard | Op::WriteZeroes => {
            let changed = change(request, |disk| {
                disk.discard(request.offset(), request.len())
            });
            settle(request, changed);
        }
        Op::Other(op) => {
            tracing::error!(
                device = request.served().id,
                op,
                "a request of a kind that was not announced"
            );
            request.answer(EIO);
        }
    }
}

/// Changes the disk, and makes that last if the request says so.
fn change(
    request: &Request,
    what: impl FnOnce(&dyn BlockDevice) -> io::Result<()>,
) -> io::Result<()> {
    let Content::Disk(disk) = &request.served().content else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    if request.served().read_only {
        return Err(io::ErrorKind::ReadOnlyFilesystem.into());
    }
    what(&**disk)?;
    if request.is_fua() {
        disk.flush()
    } else {
        Ok(())
    }
}

fn settle(request: &Request, result: io::Result<()>) {
    match result {
        Ok(()) => request.answer(0),
        Err(error) => refuse(request, &error),
    }
}

fn refuse(request: &Request, error: &io::Error) {
    tracing::warn!(device = request.served().id, op = ?request.op(), offset = request.offset(), len = request.len(), %error,
        "a request failed");
    request.answer(number(error));
}

/// The negative number that tells the block layer what is wrong. It knows few: a full disk is told from everything else.
fn number(error: &io::Error) -> i32 {
    let full = [nix::libc::ENOSPC, nix::libc::EDQUOT];
    match error.raw_os_error() {
        Some(code) if full.contains(&code) => -nix::libc::ENOSPC,
        _ if error.kind() == io::ErrorKind::StorageFull => -nix::libc::ENOSPC,
        _ if error.kind() == io::ErrorKind::QuotaExceeded => -nix::libc::ENOSPC,
        _ if error.kind() == io::ErrorKind::TimedOut => -nix::libc::ETIMEDOUT,
        _ => EIO,
    }
}
