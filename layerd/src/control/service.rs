//! What layerd can be asked, in one place: mounts, counters, and the life of the data plane behind them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use imgstore::ids::Digest;
use imgstore::origin::counting::Traffic;
use imgstore::store::cache::SegmentCache;
use layerd_client::api::{ApiError, Counters, Mount, MountRequest, MountStats, Stats};

use super::link::PlaneLink;
use super::mounts::{Guarded, MountService, MountsError};
use super::plane::{Plane, StartError, Starter, is_dead, make_dead, stop};

/// Pause before a data plane that would not start is tried again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// So often a data plane that lives is connected to in vain before it is killed: that kills its mounts with it.
const ADOPT_TRIES_MAX: u32 = 3;

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
}

impl Service {
    /// See [`MountService::mount`].
    ///
    /// # Errors
    /// In words for the caller.
    pub(crate) fn mount(&self, request: &MountRequest) -> Result<Mount, ApiError> {
        let mounted = self.mounts.mount(request);
        self.count_names();
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
        tracing::info!(id = mount.id, mountpoint = %mount.mountpoint.display(), "unmounted");
        Ok(mount)
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
        Stats {
            mounts: self.mounts.all().into_iter().map(of_mount).collect(),
            total: counted.total,
            cache: super::cache::stats(&self.cache),
            data_plane_pid: plane.map(|plane| plane.pid),
            control_pid: std::process::id(),
        }
    }

    /// Finds or starts the data plane and takes over its mounts. The caller holds the lock, so mount requests wait.
    ///
    /// # Errors
    /// When there can be none.
    pub(crate) fn recover(self: &Arc<Self>, guarded: &mut Guarded) -> Result<(), RecoverError> {
        let adopted = self.starter.adopt()?;
        let served = adopted.as_ref().map(|plane| plane.link.layers.clone());
        // Dead mounts go before a new data plane mounts at the same place; living ones only after we can speak to theirs.
        let plane = match adopted {
            Some(plane) => {
                tracing::info!(
                    pid = plane.link.pid,
                    layers = plane.link.layers.len(),
                    "adopted the data plane"
                );
                self.watch(plane)?;
                self.mounts.adopt(guarded, served.as_deref())?;
                return Ok(());
            }
            None => {
                self.mounts.adopt(guarded, None::<&[Digest]>)?;
                self.starter.start()?
            }
        };
        tracing::info!(pid = plane.link.pid, "started the data plane");
        self.watch(plane)
    }

    /// Listens to a data plane, and starts another one when it dies.
    fn watch(self: &Arc<Self>, plane: Plane) -> Result<(), RecoverError> {
        let Plane { link, reader } = plane;
        let link = Arc::new(link);
        self.mounts.feed.set_plane(Some(Arc::clone(&link)));
        let service = Arc::clone(self);
        let listen = move || {
            let feed = service.mounts.feed.clone();
            link.listen(reader, move |wish| feed.wish(wish));
            service.mounts.feed.set_plane(None);
            service.restart(&link);
        };
        std::thread::Builder::new()
            .name("link".to_owned())
            .spawn(listen)
            .map(|_| ())
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
                return self.watch(plane);
            }
            Ok(None) => {}
            Err(error) if last || is_dead(lost) => {
                tracing::warn!(%error, "the data plane is given up");
            }
            Err(error) => return Err(error.into()),
        }
        make_dead(lost, &self.mounts.paths);
        tracing::error!(
            pid = lost.pid,
            "the data plane died: its mounts give EIO; starting another one"
        );
        self.mounts.bury(guarded);
        let plane = self.starter.start()?;
        tracing::info!(pid = plane.link.pid, "started the data plane");
        self.watch(plane)
    }

    /// Unmounts everything and ends the data plane.
    pub(crate) fn shut_down(&self) {
        self.mounts.close();
        self.ending.store(true, Ordering::Release);
        if let Some(plane) = self.mounts.feed.plane() {
            stop(&plane, &self.mounts.paths);
        }
        // Nothing is left there unless the data plane had to be killed.
        self.mounts.bury(&mut self.mounts.lock());
    }

    /// Leaves mounts and data plane to the next control process.
    pub(crate) fn leave(&self) {
        self.mounts.freeze();
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
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}
