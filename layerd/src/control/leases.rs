//! Leases on mounted layers: while a host has a layer mounted, no collector removes it from an origin that this host can
//! write to.
//!
//! One lease an origin, under a name that the next control process takes over; one thread an origin, so that an origin
//! that hangs holds up no other. A mount waits until its layers are named on every origin, but not for long: without a lease
//! it is protected by the collector's grace period only, as on origins that cannot be written at all. That is a
//! warning and a count, never a failed mount.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use imgstore::format::lease::Purpose;
use imgstore::ids::{Digest, to_u64};
use imgstore::origin::Origin;
use imgstore::store::layer::{self, Layer};
use imgstore::store::lease::{self, Hold, HoldError, Wanted};

/// Longest time a mount waits for its leases.
const MOUNT_WAIT: Duration = Duration::from_secs(5);
/// Longest time an unmount or the end waits for them.
const UMOUNT_WAIT: Duration = Duration::from_millis(50);
/// Longest wait for a collection that is about to remove what is being mounted.
const GC_WAIT: Duration = Duration::from_secs(4);
/// Longest pause between two looks whether a lease must be renewed.
const TICK_MAX: Duration = Duration::from_mins(1);
/// Looks in the time that a lease runs.
const TICKS: u32 = 16;

#[derive(Debug, Default)]
struct State {
    /// Layers of compositions that exist.
    mounted: BTreeSet<Digest>,
    /// Layers of compositions that are being made, and by how many.
    pending: BTreeMap<Digest, (usize, Arc<Layer>)>,
    /// Counts changes of the two.
    generation: u64,
    /// Up to which generation each origin knows.
    done: Vec<u64>,
    ending: bool,
}

impl State {
    fn wanted(&self) -> BTreeSet<Digest> {
        let pending = self.pending.keys();
        self.mounted.iter().chain(pending).copied().collect()
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    failures: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is wanted, and tells the threads if that makes a difference.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        let before = state.wanted();
        change(&mut state);
        if state.wanted() != before {
            state.generation += 1;
            self.changed.notify_all();
        }
    }

    /// Waits until every origin knows of every change so far; whether they all do.
    fn settle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        let generation = state.generation;
        while state.done.iter().any(|done| *done < generation) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Leases {
    shared: Arc<Shared>,
}

/// Layers of a composition that is being made are held while this lives.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    leases: &'a Leases,
    layers: BTreeSet<Digest>,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.leases.shared.change(|state| {
            for layer in &self.layers {
                if let Some((users, _)) = state.pending.get_mut(layer) {
                    *users -= 1;
                    if *users == 0 {
                        state.pending.remove(layer);
                    }
                }
            }
        });
    }
}

impl Leases {
    /// Starts a thread for each origin. `id_file` keeps the leases' name for the next control process.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn start(
        origins: &[Arc<dyn Origin>],
        id_file: &Path,
        ttl: Duration,
    ) -> std::io::Result<Self> {
        let (name, inherited) = name(id_file);
        let shared = Arc::new(Shared::default());
        shared.lock().done = vec![0; origins.len()];
        for (index, origin) in origins.iter().enumerate() {
            let target = Target {
                shared: Arc::clone(&shared),
                index,
                origin: Arc::clone(origin),
                hold: Hold::named(name.clone(), Purpose::Mount, ttl),
                tick: (ttl / TICKS).min(TICK_MAX),
                inherited,
            };
            std::thread::Builder::new()
                .name("lease".to_owned())
                .spawn(move || target.run())?;
        }
        Ok(Self { shared })
    }

    /// Names layers that are about to be mounted, and waits until the origins know, or until that takes too long.
    pub(crate) fn expect(&self, layers: &[Arc<Layer>]) -> Expected<'_> {
        let layers: BTreeMap<Digest, &Arc<Layer>> = layers.iter().map(|l| (l.digest, l)).collect();
        self.shared.change(|state| {
            for (digest, layer) in &layers {
                let entry = state.pending.entry(*digest);
                entry.or_insert_with(|| (0, Arc::clone(layer))).0 += 1;
            }
        });
        if !self.shared.settle(MOUNT_WAIT) {
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "an origin takes long to note what is mounted; until it has, only the collector's grace period protects it"
            );
        }
        Expected {
            leases: self,
            layers: layers.into_keys().collect(),
        }
    }

    /// Says which layers are mounted. Does not wait.
    pub(crate) fn show(&self, mounted: impl IntoIterator<Item = Digest>) {
        let mounted = mounted.into_iter().collect();
        self.shared.change(|state| state.mounted = mounted);
    }

    /// Waits a moment until the origins know what was unmounted.
    pub(crate) fn settle(&self) {
        if !self.shared.settle(UMOUNT_WAIT) {
            tracing::debug!("an origin still notes what is mounted");
        }
    }

    /// Nothing is renewed any more: the next control process does.
    pub(crate) fn leave(&self) {
        self.shared.lock().ending = true;
        self.shared.changed.notify_all();
    }

    /// For the metrics: how many layers leases shall name, and how many leases could not be written or came late.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let failures = self.shared.failures.load(Ordering::Relaxed);
        let leased = self.shared.lock().wanted().len();
        (to_u64(leased), failures)
    }
}

/// The name that an earlier process kept, or a new one; and whether it is an old one.
fn name(id_file: &Path) -> (String, bool) {
    let fresh = lease::fresh_name(Purpose::Mount);
    let is_ours = |name: &str| {
        let middle = name
            .strip_prefix("leases/mount-")
            .and_then(|rest| rest.strip_suffix(".json"));
        middle.is_some_and(|id| id.len() == 16 && id.bytes().all(|b| b.is_ascii_hexdigit()))
    };
    match fs::read_to_string(id_file) {
        Ok(kept) if is_ours(&kept) => return (kept, true),
        _ => {}
    }
    if let Err(error) = fs::write(id_file, &fresh) {
        tracing::warn!(path = %id_file.display(), %error, "the next layerd will have leases of another name");
    }
    (fresh, false)
}

/// One origin's lease.
#[derive(Debug)]
struct Target {
    shared: Arc<Shared>,
    index: usize,
    origin: Arc<dyn Origin>,
    hold: Hold,
    tick: Duration,
    /// Whether an earlier process may have left a lease of this name.
    inherited: bool,
}

impl Target {
    fn run(mut self) {
        let mut known = BTreeSet::new();
        let mut failed = false;
        while let Some((wanted, relied_on, generation)) = self.next(&known) {
            let done = self.write(&wanted, &relied_on, wanted != known || failed);
            let was_failed = std::mem::replace(&mut failed, done.is_err());
            match done {
                Ok(()) => known = wanted,
                Err(error) => {
                    self.shared.failures.fetch_add(1, Ordering::Relaxed);
                    if was_failed {
                        tracing::debug!(%error, "still no lease");
                    } else {
                        tracing::warn!(origin = self.origin.address(), %error, "no lease for what is mounted; only the collector's grace period protects it");
                    }
                }
            }
            let mut state = self.shared.lock();
            if let Some(done) = state.done.get_mut(self.index) {
                *done = generation;
            }
            self.shared.changed.notify_all();
        }
    }

    /// Waits for a change or for the time to renew: what to name, which objects are about to be relied on, and the
    /// generation of that. `None` at the end.
    fn next(&self, known: &BTreeSet<Digest>) -> Option<(BTreeSet<Digest>, BTreeSet<String>, u64)> {
        let mut state = self.shared.lock();
        let begun = Instant::now();
        let is_done = |state: &State| state.done.get(self.index) == Some(&state.generation);
        while is_done(&state) && !state.ending {
            let left = self.tick.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ending {
            return None;
        }
        let new = state
            .pending
            .values()
            .filter(|(_, l)| !known.contains(&l.digest));
        let relied_on = new.flat_map(|(_, layer)| layer::objects(layer)).collect();
        Some((state.wanted(), relied_on, state.generation))
    }

    fn write(
        &mut self,
        layers: &BTreeSet<Digest>,
        relied_on: &BTreeSet<String>,
        changed: bool,
    ) -> Result<(), HoldError> {
        let origin = &*self.origin;
        if layers.is_empty() {
            let inherited = std::mem::take(&mut self.inherited);
            return Ok(self.hold.withdraw(origin, inherited)?);
        }
        if changed || !self.hold.is_fresh() {
            let wanted = Wanted {
                layers: layers.clone(),
                objects: BTreeSet::new(),
            };
            return self.hold.claim(origin, &wanted, relied_on, GC_WAIT);
        }
        self.hold.renew(origin)?;
        Ok(())
    }
}
