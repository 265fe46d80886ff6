//! Mounting and unmounting compositions.
//!
//! One EROFS mount a layer, at `CACHE/run/layers/<digest>`, however many compositions use it; a composition is an overlay
//! over those, or, of one layer read-only, another view of that mount. One lock orders everything that changes
//! mounts; names are resolved and descriptions fetched outside of it. Nothing under the lock waits for an origin.

mod adopting;
mod mountpoint;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use imgstore::format::trace::Trace;
use imgstore::ids::{Digest, IdError, LayerRef};
use imgstore::origin::OriginError;
use imgstore::store::cache::LayerHold;
use imgstore::store::layer::{Layer, LayerError};
use layerd_client::api::{ApiError, ErrorKind, Mount, MountRequest, MountState};

use super::ControlConfig;
use super::ahead::{self, Foresight};
use super::feed::Feed;
use super::layers::{LayerStore, LayersError};
use super::leases::Leases;
use super::link::{LinkError, PlaneLink};
use super::record::{RecordError, Records};
use super::table::Table;
use crate::driver::Driver;
use crate::kernel::mount::{self, MountError, Upper};
use crate::kernel::mountinfo::MountInfo;
use crate::kill::step;
use crate::paths::Paths;
use mountpoint::{check_mountpoint, copy_root_attributes};

/// Layers that are described at a time.
const DESCRIBED_AT_ONCE: usize = 8;
/// Most layers of one composition: the kernel's limit for an overlay.
const LAYERS_MAX: usize = 500;

/// Why a composition could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountsError {
    #[error("{0}")]
    Request(String),
    #[error(transparent)]
    Name(#[from] IdError),
    #[error("`{mountpoint}` is a composition already; `dsec umount {mountpoint}` takes it away")]
    Taken { mountpoint: PathBuf },
    #[error("nothing of this layerd is mounted at `{0}`; `dsec mounts` lists what is")]
    NotMounted(PathBuf),
    #[error("`{0}` is in use; end what uses it (`fuser -vm {0}` lists it) and try again")]
    Busy(PathBuf),
    #[error("layerd is starting or ending its data plane; try again")]
    NoPlane,
    #[error("layerd is shutting down")]
    Closed,
    #[error("what is kept of layer `{layer}` is damaged: {reason}")]
    Kept { layer: Digest, reason: String },
    #[error(transparent)]
    Layers(#[from] LayersError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl MountsError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }

    /// What the caller can do about it.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Request(_) | Self::Name(_) => ErrorKind::Invalid,
            Self::Taken { .. } | Self::Busy(_) => ErrorKind::Conflict,
            Self::NotMounted(_) => ErrorKind::NotFound,
            Self::Kept { .. } => ErrorKind::Corrupt,
            Self::NoPlane
            | Self::Closed
            | Self::Link(LinkError::Gone(_) | LinkError::Silent(_)) => ErrorKind::Unavailable,
            Self::Link(LinkError::Refused(failure)) => failure.kind,
            Self::Layers(LayersError::Layer(error)) => match error {
                LayerError::NoLayer { .. } | LayerError::Origin(OriginError::NotFound { .. }) => {
                    ErrorKind::NotFound
                }
                LayerError::Damaged { .. } => ErrorKind::Corrupt,
                _ => ErrorKind::Unavailable,
            },
            Self::Layers(LayersError::Cache(_))
            | Self::Link(LinkError::Version { .. } | LinkError::Feature { .. })
            | Self::Mount(_)
            | Self::Record(_)
            | Self::Io { .. } => ErrorKind::Internal,
        }
    }
}

impl From<MountsError> for ApiError {
    fn from(error: MountsError) -> Self {
        Self {
            kind: error.kind(),
            message: error.to_string(),
        }
    }
}

/// A layer that is described on disk, and stays so.
type Described = (Arc<Layer>, LayerHold);

/// What the lock protects.
#[derive(Debug, Default)]
pub(crate) struct Guarded {
    pub(crate) table: Table,
    /// What describes these layers stays in the cache: living compositions use them.
    held: HashMap<Digest, LayerHold>,
    /// Set for good when everything is being unmounted.
    closed: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct MountService {
    pub(crate) paths: Paths,
    pub(crate) layers: Arc<LayerStore>,
    pub(crate) feed: Feed,
    pub(crate) leases: Leases,
    records: Records,
    /// Whether EROFS reads the FUSE file past that file's page cache: one copy in memory, and eight times as many requests
    /// for small files. Without it the data plane keeps the second copy short (`plane/pages`).
    directio: bool,
    /// Whether anything is fetched before it is read.
    foresees: bool,
    guarded: Mutex<Guarded>,
}

impl MountService {
    pub(crate) fn new(
        paths: Paths,
        layers: Arc<LayerStore>,
        feed: Feed,
        leases: Leases,
        config: &ControlConfig,
    ) -> Self {
        Self {
            leases,
            records: Records::new(paths.records()),
            paths,
            layers,
            feed,
            directio: config.directio,
            foresees: config.traced_bytes_max > 0,
            guarded: Mutex::new(Guarded::default()),
        }
    }

    /// The lock. Whoever starts or ends a data plane holds it meanwhile.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plane(&self) -> Result<Arc<PlaneLink>, MountsError> {
        self.feed.plane().ok_or(MountsError::NoPlane)
    }

    /// Names, manifests, placements and metadata of all layers, local afterwards. Each costs a few round trips to an
    /// origin, so several layers are described at a time.
    /// What the foresight says will be read is fetched from then on.
    pub(crate) fn describe(
        &self,
        refs: &[String],
        foresight: &Foresight,
    ) -> Result<Vec<Described>, MountsError> {
        let one = |reference: &String| -> Result<Described, MountsError> {
            let reference: LayerRef = reference.parse()?;
            let named = self.layers.find(&reference)?;
            let hold = self.layers.hold(named.layer);
            let layer = self.layers.load_named(named)?;
            self.layers.ensure_meta(&layer)?;
            foresight.begin(&layer, named.trace, &self.layers, &self.feed);
            Ok((layer, hold))
        };
        let mut layers = Vec::with_capacity(refs.len());
        for batch in refs.chunks(DESCRIBED_AT_ONCE) {
            if let [reference] = batch {
                layers.push(one(reference)?);
                continue;
            }
            let described: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = batch.iter().map(|r| scope.spawn(|| one(r))).collect();
                let joined = threads
                    .into_iter()
                    .map(|t| t.join().expect("describing a layer does not panic"));
                joined.collect()
            });
            for layer in described {
                layers.push(layer?);
            }
        }
        Ok(layers)
    }

    /// Mounts a composition; a dead one at the same place is replaced.
    ///
    /// # Errors
    /// Says what is wrong with the request, the origin, the kernel or the disk. Nothing is left behind.
    pub(crate) fn mount(&self, request: &MountRequest) -> Result<Mount, MountsError> {
        check_mountpoint(&request.mountpoint)?;
        if request.refs.is_empty() || request.refs.len() > LAYERS_MAX {
            return Err(MountsError::Request(format!(
                "a composition has 1 to {LAYERS_MAX} layers, not {}",
                request.refs.len()
            )));
        }
        let foresight = Foresight::of(request, self.foresees)?;
        let described = self.describe(&request.refs, &foresight);
        let described = described.inspect_err(|_| self.stop_unused(&self.lock()))?;
        let (mut layers, mut holds): (Vec<_>, Vec<_>) = described.into_iter().unzip();
        let _expected = self.leases.expect(&layers);
        let mut fetched_again = HashSet::new();
        loop {
            match self.mount_described(request, &foresight, &layers, &mut holds) {
                Err(MountsError::Kept { layer, reason }) if fetched_again.insert(layer) => {
                    // Without the lock: other mounts must not wait for an origin.
                    tracing::warn!(%layer, reason, "fetching a damaged description again");
                    let fresh = self.layers.fetch_again(&layer)?;
                    for old in layers.iter_mut().filter(|old| old.digest == layer) {
                        *old = Arc::clone(&fresh);
                    }
                }
                Err(error) => {
                    self.stop_unused(&self.lock());
                    return Err(error);
                }
                made => return made,
            }
        }
    }

    fn mount_described(
        &self,
        request: &MountRequest,
        foresight: &Foresight,
        layers: &[Arc<Layer>],
        holds: &mut Vec<LayerHold>,
    ) -> Result<Mount, MountsError> {
        let mountpoint = &check_mountpoint(&request.mountpoint)?;
        let id = fresh_id(mountpoint);
        let mount = Mount {
            id: id.clone(),
            refs: request.refs.clone(),
            layers: layers.iter().map(|layer| layer.digest.to_hex()).collect(),
            mountpoint: mountpoint.to_owned(),
            rw: request.rw,
            upper: request.rw.then(|| self.paths.rw(&id).join("upper")),
            lowers: layers
                .iter()
                .map(|layer| self.paths.layer_mount(&layer.digest))
                .collect(),
            state: MountState::Alive,
        };
        let mut guarded = self.lock();
        if guarded.closed {
            return Err(MountsError::Closed);
        }
        match guarded.table.at(mountpoint).map(|old| old.state) {
            Some(MountState::Alive) => {
                return Err(MountsError::Taken {
                    mountpoint: mountpoint.to_owned(),
                });
            }
            Some(MountState::Dead) => self.clear_dead(&mut guarded, mountpoint)?,
            None => {}
        }
        // Before there is a mount: whenever this process is killed, the next one knows of it.
        if let Err(error) = self.records.put(&mount) {
            tracing::error!(%error, "this mount will not be adopted after a restart");
        }
        let made = self
            .mount_layers(&guarded, layers, foresight)
            .and_then(|()| self.compose(&mount));
        if let Err(error) = made {
            self.free_unused(&mut guarded, layers.iter().map(|layer| layer.digest));
            self.clear_upper(&mount.id);
            if let Err(error) = self.records.remove(&mount.id) {
                tracing::warn!(%error, "a record outlives its mount");
            }
            return Err(error);
        }
        guarded.table.insert(mount.clone());
        self.leases.show(guarded.table.layers());
        let held = layers.iter().map(|layer| layer.digest).zip(holds.drain(..));
        guarded.held.extend(held);
        Ok(mount)
    }

    /// Takes a dead composition away, so that another can take its place.
    fn clear_dead(&self, guarded: &mut Guarded, mountpoint: &Path) -> Result<(), MountsError> {
        let Some(old) = guarded.table.at(mountpoint).cloned() else {
            return Ok(());
        };
        if self.is_there(&old)? {
            mount::detach(mountpoint)?;
        }
        guarded.table.remove(mountpoint);
        self.leases.show(guarded.table.layers());
        self.clear_upper(&old.id);
        Ok(self.records.remove(&old.id)?)
    }

    /// Whether what is seen at its mountpoint is this composition.
    fn is_there(&self, mount: &Mount) -> Result<bool, MountsError> {
        let info = MountInfo::read()
            .map_err(MountsError::io("read", Path::new("/proc/self/mountinfo")))?;
        Ok(self.shows(&info, mount))
    }

    fn shows(&self, info: &MountInfo, mount: &Mount) -> bool {
        let Some(seen) = info.at(&mount.mountpoint) else {
            return false;
        };
        match &*seen.kind {
            // The layer's file, or its device.
            "erofs" => {
                let device = self.paths.layer_of_device(&seen.source);
                let image = |layer: &String| {
                    seen.source == self.paths.fuse().join(layer) || device.as_ref() == Some(layer)
                };
                mount.layers.first().is_some_and(image)
            }
            "overlay" => seen.source == Path::new(&overlay_name(mount)),
            _ => false,
        }
    }

    /// Makes sure that every layer has its EROFS mount.
    fn mount_layers(
        &self,
        guarded: &Guarded,
        layers: &[Arc<Layer>],
        foresight: &Foresight,
    ) -> Result<(), MountsError> {
        let plane = self.plane()?;
        for layer in layers {
            if guarded.table.uses(&layer.digest) {
                continue;
            }
            let target = self.paths.layer_mount(&layer.digest);
            fs::create_dir_all(&target).map_err(MountsError::io("create", &target))?;
            let info = MountInfo::read()
                .map_err(MountsError::io("read", Path::new("/proc/self/mountinfo")))?;
            if info.at(&target).is_some() {
                // The same layer twice in one composition.
                continue;
            }
            step("a layer's mount point is there");
            let source = add_image(&plane, layer, foresight.is_on())?
                .unwrap_or_else(|| self.paths.fuse().join(layer.digest.to_hex()));
            mount::erofs(
                &source,
                &target,
                self.directio && plane.driver == Driver::Fuse,
            )?;
        }
        Ok(())
    }

    fn compose(&self, mount: &Mount) -> Result<(), MountsError> {
        let mut lowers: Vec<PathBuf> = mount
            .layers
            .iter()
            .rev()
            .map(|layer| self.paths.layer_mounts().join(layer))
            .collect();
        // The overlay refuses the same lower twice, and the upper one of the two decides anyway.
        let mut seen = HashSet::new();
        lowers.retain(|lower| seen.insert(lower.clone()));
        if let ([only], None) = (&*lowers, &mount.upper) {
            return Ok(mount::bind(only, &mount.mountpoint)?);
        }
        let upper = match &mount.upper {
            Some(upper) => {
                let work = self.paths.rw(&mount.id).join("work");
                for folder in [upper, &work] {
                    fs::create_dir_all(folder).map_err(MountsError::io("create", folder))?;
                }
                copy_root_attributes(lowers.first(), upper)?;
                Some(Upper {
                    upper: upper.clone(),
                    work,
                })
            }
            None => None,
        };
        Ok(mount::overlay(
            &overlay_name(mount),
            &lowers,
            upper.as_ref(),
            &mount.mountpoint,
        )?)
    }

    /// Forgets a layer that was only looked at.
    pub(crate) fn unload_unused(&self, layer: &Digest) {
        if !self.lock().table.uses(layer) {
            self.layers.unload(layer);
        }
    }

    /// Unmounts and stops serving those of these layers that no composition uses.
    fn free_unused(&self, guarded: &mut Guarded, layers: impl IntoIterator<Item = Digest>) {
        for layer in layers {
            if guarded.table.uses(&layer) {
                continue;
            }
            let target = self.paths.layer_mount(&layer);
            if let Err(error) = mount::umount(&target)
                && fs::exists(&target).unwrap_or(true)
            {
                tracing::debug!(%error, "detaching instead");
                if let Err(error) = mount::detach(&target) {
                    tracing::debug!(%error, "was not mounted");
                }
            }
            if let Err(error) = fs::remove_dir(&target)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %target.display(), %error, "cannot remove a mount point");
            }
            self.feed.stop_prefetch(|l| *l == layer);
            self.layers.unload(&layer);
            guarded.held.remove(&layer);
            if guarded.closed {
                // The data plane ends with everything; one that is stopped would be waited for once a layer.
                continue;
            }
            if let Some(plane) = self.feed.plane()
                && let Err(error) = plane.remove_image(layer)
            {
                tracing::warn!(%layer, %error, "a layer is still served");
            }
            self.feed.pages.close(Some(layer));
        }
    }

    /// What is fetched ahead for layers that no composition uses is not fetched any more.
    fn stop_unused(&self, guarded: &Guarded) {
        self.feed.stop_prefetch(|layer| !guarded.table.uses(layer));
    }

    /// What was read first of a composition since its layers are served, and whether there was more than is recorded.
    ///
    /// # Errors
    /// When nothing is mounted there, or the data plane does not answer.
    pub(crate) fn trace(&self, mountpoint: &Path) -> Result<(Trace, bool), MountsError> {
        let guarded = self.lock();
        let mount = self.find(&guarded, mountpoint)?;
        drop(guarded);
        let plane = self.plane()?;
        let mut seen = HashSet::new();
        let mut touches = Vec::new();
        for layer in mount.layers.iter().filter_map(|l| l.parse::<Digest>().ok()) {
            if seen.insert(layer) {
                touches.push((layer, plane.touches(layer)?));
            }
        }
        Ok(ahead::merge(touches))
    }

    /// The composition at a mountpoint, however it is written.
    fn find(&self, guarded: &Guarded, mountpoint: &Path) -> Result<Mount, MountsError> {
        if let Some(found) = guarded.table.at(mountpoint) {
            return Ok(found.clone());
        }
        let real = fs::canonicalize(mountpoint).ok();
        real.and_then(|real| guarded.table.at(&real).cloned())
            .ok_or_else(|| MountsError::NotMounted(mountpoint.to_owned()))
    }

    /// Removes the scratch folder of a composition, and its upper directory if nothing was written there. What was
    /// written stays: it is the user's.
    fn clear_upper(&self, id: &str) {
        let folder = self.paths.rw(id);
        let present = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        };
        step("clearing what was not written");
        let remove = || {
            present(fs::remove_dir_all(folder.join("work")))?;
            present(fs::remove_dir(folder.join("upper")))?;
            present(fs::remove_dir(&folder))
        };
        match remove() {
            Err(error) if error.kind() != io::ErrorKind::DirectoryNotEmpty => {
                tracing::warn!(path = %folder.display(), %error, "cannot clear the upper directory");
            }
            _ => {}
        }
    }

    /// Takes a composition away; what it was. What was written into it stays in its upper directory.
    ///
    /// # Errors
    /// [`MountsError::Busy`] while somebody uses it; it stays whole then.
    pub(crate) fn umount(&self, mountpoint: &Path) -> Result<Mount, MountsError> {
        let mut guarded = self.lock();
        let found = self.find(&guarded, mountpoint)?;
        if self.is_there(&found)? {
            let gone = if found.state == MountState::Dead {
                mount::detach(&found.mountpoint)
            } else {
                mount::umount(&found.mountpoint)
            };
            match gone {
                Err(error) if error.is_busy() => {
                    return Err(MountsError::Busy(found.mountpoint));
                }
                gone => gone?,
            }
        }
        self.forget(&mut guarded, &found);
        Ok(found)
    }

    fn forget(&self, guarded: &mut Guarded, mount: &Mount) {
        let freed = guarded.table.remove(&mount.mountpoint);
        self.leases.show(guarded.table.layers());
        self.free_unused(guarded, freed);
        // The record goes last: whoever finds it does the rest.
        self.clear_upper(&mount.id);
        if let Err(error) = self.records.remove(&mount.id) {
            tracing::warn!(%error, "a record outlives its mount");
        }
    }

    /// All compositions.
    pub(crate) fn all(&self) -> Vec<Mount> {
        self.lock().table.all()
    }

    /// Unmounts everything, for good. What is in use is detached: it disappears when its user ends.
    pub(crate) fn close(&self) {
        let mut guarded = self.lock();
        guarded.closed = true;
        // Read once: nobody else mounts now, and a host may have thousands.
        let info = MountInfo::read()
            .inspect_err(|error| tracing::error!(%error, "cannot read /proc/self/mountinfo"))
            .unwrap_or_default();
        for found in guarded.table.all() {
            let there = self.shows(&info, &found);
            if there
                && let Err(error) =
                    mount::umount(&found.mountpoint).or_else(|_| mount::detach(&found.mountpoint))
            {
                tracing::error!(%error, "a composition stays mounted");
            }
            self.forget(&mut guarded, &found);
        }
    }

    /// No mount or unmount begins any more, and none is going on.
    pub(crate) fn freeze(&self) {
        self.lock().closed = true;
    }

    /// Whether [`MountService::close`] or [`MountService::freeze`] was called.
    pub(crate) fn is_closed(guarded: &Guarded) -> bool {
        guarded.closed
    }
}

/// Has the data plane serve a layer; [`MountsError::Kept`] when it finds the local files damaged.
fn add_image(
    plane: &PlaneLink,
    layer: &Layer,
    ahead: bool,
) -> Result<Option<PathBuf>, MountsError> {
    match plane.add_image(layer.digest, ahead) {
        Err(LinkError::Refused(failure)) if failure.kind == ErrorKind::Corrupt => {
            Err(MountsError::Kept {
                layer: layer.digest,
                reason: failure.message,
            })
        }
        added => Ok(added?),
    }
}

/// What the kernel shows as the source of a composition's overlay.
fn overlay_name(mount: &Mount) -> String {
    format!("dsec-{}", mount.id)
}

/// An id that no composition of this cache had: 64 random bits.
fn fresh_id(mountpoint: &Path) -> String {
    format!("{:016x}", RandomState::new().hash_one(mountpoint))
}
