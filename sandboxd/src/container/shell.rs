//! The empty shell of a sandbox: namespaces, `/proc`, `/sys` and `/dev`, everything but a root file system and a purpose.
//!
//! Setting it up costs milliseconds (a network namespace alone three, moving into v1 groups more), and none of it
//! depends on what the sandbox will be for. So shells are made ahead, and a create only brings the root: one move of a mount,
//! one `pivot_root`. The process here becomes the agent (pid 1); its first child is the launcher.
//!
//! Its code comes from outside: it never runs a program of the sandbox's file system. It has the sandbox's ids, yet nothing
//! inside can trace it or open its descriptors through `/proc`: it is not dumpable, and its memory belongs to the host's user
//! namespace (it has not called `execve` since), so that no capability inside counts.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::sched::CloneFlags;
use nix::unistd::{Gid, Uid};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{MountAttrFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Signal};

use super::agent::Agent;
use super::launcher::{self, Launcher};
use super::{fs, message};
use crate::sys::{self, CloneArgs, Cloned, SingleThreaded};

/// What the shell's process gets from the daemon.
#[derive(Debug)]
pub(crate) struct Inherited {
    pub(crate) listener: OwnedFd,
    pub(crate) group: OwnedFd,
    pub(crate) run: OwnedFd,
    pub(crate) oom: OwnedFd,
    pub(crate) join: Vec<OwnedFd>,
}

impl Inherited {
    pub(crate) fn new(fds: Vec<OwnedFd>) -> io::Result<Self> {
        let mut fds = fds.into_iter();
        let mut next = || {
            fds.next()
                .ok_or_else(|| io::Error::other("a request to the spawner lacks descriptors"))
        };
        Ok(Self {
            listener: next()?,
            group: next()?,
            run: next()?,
            oom: next()?,
            join: fds.collect(),
        })
    }
}

/// Files of `/proc` that tell about the host or reach into it: hidden behind `/dev/null`.
const HIDDEN_FILES: [&str; 17] = [
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "kmsg",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "sched_debug",
    "timer_list",
    "timer_stats",
    "interrupts",
    "softirqs",
    "vmallocinfo",
    "slabinfo",
    "pagetypeinfo",
];
/// Folders of `/proc`: hidden behind an empty one.
const HIDDEN_FOLDERS: [&str; 4] = ["acpi", "asound", "scsi", "driver"];
/// What of `/proc` may be read only.
const READ_ONLY: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];
/// Folders of `/sys`: hidden behind an empty one.
const HIDDEN_SYS: [&str; 7] = [
    "firmware",
    "fs",
    "kernel",
    "module",
    "power",
    "devices/virtual/powercap",
    "hypervisor",
];

/// Sets up the shell and becomes its agent; returns when the sandbox is to end.
///
/// # Errors
/// What failed while setting up.
pub(crate) fn run(proof: SingleThreaded, inherited: Inherited, mapped: OwnedFd) -> io::Result<()> {
    sys::reset_signals()?;
    File::from(mapped).read_exact(&mut [0])?;
    let root = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(root.1, root.1, root.1)?;
    nix::unistd::setresuid(root.0, root.0, root.0)?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Until it has a purpose it ends with its spawner, and that with the daemon. Here: a change of ids would undo it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    nix::unistd::setsid()?;
    // Here and not at birth: it takes milliseconds, and the spawner has others to make.
    nix::sched::unshare(CloneFlags::CLONE_NEWNET)?;
    sys::loopback_up().map_err(named("switching the loopback interface on"))?;
    stage().map_err(named("mounting"))?;
    quiet()?;
    let launcher = start_launcher(proof, &inherited)?;
    Agent::new(proof, inherited, launcher)?.run()
}

fn named(what: &'static str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Says why a shell could not be made, where the daemon's log is; the status to end with.
pub(crate) fn complain(error: &io::Error) -> i32 {
    // Nobody is left to tell if this fails too.
    drop(writeln!(
        io::stderr().lock(),
        "sandboxd: a new sandbox could not be set up: {error}"
    ));
    1
}

/// From here on nothing of the daemon's streams is held.
fn quiet() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

fn start_launcher(proof: SingleThreaded, inherited: &Inherited) -> io::Result<Launcher> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let (ours, theirs) = message::pair()?;
    set_socket_timeout(&ours, Timeout::Recv, Some(launcher::PATIENCE))?;
    match sys::clone(proof, &CloneArgs::default())? {
        Cloned::Child => {
            drop(ours);
            let done = launcher::run(proof, theirs, &inherited.join);
            sys::exit_now(i32::from(done.is_err()));
        }
        Cloned::Parent { pid, .. } => Ok(Launcher { socket: ours, pid }),
    }
}

/// Starts another launcher when the kernel killed the first.
///
/// # Errors
/// What the kernel says.
pub(crate) fn restart_launcher(
    proof: SingleThreaded,
    inherited: &Inherited,
) -> io::Result<Launcher> {
    start_launcher(proof, inherited)
}

fn stage() -> io::Result<()> {
    let plain = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let read_only = u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits());
    let proc = Path::new("/stage/proc");
    fs::attach(fs::make("proc", &[], plain)?, proc)?;
    let empty = fs::make(
        "tmpfs",
        &[("size", "4k"), ("nr_inodes", "1"), ("mode", "0555")],
        plain | MountAttrFlags::MOUNT_ATTR_RDONLY,
    )?;
    fs::attach(&empty, "/empty")?;
    for name in READ_ONLY {
        let path = proc.join(name);
        if path.try_exists()? {
            let clone = fs::clone_tree(&path)?;
            sys::set_mount_attributes(clone.as_fd(), read_only)?;
            fs::attach(&clone, &path)?;
        }
    }
    hide(proc, &HIDDEN_FILES, Path::new("/dev/null"))?;
    hide(proc, &HIDDEN_FOLDERS, Path::new("/empty"))?;
    let sys = Path::new("/stage/sys");
    let mount = fs::make("sysfs", &[], plain | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    fs::attach(mount, sys)?;
    hide(sys, &HIDDEN_SYS, Path::new("/empty"))?;
    let dev = Path::new("/stage/dev");
    fs::attach(fs::clone_tree(Path::new("/dev"))?, dev)?;
    let terminals = fs::make(
        "devpts",
        &[("ptmxmode", "0666"), ("mode", "0620"), ("gid", "5")],
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    fs::attach(terminals, dev.join("pts"))?;
    let shared = fs::make("tmpfs", &[("mode", "1777")], plain)?;
    fs::attach(shared, dev.join("shm"))
}

fn hide(below: &Path, names: &[&str], behind: &Path) -> io::Result<()> {
    for name in names {
        let path = below.join(name);
        if path.try_exists()? {
            fs::attach(fs::clone_tree(behind)?, &path)?;
        }
    }
    Ok(())
}

/// Makes `root` the root of the sandbox, with the staged `/proc`, `/sys` and `/dev` in it.
///
/// # Errors
/// When the root has something at these names that is not a folder, or the kernel refuses.
pub(crate) fn enter(root: &OwnedFd, hostname: &str) -> io::Result<()> {
    // From now on it outlives the daemon.
    rustix::process::set_parent_process_death_signal(None)?;
    rustix::system::sethostname(hostname.as_bytes())?;
    fs::attach(root, "/new")?;
    let open = |name: &str| {
        // Never through a link: the image decides what is there, and we mount on it.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        rustix::fs::openat2(root, name, flags, Mode::empty(), resolve)
    };
    for name in ["proc", "sys", "dev"] {
        let place = match open(name) {
            Err(rustix::io::Errno::NOENT) => {
                rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755))?;
                open(name)
            }
            place => place,
        };
        let place = place.map_err(|e| fs::at("use folder", &Path::new("/").join(name), e))?;
        let staged = rustix::mount::open_tree(
            rustix::fs::CWD,
            Path::new("/stage").join(name),
            rustix::mount::OpenTreeFlags::OPEN_TREE_CLOEXEC,
        )?;
        fs::attach_at(&staged, &place)?;
    }
    rustix::process::fchdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")
}

/// A cgroup namespace whose root is where this process is.
///
/// # Errors
/// What the kernel says.
pub(crate) fn own_cgroups() -> io::Result<()> {
    Ok(nix::sched::unshare(CloneFlags::CLONE_NEWCGROUP)?)
}
