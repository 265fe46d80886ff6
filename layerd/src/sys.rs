//! Calls that have no safe wrapper: how the allocator keeps memory.
#![expect(unsafe_code, reason = "the C library has no safe interface for this")]

use nix::libc;

/// Larger blocks come from the kernel one by one and go back when they are freed. Above the buffers of the HTTP client
/// and the usual segment: the kernel clears such a block's pages each time, which doubled the cost of fetching.
const MMAP_THRESHOLD_BYTES: libc::c_int = 1 << 20;
/// Free memory at the end of the heap beyond this goes back.
const TRIM_THRESHOLD_BYTES: libc::c_int = 1 << 20;
/// Heaps: free memory in one is of no use to the threads of another.
const ARENAS_MAX: libc::c_int = 2;

/// Makes the allocator give memory back. By default it learns from large blocks that are freed, and then keeps as much as
/// was ever used at a time; a daemon that is idle most of the time should not.
///
/// Call it before there are threads.
pub(crate) fn keep_little_memory() {
    for (option, value) in [
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (libc::M_ARENA_MAX, ARENAS_MAX),
    ] {
        // SAFETY: `mallopt` takes two integers and changes settings of the allocator only; no thread allocates meanwhile.
        let set = unsafe { libc::mallopt(option, value) };
        if set != 1 {
            tracing::debug!(option, value, "the allocator does not know an option");
        }
    }
}
