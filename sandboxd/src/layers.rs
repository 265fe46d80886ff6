//! Layers that sandboxes stand on: asked of layerd, shared, and given back when nobody stands on them.
//!
//! One read-only composition at layerd keeps its layers mounted; sandboxes of the same layers share it, so that a warm create
//! asks layerd nothing. A tag may move: what was asked longer ago than `FRESH` is asked again for new sandboxes.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use layerd_client::api::{MountRequest, MountState};
use layerd_client::client::Client;

use crate::error::{ApiError, ErrorKind};

/// How long an answer about names is believed: as long as readers of an origin believe a tag.
const FRESH: Duration = Duration::from_secs(30);

/// A composition that is held.
#[derive(Debug, Clone)]
pub struct Held {
    /// Where layerd shows it.
    pub mountpoint: PathBuf,
    /// Each layer's own mount, lowest first.
    pub lowers: Vec<PathBuf>,
    /// Digests, lowest first.
    pub layers: Vec<String>,
}

#[derive(Debug)]
struct Entry {
    held: Arc<Held>,
    asked: Instant,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Layers {
    client: Client,
    folder: PathBuf,
    known: Mutex<HashMap<Vec<String>, Entry>>,
    /// Everything mounted by us: unmounted when only this list still has it.
    all: Mutex<Vec<Arc<Held>>>,
}

impl Layers {
    /// Asks the layerd at `socket`; mount points are made in `folder`.
    pub fn new(socket: &Path, folder: &Path) -> Self {
        Self {
            client: Client::new(socket),
            folder: folder.to_owned(),
            known: Mutex::default(),
            all: Mutex::default(),
        }
    }

    /// The layers of a composition. Blocks.
    ///
    /// # Errors
    /// What layerd says.
    pub fn acquire(&self, refs: &[String]) -> Result<Arc<Held>, ApiError> {
        // One at a time for all: the second of two that ask for the same finds it known.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = known.get(refs)
            && entry.asked.elapsed() < FRESH
        {
            return Ok(Arc::clone(&entry.held));
        }
        let io = |e: std::io::Error| ApiError::new(ErrorKind::InfraFailed, e.to_string());
        let mountpoint = self.folder.join(crate::ids::random());
        fs::create_dir_all(&mountpoint).map_err(io)?;
        let mounted = self.client.mount(&MountRequest {
            refs: refs.to_vec(),
            mountpoint: mountpoint.clone(),
            rw: false,
            trace: None,
            no_trace: false,
        });
        let mount = match mounted {
            Ok(mount) if mount.lowers.len() == mount.layers.len() => mount,
            Ok(_) => {
                self.umount(&mountpoint);
                let message = "this layerd does not say where layers are mounted: update it";
                return Err(ApiError::new(ErrorKind::InfraFailed, message));
            }
            Err(error) => {
                fs::remove_dir(&mountpoint).map_err(io)?;
                return Err(error.into());
            }
        };
        let held = Arc::new(Held {
            mountpoint,
            lowers: distinct(mount.lowers),
            layers: mount.layers,
        });
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::clone(&held));
        let entry = Entry {
            held: Arc::clone(&held),
            asked: Instant::now(),
        };
        known.insert(refs.to_vec(), entry);
        Ok(held)
    }

    /// Takes over what an earlier run held: `used` are the mount points of living sandboxes; others are given back.
    ///
    /// # Errors
    /// What layerd says.
    pub fn adopt(&self, used: &[PathBuf]) -> Result<Vec<Arc<Held>>, ApiError> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for mount in self.client.mounts()?.mounts {
            if !mount.mountpoint.starts_with(&self.folder) {
                continue;
            }
            if used.contains(&mount.mountpoint) {
                all.push(Arc::new(Held {
                    mountpoint: mount.mountpoint,
                    lowers: distinct(mount.lowers),
                    layers: mount.layers,
                }));
            } else {
                self.umount(&mount.mountpoint);
            }
        }
        Ok(all.clone())
    }

    /// Gives back what nobody uses, forgets answers that are old, and forgets compositions that layerd has lost. Blocks.
    pub fn tidy(&self, everything: bool) {
        let dead: Vec<PathBuf> = match self.client.mounts() {
            Ok(mounts) => mounts
                .mounts
                .into_iter()
                .filter(|mount| mount.state == MountState::Dead)
                .map(|mount| mount.mountpoint)
                .collect(),
            Err(error) => {
                tracing::warn!(%error, "layerd cannot be asked what it serves");
                Vec::new()
            }
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, entry| {
            !everything && entry.asked.elapsed() < FRESH && !dead.contains(&entry.held.mountpoint)
        });
        drop(known);
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let unused: Vec<Arc<Held>>;
        (unused, *all) = all.drain(..).partition(|held| Arc::strong_count(held) == 1);
        drop(all);
        for held in unused {
            self.umount(&held.mountpoint);
        }
    }

    fn umount(&self, mountpoint: &Path) {
        if let Err(error) = self.client.umount(mountpoint) {
            tracing::warn!(mountpoint = %mountpoint.display(), %error, "a composition stays");
            return;
        }
        if let Err(error) = fs::remove_dir(mountpoint) {
            tracing::warn!(mountpoint = %mountpoint.display(), %error, "a mount point stays");
        }
    }
}

/// The overlay refuses the same layer twice; the upper one of the two decides anyway.
fn distinct(lowers: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut kept: Vec<PathBuf> = Vec::with_capacity(lowers.len());
    for lower in lowers.into_iter().rev() {
        if !kept.contains(&lower) {
            kept.push(lower);
        }
    }
    kept.reverse();
    kept
}
