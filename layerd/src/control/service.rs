//! What layerd can be asked, in one place: mounts, counters, and the life of the data plane behind them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use imgstore::ids::Digest;
use imgstore::origin::counting::Traffic;
use imgstore::store::cache::SegmentCache;
use layerd_client::api::{
    ApiError, Counters, Mount, MountRequest, MountState, MountStats, RecordedTrace, Stats,
};

use super::link::PlaneLink;
use super::metrics::{self, ControlMetrics, Sample};
use super::mounts::{Guarded, MountService, MountsError};
use super::plane::{Plane, StartError, Starter, is_dead, make_dead, stop};
use super::selftest::{self, Addressing, SelfTest, SelfTestError};
use crate::driver::Driver;
use crate::kill::step;
use crate::protocol::PlaneNow;

/// Pause before a data plane that would not start is tried again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// So often a data plane that lives is connected to in vain before it is killed: that kills its mounts with it.
const ADOPT_TRIES_MAX: u32 = 3;
/// How long a control process that makes room for the next one waits for what it fetches.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) mounts: MountService,
    pub(crate) cache: Arc<SegmentCache>,
    pub(crate) starter: Starter,
    /// Requests for names and descriptions, which belong to no layer.
    pub(crate) names: Arc<Traffic>,
    pub(crate) counted: std::sync::Mutex<(u64, u64)>,
    pub(crate) ending: AtomicBool,
    pub(crate) metrics: ControlMetrics,
    /// Which image the self-test mounts; `None` leaves it out.
    pub(crate) self_test: Option<Addressing>,
}

impl Service {
    /// See [`MountService::mount`].
    ///
    /// # Errors
    /// In words for the caller.
    pub(crate) fn mount(&self, request: &MountRequest) -> Result<Mount, ApiError> {
        let started = std::time::Instant::now();
        let mounted = self.mounts.mount(request);
        self.count_names();
        let histogram = match &mounted {
            Ok(_) => &self.metrics.mounted,
            Err(_) => &self.metrics.not_mounted,
        };
        histogram.observe(started.elapsed());
        match &mounted {
            Ok(mount) => {
                tracing::info!(id = mount.id, mountpoint = %mount.mountpoint.display(), layers = mount.layers.len(), rw = mount.rw, "mounted");
            }
            Err(error) => {
                tracing::warn!(mountpoint = %request.mountpoint.display(), %error, "not mounted");
            }
        }
        Ok(mounted?)
    }

    /// See [`MountService::umount`].
    ///
    /// # Errors
    /// In words for the caller.
    pub(crate) fn umount(&self, mountpoint: &Path) -> Result<Mount, ApiError> {
        let mount = self.mounts.umount(mountpoint)?;
        ControlMetrics::count(&self.metrics.unmounted);
        self.mounts.leases.settle();
        tracing::info!(id = mount.id, mountpoint = %mount.mountpoint.display(), "unmounted");
        Ok(mount)
    }

    /// See [`MountService::trace`].
    ///
    /// # Errors
    /// In words for the caller.
    pub(crate) fn trace(&self, mountpoint: &Path) -> Result<RecordedTrace, ApiError> {
        let (trace, truncated) = self.mounts.trace(mountpoint)?;
        let trace = String::from_utf8_lossy(&trace.to_bytes()).into_owned();
        Ok(RecordedTrace { trace, truncated })
    }

    /// All compositions.
    pub(crate) fn mounts(&self) -> Vec<Mount> {
        self.mounts.all()
    }

    /// Tells the data plane, which keeps all counters, what names and descriptions have cost since the last time.
    fn count_names(&self) {
        let mut counted = self
            .counted
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // Read under the lock: with an older reading than the last one the difference would be below zero.
        let now = (self.names.requests(), self.names.bytes());
        let counters = Counters {
            remote_requests: now.0 - counted.0,
            remote_bytes: now.1 - counted.1,
            ..Counters::default()
        };
        if self.mounts.feed.plane().is_some() && counters != Counters::default() {
            *counted = now;
            self.mounts.feed.count(counters);
        }
    }

    /// All counters. Without a data plane they are zero: it had them.
    pub(crate) fn stats(&self) -> Stats {
        self.look().0
    }

    /// All metrics, for Prometheus.
    pub(crate) fn metrics(&self) -> String {
        let (stats, now) = self.look();
        let states: Vec<MountState> = self.mounts.all().iter().map(|m| m.state).collect();
        let health = self.mounts.feed.health();
        let origins: Vec<_> = health.iter().map(|origin| origin.snapshot()).collect();
        metrics::render(&Sample {
            stats: &stats,
            states: &states,
            now: &now,
            depth: self.mounts.feed.depth(),
            origins: &origins,
            leases: self.mounts.leases.counts(),
            control: &self.metrics,
        })
    }

    fn look(&self) -> (Stats, PlaneNow) {
        self.count_names();
        let plane = self.mounts.feed.plane();
        let counted = plane.as_ref().and_then(|plane| {
            plane
                .stats()
                .inspect_err(|error| tracing::warn!(%error, "no counters"))
                .ok()
        });
        let counted = counted.unwrap_or_default();
        let of_mount = |mount: Mount| {
            let mut counters = Counters::default();
            let mut layers = mount.layers;
            layers.sort_unstable();
            layers.dedup();
            for layer in layers {
                if let Some(of_layer) = counted.layers.get(&layer) {
                    counters.add(of_layer);
                }
            }
            MountStats {
                mountpoint: mount.mountpoint,
                id: mount.id,
                counters,
            }
        };
        let now = counted.now.unwrap_or_default();
        let chosen = &self.starter.chosen;
        let (driver, reason) = match &plane {
            Some(plane) if plane.driver != chosen.driver => (
                plane.driver.name(),
                format!(
                    "the data plane was started with it; the next one uses {}",
                    chosen.driver.name()
                ),
            ),
            _ => (chosen.driver.name(), chosen.reason.clone()),
        };
        let stats = Stats {
            mounts: self.mounts.all().into_iter().map(of_mount).collect(),
            total: counted.total,
            cache: super::cache::stats(&self.cache),
            data_plane_pid: plane.map(|plane| plane.pid),
            control_pid: std::process::id(),
            driver: driver.to_owned(),
            driver_reason: reason,
        };
        (stats, now)
    }

    /// Finds or starts the data plane and takes over its mounts. The caller holds the lock, so mount requests wait.
    ///
    /// # Errors
    /// When there can be none.
    pub(crate) fn recover(self: &Arc<Self>, guarded: &mut Guarded) -> Result<(), RecoverError> {
        step("recovering");
        let adopted = self.starter.adopt()?;
        step("looked for a data plane");
        let served = adopted.as_ref().map(|plane| plane.link.layers.clone());
        // Dead mounts go before a new data plane mounts at the same place; living ones only after we can speak to theirs.
        let plane = match adopted {
            Some(plane) => {
                tracing::info!(
                    pid = plane.link.pid,
                    layers = plane.link.layers.len(),
                    "adopted the data plane"
                );
                ControlMetrics::count(&self.metrics.planes_adopted);
                let link = self.watch(plane)?;
                self.mounts.adopt(guarded, served.as_deref())?;
                return Ok(self.test_kernel(&link)?);
            }
            // Devices outlive their data plane: the next one serves them on.
            None if self.starter.chosen.driver == Driver::Ublk => {
                let plane = self.starter.start()?;
                self.mounts.inherit(guarded, &plane.link.layers)?;
                plane
            }
            None => {
                self.mounts.adopt(guarded, None::<&[Digest]>)?;
                self.starter.start()?
            }
        };
        tracing::info!(pid = plane.link.pid, "started the data plane");
        ControlMetrics::count(&self.metrics.planes_started);
        let link = self.watch(plane)?;
        let tested = self.test_kernel(&link);
        if tested.is_err() {
            // Nothing is mounted: nobody needs it.
            self.ending.store(true, Ordering::Release);
            stop(&link, &self.mounts.paths);
        }
        Ok(tested?)
    }

    fn test_kernel(&self, plane: &PlaneLink) -> Result<(), SelfTestError> {
        let Some(addressing) = self.self_test else {
            tracing::warn!(
                "the self-test is left out: nobody knows whether this kernel reads layers right"
            );
            return Ok(());
        };
        let test = Arc::new(SelfTest::new(addressing));
        let (paths, feed) = (&self.mounts.paths, &self.mounts.feed);
        feed.set_self_test(Some(Arc::clone(&test)));
        let outcome = selftest::check(&test, paths, plane, self.starter.directio);
        feed.set_self_test(None);
        if let Some(took) = outcome? {
            let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
            self.metrics.self_test_us.store(us, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Listens to a data plane, and starts another one when it dies.
    fn watch(self: &Arc<Self>, plane: Plane) -> Result<Arc<PlaneLink>, RecoverError> {
        let Plane { link, reader } = plane;
        let link = Arc::new(link);
        self.mounts.feed.set_plane(Some(Arc::clone(&link)));
        let service = Arc::clone(self);
        let ours = Arc::clone(&link);
        let listen = move || {
            let feed = service.mounts.feed.clone();
            link.listen(reader, move |wish| feed.wish(wish));
            service.mounts.feed.set_plane(None);
            service.restart(&link);
        };
        std::thread::Builder::new()
            .name("link".to_owned())
            .spawn(listen)
            .map(|_| ours)
            .map_err(RecoverError::Thread)
    }

    /// After the connection ended: the data plane is dead, or (we did not listen for a while) only wants a new connection.
    fn restart(self: &Arc<Self>, lost: &PlaneLink) {
        let mut tries = 0;
        loop {
            let mut guarded = self.mounts.lock();
            if MountService::is_closed(&guarded) || self.ending.load(Ordering::Acquire) {
                return;
            }
            tries += 1;
            let last = tries >= ADOPT_TRIES_MAX;
            if let Err(error) = self.replace(lost, &mut guarded, last) {
                tracing::error!(%error, "no data plane; trying again");
            } else {
                return;
            }
            drop(guarded);
            std::thread::sleep(RESTART_PAUSE);
        }
    }

    fn replace(
        self: &Arc<Self>,
        lost: &PlaneLink,
        guarded: &mut Guarded,
        last: bool,
    ) -> Result<(), RecoverError> {
        match self.starter.adopt() {
            Ok(Some(plane)) => {
                tracing::info!(pid = plane.link.pid, "connected to the data plane again");
                return self.watch(plane).map(|_| ());
            }
            Ok(None) => {}
            Err(error) if last || is_dead(lost) => {
                tracing::warn!(%error, "the data plane is given up");
            }
            Err(error) => return Err(error.into()),
        }
        make_dead(lost, &self.mounts.paths);
        let inherited = lost.driver == Driver::Ublk && self.starter.chosen.driver == Driver::Ublk;
        tracing::error!(
            pid = lost.pid,
            "the data plane died: {}; starting another one",
            if inherited {
                "readers of its mounts wait"
            } else {
                "its mounts give EIO"
            }
        );
        ControlMetrics::count(&self.metrics.planes_died);
        if !inherited {
            self.mounts.bury(guarded);
        }
        let plane = self.starter.start()?;
        tracing::info!(pid = plane.link.pid, "started the data plane");
        ControlMetrics::count(&self.metrics.planes_started);
        let layers = plane.link.layers.clone();
        self.watch(plane)?;
        if inherited {
            self.mounts.inherit(guarded, &layers)?;
        }
        Ok(())
    }

    /// Unmounts everything and ends the data plane.
    pub(crate) fn shut_down(&self) {
        self.mounts.close();
        self.mounts.leases.settle();
        self.mounts.leases.leave();
        self.ending.store(true, Ordering::Release);
        if let Some(plane) = self.mounts.feed.plane() {
            stop(&plane, &self.mounts.paths);
        }
        // Nothing is left there unless the data plane had to be killed.
        self.mounts.bury(&mut self.mounts.lock());
    }

    /// Leaves mounts and data plane to the next control process.
    pub(crate) fn leave(&self) {
        if !self.mounts.feed.drain(DRAIN_TIMEOUT) {
            tracing::warn!(
                "leaving while ranges are being fetched; the next layerd fetches them again"
            );
        }
        self.mounts.freeze();
        self.mounts.leases.leave();
        self.ending.store(true, Ordering::Release);
    }
}

/// Why layerd cannot serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecoverError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Mounts(#[from] MountsError),
    #[error(transparent)]
    SelfTest(Box<SelfTestError>),
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

impl From<SelfTestError> for RecoverError {
    fn from(error: SelfTestError) -> Self {
        Self::SelfTest(Box::new(error))
    }
}
