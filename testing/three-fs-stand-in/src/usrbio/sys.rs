//! The C interface: all 21 functions of `hf3fs_usrbio.h`, with their layouts, conventions and oddities.
#![expect(
    unsafe_code,
    reason = "a C interface, and memory that two mappings share"
)]
#![expect(unreachable_pub, reason = "found by name, not by path")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fs::{self, File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::libc::timespec;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{CLIENT, Io, Ring, mount_of, path_of};
use crate::control::Control;

const EIO: c_int = 5;
const EBADF: c_int = 9;
const EINVAL: c_int = 22;
const ENOSYS: c_int = 38;

#[repr(C)]
#[derive(Debug)]
pub struct Iov {
    base: *mut u8,
    iovh: *mut c_void,
    id: [u8; 16],
    mount_point: [c_char; 256],
    size: usize,
    block_size: usize,
    numa: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub struct Ior {
    iov: Iov,
    iorh: *mut c_void,
    mount_point: [c_char; 256],
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    flags: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct Cqe {
    index: i32,
    reserved: i32,
    result: i64,
    userdata: *const c_void,
}

const _: () = {
    assert!(size_of::<Iov>() == 312);
    assert!(size_of::<Ior>() == 600);
    assert!(size_of::<Cqe>() == 24);
};

/// Shared memory with two mappings: the program's, which ends when it says so, and the client's, which a late answer can
/// still be written to.
#[derive(Debug)]
pub(super) struct Memory {
    program: *mut u8,
    client: *mut u8,
    size: usize,
    file: PathBuf,
    link: PathBuf,
}

// SAFETY: raw memory without an owner thread; the client writes under its lock.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

fn map(file: &File, size: usize) -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, wherever the kernel likes.
    let mapped = unsafe { mmap(ptr::null_mut(), size, protection, MapFlags::SHARED, file, 0) };
    mapped.unwrap().cast()
}

impl Memory {
    fn create(id: [u8; 16], mount: &Path, size: usize, ending: &str) -> std::io::Result<Self> {
        let name = id_text(id);
        let file = Path::new("/dev/shm").join(format!("hf3fs-iov-{name}"));
        let link = mount.join("3fs-virt/iovs").join(format!("{name}{ending}"));
        let mut options = OpenOptions::new();
        let memory = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&file)?;
        let made = memory
            .set_len(u64::try_from(size).unwrap())
            .and_then(|()| std::os::unix::fs::symlink(&file, &link));
        if let Err(e) = made {
            fs::remove_file(&file)?;
            return Err(e);
        }
        Ok(Self {
            program: map(&memory, size),
            client: map(&memory, size),
            size,
            file,
            link,
        })
    }

    /// The client writes.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.size);
        // SAFETY: inside of the client's mapping, which lives as long as `self`.
        let target = unsafe { self.client.add(at) };
        // SAFETY: as many bytes as were checked above; no Rust reference to them exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    fn unlink(&self) {
        // Unlinked already, perhaps.
        drop(fs::remove_file(&self.file));
    }

    fn unmap_program(&self) {
        // SAFETY: the program said that it is done with it.
        unsafe { munmap(self.program.cast(), self.size) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing of the client can write any more: whoever could holds a reference.
        unsafe { munmap(self.client.cast(), self.size) }.unwrap();
    }
}

/// An id that begins with the process, so that a test can tell its own.
fn new_id() -> [u8; 16] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let mut id = [0; 16];
    for (at, byte) in process.to_le_bytes().iter().rev().enumerate() {
        id[at] = *byte;
    }
    for (at, byte) in number.to_le_bytes().iter().rev().enumerate() {
        id[8 + at] = *byte;
    }
    id
}

fn id_text(id: [u8; 16]) -> String {
    let mut out = String::new();
    for (at, byte) in id.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

/// A C string as a path.
///
/// # Safety
/// `text` is a C string.
unsafe fn path(text: *const c_char) -> PathBuf {
    // SAFETY: the caller says so.
    let text = unsafe { CStr::from_ptr(text) };
    OsStr::from_bytes(text.to_bytes()).into()
}

fn put_path(place: &mut [c_char; 256], path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= place.len() {
        return false;
    }
    for (to, from) in place.iter_mut().zip(bytes.iter().chain([&0])) {
        *to = from.cast_signed();
    }
    true
}

fn errno(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(EIO)
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_is_hf3fs(fd: c_int) -> bool {
    // SAFETY: the caller's open descriptor.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let file = fd.try_clone_to_owned().map(File::from);
    file.is_ok_and(|file| mount_of(&path_of(&file)).is_some())
}

/// # Safety
/// `buf` has room for `size` bytes, `below` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_extract_mount_point(
    buf: *mut c_char,
    size: c_int,
    below: *const c_char,
) -> c_int {
    // SAFETY: a C string, as the caller says.
    let below = unsafe { path(below) };
    let Some(mount) = mount_of(&below) else {
        return -1;
    };
    let bytes = mount.as_os_str().as_bytes();
    let len = c_int::try_from(bytes.len() + 1).unwrap();
    if len <= size {
        // SAFETY: `buf` has room for `size` bytes.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), bytes.len()) };
        // SAFETY: there is room for the NUL, counted above.
        let end = unsafe { buf.add(bytes.len()) };
        // SAFETY: as above.
        unsafe { end.write(0) };
    }
    len
}

fn create_memory(mount: &Path, size: usize, block_size: usize, ending: &str) -> Result<Iov, c_int> {
    let id = new_id();
    let mut iov = Iov {
        base: ptr::null_mut(),
        iovh: ptr::null_mut(),
        id,
        mount_point: [0; 256],
        size,
        block_size,
        numa: -1,
    };
    if !put_path(&mut iov.mount_point, mount) {
        return Err(-EINVAL);
    }
    if Control::read(mount).failure("iovcreate").is_some() {
        return Err(-EIO);
    }
    let memory = Memory::create(id, mount, size, ending).map_err(|_any| -EIO)?;
    iov.base = memory.program;
    iov.iovh = Arc::into_raw(Arc::new(memory)).cast_mut().cast();
    Ok(iov)
}

/// # Safety
/// `iov` is writable, `mount` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate(
    iov: *mut Iov,
    mount: *const c_char,
    size: usize,
    block_size: usize,
    _numa: c_int,
) -> c_int {
    // SAFETY: a C string.
    let mount = unsafe { path(mount) };
    match create_memory(&mount, size, block_size, "") {
        Ok(made) => {
            // SAFETY: writable.
            unsafe { iov.write(made) };
            0
        }
        Err(e) => e,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iovopen(
    _iov: *mut Iov,
    _id: *const u8,
    _mount: *const c_char,
    _size: usize,
    _block_size: usize,
    _numa: c_int,
) -> c_int {
    -ENOSYS
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iovwrap(
    _iov: *mut Iov,
    _base: *mut c_void,
    _id: *const u8,
    _mount: *const c_char,
    _size: usize,
    _block_size: usize,
    _numa: c_int,
) -> c_int {
    -ENOSYS
}

/// # Safety
/// `iov` was created here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink(iov: *mut Iov) {
    // SAFETY: as the caller says.
    let handle = unsafe { (*iov).iovh };
    // SAFETY: created here, so the handle is one of ours.
    let memory = unsafe { &*handle.cast::<Memory>() };
    memory.unlink();
}

/// # Safety
/// `iov` was created here and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy(iov: *mut Iov) {
    // SAFETY: as the caller says.
    let handle = unsafe { (*iov).iovh };
    // SAFETY: the reference that `create_memory` gave away.
    let memory = unsafe { Arc::from_raw(handle.cast_const().cast::<Memory>()) };
    memory.unlink();
    drop(fs::remove_file(&memory.link));
    memory.unmap_program();
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_ior_size(entries: c_int) -> usize {
    16 + 32 + 96 * (usize::try_from(entries).unwrap() + 1) + 4096
}

/// # Safety
/// `ior` was created here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_io_entries(ior: *const Ior) -> c_int {
    // SAFETY: as the caller says.
    let key = unsafe { (*ior).iorh }.addr();
    CLIENT.with(|state| c_int::try_from(state.rings[&key].entries).unwrap())
}

/// # Safety
/// As for [`hf3fs_iorcreate4`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: as for the function that is called.
    unsafe { hf3fs_iorcreate4(ior, mount, entries, for_read, io_depth, 0, numa, 0) }
}

/// # Safety
/// As for [`hf3fs_iorcreate4`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate2(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    _priority: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: as for the function that is called.
    unsafe { hf3fs_iorcreate4(ior, mount, entries, for_read, io_depth, 0, numa, 0) }
}

/// # Safety
/// As for [`hf3fs_iorcreate4`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate3(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    _priority: c_int,
    timeout: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: as for the function that is called.
    unsafe { hf3fs_iorcreate4(ior, mount, entries, for_read, io_depth, timeout, numa, 0) }
}

fn direction(for_read: bool) -> char {
    if for_read { 'r' } else { 'w' }
}

/// # Safety
/// `ior` is writable, `mount` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate4(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    timeout: c_int,
    _numa: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: a C string.
    let mount = unsafe { path(mount) };
    if timeout < 0 || entries <= 0 {
        return -EINVAL;
    }
    if let Some(e) = Control::read(&mount).failure("iorcreate") {
        return -e;
    }
    // The flags are binary here, and decimal where the link is looked for when it should go: so it is with 3FS.
    let ending = format!(".{}{io_depth}.t{timeout}.f{flags:b}", direction(for_read));
    let iov = match create_memory(&mount, hf3fs_ior_size(entries), 0, &ending) {
        Ok(iov) => iov,
        Err(e) => return e,
    };
    let key = CLIENT.with(|state| {
        state.next_ring += 1;
        let ring = Ring {
            mount: mount.clone(),
            entries: usize::try_from(entries).unwrap(),
            for_read,
            flags,
            prepared: Vec::new(),
            done: std::collections::VecDeque::new(),
            under_way: 0,
        };
        state.rings.insert(state.next_ring, ring);
        state.next_ring
    });
    let made = Ior {
        mount_point: iov.mount_point,
        iov,
        iorh: ptr::without_provenance_mut(key),
        for_read,
        io_depth,
        priority: 0,
        timeout,
        flags,
    };
    // SAFETY: writable.
    unsafe { ior.write(made) };
    0
}

/// # Safety
/// `ior` was created here and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iordestroy(ior: *mut Ior) {
    // SAFETY: as the caller says.
    let ior = unsafe { &mut *ior };
    CLIENT.with(|state| state.rings.remove(&ior.iorh.addr()));
    // SAFETY: the reference that `create_memory` gave away.
    let memory = unsafe { Arc::from_raw(ior.iov.iovh.cast_const().cast::<Memory>()) };
    memory.unlink();
    let name = format!(
        "{}.{}{}.t{}.f{}",
        id_text(ior.iov.id),
        direction(ior.for_read),
        ior.io_depth,
        ior.timeout,
        ior.flags
    );
    drop(fs::remove_file(memory.link.with_file_name(name)));
    memory.unmap_program();
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_reg_fd(fd: c_int, _flags: u64) -> c_int {
    use std::os::fd::AsRawFd as _;
    if fd < 0 {
        return EBADF;
    }
    // SAFETY: the caller's open descriptor.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let file = match fd.try_clone_to_owned() {
        Ok(file) => File::from(file),
        Err(e) => return errno(&e),
    };
    let Some(mount) = mount_of(&path_of(&file)) else {
        return EBADF;
    };
    if let Some(e) = Control::read(&mount).failure("reg_fd") {
        return e;
    }
    let number = file.as_raw_fd();
    CLIENT.with(|state| match state.files.entry(fd.as_raw_fd()) {
        std::collections::hash_map::Entry::Occupied(_) => EINVAL,
        std::collections::hash_map::Entry::Vacant(free) => {
            free.insert(Arc::new(file));
            -number
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_dereg_fd(fd: c_int) {
    CLIENT.with(|state| state.files.remove(&fd));
}

/// # Safety
/// `ior` and `iov` were created here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_prep_io(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    buffer: *mut c_void,
    fd: c_int,
    offset: usize,
    len: u64,
    userdata: *const c_void,
) -> c_int {
    // SAFETY: as the caller says.
    let ior = unsafe { &*ior };
    // SAFETY: as the caller says.
    let iov = unsafe { &*iov };
    // SAFETY: the handle of memory that lives; one more reference.
    unsafe { Arc::increment_strong_count(iov.iovh.cast_const().cast::<Memory>()) };
    // SAFETY: that reference.
    let memory = unsafe { Arc::from_raw(iov.iovh.cast_const().cast::<Memory>()) };
    let len = usize::try_from(len).unwrap();
    let at = buffer.addr().wrapping_sub(memory.program.addr());
    let inside = at.checked_add(len).is_some_and(|end| end <= memory.size);
    let blocks = iov.block_size;
    let crosses = blocks != 0 && inside && len > 0 && at / blocks != (at + len - 1) / blocks;
    let key = ior.iorh.addr();
    CLIENT.with(|state| {
        let ring = &state.rings[&key];
        if !inside || crosses || len == 0 || read != ring.for_read {
            return -EINVAL;
        }
        let control = Control::read(&ring.mount);
        if let Some(e) = control.failure("prep_io") {
            return -e;
        }
        let by_number = |file: &&Arc<File>| {
            use std::os::fd::AsRawFd as _;
            fd < 0 && file.as_raw_fd() == -fd
        };
        let found = state
            .files
            .get(&fd)
            .or_else(|| state.files.values().find(by_number));
        let Some(file) = found.cloned() else {
            return -EBADF;
        };
        let io = Io {
            ring: key,
            memory,
            at,
            len,
            file,
            offset: u64::try_from(offset).unwrap(),
            userdata: userdata.addr(),
        };
        state.prepare(io, &control)
    })
}

/// # Safety
/// `ior` was created here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_submit_ios(ior: *const Ior) -> c_int {
    // SAFETY: as the caller says.
    let key = unsafe { (*ior).iorh }.addr();
    CLIENT.with(|state| {
        let control = Control::read(&state.rings[&key].mount);
        state.submit(key, &control);
        // After the reads were started: the caller must not take the error for "nothing happens".
        control.failure("submit_ios").map_or(0, |e| -e)
    })
}

/// # Safety
/// `ior` was created here, `cqes` has room for `max`, the time is a valid one or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_wait_for_ios(
    ior: *const Ior,
    cqes: *mut Cqe,
    max: c_int,
    min: c_int,
    until: *const timespec,
) -> c_int {
    // SAFETY: as the caller says.
    let key = unsafe { (*ior).iorh }.addr();
    // SAFETY: as the caller says.
    let until = unsafe { until.as_ref() }.map(|t| {
        let seconds = Duration::from_secs(u64::try_from(t.tv_sec).unwrap());
        SystemTime::UNIX_EPOCH + seconds + Duration::from_nanos(u64::try_from(t.tv_nsec).unwrap())
    });
    let (max, min) = (usize::try_from(max).unwrap(), usize::try_from(min).unwrap());
    let mut count = 0;
    let mut guard = CLIENT.lock();
    loop {
        let state = guard.get_or_insert_default();
        let mount = state.rings[&key].mount.clone();
        let control = Control::read(&mount);
        if let Some(e) = control.failure("wait_for_ios") {
            return -e;
        }
        for done in state.take(key, max - count) {
            let cqe = Cqe {
                index: 0,
                reserved: 0,
                result: done.result,
                userdata: ptr::without_provenance(done.userdata),
            };
            // SAFETY: `count` is below `max`.
            let place = unsafe { cqes.add(count) };
            // SAFETY: as above.
            unsafe { place.write(cqe) };
            count += 1;
        }
        // What was held is done after others were handed over and before the program looks at their bytes: the worst moment.
        state.release(&mount, &control);
        let left = until.map(|t| t.duration_since(SystemTime::now()).unwrap_or_default());
        if count >= min || left.is_some_and(|left| left.is_zero()) {
            return c_int::try_from(count).unwrap();
        }
        // The control file may change at any time.
        let step = Duration::from_millis(5).min(left.unwrap_or(Duration::MAX));
        let waited = CLIENT.finished.wait_timeout(guard, step);
        guard = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
    }
}

/// # Safety
/// Both are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_hardlink(target: *const c_char, link: *const c_char) -> c_int {
    // SAFETY: as the caller says.
    let target = unsafe { path(target) };
    // SAFETY: as the caller says.
    let link = unsafe { path(link) };
    fs::hard_link(target, link).map_or_else(|e| errno(&e), |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_punchhole(
    _fd: c_int,
    _n: c_int,
    _start: *const usize,
    _end: *const usize,
    _flags: usize,
) -> c_int {
    ENOSYS
}
