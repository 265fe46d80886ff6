//! Calls that have no safe wrapper: new processes in new namespaces, mount attributes, seccomp, an interface's flags.
#![expect(
    unsafe_code,
    reason = "the C library and rustix have no safe interface for these calls"
)]

pub(crate) mod borrow;
pub(crate) mod loops;
pub(crate) mod quota;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::libc;

/// Proof that this process had one thread when it was asked. Forking copies the calling thread only: a lock that another
/// thread holds (the allocator's, say) would stay locked in the child for ever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SingleThreaded(());

impl SingleThreaded {
    /// # Errors
    /// When there are more threads, or `/proc` cannot be read.
    pub(crate) fn prove() -> io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        if threads == 1 {
            return Ok(Self(()));
        }
        Err(io::Error::other(format!(
            "this process has {threads} threads, and must have one to fork"
        )))
    }
}

/// Where [`clone`] returned.
#[derive(Debug)]
pub(crate) enum Cloned {
    /// In the new process.
    Child,
    /// In the old one: the child's process id and a descriptor of it.
    Parent {
        /// As seen from here.
        pid: i32,
        /// Its descriptor.
        pidfd: OwnedFd,
    },
}

/// Which new process [`clone`] makes.
#[derive(Debug, Default)]
pub(crate) struct CloneArgs<'a> {
    /// `CLONE_NEW*` and `CLONE_PARENT`.
    pub(crate) flags: i32,
    /// The v2 cgroup that it begins in.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
}

/// Not among libc's constants of 32 bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `clone3` without shared memory: a fork into namespaces and a cgroup.
///
/// # Errors
/// What the kernel says.
pub(crate) fn clone(_proof: SingleThreaded, args: &CloneArgs<'_>) -> io::Result<Cloned> {
    let mut pidfd: RawFd = -1;
    let flags =
        u64::from(args.flags.cast_unsigned()) | u64::from(libc::CLONE_PIDFD.cast_unsigned());
    let sibling = args.flags & libc::CLONE_PARENT != 0;
    let mut raw = libc::clone_args {
        flags,
        pidfd: std::ptr::from_mut(&mut pidfd).addr() as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: if sibling {
            0
        } else {
            u64::from(libc::SIGCHLD.cast_unsigned())
        },
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    if let Some(cgroup) = args.cgroup {
        raw.flags |= CLONE_INTO_CGROUP;
        raw.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    }
    // SAFETY: `raw` is a whole `clone_args` whose pointer names `pidfd`, which lives until the call returns. No `CLONE_VM`:
    // the child has its own copy of the memory, and `_proof` says that no other thread held a lock in it.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            std::ptr::from_mut(&mut raw),
            size_of::<libc::clone_args>(),
        )
    };
    match pid {
        0 => Ok(Cloned::Child),
        pid if pid < 0 => Err(io::Error::last_os_error()),
        pid => {
            // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            let pid = i32::try_from(pid).map_err(io::Error::other)?;
            Ok(Cloned::Parent { pid, pidfd })
        }
    }
}

/// Ends a forked process without running what the parent registered to run at its end.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// `struct mount_attr` of `mount_setattr(2)`.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

/// `MOUNT_ATTR_IDMAP`.
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

fn mount_setattr(mount: BorrowedFd<'_>, attr: &MountAttr) -> io::Result<()> {
    // SAFETY: the path is an empty C string, and `attr` a whole `mount_attr` of the size that is told.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Maps the ids of a detached mount through a user namespace (`MOUNT_ATTR_IDMAP`).
///
/// # Errors
/// What the kernel says: EINVAL for a file system that cannot be mapped.
pub(crate) fn idmap_mount(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>) -> io::Result<()> {
    mount_setattr(
        mount,
        &MountAttr {
            set: MOUNT_ATTR_IDMAP,
            clear: 0,
            propagation: 0,
            userns_fd: u64::from(userns.as_raw_fd().cast_unsigned()),
        },
    )
}

/// Sets mount attributes (`MOUNT_ATTR_RDONLY` and others) on one mount.
///
/// # Errors
/// What the kernel says.
pub(crate) fn set_mount_attributes(mount: BorrowedFd<'_>, set: u64) -> io::Result<()> {
    mount_setattr(
        mount,
        &MountAttr {
            set,
            clear: 0,
            propagation: 0,
            userns_fd: 0,
        },
    )
}

/// One instruction of a seccomp filter: code, jump if true, jump if false, constant.
pub(crate) type Instruction = (u16, u8, u8, u32);

/// A seccomp filter as the kernel takes it.
#[derive(Debug)]
pub(crate) struct Filter(Vec<libc::sock_filter>);

impl Filter {
    /// From its instructions.
    pub(crate) fn new(program: &[Instruction]) -> Self {
        let filter = program
            .iter()
            .map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k });
        Self(filter.collect())
    }
}

/// Installs a seccomp filter on this thread; `no_new_privs` must be set. Allocates nothing.
///
/// # Errors
/// What the kernel says.
pub(crate) fn install_filter(filter: &Filter) -> Result<(), rustix::io::Errno> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.0.len()).unwrap_or(u16::MAX),
        filter: filter.0.as_ptr().cast_mut(),
    };
    // SAFETY: `program` names `filter` and its length (a longer one than the kernel takes is refused by it); the kernel
    // copies it before the call returns and writes nothing.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            std::ptr::from_ref(&program),
        )
    };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Marks every descriptor from `first` on to be closed by `execve`.
///
/// # Errors
/// What the kernel says.
pub(crate) fn close_on_exec_from(first: u32) -> Result<(), rustix::io::Errno> {
    // SAFETY: three integers; no descriptor is closed now.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

fn last_errno() -> rustix::io::Errno {
    rustix::io::Errno::from_raw_os_error(
        io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    )
}

/// Closes every descriptor but the standard ones and `kept`. For a forked process that goes on with one task and then ends by
/// [`exit_now`]: whatever else owns descriptors there must not be used or dropped.
///
/// # Errors
/// What the kernel says.
pub(crate) fn close_all_but(kept: BorrowedFd<'_>) -> io::Result<()> {
    let kept = kept.as_raw_fd().cast_unsigned();
    for (first, last) in [(3, kept.saturating_sub(1)), (kept + 1, u32::MAX)] {
        if first > last {
            continue;
        }
        // SAFETY: three integers. Owners of these descriptors are never used again, see above.
        let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Every signal does again what it does by default, and none is blocked: what a new program expects.
///
/// # Errors
/// When the mask cannot be changed.
pub(crate) fn reset_signals() -> io::Result<()> {
    for signal in 1..=64 {
        // SAFETY: the default disposition runs no code of ours. SIGKILL, SIGSTOP and the C library's own signals refuse,
        // and keep what they have, which is the default.
        let _old = unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    nix::sys::signal::SigSet::empty()
        .thread_set_mask()
        .map_err(io::Error::from)
}

/// Has the kernel collect children that end; nobody will ask for their status.
///
/// # Errors
/// What the kernel says.
pub(crate) fn ignore_children() -> io::Result<()> {
    // SAFETY: ignoring a signal runs no code of ours.
    let old = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    if old == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Switches the loopback interface of this network namespace on.
///
/// # Errors
/// What the kernel says.
pub(crate) fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: an all-zero `ifreq` is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = i8::try_from(*from).map_err(io::Error::other)?;
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_UP).map_err(io::Error::other)?;
    // SAFETY: `request` is a whole `ifreq` whose name ends with a zero byte.
    let done = unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCSIFFLAGS,
            std::ptr::from_mut(&mut request),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Writes a file's dirty pages out and waits. A mapped page is clean then: the next store to it is a change with a time.
///
/// # Errors
/// What the disk says.
pub(crate) fn write_out(file: BorrowedFd<'_>) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open; the call takes no memory.
    let done = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) };
    if done == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
