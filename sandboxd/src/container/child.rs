//! The last steps of a new process before it becomes a program of the sandbox.
//!
//! From the first program instruction on everything is the sandbox's; so descriptors, capabilities, limits, ids and the filter
//! of system calls are settled here, in this order: each step may need what a later one takes away.
//!
//! The process borrows the launcher's memory until then (`sys::borrow`) and can be killed from inside at any moment. So all that
//! needs memory is made before, by [`Prepared`], and what is done afterwards allocates nothing.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use super::protocol::ExecSpec;
use super::users::{self, User};
use crate::sys::borrow::{self, Strings};
use crate::sys::{self, Filter};

/// What a new process gets.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
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

/// A step at which a process can fail to become a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Of the terminal.
    Terminal,
    /// Limits.
    Limit,
    /// Ids and capabilities.
    User,
    /// The working directory.
    Folder,
    /// No new privileges.
    Privileges,
    /// Other descriptors.
    Descriptors,
    /// The filter.
    Filter,
    /// Telling the agent.
    Tell,
    /// The program itself, at this place of the list.
    Run(u16),
    /// No place of the list has it.
    Find,
}

impl Step {
    /// A number for each, above zero.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Terminal => 1,
            Self::Limit => 2,
            Self::User => 3,
            Self::Folder => 4,
            Self::Privileges => 5,
            Self::Descriptors => 6,
            Self::Filter => 7,
            Self::Find => 8,
            Self::Tell => 9,
            Self::Run(place) => RUN | u32::from(place),
        }
    }

    /// The step of a number.
    pub(crate) fn of(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Terminal,
            2 => Self::Limit,
            3 => Self::User,
            4 => Self::Folder,
            5 => Self::Privileges,
            6 => Self::Descriptors,
            7 => Self::Filter,
            8 => Self::Find,
            9 => Self::Tell,
            number if number & RUN != 0 => Self::Run(u16::try_from(number & !RUN).ok()?),
            _ => return None,
        })
    }
}

/// Marks [`Step::Run`] among numbers.
const RUN: u32 = 1 << 16;

/// Why a process did not become a program.
pub(crate) type Failed = (Step, Errno);

/// The status of a process that did not.
pub(crate) fn status(errno: Errno) -> i32 {
    if errno == Errno::NOENT { 127 } else { 126 }
}

/// All that a process needs to become a program.
#[derive(Debug)]
pub(crate) struct Prepared {
    user: User,
    groups: Vec<Gid>,
    cwd: CString,
    has_terminal: bool,
    open_files: u64,
    candidates: Vec<CString>,
    argv: Strings,
    env: Strings,
}

impl Prepared {
    /// Looks up what the sandbox's own files say.
    ///
    /// # Errors
    /// What could not be done, and the error number.
    pub(crate) fn new(spec: &ExecSpec) -> Result<Self, (String, i32)> {
        let errno = |e: &io::Error| e.raw_os_error().unwrap_or(nix::libc::EINVAL);
        let user = users::find(&spec.user).map_err(|e| {
            let missing = e.kind() == io::ErrorKind::NotFound;
            let errno = if missing {
                nix::libc::ENOENT
            } else {
                errno(&e)
            };
            (format!("find user `{}` in /etc/passwd", spec.user), errno)
        })?;
        Self::of(spec, user).map_err(|e| ("read the command".to_owned(), errno(&e)))
    }

    fn of(spec: &ExecSpec, user: User) -> io::Result<Self> {
        let home = Path::new(&user.home).is_dir();
        let cwd = match &*spec.cwd {
            "~" if home => &user.home,
            "" | "~" => "/",
            cwd => cwd,
        };
        let text = |text: &str| CString::new(text).map_err(io::Error::other);
        let argv = spec.argv.iter().map(|a| text(a));
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
            groups: user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect(),
            cwd: text(cwd)?,
            has_terminal: spec.pty.is_some(),
            open_files: spec.open_files,
            candidates,
            argv: Strings::new(argv.collect::<io::Result<_>>()?),
            env: Strings::new(env),
            user,
        })
    }

    /// A step, for people.
    pub(crate) fn describe(&self, step: Step) -> String {
        match step {
            Step::Terminal => "take the terminal".to_owned(),
            Step::Limit => "limit open files".to_owned(),
            Step::User => "change to the user".to_owned(),
            Step::Folder => format!("use working directory `{}`", self.cwd.to_string_lossy()),
            Step::Privileges => "give up new privileges".to_owned(),
            Step::Descriptors => "close descriptors".to_owned(),
            Step::Filter => "install the filter of system calls".to_owned(),
            Step::Tell => "tell the agent".to_owned(),
            Step::Run(place) => {
                let program = self.candidates.get(usize::from(place));
                let program = program.map(|p| p.to_string_lossy()).unwrap_or_default();
                format!("run `{program}`")
            }
            Step::Find => {
                let name = self.argv.first().map(|p| p.to_string_lossy());
                format!("find `{}`", name.unwrap_or_default())
            }
        }
    }

    /// Turns this process into the program; returns why that failed. Allocates nothing.
    /// `tell` is called at the last moment: from then on it may run.
    pub(crate) fn become_program(
        &self,
        streams: &Streams,
        filter: &Filter,
        tell: &dyn Fn() -> Result<(), Errno>,
    ) -> Failed {
        let failed = |step: Step| move |errno: Errno| (step, errno);
        let ready = (|| {
            self.terminal(streams).map_err(failed(Step::Terminal))?;
            self.limit().map_err(failed(Step::Limit))?;
            self.become_user().map_err(failed(Step::User))?;
            rustix::process::chdir(&*self.cwd).map_err(failed(Step::Folder))?;
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
            rustix::thread::set_no_new_privs(true).map_err(failed(Step::Privileges))?;
            sys::close_on_exec_from(3).map_err(failed(Step::Descriptors))?;
            sys::install_filter(filter).map_err(failed(Step::Filter))?;
            tell().map_err(failed(Step::Tell))
        })();
        match ready {
            Ok(()) => self.execute(),
            Err(failed) => failed,
        }
    }

    fn terminal(&self, streams: &Streams) -> Result<(), Errno> {
        rustix::process::setsid()?;
        rustix::stdio::dup2_stdin(&streams.stdin)?;
        rustix::stdio::dup2_stdout(&streams.stdout)?;
        rustix::stdio::dup2_stderr(&streams.stderr)?;
        if self.has_terminal {
            rustix::process::ioctl_tiocsctty(&streams.stdin)?;
        }
        Ok(())
    }

    fn limit(&self) -> Result<(), Errno> {
        let most = getrlimit(Resource::Nofile).maximum;
        let wanted = if self.open_files == 0 {
            most
        } else {
            Some(most.map_or(self.open_files, |most| most.min(self.open_files)))
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
        setrlimit(Resource::Core, none)
    }

    fn become_user(&self) -> Result<(), Errno> {
        for capability in CapabilitySet::all().difference(KEPT).iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // The kernel is older than the list.
                Err(Errno::INVAL) => {}
                dropped => dropped?,
            }
        }
        rustix::thread::clear_ambient_capability_set()?;
        let (uid, gid) = (Uid::from_raw(self.user.uid), Gid::from_raw(self.user.gid));
        // Of this thread only: the C library's own calls would look for others in the memory that is borrowed.
        rustix::thread::set_thread_groups(&self.groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        if self.user.uid == 0 {
            let sets = rustix::thread::CapabilitySets {
                effective: KEPT,
                permitted: KEPT,
                inheritable: CapabilitySet::empty(),
            };
            rustix::thread::set_capabilities(None, sets)?;
        }
        // It belongs to the memory, which is the launcher's still, and a change of ids sets it as the host is configured.
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
    }

    fn execute(&self) -> Failed {
        let mut last = (Step::Find, Errno::NOENT);
        for (place, candidate) in (0..).zip(&self.candidates) {
            let errno = borrow::execute(candidate, &self.argv, &self.env);
            let missing = matches!(errno, Errno::NOENT | Errno::NOTDIR);
            if !missing || self.candidates.len() == 1 {
                last = (Step::Run(place), errno);
            }
            if !missing && errno != Errno::ACCESS {
                break;
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: two steps with the same number.
    #[test]
    fn steps_travel_as_numbers() {
        let steps = [
            Step::Terminal,
            Step::Limit,
            Step::User,
            Step::Folder,
            Step::Privileges,
            Step::Descriptors,
            Step::Filter,
            Step::Find,
            Step::Tell,
            Step::Run(0),
            Step::Run(u16::MAX),
        ];
        for step in steps {
            assert_eq!(Step::of(step.number()), Some(step));
        }
        assert_eq!(Step::of(0), None);
        assert_eq!(Step::of(10), None);
    }
}
