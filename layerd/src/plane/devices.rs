//! Layers as block devices: one ublk device a layer, which outlives this process.
//!
//! If this process dies, reads wait; the next data plane finds the devices in the kernel, knows from `CACHE/run/ublk/<number>` which layer each was made
//! for, and serves on: readers notice a pause. The file is written before there is a device, and the device carries a mark
//! made of the cache's path and the layer, so neither a file that is left nor a stranger's device is mistaken. A device whose layer cannot
//! be opened any more gives EIO.
//!
//! A device that is still in use when its layer is to be taken back (a file is open in a detached mount) is served on, and taken away
//! when it is found free.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use imgstore::ids::Digest;
use imgstore::image::{BlockImage, ReadDone, ReadError};
use ublk_driver::{Content, Device, Driver, Options, Recovery, State, UblkError};

use crate::kill::step;
use crate::paths::Paths;

/// Highest number tried: the kernel has 2^20 minor numbers.
const NUMBERS: u32 = 1 << 20;
/// Blocks of EROFS.
const BLOCK_BYTES: u32 = 4096;
/// Most queues: reads are answered by the loader's workers, not by the queues' threads.
const QUEUES_MAX: u16 = 4;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error(transparent)]
    Ublk(#[from] UblkError),
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("no number is free for another block device")]
    Full,
}

/// What a device serves: replaced when a layer that lingers is wanted again.
#[derive(Debug)]
struct Exchangeable {
    len: u64,
    image: RwLock<Arc<dyn BlockImage>>,
}

impl BlockImage for Exchangeable {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, len: u32, done: ReadDone) {
        let image = self.image.read().unwrap_or_else(PoisonError::into_inner);
        let image = Arc::clone(&image);
        image.read_at(offset, len, done);
    }
}

/// An image that cannot be read.
#[derive(Debug)]
struct Broken {
    len: u64,
    reason: String,
}

impl BlockImage for Broken {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, _: u64, _: u32, done: ReadDone) {
        done(Err(ReadError(self.reason.clone())));
    }
}

#[derive(Debug)]
struct Held {
    device: Device,
    content: Arc<Exchangeable>,
    /// Nobody needs it: it goes when it is free.
    lingers: bool,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Devices {
    driver: Driver,
    paths: Paths,
    held: Mutex<BTreeMap<Digest, Held>>,
}

/// The mark of a layer's device.
fn owner(paths: &Paths, layer: &Digest) -> u32 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(paths.root().as_os_str().as_encoded_bytes());
    hasher.update(layer.as_bytes());
    let hash = hasher.finalize();
    let head = hash.as_bytes().first_chunk().copied().unwrap_or_default();
    u32::from_le_bytes(head)
}

fn options(paths: &Paths, layer: &Digest) -> Options {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Options {
        queues: Some(u16::try_from(cpus).unwrap_or(QUEUES_MAX).min(QUEUES_MAX)),
        block_bytes: BLOCK_BYTES,
        read_only: true,
        partitions: false,
        recovery: Recovery::Wait,
        owner: owner(paths, layer),
        ..Options::default()
    }
}

impl Devices {
    /// Starts the driver. Nothing is served yet.
    ///
    /// # Errors
    /// Why ublk cannot be used.
    pub(crate) fn start(paths: Paths) -> Result<Self, DeviceError> {
        let folder = paths.ublk();
        fs::create_dir_all(&folder).map_err(|source| DeviceError::Io {
            what: "create",
            path: folder,
            source,
        })?;
        Ok(Self {
            driver: Driver::start(0)?,
            paths,
            held: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Digest, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, id: u32) -> PathBuf {
        self.paths.ublk().join(id.to_string())
    }

    /// Forgets a number.
    fn forget(&self, id: u32) {
        let path = self.file(id);
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "a number stays taken");
        }
    }

    /// Takes the next number and says what it is for.
    fn reserve(&self, layer: &Digest, from: u32) -> Result<u32, DeviceError> {
        for id in from..NUMBERS {
            let path = self.file(id);
            let taken = fs::exists(format!("/dev/ublkc{id}")).unwrap_or(true);
            if taken {
                continue;
            }
            let failed = |what| {
                let path = path.clone();
                move |source| DeviceError::Io { what, path, source }
            };
            let mut file = match File::create_new(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file.map_err(failed("create"))?,
            };
            file.write_all(layer.to_hex().as_bytes())
                .map_err(failed("write"))?;
            return Ok(id);
        }
        Err(DeviceError::Full)
    }

    /// Serves a layer; its device.
    pub(crate) fn add(
        &self,
        layer: Digest,
        image: Arc<dyn BlockImage>,
    ) -> Result<PathBuf, DeviceError> {
        self.sweep();
        if let Some(held) = self.lock().get_mut(&layer) {
            let mut content = held
                .content
                .image
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            *content = image;
            held.lingers = false;
            return Ok(held.device.path().to_owned());
        }
        let content = Arc::new(Exchangeable {
            len: image.len(),
            image: RwLock::new(image),
        });
        let mut from = 0;
        let device = loop {
            let id = self.reserve(&layer, from)?;
            step("a number for a device");
            let options = Options {
                id: Some(id),
                ..options(&self.paths, &layer)
            };
            let image: Arc<dyn BlockImage> = Arc::<Exchangeable>::clone(&content);
            match self.driver.add(Content::Image(image), &options) {
                Ok(device) => break device,
                Err(error) => {
                    self.forget(id);
                    if !is_taken(&error) {
                        return Err(error.into());
                    }
                    from = id + 1;
                }
            }
        };
        step("a device serves");
        let path = device.path().to_owned();
        let held = Held {
            device,
            content,
            lingers: false,
        };
        let mut all = self.lock();
        if let Some(other) = all.get(&layer) {
            // Two requests for one layer at a time: the other one was faster.
            let path = other.device.path().to_owned();
            drop(all);
            self.take_away(&held.device);
            return Ok(path);
        }
        all.insert(layer, held);
        Ok(path)
    }

    pub(crate) fn source(&self, layer: &Digest) -> Option<PathBuf> {
        self.lock()
            .get(layer)
            .map(|held| held.device.path().to_owned())
    }

    /// Takes a device away, if it is free.
    fn take_away(&self, device: &Device) -> bool {
        match device.remove() {
            Ok(()) => {
                self.forget(device.id());
                true
            }
            Err(UblkError::InUse(_)) => false,
            Err(error) => {
                tracing::error!(device = device.id(), %error, "a device cannot be taken away");
                false
            }
        }
    }

    /// Takes a layer's device away, now or when it is free.
    pub(crate) fn remove(&self, layer: &Digest) {
        if let Some(held) = self.lock().get_mut(layer) {
            held.lingers = true;
        }
        self.sweep();
    }

    /// Takes away what lingers and is free now.
    fn sweep(&self) {
        self.lock()
            .retain(|_, held| !held.lingers || !self.take_away(&held.device));
    }

    /// Takes all devices away: this process ends. Whoever still uses one gets errors.
    pub(crate) fn close(&self) {
        for held in std::mem::take(&mut *self.lock()).into_values() {
            if self.take_away(&held.device) {
                continue;
            }
            tracing::warn!(
                device = held.device.id(),
                "a layer is still in use; its readers get errors"
            );
            if let Err(error) = held.device.remove_by_force() {
                tracing::error!(device = held.device.id(), %error, "a device cannot be taken away");
            }
            self.forget(held.device.id());
        }
    }

    /// Serves on what a data plane that died left, and deletes what nobody can use. `open` opens a layer.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub(crate) fn recover(
        &self,
        open: impl Fn(Digest) -> Result<Arc<dyn BlockImage>, String>,
    ) -> Result<(), DeviceError> {
        let folder = self.paths.ublk();
        let failed = |source| DeviceError::Io {
            what: "list",
            path: folder.clone(),
            source,
        };
        let found = ublk_driver::devices()?;
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().and_then(|n| n.to_str()).map(str::parse);
            let Some(Ok(id)) = name else { continue };
            let layer = read_digest(&path);
            let device = found.iter().find(|device| device.id == id);
            let ours = layer.filter(|l| device.is_some_and(|d| d.owner == owner(&self.paths, l)));
            let (Some(layer), Some(device)) = (ours, device) else {
                self.forget(id);
                continue;
            };
            if device.state == State::Dead {
                // It never served, or cannot any more.
                self.delete(id);
                continue;
            }
            match self.recover_one(id, layer, &open) {
                Ok(held) => {
                    tracing::info!(device = id, %layer, "serving a dead data plane's device again");
                    self.lock().insert(layer, held);
                }
                Err(error) => {
                    tracing::error!(device = id, %layer, %error, "a dead data plane's device cannot be served again; deleting it");
                    self.delete(id);
                }
            }
        }
        Ok(())
    }

    fn recover_one(
        &self,
        id: u32,
        layer: Digest,
        open: impl Fn(Digest) -> Result<Arc<dyn BlockImage>, String>,
    ) -> Result<Held, DeviceError> {
        let mut lingers = false;
        let image = open(layer).or_else(|reason| {
            // Nobody can use it; it goes when it is free.
            lingers = true;
            tracing::error!(device = id, %layer, reason, "a layer cannot be opened again; its readers get EIO");
            let len = device_len(id)?;
            Ok::<_, DeviceError>(Arc::new(Broken { len, reason }) as Arc<dyn BlockImage>)
        })?;
        let content = Arc::new(Exchangeable {
            len: image.len(),
            image: RwLock::new(image),
        });
        let shared: Arc<dyn BlockImage> = Arc::<Exchangeable>::clone(&content);
        let options = options(&self.paths, &layer);
        let device = self.driver.recover(id, Content::Image(shared), &options)?;
        Ok(Held {
            device,
            content,
            lingers,
        })
    }

    fn delete(&self, id: u32) {
        if delete(id) {
            self.forget(id);
        }
    }
}

/// Deletes a dead data plane's device; whether it is gone.
fn delete(id: u32) -> bool {
    match ublk_driver::delete(id) {
        Ok(()) | Err(UblkError::NoDevice(_)) => true,
        Err(error) => {
            tracing::error!(device = id, %error, "a dead device stays; deleted at the next start");
            false
        }
    }
}

/// Deletes what a dead data plane with devices left, for one that has none.
pub(crate) fn clear(paths: &Paths) {
    let Ok(entries) = fs::read_dir(paths.ublk()) else {
        return;
    };
    let found = ublk_driver::devices().unwrap_or_else(|error| {
        tracing::warn!(%error, "devices of an earlier data plane may be left");
        Vec::new()
    });
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let layer = read_digest(&path);
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .map(str::parse::<u32>);
        let Some(Ok(id)) = name else { continue };
        let ours = |d: &&ublk_driver::Found| {
            d.id == id && layer.is_some_and(|l| d.owner == owner(paths, &l))
        };
        let gone = found
            .iter()
            .find(ours)
            .is_none_or(|device| delete(device.id));
        if gone && let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "a number stays taken");
        }
    }
}

/// Whether somebody else has the number.
fn is_taken(error: &UblkError) -> bool {
    matches!(error, UblkError::Command { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
}

fn read_digest(path: &Path) -> Option<Digest> {
    fs::read_to_string(path).ok()?.parse().ok()
}

/// Bytes of a device, from the kernel.
fn device_len(id: u32) -> Result<u64, DeviceError> {
    const SECTOR: u64 = 512;
    let path = PathBuf::from(format!("/sys/block/ublkb{id}/size"));
    let failed = |source| DeviceError::Io {
        what: "read",
        path: path.clone(),
        source,
    };
    let text = fs::read_to_string(&path).map_err(failed)?;
    let sectors: u64 = text
        .trim()
        .parse()
        .map_err(io::Error::other)
        .map_err(failed)?;
    Ok(sectors.saturating_mul(SECTOR))
}
