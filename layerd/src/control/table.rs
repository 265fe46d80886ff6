//! Which compositions exist, and which layers they use. Pure: no mounts are made here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use imgstore::ids::Digest;
use layerd_client::api::{Mount, MountState};

/// All compositions by mountpoint, and how many living ones use each layer.
#[derive(Debug, Default)]
pub(crate) struct Table {
    mounts: BTreeMap<PathBuf, Mount>,
    uses: BTreeMap<Digest, usize>,
}

fn layers(mount: &Mount) -> impl Iterator<Item = Digest> {
    mount.layers.iter().filter_map(|layer| layer.parse().ok())
}

impl Table {
    /// The composition at `mountpoint`.
    pub(crate) fn at(&self, mountpoint: &Path) -> Option<&Mount> {
        self.mounts.get(mountpoint)
    }

    /// All of them, by mountpoint.
    pub(crate) fn all(&self) -> Vec<Mount> {
        self.mounts.values().cloned().collect()
    }

    /// The layers of all of them, dead ones included, some more than once.
    pub(crate) fn layers(&self) -> impl Iterator<Item = Digest> {
        self.mounts.values().flat_map(layers)
    }

    /// Whether a living composition uses `layer`.
    pub(crate) fn uses(&self, layer: &Digest) -> bool {
        self.uses.contains_key(layer)
    }

    /// Adds a composition where there was none.
    pub(crate) fn insert(&mut self, mount: Mount) {
        if mount.state == MountState::Alive {
            for layer in layers(&mount) {
                *self.uses.entry(layer).or_insert(0) += 1;
            }
        }
        self.mounts.insert(mount.mountpoint.clone(), mount);
    }

    /// Takes a composition out; the layers that nobody uses any more.
    pub(crate) fn remove(&mut self, mountpoint: &Path) -> Vec<Digest> {
        let Some(mount) = self.mounts.remove(mountpoint) else {
            return Vec::new();
        };
        if mount.state == MountState::Dead {
            return Vec::new();
        }
        layers(&mount).filter(|layer| self.release(layer)).collect()
    }

    /// One use less; whether it was the last.
    fn release(&mut self, layer: &Digest) -> bool {
        let Some(count) = self.uses.get_mut(layer) else {
            return false;
        };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.uses.remove(layer);
        }
        last
    }

    /// The data plane died: nothing that exists can be read any more.
    pub(crate) fn kill_all(&mut self) {
        for mount in self.mounts.values_mut() {
            mount.state = MountState::Dead;
        }
        self.uses.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(at: &str, layers: &[&[u8]]) -> Mount {
        Mount {
            id: at.to_owned(),
            refs: Vec::new(),
            layers: layers.iter().map(|l| Digest::of(l).to_hex()).collect(),
            mountpoint: at.into(),
            rw: false,
            upper: None,
            lowers: Vec::new(),
            state: MountState::Alive,
        }
    }

    #[test]
    fn a_layer_is_free_when_its_last_composition_goes() {
        let mut table = Table::default();
        table.insert(mount("/a", &[b"base", b"x"]));
        table.insert(mount("/b", &[b"base", b"y"]));
        assert_eq!(table.remove(Path::new("/a")), [Digest::of(b"x")]);
        assert!(table.uses(&Digest::of(b"base")));
        let freed = table.remove(Path::new("/b"));
        assert_eq!(freed, [Digest::of(b"base"), Digest::of(b"y")]);
        assert!(table.remove(Path::new("/b")).is_empty());
    }

    #[test]
    fn a_layer_named_twice_in_one_composition_is_counted_twice() {
        let mut table = Table::default();
        table.insert(mount("/a", &[b"base", b"base"]));
        assert_eq!(table.remove(Path::new("/a")), [Digest::of(b"base")]);
        assert!(!table.uses(&Digest::of(b"base")));
    }

    #[test]
    fn dead_compositions_use_nothing() {
        let mut table = Table::default();
        table.insert(mount("/a", &[b"base"]));
        table.kill_all();
        assert!(!table.uses(&Digest::of(b"base")));
        table.insert(mount("/b", &[b"base"]));
        assert!(table.remove(Path::new("/a")).is_empty());
        assert!(table.uses(&Digest::of(b"base")));
    }
}
