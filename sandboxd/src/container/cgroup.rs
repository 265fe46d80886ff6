//! A sandbox's control groups: limits, freezing, and the scope in which its processes can be found.
//!
//! Processes live in a v2 group (`NAME/run/x-N`, one an exec): killing and freezing a group at a stroke exists only there. Limits
//! come from the v2 group where it has the controllers; on a hybrid host from v1 groups of the same name. Moving a
//! process into a v1 group waits for a grace period of the kernel, 11 ms at the median (measured), so only one process is
//! ever moved, long before it is needed: the launcher, whose children are born in its groups.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Controllers that are used, by their v1 names.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Period of the CPU quota.
const PERIOD_US: u64 = 100_000;
/// Pause between two looks at a group that is emptying.
const PAUSE: Duration = Duration::from_millis(1);

/// Why a group cannot be made, limited or removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// A file of a group would not be read or written.
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The host lacks something.
    #[error("no {what} is mounted on this host (`/proc/self/mountinfo`); sandboxes need it")]
    Missing {
        /// What.
        what: String,
    },
    /// Processes would not go in time.
    #[error("processes in `{path}` did not {what} within {waited:?}")]
    Stuck {
        /// The group.
        path: PathBuf,
        /// What they should have done.
        what: &'static str,
        /// How long it was waited.
        waited: Duration,
    },
}

fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { what, path, source }
}

fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(path, value).map_err(io("write", path))
}

/// What a sandbox may use at most.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory, page cache and tmpfs included.
    pub memory_bytes: u64,
    /// Processors' worth of time.
    pub cpus: f64,
    /// Processes and threads.
    pub pids: u32,
}

/// What a sandbox has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Usage {
    /// Bytes of memory now.
    pub memory_bytes: u64,
    /// Processes and threads now, the launcher included.
    pub pids: u64,
    /// Processes that were killed for lack of memory.
    pub oom_kills: u64,
    /// Microseconds of processor time so far.
    pub cpu_us: u64,
}

/// Where this host's groups are.
#[derive(Debug, Clone)]
pub struct Hierarchies {
    name: String,
    v2: PathBuf,
    /// Controllers that only v1 has, and their roots.
    v1: Vec<(&'static str, PathBuf)>,
}

impl Hierarchies {
    /// Looks at what is mounted, and makes a parent group `name` everywhere.
    ///
    /// # Errors
    /// When there is no v2 hierarchy, or a controller is nowhere.
    pub fn open(name: &str) -> Result<Self, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        let text = fs::read_to_string(path).map_err(io("read", path))?;
        let mounts: Vec<(&str, &str, &str)> = text.lines().filter_map(parse_mount).collect();
        let v2 = mounts.iter().find(|(kind, ..)| *kind == "cgroup2");
        let Some((_, v2, _)) = v2 else {
            return Err(CgroupError::Missing {
                what: "cgroup v2 hierarchy".to_owned(),
            });
        };
        let v2 = PathBuf::from(v2);
        let file = v2.join("cgroup.controllers");
        let unified = fs::read_to_string(&file).map_err(io("read", &file))?;
        let mut v1 = Vec::new();
        for controller in CONTROLLERS {
            if unified.split_whitespace().any(|c| c == controller) {
                write(
                    &v2.join("cgroup.subtree_control"),
                    &format!("+{controller}"),
                )?;
                continue;
            }
            let root = mounts.iter().find(|(kind, _, options)| {
                *kind == "cgroup" && options.split(',').any(|o| o == controller)
            });
            let Some((_, root, _)) = root else {
                return Err(CgroupError::Missing {
                    what: format!("cgroup with the controller `{controller}`"),
                });
            };
            v1.push((controller, PathBuf::from(root)));
        }
        let found = Self {
            name: name.to_owned(),
            v2,
            v1,
        };
        for parent in found.parents() {
            make(&parent)?;
        }
        found.delegate(&found.v2.join(name))?;
        Ok(found)
    }

    /// Which controllers come from v1, for the log.
    pub fn v1_controllers(&self) -> Vec<&'static str> {
        self.v1.iter().map(|(name, _)| *name).collect()
    }

    fn parents(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let v1 = self.v1.iter().map(|(_, root)| root.join(&self.name));
        std::iter::once(self.v2.join(&self.name)).chain(v1)
    }

    /// Hands the controllers of v2 down to the children of `group`.
    fn delegate(&self, group: &Path) -> Result<(), CgroupError> {
        for controller in CONTROLLERS {
            if !self.v1.iter().any(|(name, _)| *name == controller) {
                let file = group.join("cgroup.subtree_control");
                write(&file, &format!("+{controller}"))?;
            }
        }
        Ok(())
    }

    /// Names of the sandboxes' groups that exist, whoever made them.
    ///
    /// # Errors
    /// When a folder cannot be read.
    pub fn names(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = Vec::new();
        for parent in self.parents() {
            for entry in fs::read_dir(&parent).map_err(io("list", &parent))? {
                let entry = entry.map_err(io("list", &parent))?;
                let is_group = entry.file_type().is_ok_and(|kind| kind.is_dir());
                let name = entry.file_name().to_string_lossy().into_owned();
                if is_group && !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        Ok(names)
    }

    /// The groups of one sandbox, whether they exist or not.
    pub fn group(&self, name: &str) -> Cgroup {
        Cgroup {
            v2: self.v2.join(&self.name).join(name),
            v1: self
                .v1
                .iter()
                .map(|(controller, root)| (*controller, root.join(&self.name).join(name)))
                .collect(),
        }
    }

    /// Removes the parent groups, if they are empty.
    ///
    /// # Errors
    /// When one is not.
    pub fn remove(&self) -> Result<(), CgroupError> {
        for parent in self.parents() {
            remove_dir(&parent)?;
        }
        Ok(())
    }
}

fn parse_mount(line: &str) -> Option<(&str, &str, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ');
    let (root, point) = (left.nth(3)?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1)?);
    // A bind mount of a part would hide the rest.
    (root == "/").then_some((kind, point, options))
}

fn make(path: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map_err(io("create", path)),
    }
}

fn remove_dir(path: &Path) -> Result<(), CgroupError> {
    match fs::remove_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(io("remove", path)),
    }
}

/// The groups of one sandbox.
#[derive(Debug, Clone)]
pub struct Cgroup {
    v2: PathBuf,
    v1: Vec<(&'static str, PathBuf)>,
}

/// What the processes of a new sandbox are given of its groups.
#[derive(Debug)]
pub(crate) struct Handles {
    /// The v2 group, to be born in.
    pub(crate) group: OwnedFd,
    /// Its folder `run`, to make groups of execs in.
    pub(crate) run: OwnedFd,
    /// `cgroup.procs` files the launcher must write itself into.
    pub(crate) join: Vec<OwnedFd>,
    /// The file that counts processes killed for lack of memory.
    pub(crate) oom: OwnedFd,
}

impl Cgroup {
    fn run(&self) -> PathBuf {
        self.v2.join("run")
    }

    fn of(&self, controller: &str) -> (PathBuf, bool) {
        let v1 = self.v1.iter().find(|(name, _)| *name == controller);
        v1.map_or_else(
            || (self.v2.clone(), false),
            |(_, path)| (path.clone(), true),
        )
    }

    /// Makes the groups; `uid` (the sandbox's root, as the host sees it) may make groups for execs in `run`.
    ///
    /// # Errors
    /// What the kernel says; the caller removes what was made.
    pub(crate) fn make(&self, uid: u32) -> Result<Handles, CgroupError> {
        let open = |path: &Path| File::open(path).map_err(io("open", path));
        make(&self.v2)?;
        let run = self.run();
        make(&run)?;
        let mut join = Vec::new();
        for (_, path) in &self.v1 {
            make(path)?;
            let file = path.join("cgroup.procs");
            let opened = File::options().write(true).open(&file);
            join.push(opened.map_err(io("open", &file))?.into());
        }
        for path in [
            self.v2.join("cgroup.procs"),
            run.join("cgroup.procs"),
            run.clone(),
        ] {
            chown(&path, Some(uid), Some(uid)).map_err(io("give away", &path))?;
        }
        let oom = self.oom_file();
        Ok(Handles {
            group: open(&self.v2)?.into(),
            run: open(&run)?.into(),
            join,
            oom: open(&oom)?.into(),
        })
    }

    fn oom_file(&self) -> PathBuf {
        match self.of("memory") {
            (path, true) => path.join("memory.oom_control"),
            (path, false) => path.join("memory.events"),
        }
    }

    /// Sets the limits; those of processors only now, so that making the sandbox was not slowed down by them.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn limit(&self, limits: &Limits) -> Result<(), CgroupError> {
        let (memory, v1) = self.of("memory");
        let bytes = limits.memory_bytes.to_string();
        if v1 {
            write(&memory.join("memory.limit_in_bytes"), &bytes)?;
        } else {
            write(&memory.join("memory.max"), &bytes)?;
            write(&memory.join("memory.swap.max"), "0")?;
        }
        let quota_us = quota(limits.cpus);
        let (cpu, v1) = self.of("cpu");
        if v1 {
            write(&cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
            write(&cpu.join("cpu.cfs_quota_us"), &quota_us.to_string())?;
        } else {
            write(&cpu.join("cpu.max"), &format!("{quota_us} {PERIOD_US}"))?;
        }
        let (pids, v1) = self.of("pids");
        // Ours count too: the launcher, and in v2 the agent.
        let most = u64::from(limits.pids) + if v1 { 1 } else { 2 };
        write(&pids.join("pids.max"), &most.to_string())
    }

    /// Stops all processes, or lets them go on; the agent is none of them.
    ///
    /// # Errors
    /// [`CgroupError::Stuck`] when they do not stop in time.
    pub(crate) fn freeze(&self, frozen: bool, patience: Duration) -> Result<(), CgroupError> {
        let run = self.run();
        write(&run.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        let wanted = if frozen { "frozen 1" } else { "frozen 0" };
        let what = if frozen { "stop" } else { "go on" };
        self.wait_for(&run, wanted, what, patience)
    }

    /// Asks the kernel to give back what page cache and unused memory it can.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn give_back(&self) -> Result<(), CgroupError> {
        let (memory, v1) = self.of("memory");
        if v1 {
            let file = memory.join("memory.force_empty");
            // EBUSY: some of it is in use, the rest was given back.
            match fs::write(&file, "0") {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(()),
                done => done.map_err(io("write", &file)),
            }
        } else {
            let used = memory.join("memory.current");
            let bytes = fs::read_to_string(&used).map_err(io("read", &used))?;
            let file = memory.join("memory.reclaim");
            match fs::write(&file, bytes.trim()) {
                // Less than was asked for could be given back.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
                done => done.map_err(io("write", &file)),
            }
        }
    }

    fn wait_for(
        &self,
        group: &Path,
        wanted: &str,
        what: &'static str,
        patience: Duration,
    ) -> Result<(), CgroupError> {
        let file = group.join("cgroup.events");
        let until = Instant::now() + patience;
        loop {
            let events = fs::read_to_string(&file).map_err(io("read", &file))?;
            if events.lines().any(|line| line == wanted) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(CgroupError::Stuck {
                    path: group.to_owned(),
                    what,
                    waited: patience,
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Kills whatever is left in the groups and removes them. Groups that are not there are no error.
    ///
    /// # Errors
    /// [`CgroupError::Stuck`] when a process cannot end (it waits for a device, say): try again later.
    pub(crate) fn remove(&self, patience: Duration) -> Result<(), CgroupError> {
        if self.v2.try_exists().map_err(io("look at", &self.v2))? {
            write(&self.v2.join("cgroup.kill"), "1")?;
            self.wait_for(&self.v2, "populated 0", "end", patience)?;
            let run = self.run();
            if let Ok(entries) = fs::read_dir(&run) {
                for entry in entries {
                    let entry = entry.map_err(io("list", &run))?;
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        self.remove_soon(&entry.path(), patience)?;
                    }
                }
            }
            self.remove_soon(&run, patience)?;
            self.remove_soon(&self.v2, patience)?;
        }
        for (_, path) in &self.v1 {
            self.remove_soon(path, patience)?;
        }
        Ok(())
    }

    /// Removes an empty group: a process that was reaped a moment ago may still count.
    fn remove_soon(&self, path: &Path, patience: Duration) -> Result<(), CgroupError> {
        let until = Instant::now() + patience;
        loop {
            match remove_dir(path) {
                Err(CgroupError::Io { source, .. })
                    if source.kind() == io::ErrorKind::ResourceBusy =>
                {
                    if Instant::now() >= until {
                        return Err(CgroupError::Stuck {
                            path: path.to_owned(),
                            what: "end",
                            waited: patience,
                        });
                    }
                    std::thread::sleep(PAUSE);
                }
                done => return done,
            }
        }
    }

    /// What is used now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn usage(&self) -> Result<Usage, CgroupError> {
        let number = |path: PathBuf| -> Result<u64, CgroupError> {
            let text = fs::read_to_string(&path).map_err(io("read", &path))?;
            Ok(text.trim().parse().unwrap_or(0))
        };
        let memory = match self.of("memory") {
            (path, true) => path.join("memory.usage_in_bytes"),
            (path, false) => path.join("memory.current"),
        };
        let oom = self.oom_file();
        let text = fs::read_to_string(&oom).map_err(io("read", &oom))?;
        // The kernel counts in every v2 group, whether its controller is there or not.
        let stat = self.v2.join("cpu.stat");
        let stat = fs::read_to_string(&stat).map_err(io("read", &stat))?;
        let cpu = stat
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "));
        Ok(Usage {
            cpu_us: cpu.and_then(|text| text.parse().ok()).unwrap_or(0),
            memory_bytes: number(memory)?,
            pids: number(self.of("pids").0.join("pids.current"))?,
            oom_kills: oom_kills(&text),
        })
    }
}

/// The quota for a number of processors.
fn quota(cpus: f64) -> u64 {
    let percent = (cpus * 100.0).clamp(1.0, 1e6);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and a million"
    )]
    let percent = percent as u64;
    percent * PERIOD_US / 100
}

/// The count in `memory.oom_control` or `memory.events`.
pub(crate) fn oom_kills(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod vm_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_texts_are_understood() {
        let line =
            "35 24 0:30 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory";
        assert_eq!(
            parse_mount(line),
            Some(("cgroup", "/sys/fs/cgroup/memory", "rw,memory"))
        );
        let part = line.replace(" / ", " /part ");
        assert_eq!(parse_mount(&part), None);
        assert_eq!(
            oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
            3
        );
        assert_eq!(oom_kills("low 0\noom 5\noom_kill 2\n"), 2);
        assert_eq!(
            (quota(0.5), quota(4.0), quota(0.0)),
            (50_000, 400_000, 1_000)
        );
    }
}
