//! Layers that were optimised with the trace of a first run: what the traced ways mount.
//!
//! Once for each workload, off the clock: a first start with an empty cache, `dsec trace record`, and `dsec optimize` into the
//! copy of the store that the origin serves (or `dsec trace apply`, which leaves the layers as they are). The trace is the workload's own, or that of another workload on the same
//! trees.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cold_start::Setting;
use crate::cold_start::ways::{self, Way};
use crate::cold_start::workload::{self, Workload};
use crate::error::Result;
use crate::host;
use crate::mounts;
use crate::say::progress;
use crate::store::{Binaries, Layerd};
use crate::timed;

/// Whose trace a way follows, if it follows one: the workload's own, or that of the first other one with the same trees.
fn traced(way: Way, workload: &'static Workload) -> Option<&'static Workload> {
    match way {
        Way::Traced => Some(workload),
        Way::ForeignTrace | Way::ForeignApplied => workload::ALL
            .iter()
            .find(|other| other.name != workload.name && other.trees == workload.trees),
        _ => None,
    }
}

/// Whether a workload can be run in a way: there may be no other workload to have a trace of.
pub(super) fn applies(way: Way, workload: &'static Workload) -> bool {
    !matches!(way, Way::ForeignTrace | Way::ForeignApplied) || traced(way, workload).is_some()
}

/// The version of the layers that a way mounts.
pub(super) const fn version(way: Way) -> &'static str {
    match way {
        Way::Traced => "traced",
        Way::ForeignTrace => "foreign",
        Way::ForeignApplied => "applied",
        _ => "1",
    }
}

/// The layers that a way mounts, lowest first.
pub(super) fn layers(way: Way, workload: &Workload) -> Vec<String> {
    let name = |tree: &&str| Binaries::layer_of(tree, version(way));
    workload.trees.iter().map(name).collect()
}

/// Records and optimises for a way that follows a trace; `store` is the folder of the origin.
///
/// # Errors
/// Where the first run, the record or the optimisation fails.
pub(super) fn prepare(
    setting: &Setting<'_>,
    workload: &'static Workload,
    way: Way,
    store: &Path,
) -> Result<()> {
    let Some(source) = traced(way, workload) else {
        return Ok(());
    };
    progress!("  recording {} for {} …", source.name, way.name());
    setting.origin.set(Duration::ZERO, 0)?;
    setting.work.empty_folder("scratch")?;
    host::drop_caches()?;
    let cache = setting.work.folder("scratch/cache")?;
    let at = setting.work.folder("scratch/root")?;
    let trace = setting.work.root().join("scratch/start.trace");
    let binaries = ways::store_binaries(setting)?;
    let mut daemon = Layerd::start(binaries, &setting.store_url(), &cache)?;
    daemon.mount(&layers(Way::OnDemand, source), &at, source.writes)?;
    let proc = source.writes.then(|| mounts::proc(&at)).transpose()?;
    timed::chroot(&at, source.command, Instant::now())?;
    daemon.record(&at, &trace)?;
    drop(proc);
    daemon.stop()?;
    let built = layers(Way::OnDemand, workload);
    if way == Way::ForeignApplied {
        return binaries.apply_trace(&built, &layers(way, workload), &trace, store);
    }
    binaries.optimize(&built, &trace, version(way), store)
}
