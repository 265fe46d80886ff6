//! Reading with io_uring.

#![expect(
    unsafe_code,
    reason = "the kernel writes into buffers that io_uring is given by address"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use imgstore::ids::{to_u64, to_usize};
use io_uring::{IoUring, opcode, types};

use super::BLOCK;

/// The part of `room` (twice `len` bytes) of `len` bytes that begins at a multiple of `len`, as O_DIRECT wants it.
pub(crate) fn aligned(room: &mut [u8], len: usize) -> &mut [u8] {
    let skip = room.as_ptr().align_offset(len);
    room.get_mut(skip..skip + len).unwrap_or_default()
}

/// Reads a block at each place, `depth` at a time.
///
/// # Errors
/// What the kernel said, or a short read.
pub(crate) fn uring_reads(file: &File, places: &[u64], depth: usize) -> io::Result<()> {
    let entries = u32::try_from(depth).map_err(io::Error::other)?;
    let mut ring = IoUring::new(entries)?;
    let mut rooms = vec![vec![0; 2 * BLOCK]; depth];
    let mut buffers: Vec<&mut [u8]> = rooms.iter_mut().map(|room| aligned(room, BLOCK)).collect();
    let len = u32::try_from(BLOCK).map_err(io::Error::other)?;
    let mut rest = places.iter();
    let mut free: Vec<usize> = (0..depth).collect();
    let mut running = 0;
    let ended = loop {
        while let Some(slot) = free.pop() {
            let Some(at) = rest.next() else { break };
            let Some(buffer) = buffers.get_mut(slot) else {
                break;
            };
            let read = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), len)
                .offset(*at)
                .build()
                .user_data(to_u64(slot));
            // SAFETY: the buffer has `BLOCK` bytes and is in `rooms`, which lives until this function returns; that is
            // not before every request that was submitted has completed. `slot` is not in use: it was in `free`. The
            // file is open meanwhile.
            let pushed = unsafe { ring.submission().push(&read) };
            pushed.map_err(io::Error::other)?;
            running += 1;
        }
        if running == 0 {
            break Ok(());
        }
        if let Err(error) = ring.submit_and_wait(1) {
            break Err(error);
        }
        let mut failed = None;
        for done in ring.completion() {
            running -= 1;
            free.push(to_usize(done.user_data()));
            match u32::try_from(done.result()) {
                Ok(n) if n == len => {}
                Ok(_) => failed = Some(io::ErrorKind::UnexpectedEof.into()),
                Err(_) => failed = Some(io::Error::from_raw_os_error(-done.result())),
            }
        }
        if let Some(error) = failed {
            break Err(error);
        }
    };
    if ended.is_err() {
        // The kernel may still write into the buffers: they must not be freed, and this is the end of a benchmark.
        std::mem::forget(rooms);
    }
    ended
}
