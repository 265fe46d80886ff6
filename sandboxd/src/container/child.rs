//! The last steps of a new process before it becomes a program of the sandbox.
//!
//! From the first program instruction on everything is the sandbox's; so descriptors, capabilities, limits, ids and the filter
//! of system calls are settled here, in this order: each step may need what a later one takes away.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::unistd::{Gid, Uid};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use super::protocol::ExecSpec;
use super::users::{self, User};
use crate::sys::{self, Instruction};

/// What a new process gets.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// Closed by `execve`; before that, the place to say what went wrong.
    pub(crate) report: OwnedFd,
}

/// Capabilities that a sandbox's root keeps, inside its own user namespace: what package managers and build tools use.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SETFCAP);

/// Where a program is looked for if the environment does not say.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Turns this process into the program; reports and ends if that fails.
pub(crate) fn become_program(spec: &ExecSpec, streams: Streams, filter: &[Instruction]) -> ! {
    let report = streams.report.try_clone();
    let (what, error) = prepare(spec, streams, filter);
    if let Ok(report) = report {
        let text = format!("{}\n{what}", error.raw_os_error().unwrap_or(0));
        // If nobody listens, the status has to do.
        rustix::io::write(&report, text.as_bytes()).ok();
    }
    let code = if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    };
    sys::exit_now(code)
}

/// Returns only if something fails: what, and why.
fn prepare(spec: &ExecSpec, streams: Streams, filter: &[Instruction]) -> (String, io::Error) {
    let step = |what: &'static str| move |error: io::Error| (what.to_owned(), error);
    let program = (|| {
        terminal(spec, &streams).map_err(step("take the terminal"))?;
        sys::reset_signals().map_err(step("reset signals"))?;
        let user = users::find(&spec.user).map_err(|e| {
            let what = format!("find user `{}` in /etc/passwd", spec.user);
            (what, e)
        })?;
        let home = Path::new(&user.home).is_dir();
        let cwd = match &*spec.cwd {
            "~" if home => &user.home,
            "" | "~" => "/",
            cwd => cwd,
        };
        limit(spec).map_err(step("limit open files"))?;
        become_user(&user).map_err(step("change to the user"))?;
        std::env::set_current_dir(cwd)
            .map_err(|e| (format!("use working directory `{cwd}`"), e))?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
        rustix::thread::set_no_new_privs(true)
            .map_err(|e| step("give up new privileges")(e.into()))?;
        sys::close_on_exec_from(3).map_err(step("close descriptors"))?;
        sys::install_filter(filter).map_err(step("install the filter of system calls"))?;
        Program::of(spec, &user).map_err(step("read the command"))
    })();
    match program {
        Ok(program) => program.execute(),
        Err(failed) => failed,
    }
}

fn terminal(spec: &ExecSpec, streams: &Streams) -> io::Result<()> {
    rustix::process::setsid()?;
    rustix::stdio::dup2_stdin(&streams.stdin)?;
    rustix::stdio::dup2_stdout(&streams.stdout)?;
    rustix::stdio::dup2_stderr(&streams.stderr)?;
    if spec.pty.is_some() {
        rustix::process::ioctl_tiocsctty(&streams.stdin)?;
    }
    Ok(())
}

fn limit(spec: &ExecSpec) -> io::Result<()> {
    let most = getrlimit(Resource::Nofile).maximum;
    let wanted = if spec.open_files == 0 {
        most
    } else {
        Some(most.map_or(spec.open_files, |most| most.min(spec.open_files)))
    };
    let files = Rlimit {
        current: wanted,
        maximum: wanted,
    };
    setrlimit(Resource::Nofile, files)?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // A core dump goes where the host's pattern says, which is not the sandbox's business.
    setrlimit(Resource::Core, none)?;
    Ok(())
}

fn become_user(user: &User) -> io::Result<()> {
    for capability in CapabilitySet::all().difference(KEPT).iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // The kernel is older than the list.
            Err(rustix::io::Errno::INVAL) => {}
            dropped => dropped?,
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    nix::unistd::setgroups(&groups)?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    if user.uid == 0 {
        let sets = rustix::thread::CapabilitySets {
            effective: KEPT,
            permitted: KEPT,
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, sets)?;
    }
    Ok(())
}

/// A command in the form that `execve` takes.
struct Program {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Program {
    fn of(spec: &ExecSpec, user: &User) -> io::Result<Self> {
        let text = |text: &str| CString::new(text).map_err(io::Error::other);
        let argv = spec
            .argv
            .iter()
            .map(|a| text(a))
            .collect::<Result<_, _>>()?;
        let mut env = Vec::new();
        let defaults = [
            ("PATH", DEFAULT_PATH),
            ("HOME", &user.home),
            ("USER", &user.name),
        ];
        for (name, value) in defaults {
            if !spec.env.contains_key(name) {
                env.push(text(&format!("{name}={value}"))?);
            }
        }
        for (name, value) in &spec.env {
            env.push(text(&format!("{name}={value}"))?);
        }
        let name = spec.argv.first().map_or("", |name| &**name);
        let path = spec.env.get("PATH").map_or(DEFAULT_PATH, |path| &**path);
        let candidates = if name.contains('/') {
            vec![text(name)?]
        } else {
            let folders = path.split(':').filter(|folder| !folder.is_empty());
            folders
                .map(|folder| CString::new(Path::new(folder).join(name).as_os_str().as_bytes()))
                .collect::<Result<_, _>>()
                .map_err(io::Error::other)?
        };
        Ok(Self {
            candidates,
            argv,
            env,
        })
    }

    fn execute(&self) -> (String, io::Error) {
        let mut last = (
            String::new(),
            io::Error::from_raw_os_error(nix::libc::ENOENT),
        );
        for candidate in &self.candidates {
            let Err(errno) = nix::unistd::execve(candidate, &self.argv, &self.env);
            let name = candidate.to_string_lossy().into_owned();
            let missing = matches!(errno, nix::Error::ENOENT | nix::Error::ENOTDIR);
            if !missing || self.candidates.len() == 1 {
                last = (format!("run `{name}`"), errno.into());
            }
            if !missing && errno != nix::Error::EACCES {
                break;
            }
        }
        if last.0.is_empty() {
            let name = self.argv.first().cloned().unwrap_or_default();
            last.0 = format!("find `{}`", name.to_string_lossy());
        }
        last
    }
}
