//! What becomes of compositions when a process of layerd ends and another takes its place.

use std::fs;
use std::path::{Path, PathBuf};

use imgstore::ids::Digest;
use layerd_client::api::MountState;

use super::{Guarded, MountService, MountsError};
use crate::control::table::Table;
use crate::kernel::mount;
use crate::kernel::mountinfo::MountInfo;

impl MountService {
    /// Takes over what an earlier control process left. `served`: the layers of a data plane that still lives; `None`: it
    /// died or there was none.
    ///
    /// # Errors
    /// When `/proc` or the records cannot be read.
    pub(crate) fn adopt(
        &self,
        guarded: &mut Guarded,
        served: Option<&[Digest]>,
    ) -> Result<(), MountsError> {
        let info = MountInfo::read()
            .map_err(MountsError::io("read", Path::new("/proc/self/mountinfo")))?;
        for mut mount in self.records.all()? {
            if !self.shows(&info, &mount) {
                tracing::info!(mountpoint = %mount.mountpoint.display(), "a composition was unmounted meanwhile");
                self.clear_upper(&mount.id);
                self.records.remove(&mount.id)?;
                continue;
            }
            let alive = served.is_some_and(|served| {
                let parsed = mount.layers.iter().map(|layer| layer.parse::<Digest>());
                parsed
                    .into_iter()
                    .all(|l| l.is_ok_and(|l| served.contains(&l)))
            });
            mount.state = if alive {
                MountState::Alive
            } else {
                MountState::Dead
            };
            if alive {
                let parsed = mount.layers.iter().filter_map(|layer| layer.parse().ok());
                let holds = parsed.map(|layer| (layer, self.layers.hold(layer)));
                guarded.held.extend(holds);
            }
            guarded.table.insert(mount);
        }
        self.leases.show(guarded.table.layers());
        match served {
            Some(served) => self.free_unused(guarded, served.iter().copied()),
            None => self.clear_layer_mounts(&info, &[]),
        }
        self.clear_mount_points()
    }

    /// Removes mount points of layers that have no mount: a control process that was killed left them.
    fn clear_mount_points(&self) -> Result<(), MountsError> {
        let folder = self.paths.layer_mounts();
        let info = MountInfo::read()
            .map_err(MountsError::io("read", Path::new("/proc/self/mountinfo")))?;
        for entry in fs::read_dir(&folder).map_err(MountsError::io("list", &folder))? {
            let path = entry.map_err(MountsError::io("list", &folder))?.path();
            if info.at(&path).is_none()
                && let Err(error) = fs::remove_dir(&path)
            {
                tracing::debug!(path = %path.display(), %error, "mount point stays");
            }
        }
        Ok(())
    }

    /// A data plane that died has a successor, which serves its devices on: `served`. What is mounted of others is dead.
    ///
    /// # Errors
    /// When `/proc` or the records cannot be read.
    pub(crate) fn inherit(
        &self,
        guarded: &mut Guarded,
        served: &[Digest],
    ) -> Result<(), MountsError> {
        guarded.table = Table::default();
        guarded.held.clear();
        self.adopt(guarded, Some(served))?;
        let info = MountInfo::read()
            .map_err(MountsError::io("read", Path::new("/proc/self/mountinfo")))?;
        let kept: Vec<_> = served.iter().map(|l| self.paths.layer_mount(l)).collect();
        self.clear_layer_mounts(&info, &kept);
        Ok(())
    }

    /// Detaches every mount of a data plane that is gone, except for `kept`.
    fn clear_layer_mounts(&self, info: &MountInfo, kept: &[PathBuf]) {
        for seen in info.below(&self.paths.run()) {
            if kept.contains(&seen.path) {
                continue;
            }
            if let Err(error) = mount::detach(&seen.path) {
                tracing::warn!(%error, "a dead mount stays");
            }
            if seen.path.starts_with(self.paths.layer_mounts())
                && let Err(error) = fs::remove_dir(&seen.path)
            {
                tracing::debug!(path = %seen.path.display(), %error, "mount point stays");
            }
        }
    }

    /// The data plane died: everything that is mounted is dead.
    pub(crate) fn bury(&self, guarded: &mut Guarded) {
        guarded.table.kill_all();
        guarded.held.clear();
        self.feed.pages.close(None);
        match MountInfo::read() {
            Ok(info) => self.clear_layer_mounts(&info, &[]),
            Err(error) => tracing::error!(%error, "cannot read /proc/self/mountinfo"),
        }
    }
}
