//! The container backend: a pool of shells, and what becomes of them.
//!
//! Shells are made ahead by two threads and wait in a channel that holds so many; a create takes one, brings the root and
//! the limits. A burst waits at the channel: creates queue, and none is refused. A shell is used once: what ran in it is never
//! trusted to have left nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::cgroup::{Cgroup, CgroupError, Hierarchies, Usage};
use super::link;
use super::message;
use super::quiet::Quiet;
use super::rootfs::{self, RootError};
use super::spawner::{self, IDS, Made, Make};
use crate::backend::{Backend, BackendError, Door, Kind, Place, Plan};

/// Sandboxes at a time: one range of ids each.
const SLOTS_MAX: u32 = 16_384;
/// Threads that make shells.
const MAKERS: usize = 2;
/// Namespaces for mapping that are kept for the next sandbox of their slot.
const MAPPINGS_MAX: u32 = 256;
/// Pause after a shell could not be made.
const MAKE_PAUSE: Duration = Duration::from_millis(200);
/// How long processes that were killed may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How the kernel treats processes whose ids change.
const DUMPABLE: &str = "/proc/sys/fs/suid_dumpable";
/// How long processes may take to stop when a sandbox is paused.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);

/// What went wrong in this backend's own machinery.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// Control groups.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The root.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The spawner.
    #[error("the spawner {what}: {source}")]
    Spawner {
        /// What it did not do.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This host shows what must not be seen.
    #[error(
        "`{DUMPABLE}` is 1, so processes of a sandbox could read those that hold it; 0 or 2 is expected: `sysctl fs.suid_dumpable=0`"
    )]
    Dumpable,
    /// A file or process would not.
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
}

impl From<ContainerError> for BackendError {
    fn from(error: ContainerError) -> Self {
        Self::Own(Box::new(error))
    }
}

impl From<CgroupError> for BackendError {
    fn from(error: CgroupError) -> Self {
        ContainerError::from(error).into()
    }
}

impl From<RootError> for BackendError {
    fn from(error: RootError) -> Self {
        ContainerError::from(error).into()
    }
}

/// What the spawner did not do, and why.
fn broken(what: &str) -> impl FnOnce(io::Error) -> BackendError {
    let what = what.to_owned();
    move |source| ContainerError::Spawner { what, source }.into()
}

const CLOSED: BackendError = BackendError::Closed {
    backend: Kind::Container,
};

fn step(name: &'static str) -> Result<(), BackendError> {
    crate::faults::step(name).map_err(failed("go on after", Path::new(name)))
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BackendError {
    let path = path.to_owned();
    move |source| ContainerError::Io { what, path, source }.into()
}

/// How the backend is set up.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The program whose `--spawner` role makes sandboxes: this one.
    pub program: PathBuf,
    /// Folder for sockets; only root may look into it.
    pub run: PathBuf,
    /// Name of the parent control groups.
    pub cgroup: String,
    /// First of the host's ids that sandboxes have.
    pub first_id: u32,
    /// Shells kept ready.
    pub pool: usize,
}

/// A sandbox without a root.
#[derive(Debug)]
struct Shell {
    place: Place,
    pidfd: OwnedFd,
    userns: OwnedFd,
}

/// The spawner, as the daemon sees it.
#[derive(Debug)]
struct Spawner {
    socket: OwnedFd,
    child: Child,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Containers {
    inner: Arc<Inner>,
    ready: Mutex<Receiver<Shell>>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    hierarchies: Hierarchies,
    spawner: Mutex<Option<Spawner>>,
    used: Mutex<BTreeSet<u32>>,
    closed: AtomicBool,
    makers: AtomicUsize,
    last_failure: Mutex<String>,
    quiet: Quiet,
    /// Namespaces that mounts are mapped through, by slot: nothing lives in them, and the ids of a slot do not change.
    mappings: Mutex<BTreeMap<u32, OwnedFd>>,
}

impl Containers {
    /// Starts the spawner and begins to make shells. Slots of `kept` belong to sandboxes that are to be adopted; whatever else an
    /// earlier run left in the same control groups is ended.
    ///
    /// # Errors
    /// When this host lacks something, or the spawner does not start.
    pub fn start(settings: Settings, kept: &[Place]) -> Result<Self, BackendError> {
        refuse_dumpable(Path::new(DUMPABLE))?;
        let hierarchies = Hierarchies::open(&settings.cgroup)?;
        fs::create_dir_all(&settings.run).map_err(failed("create", &settings.run))?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(&settings.run, private).map_err(failed("protect", &settings.run))?;
        let used: BTreeSet<u32> = kept.iter().map(|place| place.slot).collect();
        for name in hierarchies.names()? {
            let slot = name.strip_prefix('s').and_then(|n| n.parse().ok());
            if slot.is_none_or(|slot| !used.contains(&slot)) {
                hierarchies.group(&name).remove(END_TIMEOUT)?;
            }
        }
        remove_old_sockets(&settings.run, &used)?;
        let (sender, ready) = mpsc::sync_channel(settings.pool.max(1));
        let inner = Arc::new(Inner {
            spawner: Mutex::new(Some(start_spawner(&settings.program)?)),
            quiet: Quiet::new(settings.pool.max(1)),
            settings,
            hierarchies,
            used: Mutex::new(used),
            closed: AtomicBool::new(false),
            makers: AtomicUsize::new(MAKERS),
            last_failure: Mutex::new(String::new()),
            mappings: Mutex::default(),
        });
        for number in 0..MAKERS {
            let (inner, sender) = (Arc::clone(&inner), sender.clone());
            std::thread::Builder::new()
                .name(format!("shells-{number}"))
                .spawn(move || inner.make_shells(&sender))
                .map_err(failed("start", Path::new("a thread")))?;
        }
        Ok(Self {
            inner,
            ready: Mutex::new(ready),
        })
    }

    /// Controllers that come from v1 groups.
    pub fn v1_controllers(&self) -> Vec<&'static str> {
        self.inner.hierarchies.v1_controllers()
    }

    /// Where a sandbox's agent listens.
    pub fn socket(&self, place: &Place) -> PathBuf {
        self.inner.socket(place.slot)
    }

    fn fill(&self, plan: &Plan<'_>, shell: &Shell) -> Result<(), BackendError> {
        let top = plan.layers.last().ok_or(RootError::Layers(0))?;
        rootfs::make_writable(plan.rw, top)?;
        step("writable")?;
        let root = rootfs::compose(plan.layers, plan.rw, shell.userns.as_fd())?;
        step("composed")?;
        self.inner.group(shell.place.slot).limit(plan.limits)?;
        step("limited")?;
        link::assign(&self.inner.socket(shell.place.slot), plan.hostname, &root)?;
        step("assigned")
    }

    /// Shells end with the spawner that made them: one that waited may be gone.
    fn take_living(&self, patience: Duration) -> Result<Shell, BackendError> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let shell = self.take(left)?;
            if self.find(&shell.place).is_ok() {
                return Ok(shell);
            }
            self.inner.discard(&shell.place, Some(&shell.pidfd));
        }
    }

    fn take(&self, patience: Duration) -> Result<Shell, BackendError> {
        let until = Instant::now() + patience;
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(Instant::now());
        match ready.recv_timeout(left) {
            Ok(shell) => {
                self.inner.quiet.taken();
                Ok(shell)
            }
            Err(RecvTimeoutError::Disconnected) => Err(CLOSED),
            Err(RecvTimeoutError::Timeout) => Err(BackendError::Busy {
                waited: patience,
                reason: self.inner.failure(),
            }),
        }
    }

    /// Whether the sandbox of an earlier daemon is there, and a descriptor of its agent.
    ///
    /// # Errors
    /// [`BackendError::Gone`] when it is not.
    pub fn find(&self, place: &Place) -> Result<OwnedFd, BackendError> {
        let gone = || BackendError::Gone { pid: place.pid };
        let pid = Pid::from_raw(place.pid).ok_or_else(gone)?;
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)
            .ok()
            .ok_or_else(gone)?;
        // The descriptor first, then its start: so both are of one process.
        if start_of(place.pid) != Some(place.started) {
            return Err(gone());
        }
        Ok(pidfd)
    }
}

impl Backend for Containers {
    fn kind(&self) -> Kind {
        Kind::Container
    }

    /// Making shells ahead can wait.
    fn asked(&self) {
        self.inner.quiet.asked();
    }

    fn create(&self, plan: &Plan<'_>) -> Result<Place, BackendError> {
        let shell = self.take_living(plan.patience)?;
        let made = self.fill(plan, &shell);
        match made {
            Ok(()) => Ok(shell.place),
            Err(error) => {
                self.inner.discard(&shell.place, Some(&shell.pidfd));
                Err(error)
            }
        }
    }

    fn lives(&self, place: &Place) -> bool {
        self.find(place).is_ok()
    }

    fn door(&self, place: &Place) -> Door {
        Door::at(self.socket(place))
    }

    fn network(&self, place: &Place) -> Result<OwnedFd, BackendError> {
        let path = PathBuf::from(format!("/proc/{}/ns/net", place.pid));
        let opened = fs::File::open(&path).map_err(failed("open", &path))?;
        // Its number may have been given to another before it was opened, not after.
        self.find(place)?;
        Ok(opened.into())
    }

    fn pause(&self, place: &Place) -> Result<(), BackendError> {
        let group = self.inner.group(place.slot);
        if let Err(error) = group.freeze(true, FREEZE_TIMEOUT) {
            group.freeze(false, FREEZE_TIMEOUT)?;
            return Err(error.into());
        }
        if let Err(error) = group.give_back() {
            tracing::warn!(slot = place.slot, %error, "a paused sandbox keeps its memory");
        }
        Ok(())
    }

    fn freeze(&self, place: &Place) -> Result<(), BackendError> {
        let group = self.inner.group(place.slot);
        if let Err(error) = group.freeze(true, FREEZE_TIMEOUT) {
            group.freeze(false, FREEZE_TIMEOUT)?;
            return Err(error.into());
        }
        Ok(())
    }

    fn resume(&self, place: &Place) -> Result<(), BackendError> {
        Ok(self.inner.group(place.slot).freeze(false, FREEZE_TIMEOUT)?)
    }

    fn usage(&self, place: &Place) -> Result<Usage, BackendError> {
        Ok(self.inner.group(place.slot).usage()?)
    }

    fn kill(&self, place: &Place) -> Result<(), BackendError> {
        self.asked();
        let pidfd = self.find(place).ok();
        self.inner.end(place, pidfd.as_ref())
    }

    fn close(&self) {
        self.inner.closed.store(true, Ordering::Release);
        self.inner.quiet.close();
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        // Until the last maker has gone: each may hold one more.
        while let Ok(shell) = ready.recv() {
            self.inner.discard(&shell.place, Some(&shell.pidfd));
        }
        let spawner = self
            .inner
            .spawner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Spawner { socket, mut child }) = spawner {
            drop(socket);
            if let Err(error) = child.wait() {
                tracing::warn!(%error, "the spawner's end is unknown");
            }
        }
        let empty = self
            .inner
            .used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty();
        if empty && let Err(error) = self.inner.hierarchies.remove() {
            tracing::warn!(%error, "control groups stay");
        }
    }
}

impl Inner {
    fn socket(&self, slot: u32) -> PathBuf {
        self.settings.run.join(format!("s{slot}.sock"))
    }

    fn group(&self, slot: u32) -> Cgroup {
        self.hierarchies.group(&format!("s{slot}"))
    }

    fn failure(&self) -> String {
        let last = self
            .last_failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last.is_empty() {
            "others came first".to_owned()
        } else {
            last.clone()
        }
    }

    fn make_shells(&self, ready: &SyncSender<Shell>) {
        while !self.closed.load(Ordering::Acquire) {
            self.quiet.wait();
            match self.make_shell() {
                Ok(shell) => {
                    self.last_failure
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .clear();
                    self.quiet.made();
                    if let Err(unsent) = ready.send(shell) {
                        self.discard(&unsent.0.place, Some(&unsent.0.pidfd));
                        break;
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a shell could not be made; trying again");
                    let mut last = self
                        .last_failure
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    *last = error.to_string();
                    drop(last);
                    std::thread::sleep(MAKE_PAUSE);
                }
            }
        }
        self.makers.fetch_sub(1, Ordering::AcqRel);
    }

    fn make_shell(&self) -> Result<Shell, BackendError> {
        let slot = self.reserve()?;
        let made = self.make_in(slot);
        if made.is_err() {
            let place = Place {
                backend: Kind::Container,
                slot,
                pid: 0,
                started: 0,
            };
            self.discard(&place, None);
        }
        made
    }

    fn reserve(&self) -> Result<u32, BackendError> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (0..SLOTS_MAX).find(|slot| !used.contains(slot));
        let slot = slot.ok_or(BackendError::Full { most: SLOTS_MAX })?;
        used.insert(slot);
        Ok(slot)
    }

    fn make_in(&self, slot: u32) -> Result<Shell, BackendError> {
        let first_id = self.settings.first_id + slot * IDS;
        let handles = self.group(slot).make(first_id)?;
        step("group")?;
        let socket = self.socket(slot);
        remove_file(&socket)?;
        let listener = UnixListener::bind(&socket).map_err(failed("listen at", &socket))?;
        listener
            .set_nonblocking(true)
            .map_err(failed("listen at", &socket))?;
        let mut fds = vec![
            listener.as_fd(),
            handles.group.as_fd(),
            handles.run.as_fd(),
            handles.oom.as_fd(),
        ];
        fds.extend(handles.join.iter().map(AsFd::as_fd));
        step("socket")?;
        let (pid, pidfd, userns) = self.spawn(slot, &fds)?;
        // Now only the agent listens: if it dies, connecting fails.
        drop(listener);
        let shell = Shell {
            place: Place {
                backend: Kind::Container,
                slot,
                pid,
                started: start_of(pid).unwrap_or(0),
            },
            pidfd,
            userns,
        };
        let ready = link::ping(&socket).map_err(BackendError::from);
        if let Err(error) = ready.and_then(|()| step("spawned")) {
            self.discard(&shell.place, Some(&shell.pidfd));
            return Err(error);
        }
        Ok(shell)
    }

    fn mappings(&self) -> MutexGuard<'_, BTreeMap<u32, OwnedFd>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The namespace that a slot's mounts are mapped through, if it is kept.
    fn mapping(&self, slot: u32) -> Result<Option<OwnedFd>, BackendError> {
        let mappings = self.mappings();
        let kept = mappings.get(&slot).map(OwnedFd::try_clone).transpose();
        kept.map_err(failed("keep", Path::new("a user namespace")))
    }

    fn keep_mapping(&self, slot: u32, userns: &OwnedFd) -> Result<(), BackendError> {
        // The lowest slots are used again first.
        if slot < MAPPINGS_MAX {
            let copy = userns.try_clone();
            let copy = copy.map_err(failed("keep", Path::new("a user namespace")))?;
            self.mappings().insert(slot, copy);
        }
        Ok(())
    }

    fn spawn(
        &self,
        slot: u32,
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(i32, OwnedFd, OwnedFd), BackendError> {
        let kept = self.mapping(slot)?;
        let request = &Make {
            first_id: self.settings.first_id + slot * IDS,
            mapping: kept.is_none(),
        };
        let mut spawner = self.spawner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::Acquire) {
            return Err(CLOSED);
        }
        let answered = match &*spawner {
            Some(Spawner { socket, .. }) => {
                message::send(socket, request, fds).and_then(|()| message::receive::<Made>(socket))
            }
            None => Ok(None),
        };
        match answered.map_err(broken("cannot be asked"))? {
            Some((Made::Pid(pid), fds)) => {
                let mut fds = fds.into_iter();
                match (fds.next(), kept, fds.next()) {
                    (Some(pidfd), Some(userns), None) => Ok((pid, pidfd, userns)),
                    (Some(pidfd), None, Some(userns)) => {
                        self.keep_mapping(slot, &userns)?;
                        Ok((pid, pidfd, userns))
                    }
                    _ => Err(broken("answered")(io::Error::other("without descriptors"))),
                }
            }
            Some((Made::Failed(why), _)) => Err(broken("made no sandbox")(io::Error::other(why))),
            None => {
                // It died: another one takes its place, and this attempt is given up.
                if let Some(mut dead) = spawner.take() {
                    drop(dead.child.wait());
                }
                *spawner = Some(start_spawner(&self.settings.program)?);
                Err(broken("died")(io::ErrorKind::UnexpectedEof.into()))
            }
        }
    }

    /// Ends what exists of a sandbox; what cannot be ended keeps its slot, and the log says so.
    fn discard(&self, place: &Place, pidfd: Option<&OwnedFd>) {
        if let Err(error) = self.end(place, pidfd) {
            tracing::error!(slot = place.slot, %error, "what is left of a sandbox keeps its ids");
        }
    }

    fn end(&self, place: &Place, pidfd: Option<&OwnedFd>) -> Result<(), BackendError> {
        if let Some(pidfd) = pidfd {
            match pidfd_send_signal(pidfd, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => {
                    return Err(failed("kill", Path::new(&place.pid.to_string()))(e.into()));
                }
            }
        }
        self.group(place.slot).remove(END_TIMEOUT)?;
        remove_file(&self.socket(place.slot))?;
        self.used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&place.slot);
        Ok(())
    }
}

/// With 1, every process whose ids change becomes one that its own user may trace, whatever it held before.
fn refuse_dumpable(setting: &Path) -> Result<(), BackendError> {
    let value = fs::read_to_string(setting).map_err(failed("read", setting))?;
    match value.trim() {
        "0" | "2" => Ok(()),
        _ => Err(ContainerError::Dumpable.into()),
    }
}

/// Sockets of agents that ended with an earlier daemon.
fn remove_old_sockets(run: &Path, used: &BTreeSet<u32>) -> Result<(), BackendError> {
    for entry in fs::read_dir(run).map_err(failed("list", run))? {
        let entry = entry.map_err(failed("list", run))?;
        let name = entry.file_name();
        let slot = name.to_str().and_then(|name| {
            let number = name.strip_prefix('s')?.strip_suffix(".sock")?;
            number.parse().ok()
        });
        if slot.is_some_and(|slot: u32| !used.contains(&slot)) {
            remove_file(&entry.path())?;
        }
    }
    Ok(())
}

fn remove_file(path: &Path) -> Result<(), BackendError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(failed("remove", path)),
    }
}

fn start_spawner(program: &Path) -> Result<Spawner, BackendError> {
    let (ours, theirs) = message::pair().map_err(broken("has no socket"))?;
    let child = Command::new(program)
        // What sandboxes see of it as the command line of their pid 1.
        .arg0("sandbox")
        .arg(spawner::SUBCOMMAND)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .map_err(broken("does not start"))?;
    match message::receive::<Made>(&ours) {
        Ok(Some((Made::Pid(_), _))) => Ok(Spawner {
            socket: ours,
            child,
        }),
        Ok(Some((Made::Failed(why), _))) => Err(broken("does not start")(io::Error::other(why))),
        Ok(None) => Err(broken("ended at once")(io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(broken("does not answer")(error)),
    }
}

/// When a living process began, in ticks since boot (field 22 of `/proc/PID/stat`); `None` for one that only waits to be
/// collected.
pub(crate) fn start_of(pid: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field may hold spaces and brackets; what follows its last bracket does not.
    let (_, rest) = text.rsplit_once(") ")?;
    if rest.starts_with(['Z', 'X']) {
        return None;
    }
    rest.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutations: `1` is taken; anything is; `0` is not.
    #[test]
    fn a_host_on_which_changed_ids_make_processes_readable_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let setting = dir.path().join("suid_dumpable");
        for (value, good) in [("0\n", true), ("2\n", true), ("1\n", false), ("", false)] {
            fs::write(&setting, value).unwrap();
            assert_eq!(refuse_dumpable(&setting).is_ok(), good, "{value:?}");
        }
        fs::remove_file(&setting).unwrap();
        assert!(refuse_dumpable(&setting).is_err());
    }
}
