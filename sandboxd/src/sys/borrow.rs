//! New processes that borrow this one's memory until they become a program (as `vfork` does), and becoming one.
//!
//! Copying the memory of even a small process, and unmapping the copy again, was a quarter of a command's round trip. A borrower
//! runs on a stack of its own while this process stands still. It may be killed at any moment, so it must leave nothing half
//! done: it allocates and frees nothing, and tells what happened in one store.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;

use nix::libc;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::{CloneArgs, SingleThreaded, exit_now, last_errno};

/// Bytes of a borrower's stack, and of what lies unused below it.
const STACK_BYTES: usize = 64 << 10;
const GUARD_BYTES: usize = 4 << 10;

/// A stack for a borrower.
#[derive(Debug)]
pub(crate) struct Stack {
    lowest: NonNull<c_void>,
}

impl Stack {
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let lowest = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                GUARD_BYTES + STACK_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::STACK,
            )?
        };
        let lowest = NonNull::new(lowest).ok_or_else(|| io::Error::other("a stack at zero"))?;
        let stack = Self { lowest };
        // SAFETY: the first bytes of our own mapping; nothing is there.
        unsafe { mprotect(stack.lowest.as_ptr(), GUARD_BYTES, MprotectFlags::empty())? };
        Ok(stack)
    }

    fn usable(&self) -> u64 {
        (self.lowest.addr().get() + GUARD_BYTES) as u64
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which no borrower uses any more: this process stood still until it had gone.
        let unmapped = unsafe { munmap(self.lowest.as_ptr(), GUARD_BYTES + STACK_BYTES) };
        // Nothing could be done about it.
        unmapped.ok();
    }
}

/// What a borrower does; the status that it ends with if it comes back.
pub(crate) type Work<'a> = &'a mut dyn FnMut() -> i32;

/// The first function of a borrower.
///
/// # Safety
/// `work` is a `Work` that lives as long as the borrower does.
unsafe extern "C" fn begin(work: *mut c_void) -> ! {
    // SAFETY: as the function's own contract says.
    let work = unsafe { &mut *work.cast::<Work<'_>>() };
    exit_now(work())
}

/// Starts a process that borrows this one's memory, and waits until it has become a program or ended; its number.
///
/// `work` must not allocate, free, lock, or panic: see the head of this file.
///
/// # Errors
/// What the kernel says.
pub(crate) fn clone_borrowing(
    _proof: SingleThreaded,
    args: &CloneArgs<'_>,
    stack: &mut Stack,
    mut work: Work<'_>,
) -> io::Result<i32> {
    let flags = args.flags | libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: all-zero is a valid `clone_args`.
    let mut raw: libc::clone_args = unsafe { std::mem::zeroed() };
    raw.flags = u64::from(flags.cast_unsigned());
    raw.stack = stack.usable();
    raw.stack_size = STACK_BYTES as u64;
    if args.flags & libc::CLONE_PARENT == 0 {
        raw.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    }
    if let Some(cgroup) = args.cgroup {
        raw.flags |= super::CLONE_INTO_CGROUP;
        raw.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    }
    let work = std::ptr::from_mut(&mut work).cast::<c_void>();
    let mut result = libc::SYS_clone3;
    // SAFETY: `raw` is a whole `clone_args`. The child begins on `stack`, which is ours alone, with the registers that it had:
    // it calls `begin` with `work` and never returns from there. This process goes on behind the label when the child has gone
    // from its memory (CLONE_VFORK), so `work` and `stack` outlive it; `_proof` says that nobody else runs meanwhile.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {work}",
            "call {begin}",
            "ud2",
            "2:",
            inlateout("rax") result,
            in("rdi") std::ptr::from_mut(&mut raw),
            in("rsi") size_of::<libc::clone_args>(),
            work = in(reg) work,
            begin = in(reg) begin as unsafe extern "C" fn(*mut c_void) -> !,
            out("rcx") _,
            out("r11") _,
        );
    }
    if result < 0 {
        let errno = i32::try_from(-result).unwrap_or(libc::EIO);
        return Err(io::Error::from_raw_os_error(errno));
    }
    i32::try_from(result).map_err(io::Error::other)
}

/// Strings in the form that `execve` takes.
#[derive(Debug)]
pub(crate) struct Strings {
    owned: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    pub(crate) fn new(owned: Vec<CString>) -> Self {
        let ends = std::iter::once(std::ptr::null());
        let pointers = owned.iter().map(|s| s.as_ptr()).chain(ends).collect();
        Self { owned, pointers }
    }

    pub(crate) fn first(&self) -> Option<&CStr> {
        self.owned.first().map(|s| &**s)
    }
}

/// Becomes a program; returns why it did not. Allocates nothing.
pub(crate) fn execute(program: &CStr, argv: &Strings, env: &Strings) -> rustix::io::Errno {
    // SAFETY: both lists end with a null pointer, and all strings live: they are borrowed.
    unsafe {
        libc::execve(
            program.as_ptr(),
            argv.pointers.as_ptr(),
            env.pointers.as_ptr(),
        )
    };
    last_errno()
}
