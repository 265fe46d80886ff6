//! Announce, look again, remove.
//!
//! A round removes at most what one record can name, and only for [`SWEEP`]; the record holds longer than that, so that
//! nobody believes it is over while something is still being removed.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::mark::{Doomed, Kept, Plan};
use super::{GcError, GcOptions, GcReport, look, parallel, record, report};
use crate::format::condemned::{CONDEMNED_OBJECTS_MAX, Condemned};
use crate::format::manifest::FORMAT;
use crate::format::names;
use crate::ids::to_u64;
use crate::origin::{Origin, OriginError};
use crate::process::Process;
use crate::store::lease;
use crate::store::lease::clock::boot_time;

/// How long a round removes.
const SWEEP: Duration = Duration::from_mins(1);
/// How much longer its record holds: a collector that is stopped for less than this while it removes harms nobody.
const SLACK: Duration = Duration::from_mins(2);
/// Objects whose removal is not interrupted: so often the time is looked at.
const STEP: usize = 64;
/// Most rounds of one run.
const ROUNDS_MAX: usize = 1000;

/// This run's record, removed at the end.
struct Announced<'a> {
    origin: &'a dyn Origin,
    name: String,
    settle: Duration,
    /// The origin's time when [`boot_time`] said this.
    seen: (SystemTime, Duration),
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.origin.remove(&self.name) {
            tracing::warn!(record = self.name, %error, "record stays until it runs out");
        }
    }
}

impl<'a> Announced<'a> {
    /// Writes an empty record and looks whether it is the only one: of two collectors at least one gives way.
    fn alone(origin: &'a dyn Origin, options: &GcOptions<'_>) -> Result<Self, GcError> {
        let name = format!("{}{}.json", names::GC_RECORD, lease::random());
        let mut own = Self {
            origin,
            name,
            settle: options.settle,
            seen: (SystemTime::UNIX_EPOCH, boot_time()),
        };
        own.write(Vec::new())?;
        let records = record::read_all(origin)?;
        let mine = records.iter().find(|r| r.info.name == own.name);
        let Some(mine) = mine else {
            return Err(OriginError::Unavailable {
                origin: origin.address(),
                object: own.name.clone(),
                reason: "it was written and is not listed".to_owned(),
            }
            .into());
        };
        own.seen.0 = mine.info.modified;
        let others = records.iter().filter(|r| r.info.name != own.name);
        if let Some(other) = others.into_iter().find(|r| r.is_live(own.now())) {
            return Err(GcError::Running {
                origin: origin.address(),
                holder: other.holder(),
                object: other.info.name.clone(),
            });
        }
        Ok(own)
    }

    fn write(&self, objects: Vec<String>) -> Result<(), OriginError> {
        let record = Condemned {
            format: FORMAT,
            holder: lease::holder(),
            objects,
            process: Process::me().map_or_else(String::new, ToString::to_string),
            seconds: (self.settle + SWEEP + SLACK).as_secs(),
        };
        self.origin.replace(&self.name, &record.to_bytes())
    }

    /// The time on the origin's clock.
    fn now(&self) -> SystemTime {
        self.seen.0 + boot_time().saturating_sub(self.seen.1)
    }
}

/// Collects, in as many rounds as it takes.
pub(super) fn run(origin: &dyn Origin, options: &GcOptions<'_>) -> Result<GcReport, GcError> {
    let announced = Announced::alone(origin, options)?;
    let mut removed = Vec::new();
    let mut kept = Kept::default();
    for _ in 0..ROUNDS_MAX {
        let mut plan = look(origin, announced.now(), &announced.name, options)?;
        let total = to_u64(removed.len() + plan.remove.len());
        kept = plan.kept;
        if plan.remove.is_empty() {
            return Ok(report(removed, kept, true, options));
        }
        let more = plan.remove.len() > CONDEMNED_OBJECTS_MAX;
        plan.remove.truncate(CONDEMNED_OBJECTS_MAX);
        let names = plan.remove.iter().map(|d| d.object.clone());
        announced.write(names.collect())?;
        let announced_at = boot_time();
        // Where readers may see an old state, they must have seen the record before we believe the leases.
        std::thread::sleep(options.settle);
        let still = still_unneeded(&plan, origin, &announced, options)?;
        kept = still.kept;
        let deadline = announced_at + options.settle + SWEEP;
        let before = removed.len();
        let (gone, in_time) = remove(origin, &still.remove, deadline, options, (before, total));
        removed.extend(gone?);
        if in_time && !more {
            return Ok(report(removed, kept, true, options));
        }
        if removed.len() == before {
            break;
        }
    }
    Ok(report(removed, kept, false, options))
}

/// The second look: of what was announced, that which is still unneeded.
fn still_unneeded(
    plan: &Plan,
    origin: &dyn Origin,
    announced: &Announced<'_>,
    options: &GcOptions<'_>,
) -> Result<Plan, GcError> {
    let named: BTreeSet<&str> = plan.remove.iter().map(|d| &*d.object).collect();
    let mut again = look(origin, announced.now(), &announced.name, options)?;
    again.remove.retain(|d| named.contains(&*d.object));
    Ok(again)
}

type Removed = (Result<Vec<Doomed>, GcError>, bool);

/// Removes in order until `deadline`; what is gone, and whether that is all.
fn remove(
    origin: &dyn Origin,
    doomed: &[Doomed],
    deadline: Duration,
    options: &GcOptions<'_>,
    (before, total): (usize, u64),
) -> Removed {
    let done = AtomicU64::new(to_u64(before));
    let failed: Mutex<Option<OriginError>> = Mutex::new(None);
    let mut gone = Vec::new();
    // A group never spans two folders: no pack goes before the last manifest.
    let folder = |d: &Doomed| d.object.split('/').next().map(str::to_owned);
    for same in doomed.chunk_by(|a, b| folder(a) == folder(b)) {
        for step in same.chunks(STEP) {
            if boot_time() >= deadline {
                return (Ok(gone), false);
            }
            parallel::map(step, options.threads, |d| {
                if let Err(error) = origin.remove(&d.object) {
                    let mut failed = failed.lock().expect("nobody panics while holding the lock");
                    failed.get_or_insert(error);
                } else {
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    (options.progress)(done, total);
                }
            });
            let error = failed
                .lock()
                .expect("nobody panics while holding the lock")
                .take();
            if let Some(error) = error {
                return (Err(error.into()), false);
            }
            gone.extend_from_slice(step);
        }
    }
    (Ok(gone), true)
}
