//! Calls that the compiler cannot check: submissions to a ring, and the memory in which the kernel describes requests.
#![expect(
    unsafe_code,
    reason = "io_uring and shared memory have no safe interface"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use io_uring::squeue::{Entry, Entry128};
use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode};
use rustix::mm::{MapFlags, ProtFlags};

use crate::wire::{self, IO_DESC_BYTES, IoDesc};

/// Descriptions of a queue's requests, written by the kernel before it hands a request out.
#[derive(Debug)]
pub(crate) struct Descs {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to this value alone, is only read, and is not bound to a thread.
unsafe impl Send for Descs {}

impl Descs {
    /// Maps those of `queue` with `depth` tags.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn map(device: &File, queue: u16, depth: u16) -> io::Result<Self> {
        let (offset, len) = wire::descs_at(queue, depth);
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { base, len })
    }

    /// The request of a tag, which the kernel has just handed out.
    pub(crate) fn read(&self, tag: u16) -> Option<IoDesc> {
        let at = usize::from(tag) * IO_DESC_BYTES;
        if at + IO_DESC_BYTES > self.len {
            return None;
        }
        // SAFETY: `at` is inside of the mapping, as just checked.
        let address = unsafe { self.base.as_ptr().add(at) };
        // SAFETY: the address is inside of a readable mapping and any alignment will do for bytes. The kernel writes a
        // description before it completes the fetch of the tag and not again until the tag is committed.
        let bytes = unsafe { std::ptr::read_volatile(address.cast::<[u8; IO_DESC_BYTES]>()) };
        Some(IoDesc::decode(&bytes))
    }
}

impl Drop for Descs {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, and nothing refers to it after this.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "descriptions of requests stay mapped");
        }
    }
}

/// Puts a submission that refers to no memory into a ring; sends what is there first where the ring is full.
///
/// # Errors
/// What the kernel said.
fn push(ring: &mut IoUring, entry: &Entry) -> io::Result<()> {
    loop {
        // SAFETY: the callers below make entries without pointers, and with descriptors that stay open as long as the ring.
        if unsafe { ring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        ring.submit()?;
    }
}

/// Sends a command of a queue: fetches a tag's next request, or answers one before.
///
/// # Errors
/// What the kernel said.
pub(crate) fn push_io(
    ring: &mut IoUring,
    device: &File,
    op: u32,
    command: [u8; 16],
    name: u64,
) -> io::Result<()> {
    let entry = opcode::UringCmd16::new(Fd(device.as_raw_fd()), op)
        .cmd(command)
        .build()
        .user_data(name);
    push(ring, &entry)
}

/// Has the ring say when `bell` can be read.
///
/// # Errors
/// What the kernel said.
pub(crate) fn push_poll(ring: &mut IoUring, bell: i32, name: u64) -> io::Result<()> {
    const POLLIN: u32 = 1;
    let entry = opcode::PollAdd::new(Fd(bell), POLLIN)
        .build()
        .user_data(name);
    push(ring, &entry)
}

/// A command to the control device with its memory. The memory is given back when the kernel has ended the command, and is
/// never freed if it does not.
pub(crate) struct ControlRing {
    ring: IoUring<Entry128, cqueue::Entry>,
}

impl std::fmt::Debug for ControlRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlRing").finish_non_exhaustive()
    }
}

impl ControlRing {
    /// A ring for one command at a time.
    ///
    /// # Errors
    /// What the kernel said.
    pub(crate) fn new() -> io::Result<Self> {
        let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(2)?;
        Ok(Self { ring })
    }

    /// Issues a command on `memory` and waits for its result; `None` when it does not end in time: then the ring
    /// must not be used again.
    ///
    /// # Errors
    /// What the kernel said of the ring, not of the command.
    pub(crate) fn command(
        &mut self,
        control: &File,
        command: (u32, u32, u64),
        memory: Vec<u8>,
        patience: std::time::Duration,
    ) -> io::Result<Option<(i32, Vec<u8>)>> {
        let (op, id, data) = command;
        let len = u16::try_from(memory.len()).map_err(io::Error::other)?;
        let memory = Box::leak(memory.into_boxed_slice());
        let address = if len == 0 {
            0
        } else {
            memory.as_mut_ptr() as u64
        };
        let entry = opcode::UringCmd80::new(Fd(control.as_raw_fd()), op)
            .cmd(wire::control(id, len, address, data))
            .build();
        let raw: *mut [u8] = memory;
        // SAFETY: the memory is leaked and so outlives the command; the control file is open until the command is submitted,
        // which takes a reference to it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let Some(result) = self.wait(patience)? else {
            return Ok(None);
        };
        // SAFETY: `raw` is what `leak` gave, and the kernel has ended the command, so nobody else refers to it.
        let memory = unsafe { Box::from_raw(raw) };
        Ok(Some((result, memory.into_vec())))
    }

    fn wait(&mut self, patience: std::time::Duration) -> io::Result<Option<i32>> {
        let until = std::time::Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            let span = io_uring::types::Timespec::from(left);
            let args = io_uring::types::SubmitArgs::new().timespec(&span);
            let waited = self.ring.submitter().submit_with_args(1, &args);
            if let Some(done) = self.ring.completion().next() {
                return Ok(Some(done.result()));
            }
            match waited {
                Err(e) if e.raw_os_error() == Some(nix::libc::ETIME) => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
                Ok(_) if left.is_zero() => return Ok(None),
                Ok(_) => {}
            }
        }
    }
}
