//! The spawner: a small process with one thread that makes sandboxes' first processes.
//!
//! The daemon is large and has threads; forking it costs milliseconds and copies locks. So it starts this process once (the same
//! program, another role) and asks it over a socket. The spawner lives in a mount namespace of its own that holds nothing but
//! what a sandbox needs to set itself up: `/proc`, `/sys`, device nodes, empty folders. A new sandbox inherits three mounts
//! in place of the host's hundreds, and holds none of the host's in use.
//!
//! It ends with the daemon's socket. Sandboxes do not: the next daemon adopts them.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::libc;
use nix::sched::CloneFlags;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use super::message;
use super::shell;
use crate::sys::{self, CloneArgs, Cloned, SingleThreaded};

/// First argument of the program when it is to be the spawner.
pub const SUBCOMMAND: &str = "--spawner";
/// Ids that each sandbox has.
pub const IDS: u32 = 65_536;

/// What the daemon asks for. Descriptors: the agent's listening socket, the v2 group, its `run` folder, the file that counts
/// kills, then files to join v1 groups through.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Make {
    /// First of the host's ids that this sandbox has.
    pub(crate) first_id: u32,
    /// Whether a namespace to map mounts through is wanted too.
    pub(crate) mapping: bool,
}

/// What it gets. Descriptors: of the process, and (if wanted) of the user namespace that its mounts' ids are mapped through.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Made {
    /// The agent's process id.
    Pid(i32),
    /// Why there is none.
    Failed(String),
}

/// Runs the spawner on an inherited socket until the daemon is gone.
///
/// # Errors
/// When its own set-up fails; requests that fail are answered.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    let proof = SingleThreaded::prove()?;
    own_root().map_err(|e| io::Error::new(e.kind(), format!("making the spawner's root: {e}")))?;
    // Children are collected by the kernel: sandboxes are watched through their descriptors.
    sys::ignore_children()?;
    message::send(&socket, &Made::Pid(0), &[])?;
    while let Some((request, fds)) = message::receive::<Make>(&socket)? {
        match make(proof, &socket, &request, fds) {
            Ok((pid, pidfd, userns)) => {
                let mut fds = vec![pidfd.as_fd()];
                fds.extend(userns.as_ref().map(AsFd::as_fd));
                message::send(&socket, &Made::Pid(pid), &fds)?;
            }
            Err(error) => message::send(&socket, &Made::Failed(error.to_string()), &[])?,
        }
    }
    Ok(())
}

/// A tmpfs with what new sandboxes need, as the root of a mount namespace of our own.
fn own_root() -> io::Result<()> {
    nix::sched::unshare(CloneFlags::CLONE_NEWNS)?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    let place = "/tmp";
    rustix::mount::mount("dsec", place, "tmpfs", flags, Some(c"mode=0755,size=1m"))?;
    let root = Path::new(place);
    for folder in [
        "proc",
        "sys",
        "dev",
        "stage",
        "stage/proc",
        "stage/sys",
        "stage/dev",
        "new",
        "empty",
    ] {
        fs::create_dir(root.join(folder))?;
    }
    rustix::mount::mount(
        "proc",
        root.join("proc"),
        "proc",
        flags | MountFlags::NODEV,
        None,
    )?;
    rustix::mount::mount(
        "sysfs",
        root.join("sys"),
        "sysfs",
        flags | MountFlags::NODEV,
        None,
    )?;
    devices(&root.join("dev"))?;
    std::env::set_current_dir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    rustix::mount::mount_remount("/", MountFlags::BIND | MountFlags::RDONLY | flags, "")
        .map_err(io::Error::from)
}

/// Device nodes that are the same for everybody.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// A `/dev` that all sandboxes share, read-only.
fn devices(dev: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("dev", dev, "tmpfs", flags, Some(c"mode=0755,size=64k"))?;
    for (name, major, minor) in NODES {
        let node = dev.join(name);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &node,
            rustix::fs::FileType::CharacterDevice,
            rustix::fs::Mode::from_raw_mode(0o666),
            rustix::fs::makedev(major, minor),
        )?;
        // The umask took some.
        fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    }
    for folder in ["pts", "shm"] {
        fs::create_dir(dev.join(folder))?;
    }
    for (name, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        std::os::unix::fs::symlink(target, dev.join(name))?;
    }
    rustix::mount::mount_remount(dev, MountFlags::BIND | MountFlags::RDONLY | flags, "")
        .map_err(io::Error::from)
}

fn make(
    proof: SingleThreaded,
    daemon: &OwnedFd,
    request: &Make,
    fds: Vec<OwnedFd>,
) -> io::Result<(i32, OwnedFd, Option<OwnedFd>)> {
    let wanted = request.mapping;
    let userns = wanted.then(|| mapping_namespace(proof, request.first_id));
    let userns = userns.transpose()?;
    let inherited = shell::Inherited::new(fds)?;
    let (mapped, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let args = CloneArgs {
        flags,
        cgroup: Some(inherited.group.as_fd()),
    };
    match sys::clone(proof, &args)? {
        Cloned::Child => {
            drop(tell);
            // This copy of the connection must not outlive the spawner's.
            let code = nix::unistd::close(daemon.as_raw_fd())
                .map_err(io::Error::from)
                .and_then(|()| shell::run(proof, inherited, mapped));
            sys::exit_now(code.err().map_or(0, |error| shell::complain(&error)));
        }
        Cloned::Parent { pid, pidfd } => {
            drop(mapped);
            let told = map_ids(pid, &format!("0 {} {IDS}\n", request.first_id))
                .and_then(|()| (&fs::File::from(tell)).write_all(b"m"));
            if let Err(error) = told {
                rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL)?;
                return Err(error);
            }
            Ok((pid, pidfd, userns))
        }
    }
}

fn map_ids(pid: i32, map: &str) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/uid_map"), map)?;
    fs::write(format!("/proc/{pid}/gid_map"), map)
}

/// The user namespace that a sandbox's mounts are mapped through. It maps as the sandbox's own does, and one id more: the
/// host's root, who makes whiteouts and working files of the overlay, appears on disk as id 65,536, which no sandbox has.
fn mapping_namespace(proof: SingleThreaded, first_id: u32) -> io::Result<OwnedFd> {
    let (wait, hold) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let args = CloneArgs {
        flags: libc::CLONE_NEWUSER,
        cgroup: None,
    };
    match sys::clone(proof, &args)? {
        Cloned::Child => {
            drop(hold);
            let ended = fs::File::from(wait).read(&mut [0]);
            sys::exit_now(i32::from(ended.is_err()));
        }
        Cloned::Parent { pid, .. } => {
            map_ids(pid, &format!("0 {first_id} {IDS}\n{IDS} 0 1\n"))?;
            let namespace = fs::File::open(format!("/proc/{pid}/ns/user"))?;
            drop(hold);
            Ok(namespace.into())
        }
    }
}

/// Runs the spawner on the socket that is its standard input.
///
/// # Errors
/// As for [`run`].
pub fn run_inherited() -> io::Result<()> {
    // As a number: standard input stays open at zero, and what is opened next must not take its place.
    let socket = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
    let null = fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    run(socket)
}
