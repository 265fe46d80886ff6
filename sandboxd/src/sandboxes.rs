//! The daemon's sandboxes: making, finding, pausing, ending; what is on disk is what there is.
//!
//! Each change is written down before it is made, so that the next daemon knows what to look for. Everything that may take long
//! (layerd, mounts, processes that end) runs on threads that may block.

mod changes;
mod derive;
mod mirror;
mod pack;
mod place;
mod plan;
mod queue;
mod steps;

pub use changes::Changes;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::api::{CreateRequest, SandboxInfo, State};
use crate::backend::{Backends, Door, Place, Plan};
use crate::disk::Disks;
use crate::error::{ApiError, ErrorKind};
use crate::faults;
use crate::layers::{Held, Layers};
use crate::network::Networks;
use crate::store::{ENDED_MAX, Record, Store};
use crate::trajectory::Trajectory;
use crate::trajectory::event::Asked;
use place::living;

/// How long a create waits for its turn.
const CREATE_PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two looks at what is due.
const TICK: Duration = Duration::from_millis(200);
/// Ticks between two looks at what layerd still has to hold.
const TICKS_TO_TIDY: u32 = 25;

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn ms(seconds: f64) -> Result<u64, ApiError> {
    if !seconds.is_finite() || seconds <= 0.0 || seconds > 1e9 {
        let message = format!("`{seconds}` is not a time in seconds above 0");
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    let millis = Duration::from_secs_f64(seconds).as_millis();
    Ok(u64::try_from(millis).unwrap_or(u64::MAX).max(1))
}

/// Runs what blocks on a thread that may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(ApiError::new(ErrorKind::InfraFailed, e.to_string())))
}

pub(crate) fn on_disk(error: std::io::Error) -> ApiError {
    let kind = match error.kind() {
        std::io::ErrorKind::StorageFull => ErrorKind::Exhausted,
        _ => ErrorKind::InfraFailed,
    };
    ApiError::new(kind, format!("the daemon's state: {error}"))
}

/// One sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    record: Mutex<Record>,
    held: Mutex<Option<Arc<Held>>>,
    /// Milliseconds since 1970 of the last request.
    touched_ms: AtomicU64,
    /// Requests that are being answered: a long one is use as well.
    in_use: AtomicUsize,
    /// Why it is being ended, from before it is.
    ending: std::sync::OnceLock<String>,
    /// Orders what changes its state.
    changing: tokio::sync::Mutex<()>,
}

impl Sandbox {
    fn new(record: Record, held: Option<Arc<Held>>) -> Self {
        Self {
            record: Mutex::new(record),
            held: Mutex::new(held),
            touched_ms: AtomicU64::new(now_ms()),
            in_use: AtomicUsize::new(0),
            ending: std::sync::OnceLock::new(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn record(&self) -> Record {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn info(&self) -> SandboxInfo {
        self.lock().info.clone()
    }
}

/// A request that uses a sandbox, until it is answered.
#[derive(Debug)]
pub(crate) struct InUse(Arc<Sandbox>);

impl InUse {
    pub(crate) fn of(sandbox: &Arc<Sandbox>) -> Self {
        sandbox.in_use.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(sandbox))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.touched_ms.store(now_ms(), Ordering::Release);
        self.0.in_use.fetch_sub(1, Ordering::AcqRel);
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct Service {
    pub(crate) metrics: crate::metrics::Metrics,
    backends: Backends,
    layers: Layers,
    store: Store,
    trajectory: Trajectory,
    networks: Networks,
    disks: Disks,
    state: PathBuf,
    packer: Packer,
    queue: queue::Queue,
    /// Disk limit of sandboxes that ask for none.
    disk_mb: Option<u64>,
    table: Mutex<HashMap<String, Arc<Sandbox>>>,
    /// One lock a request id that is being worked on.
    requests: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Copies that children are being made of.
    forking: Mutex<Vec<PathBuf>>,
}

/// What publishes layers.
#[derive(Debug, Clone)]
pub struct Packer {
    /// The program `dsec`.
    pub program: PathBuf,
    /// Where layers are published; without it nothing can be.
    pub origin: Option<String>,
}

impl Service {
    /// Takes over the sandboxes that earlier records name and that still live. Blocks.
    ///
    /// # Errors
    /// What the disk, the kernel or layerd say.
    pub fn start(
        state: PathBuf,
        layerd: &std::path::Path,
        packer: Packer,
        networks: Networks,
        disk_mb: Option<u64>,
        settings: crate::container::backend::Settings,
    ) -> Result<Arc<Self>, ApiError> {
        let store = Store::open(&state).map_err(on_disk)?;
        // Copies that an earlier run was packing: whoever asked has no answer and asks again.
        match std::fs::remove_dir_all(state.join("packing")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(on_disk(e)),
            _ => {}
        }
        let trajectory = Trajectory::open(&state.join("trajectory"), &state.join("uploads"))?;
        let records = store.all().map_err(on_disk)?;
        for id in trajectory.sandboxes()? {
            if !records.iter().any(|record| record.info.id == id) {
                trajectory.forget(&id)?;
            }
        }
        let living = |r: &Record| r.info.state != State::Gone && r.place.is_some();
        let places: Vec<Place> = records
            .iter()
            .filter(|r| living(r))
            .filter_map(|r| r.place.clone())
            .collect();
        let backends = Backends::start(settings, &places)?;
        let layers = Layers::new(layerd, &state.join("layers"));
        let used: Vec<PathBuf> = records
            .iter()
            .filter(|r| living(r))
            .filter_map(|r| r.hold.clone())
            .collect();
        let held = layers.adopt(&used)?;
        let service = Arc::new(Self {
            metrics: crate::metrics::Metrics::default(),
            backends,
            layers,
            store,
            trajectory,
            networks,
            disks: Disks::new(&state),
            state,
            packer,
            queue: queue::Queue::default(),
            disk_mb,
            table: Mutex::default(),
            requests: Mutex::default(),
            forking: Mutex::default(),
        });
        for record in records {
            service.adopt(record, &held)?;
        }
        service.remove_unused_frozen();
        Ok(service)
    }

    fn adopt(self: &Arc<Self>, record: Record, held: &[Arc<Held>]) -> Result<(), ApiError> {
        let id = record.info.id.clone();
        let hold = held
            .iter()
            .find(|held| record.hold.as_ref() == Some(&held.mountpoint));
        let ended = record.info.state == State::Gone;
        // One that ended stands on nothing any more.
        let hold = hold.filter(|_| !ended).cloned();
        let sandbox = Arc::new(Sandbox::new(record.clone(), hold));
        self.table().insert(id.clone(), Arc::clone(&sandbox));
        if ended {
            return Ok(());
        }
        match record.place {
            Some(place) if self.lives(&place) => {
                // It may have been stopped for a moment, to be copied, when the daemon was killed.
                if record.info.state != State::Paused {
                    self.backends.of(&place)?.resume(&place)?;
                }
                tracing::info!(id, "adopted");
                Ok(())
            }
            Some(_) => self.end(&sandbox, "it had ended while the daemon was down"),
            // Nothing has run in it: as if it had not been asked for.
            None => {
                self.end(&sandbox, "the daemon ended while it was being made")?;
                self.table().remove(&id);
                self.store.remove(&id).map_err(on_disk)?;
                Ok(self.trajectory.forget(&id)?)
            }
        }
    }

    /// What was asked of sandboxes, and what they did.
    pub(crate) fn trajectory(&self) -> &Trajectory {
        &self.trajectory
    }

    /// Sandboxes that have not ended.
    pub(crate) fn living_sandboxes(&self) -> Vec<Arc<Sandbox>> {
        let table = self.table();
        let living = table.values().filter(|s| living(&s.lock()).is_ok());
        living.cloned().collect()
    }

    /// Where a sandbox's agent listens, whether it is paused or not.
    ///
    /// # Errors
    /// `SandboxGone`.
    pub(crate) fn door(&self, sandbox: &Sandbox) -> Result<Door, ApiError> {
        let place = living(&sandbox.record())?;
        Ok(self.backends.of(&place)?.door(&place))
    }

    fn lives(&self, place: &Place) -> bool {
        self.backends
            .of(place)
            .is_ok_and(|backend| backend.lives(place))
    }

    fn table(&self) -> MutexGuard<'_, HashMap<String, Arc<Sandbox>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after what is due until the daemon ends.
    pub async fn look_after(self: Arc<Self>) {
        let mut ticks = 0;
        loop {
            tokio::time::sleep(TICK).await;
            ticks += 1;
            let service = Arc::clone(&self);
            let tidy = ticks % TICKS_TO_TIDY == 0;
            let looked = blocking(move || {
                service.look_at_sandboxes();
                if tidy {
                    service.layers.tidy(false);
                    service.forget_ended()?;
                }
                Ok(())
            });
            if let Err(error) = looked.await {
                tracing::error!(%error, "sandboxes were not looked after");
            }
        }
    }

    /// Forgets the oldest of those that ended, above the bound.
    fn forget_ended(&self) -> Result<(), ApiError> {
        let ended = |s: &&Arc<Sandbox>| s.lock().info.state == State::Gone;
        let mut old: Vec<(u64, String)> = {
            let table = self.table();
            let infos = table.values().filter(ended).map(|s| s.info());
            infos.map(|info| (info.created_ms, info.id)).collect()
        };
        old.sort();
        let over = old.len().saturating_sub(ENDED_MAX);
        for (_, id) in old.into_iter().take(over) {
            self.store.remove(&id).map_err(on_disk)?;
            self.trajectory.forget(&id)?;
            self.table().remove(&id);
        }
        Ok(())
    }

    fn look_at_sandboxes(&self) {
        let now = now_ms();
        let all: Vec<Arc<Sandbox>> = self.table().values().cloned().collect();
        for sandbox in all {
            let record = sandbox.record();
            let Some(place) = &record.place else { continue };
            if record.info.state == State::Gone {
                continue;
            }
            let idle = now.saturating_sub(sandbox.touched_ms.load(Ordering::Acquire));
            let reason = if record.info.ends_ms.is_some_and(|end| end <= now) {
                "its time was over"
            } else if record.idle_ms.is_some_and(|most| idle >= most)
                && sandbox.in_use.load(Ordering::Acquire) == 0
            {
                "nobody used it"
            } else if !self.lives(place) {
                "its first process ended"
            } else {
                continue;
            };
            // Somebody changes it now: the next look finds what becomes of it.
            let Ok(_changing) = sandbox.changing.try_lock() else {
                continue;
            };
            if let Err(error) = self.end(&sandbox, reason) {
                tracing::error!(id = record.info.id, %error, "a sandbox could not be ended; trying again");
            }
        }
    }

    /// A sandbox of this project.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn find(&self, project: &str, id: &str) -> Result<Arc<Sandbox>, ApiError> {
        let found = self.table().get(id).cloned();
        found
            .filter(|sandbox| sandbox.lock().project == project)
            .ok_or_else(|| ApiError::new(ErrorKind::NotFound, format!("no sandbox `{id}`")))
    }

    /// A sandbox, for whom its token lets in.
    pub(crate) fn find_any(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.table().get(id).cloned()
    }

    /// All of a project, by creation.
    pub(crate) fn list(&self, project: &str) -> Vec<SandboxInfo> {
        let table = self.table();
        let mine = table.values().map(|s| s.record());
        let mut infos: Vec<SandboxInfo> = mine
            .filter(|r| r.project == project)
            .map(|r| r.info)
            .collect();
        infos.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
        infos
    }

    /// Makes a sandbox, or finds the one that this request id made.
    ///
    /// # Errors
    /// What is wrong with the request, or what failed; nothing is left then.
    pub(crate) async fn create(
        self: &Arc<Self>,
        project: &str,
        request: CreateRequest,
    ) -> Result<SandboxInfo, ApiError> {
        let creating = self.metrics.creating();
        let made = self.make_or_find(project, request).await;
        creating.ended(&made);
        made
    }

    async fn make_or_find(
        self: &Arc<Self>,
        project: &str,
        request: CreateRequest,
    ) -> Result<SandboxInfo, ApiError> {
        self.backends.choose(&request.backend)?;
        let disk = (self.disk_mb, self.disks.keeper());
        let record = plan::plan(project, &request, disk)?;
        let asked = Asked {
            method: "POST".to_owned(),
            path: String::new(),
            body: serde_json::to_value(&request).ok(),
        };
        let Some(request_id) = request.request_id else {
            return self.make(record, asked).await;
        };
        let key = format!("{project}\n{request_id}");
        let turn = {
            let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            requests.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(requests.entry(key).or_default())
        };
        let _turn = turn.lock().await;
        let made = self.made_by(project, &request_id);
        match made {
            Some(made) if !self.was_asked(&made.info.id, &asked)? => Err(ApiError::new(
                ErrorKind::Conflict,
                format!("request `{request_id}` asked for another sandbox: use another id"),
            )),
            Some(made) => Ok(made.info),
            None => self.make(record, asked).await,
        }
    }

    fn made_by(&self, project: &str, request_id: &str) -> Option<Record> {
        let table = self.table();
        let found = table.values().find(|sandbox| {
            let record = sandbox.lock();
            record.project == project && record.info.request_id.as_deref() == Some(request_id)
        });
        found.map(|sandbox| sandbox.record())
    }

    async fn make(self: &Arc<Self>, record: Record, asked: Asked) -> Result<SandboxInfo, ApiError> {
        let turn = self.queue.turn().await?;
        let service = Arc::clone(self);
        // On a thread of its own: a client that goes away does not leave half a sandbox.
        blocking(move || {
            let _turn = turn;
            service.make_now(record, None, asked)
        })
        .await
    }

    /// Makes what a record describes, on the layers of `held` or those that its names stand for. Blocks.
    fn make_now(
        &self,
        mut record: Record,
        held: Option<Arc<Held>>,
        asked: Asked,
    ) -> Result<SandboxInfo, ApiError> {
        let id = record.info.id.clone();
        let held = match held {
            Some(held) => held,
            None => self.layers.acquire(&record.info.refs)?,
        };
        record.info.layers.clone_from(&held.layers);
        record.hold = Some(held.mountpoint.clone());
        self.store.put(&record).map_err(on_disk)?;
        match self.place(&record, &held) {
            Ok(place) => record.place = Some(place),
            Err(error) => {
                self.store.remove(&id).map_err(on_disk)?;
                return Err(error);
            }
        }
        record.info.state = State::Running;
        record.info.ends_ms = record.lifetime_ms.map(|life| now_ms() + life);
        if let Err(error) = self.write_down(&record, asked) {
            self.networks.close(&id);
            if let Some(place) = &record.place {
                self.backends.of(place)?.kill(place)?;
            }
            self.store.remove(&id).map_err(on_disk)?;
            self.trajectory.forget(&id)?;
            return Err(error);
        }
        let info = record.info.clone();
        let sandbox = Arc::new(Sandbox::new(record, Some(held)));
        self.table().insert(id, sandbox);
        tracing::info!(id = info.id, refs = info.refs.join(" + "), "made");
        Ok(info)
    }

    /// A new sandbox's record and the beginning of its trajectory; the record that has no place was the intent.
    fn write_down(&self, record: &Record, asked: Asked) -> Result<(), ApiError> {
        let id = &record.info.id;
        let request_id = record.info.request_id.as_deref().unwrap_or("create");
        let reply = serde_json::to_value(&record.info).unwrap_or_default();
        self.trajectory.add(id, request_id, asked, reply)?;
        faults::step("trajectory").map_err(on_disk)?;
        self.store.put(record).map_err(on_disk)?;
        faults::step("record").map_err(on_disk)
    }

    fn place(&self, record: &Record, held: &Held) -> Result<Place, ApiError> {
        if let Some(disk) = &record.info.disk {
            let id = &record.info.id;
            self.disks
                .attach(disk, &self.store.image(id), &self.store.rw(id))?;
        }
        faults::step("disk").map_err(on_disk)?;
        let layers: Vec<PathBuf> = held.lowers.iter().chain(&record.frozen).cloned().collect();
        let backend = self
            .backends
            .get(self.backends.choose(&record.info.backend)?)?;
        let place = backend.create(&Plan {
            layers: &layers,
            rw: &self.store.rw(&record.info.id),
            hostname: &record.info.id,
            limits: &record.limits,
            patience: CREATE_PATIENCE,
        })?;
        let opened = self.open_network(record, &place);
        if let Err(error) = opened.and_then(|()| faults::step("network").map_err(on_disk)) {
            self.networks.close(&record.info.id);
            backend.kill(&place)?;
            return Err(error);
        }
        Ok(place)
    }

    fn open_network(&self, record: &Record, place: &Place) -> Result<(), ApiError> {
        if record.network.is_empty() {
            return Ok(());
        }
        let namespace = self.backends.of(place)?.network(place)?;
        Ok(self
            .networks
            .open(&record.info.id, namespace, &record.network)?)
    }

    /// Opens the networks of sandboxes that an earlier daemon made. Within a runtime.
    pub(crate) fn open_networks(&self) {
        for sandbox in self.living_sandboxes() {
            let record = sandbox.record();
            let Some(place) = &record.place else { continue };
            if let Err(error) = self.open_network(&record, place) {
                tracing::error!(id = record.info.id, %error, "a sandbox that was adopted has no network");
            }
        }
    }

    /// Ends a sandbox, whatever it is doing.
    ///
    /// # Errors
    /// When a process cannot end; calling it again tries again.
    pub(crate) async fn kill(
        self: &Arc<Self>,
        sandbox: Arc<Sandbox>,
    ) -> Result<SandboxInfo, ApiError> {
        let _changing = sandbox.changing.lock().await;
        let (service, ended) = (Arc::clone(self), Arc::clone(&sandbox));
        blocking(move || service.end(&ended, "it was killed")).await?;
        Ok(sandbox.info())
    }

    /// Blocks; the caller holds `changing`, or is the only one who knows the sandbox.
    fn end(&self, sandbox: &Sandbox, reason: &str) -> Result<(), ApiError> {
        let mut record = sandbox.record();
        if record.info.state == State::Gone {
            return Ok(());
        }
        let reason = sandbox.ending.get_or_init(|| reason.to_owned());
        self.networks.close(&record.info.id);
        if let Some(place) = &record.place {
            self.backends.of(place)?.kill(place)?;
        }
        self.store.remove_rw(&record.info.id).map_err(on_disk)?;
        record.info.state = State::Gone;
        record.info.reason = Some(reason.to_owned());
        record.frozen.clear();
        record.steps.retain(|kept| kept.folder.is_none());
        self.store.put(&record).map_err(on_disk)?;
        self.trajectory.ended(&record.info.id, reason)?;
        tracing::info!(id = record.info.id, reason, "ended");
        *sandbox.lock() = record;
        *sandbox.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.remove_unused_frozen();
        Ok(())
    }

    /// Pauses a sandbox; one that is paused stays so.
    ///
    /// # Errors
    /// `SandboxGone`, or when its processes do not stop.
    pub(crate) async fn pause(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<SandboxInfo, ApiError> {
        self.change(sandbox, State::Paused).await
    }

    /// Lets a sandbox go on; one that runs does.
    ///
    /// # Errors
    /// `SandboxGone`.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<SandboxInfo, ApiError> {
        self.change(sandbox, State::Running).await
    }

    async fn change(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        to: State,
    ) -> Result<SandboxInfo, ApiError> {
        let _changing = sandbox.changing.lock().await;
        let (service, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        blocking(move || {
            let mut record = sandbox.record();
            let place = living(&record)?;
            if record.info.state != to {
                let backend = service.backends.of(&place)?;
                if to == State::Paused {
                    backend.pause(&place)?;
                } else {
                    backend.resume(&place)?;
                }
                record.info.state = to;
                service.store.put(&record).map_err(on_disk)?;
                let paused = to == State::Paused;
                tracing::info!(
                    id = record.info.id,
                    "{}",
                    if paused { "paused" } else { "resumed" }
                );
                *sandbox.lock() = record;
            }
            Ok(sandbox.info())
        })
        .await
    }

    /// Where a sandbox's agent listens; a paused one goes on.
    ///
    /// # Errors
    /// `SandboxGone`.
    pub(crate) async fn use_it(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<Door, ApiError> {
        sandbox.touched_ms.store(now_ms(), Ordering::Release);
        let record = sandbox.record();
        let place = living(&record)?;
        let backend = self.backends.of(&place)?;
        backend.asked();
        if record.info.state == State::Paused {
            self.resume(sandbox).await?;
        }
        Ok(backend.door(&place))
    }

    /// Sets when a sandbox is killed.
    ///
    /// # Errors
    /// `SandboxGone`, or a time that is none.
    pub(crate) async fn set_timeout(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        timeout: Option<f64>,
    ) -> Result<SandboxInfo, ApiError> {
        let _changing = sandbox.changing.lock().await;
        let mut record = sandbox.record();
        living(&record)?;
        record.info.ends_ms = timeout.map(ms).transpose()?.map(|ms| now_ms() + ms);
        self.store.put(&record).map_err(on_disk)?;
        *sandbox.lock() = record;
        Ok(sandbox.info())
    }

    /// Living sandboxes, for the metrics: running and paused.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let table = self.table();
        let count = |state| {
            table
                .values()
                .filter(|s| s.lock().info.state == state)
                .count()
        };
        (count(State::Running), count(State::Paused))
    }

    /// Ends the shells that wait; sandboxes go on. Blocks.
    pub fn close(&self) {
        self.backends.close();
        self.layers.tidy(true);
    }
}
