//! Calls into the kernel and into 3FS's user-space I/O library, as safe functions.
//!
//! The library (`libhf3fs_api_shared.so`, header `hf3fs_usrbio.h`) is loaded at run time and never unloaded: it has threads
//! of its own. Layouts and conventions are those of 3FS at commit e2cef822 on x86-64; the assertions below hold the
//! layouts. A [`Ring`] owns both the queue and the shared memory that its reads fill, so that neither can outlive the other.
#![expect(
    unsafe_code,
    reason = "a C library and an ioctl have no safe interface"
)]

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::ptr;

use nix::libc;
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, Opcode};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// What a 3FS mount answers to [`magic`].
pub(super) const MAGIC: u32 = 0x8f3f_5fff;
/// `_IOR('h', 2, u32)`.
const MAGIC_OPCODE: Opcode = ioctl::opcode::read::<u32>(b'h', 2);
/// A hole is an error (`ENODATA`), not zeros.
const FORBID_READ_HOLES: u64 = 2;
/// Longest mount path, with its NUL.
const MOUNT_BYTES_MAX: usize = 256;

/// Asks the file system of `fd` for its magic number.
pub(super) fn magic(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    // SAFETY: `_IOR('h', 2, u32)` writes at most the four bytes that its number says, into the `u32` that `Getter` owns.
    let getter = unsafe { Getter::<MAGIC_OPCODE, u32>::new() };
    // SAFETY: as above; file systems that do not know the number write nothing and give an error.
    unsafe { ioctl::ioctl(fd, getter) }
}

/// `struct hf3fs_iov`: shared memory.
#[repr(C)]
struct RawIov {
    base: *mut u8,
    iovh: *mut c_void,
    id: [u8; 16],
    mount_point: [c_char; MOUNT_BYTES_MAX],
    size: usize,
    block_size: usize,
    numa: c_int,
}

const _: () = {
    assert!(size_of::<RawIov>() == 312);
    assert!(offset_of!(RawIov, base) == 0);
    assert!(offset_of!(RawIov, iovh) == 8);
    assert!(offset_of!(RawIov, id) == 16);
    assert!(offset_of!(RawIov, mount_point) == 32);
    assert!(offset_of!(RawIov, size) == 288);
    assert!(offset_of!(RawIov, block_size) == 296);
    assert!(offset_of!(RawIov, numa) == 304);
};

/// `struct hf3fs_ior`: a queue.
#[repr(C)]
struct RawIor {
    iov: RawIov,
    iorh: *mut c_void,
    mount_point: [c_char; MOUNT_BYTES_MAX],
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    flags: u64,
}

const _: () = {
    assert!(size_of::<RawIor>() == 600);
    assert!(offset_of!(RawIor, iov) == 0);
    assert!(offset_of!(RawIor, iorh) == 312);
    assert!(offset_of!(RawIor, mount_point) == 320);
    assert!(offset_of!(RawIor, for_read) == 576);
    assert!(offset_of!(RawIor, io_depth) == 580);
    assert!(offset_of!(RawIor, priority) == 584);
    assert!(offset_of!(RawIor, timeout) == 588);
    assert!(offset_of!(RawIor, flags) == 592);
};

/// `struct hf3fs_cqe`: a finished read.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawCqe {
    index: i32,
    reserved: i32,
    result: i64,
    userdata: *const c_void,
}

const _: () = {
    assert!(size_of::<RawCqe>() == 24);
    assert!(offset_of!(RawCqe, index) == 0);
    assert!(offset_of!(RawCqe, reserved) == 4);
    assert!(offset_of!(RawCqe, result) == 8);
    assert!(offset_of!(RawCqe, userdata) == 16);
};

/// A finished read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Completion {
    /// What the read was prepared with.
    pub(super) ticket: usize,
    /// Bytes, or a negative error number.
    pub(super) result: i64,
}

type ExtractMountPoint = unsafe extern "C" fn(*mut c_char, c_int, *const c_char) -> c_int;
type IovCreate = unsafe extern "C" fn(*mut RawIov, *const c_char, usize, usize, c_int) -> c_int;
type IovDestroy = unsafe extern "C" fn(*mut RawIov);
type IorCreate4 = unsafe extern "C" fn(
    *mut RawIor,
    *const c_char,
    c_int,
    bool,
    c_int,
    c_int,
    c_int,
    u64,
) -> c_int;
type IorDestroy = unsafe extern "C" fn(*mut RawIor);
type RegFd = unsafe extern "C" fn(c_int, u64) -> c_int;
type DeregFd = unsafe extern "C" fn(c_int);
type PrepIo = unsafe extern "C" fn(
    *const RawIor,
    *const RawIov,
    bool,
    *mut c_void,
    c_int,
    usize,
    u64,
    *const c_void,
) -> c_int;
type SubmitIos = unsafe extern "C" fn(*const RawIor) -> c_int;
type WaitForIos =
    unsafe extern "C" fn(*const RawIor, *mut RawCqe, c_int, c_int, *const libc::timespec) -> c_int;

/// The library's functions, which stay where they are until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    extract_mount_point: ExtractMountPoint,
    iovcreate: IovCreate,
    iovdestroy: IovDestroy,
    iorcreate4: IorCreate4,
    iordestroy: IorDestroy,
    reg_fd: RegFd,
    dereg_fd: DeregFd,
    prep_io: PrepIo,
    submit_ios: SubmitIos,
    wait_for_ios: WaitForIos,
}

fn dl_error() -> String {
    // SAFETY: `dlerror` gives NULL or a string that lives until this thread's next call of the family.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: not NULL, so a C string, which is copied before anything else is called.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// A function of the library.
///
/// # Safety
/// `F` is the type that the function has in the header.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: `library` came from `dlopen` and was never closed; `name` is a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(format!("it has no `{}`", name.to_string_lossy()));
    }
    // SAFETY: not NULL, of a pointer's size (asserted), and of type `F` as the caller says.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

impl Library {
    /// Loads the library of this path, or of this name where the loader looks.
    pub(super) fn load(name: &OsStr) -> Result<Self, String> {
        let name = CString::new(name.as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: a C string; the library's initialisers run, which is what loading it means.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(dl_error());
        }
        macro_rules! find {
            ($type:ty, $name:literal) => {
                // SAFETY: the type is the one that `hf3fs_usrbio.h` declares for this name.
                unsafe { symbol::<$type>(library, $name) }?
            };
        }
        Ok(Self {
            extract_mount_point: find!(ExtractMountPoint, c"hf3fs_extract_mount_point"),
            iovcreate: find!(IovCreate, c"hf3fs_iovcreate"),
            iovdestroy: find!(IovDestroy, c"hf3fs_iovdestroy"),
            iorcreate4: find!(IorCreate4, c"hf3fs_iorcreate4"),
            iordestroy: find!(IorDestroy, c"hf3fs_iordestroy"),
            reg_fd: find!(RegFd, c"hf3fs_reg_fd"),
            dereg_fd: find!(DeregFd, c"hf3fs_dereg_fd"),
            prep_io: find!(PrepIo, c"hf3fs_prep_io"),
            submit_ios: find!(SubmitIos, c"hf3fs_submit_ios"),
            wait_for_ios: find!(WaitForIos, c"hf3fs_wait_for_ios"),
        })
    }

    /// The mount point that `path` is below; `None` if that is not 3FS.
    pub(super) fn mount_point(&self, path: &Path) -> Option<PathBuf> {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        let mut buf = [0_u8; MOUNT_BYTES_MAX];
        let room = c_int::try_from(buf.len()).ok()?;
        // SAFETY: writes at most `room` bytes into `buf`, reads the C string `path`.
        let len =
            unsafe { (self.extract_mount_point)(buf.as_mut_ptr().cast(), room, path.as_ptr()) };
        // The length counts the NUL; more than there is room for means that nothing useful was written.
        let len = usize::try_from(len).ok().filter(|len| *len <= buf.len())?;
        let text = CStr::from_bytes_until_nul(buf.get(..len)?).ok()?;
        Some(OsString::from_vec(text.to_bytes().to_vec()).into())
    }

    /// Registers an open file. The library duplicates it.
    pub(super) fn register(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        // SAFETY: the descriptor is open; nothing else is passed.
        let result = unsafe { (self.reg_fd)(fd.as_raw_fd(), 0) };
        // The other way round than everything else: the negated duplicate, or a positive error number.
        if result > 0 {
            return Err(Errno::from_raw_os_error(result));
        }
        Ok(())
    }

    /// Takes back [`Library::register`], while the file is still open.
    pub(super) fn deregister(&self, fd: BorrowedFd<'_>) {
        // SAFETY: the descriptor is open; the library ignores those that it does not know.
        unsafe { (self.dereg_fd)(fd.as_raw_fd()) }
    }
}

/// Errors of the library as it returns them: negated.
fn checked(result: c_int) -> Result<c_int, Errno> {
    if result < 0 {
        return Err(Errno::from_raw_os_error(result.saturating_neg()));
    }
    Ok(result)
}

/// A queue for reads, with the memory that they fill.
pub(super) struct Ring {
    library: &'static Library,
    /// Boxed: the library may remember where they are.
    ior: Box<RawIor>,
    iov: Box<RawIov>,
}

// SAFETY: the pointers are to shared memory and to the library's own objects, none of which belongs to a thread; all use
// is through `&mut self`, by one thread at a time.
unsafe impl Send for Ring {}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("bytes", &self.iov.size)
            .finish_non_exhaustive()
    }
}

fn zeroed_iov() -> Box<RawIov> {
    // SAFETY: null pointers and zeros are values of all its fields.
    Box::new(unsafe { std::mem::zeroed() })
}

impl Ring {
    /// A queue of `entries` reads into `bytes` of memory; holes are errors, and every read starts at once.
    pub(super) fn create(
        library: &'static Library,
        mount: &Path,
        entries: u16,
        bytes: usize,
    ) -> Result<Self, Errno> {
        let mount = mount.as_os_str().as_bytes();
        let mount = CString::new(mount).map_err(|_nul| Errno::INVAL)?;
        let mut iov = zeroed_iov();
        // SAFETY: the box stays where it is until `iovdestroy`; the C string is copied by the library.
        checked(unsafe { (library.iovcreate)(&raw mut *iov, mount.as_ptr(), bytes, 0, -1) })?;
        // SAFETY: null pointers and zeros are values of all its fields.
        let mut ior: Box<RawIor> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: as for `iovcreate`. Depth 0: at once; time-out 0: there are no batches to wait for; NUMA -1: any.
        let created = checked(unsafe {
            (library.iorcreate4)(
                &raw mut *ior,
                mount.as_ptr(),
                c_int::from(entries),
                true,
                0,
                0,
                -1,
                FORBID_READ_HOLES,
            )
        });
        if let Err(e) = created {
            // SAFETY: created above, and used by nothing.
            unsafe { (library.iovdestroy)(&raw mut *iov) };
            return Err(e);
        }
        Ok(Self { library, ior, iov })
    }

    /// The ids of queue and memory, which are part of the names of their links below the mount.
    pub(super) fn ids(&self) -> [[u8; 16]; 2] {
        [self.ior.iov.id, self.iov.id]
    }

    /// Prepares a read of `len` bytes at `offset` of a registered file, into the memory at `at`. From here on the memory is
    /// the library's, until the read is finished.
    pub(super) fn prepare(
        &mut self,
        (at, len): (usize, usize),
        fd: BorrowedFd<'_>,
        offset: u64,
        ticket: usize,
    ) -> Result<(), Errno> {
        let end = at.checked_add(len).ok_or(Errno::INVAL)?;
        if end > self.iov.size || self.iov.base.is_null() {
            return Err(Errno::INVAL);
        }
        let offset = usize::try_from(offset).map_err(|_too_far| Errno::OVERFLOW)?;
        let bytes = u64::try_from(len).map_err(|_too_long| Errno::OVERFLOW)?;
        // SAFETY: `at` was checked to lie inside of the memory, which `base` begins.
        let buffer = unsafe { self.iov.base.add(at) };
        // SAFETY: queue and memory live, the buffer and its length lie inside the memory; the ticket is never followed.
        let slot = unsafe {
            (self.library.prep_io)(
                &raw const *self.ior,
                &raw const *self.iov,
                true,
                buffer.cast(),
                fd.as_raw_fd(),
                offset,
                bytes,
                ptr::without_provenance(ticket),
            )
        };
        checked(slot).map(drop)
    }

    /// Has the prepared reads done.
    pub(super) fn submit(&mut self) -> Result<(), Errno> {
        // SAFETY: the queue lives.
        checked(unsafe { (self.library.submit_ios)(&raw const *self.ior) }).map(drop)
    }

    /// Adds finished reads to `done` until there is one, or `patience` is over. At most `max`, which is at least 1.
    pub(super) fn wait(
        &mut self,
        done: &mut Vec<Completion>,
        max: u16,
        patience: Timespec,
    ) -> Result<(), Errno> {
        let empty = RawCqe {
            index: 0,
            reserved: 0,
            result: 0,
            userdata: ptr::null(),
        };
        let mut cqes = vec![empty; usize::from(max)];
        let until = clock_gettime(ClockId::Realtime)
            .checked_add(patience)
            .ok_or(Errno::OVERFLOW)?;
        let until = libc::timespec {
            tv_sec: until.tv_sec,
            tv_nsec: until.tv_nsec,
        };
        // SAFETY: the queue lives, there is room for `max` entries, and the time is a valid one.
        let count = checked(unsafe {
            (self.library.wait_for_ios)(
                &raw const *self.ior,
                cqes.as_mut_ptr(),
                c_int::from(max),
                1,
                &raw const until,
            )
        })?;
        let count = usize::try_from(count).map_err(|_negative| Errno::PROTO)?;
        let finished = cqes.get(..count).ok_or(Errno::PROTO)?;
        done.extend(finished.iter().map(|cqe| Completion {
            ticket: cqe.userdata.addr(),
            result: cqe.result,
        }));
        Ok(())
    }

    /// Copies bytes out of the memory; none of them is part of a read that is not finished.
    pub(super) fn copy_to(&self, at: usize, len: usize, out: &mut Vec<u8>) -> Result<(), Errno> {
        let end = at.checked_add(len).ok_or(Errno::INVAL)?;
        if end > self.iov.size || self.iov.base.is_null() {
            return Err(Errno::INVAL);
        }
        out.reserve(len);
        // SAFETY: `at` lies inside of the memory.
        let source = unsafe { self.iov.base.add(at) };
        let target = out.spare_capacity_mut();
        // SAFETY: `len` bytes lie inside of the memory, and that many were reserved behind `out`; they do not overlap.
        unsafe { ptr::copy_nonoverlapping(source, target.as_mut_ptr().cast(), len) };
        // SAFETY: the bytes up to there were just written.
        unsafe { out.set_len(out.len() + len) };
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once; the queue first, for it refers to the memory.
        unsafe { (self.library.iordestroy)(&raw mut *self.ior) };
        // SAFETY: as above.
        unsafe { (self.library.iovdestroy)(&raw mut *self.iov) };
    }
}
