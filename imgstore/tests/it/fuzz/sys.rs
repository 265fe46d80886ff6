//! The allocator of this test binary: counts live bytes, and stops the process where a parser asks for far too many.
//!
//! A parser that trusts a count would ask for more memory than there is, and an aborted process tells nothing. So the
//! watcher that is set here is called first: it saves the input. What C libraries allocate is not seen.

#![expect(
    unsafe_code,
    reason = "an allocator is unsafe by its trait; it only counts and hands over to the system's"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

#[global_allocator]
static COUNTING: Counting = Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Most live bytes; beyond, the watcher is called.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// A `fn(usize)`, or null.
static WATCHER: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

struct Counting;

fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
    if live > LIMIT.load(Ordering::Relaxed) {
        // The watcher allocates too.
        LIMIT.store(usize::MAX, Ordering::Relaxed);
        let watcher = WATCHER.load(Ordering::Relaxed);
        if !watcher.is_null() {
            // SAFETY: only `limit` stores here, and only pointers of this type.
            let watcher = unsafe { std::mem::transmute::<*mut (), fn(usize)>(watcher) };
            watcher(bytes);
        }
    }
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as promised to us.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as promised to us.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised to us.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if new_size > layout.size() {
            add(new_size - layout.size());
        } else {
            LIVE.fetch_sub(layout.size() - new_size, Ordering::Relaxed);
        }
        // SAFETY: as promised to us.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

/// From now on at most `more` bytes beyond what lives; `watcher` is told of the request that asks for more.
pub(crate) fn limit(more: usize, watcher: fn(usize)) {
    WATCHER.store(watcher as *mut (), Ordering::Relaxed);
    LIMIT.store(
        LIVE.load(Ordering::Relaxed).saturating_add(more),
        Ordering::Relaxed,
    );
}

/// No limit any more.
pub(crate) fn unlimit() {
    LIMIT.store(usize::MAX, Ordering::Relaxed);
}

/// Runs `work` and gives what it needed at most beyond what lived before, on all threads.
pub(crate) fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed).saturating_sub(before))
}
