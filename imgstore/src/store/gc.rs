//! Collecting garbage: removing from an origin what no tag, no lease and no publisher needs.
//!
//! `survey` reads the origin, `mark` decides (pure: the same survey always gives the same list), `sweep` removes. A run
//! announces what it is about to remove in a record, looks at everything once more, and removes only what was announced
//! *and* is still unneeded. So whoever begins to rely on an object either wrote its lease before the second look, which
//! then keeps the object, or reads the announcement and waits (`lease::hold`). `docs/decisions/0007-gc.md` has the
//! argument. What cannot be read is never taken for unneeded: then nothing is removed at all.

pub mod mark;
mod parallel;
pub mod record;
pub mod settle;
pub mod survey;
mod sweep;

use std::time::{Duration, SystemTime};

use crate::origin::{Origin, OriginError};
use crate::store::layer::LayerError;
use crate::store::lease::clock;

use mark::{Doomed, Plan};

/// Objects younger than this are kept, and so are layers that lost their last tag more recently.
pub const GRACE: Duration = Duration::from_hours(24);

/// Called with objects removed so far and in all.
pub type ProgressFn<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// How to collect.
#[derive(Clone, Copy)]
pub struct GcOptions<'a> {
    /// Objects younger than this are kept.
    pub grace: Duration,
    /// Only say what would be removed.
    pub dry_run: bool,
    /// For how long the origin may show one host an old state after another host has written: [`settle::of_dir`].
    pub settle: Duration,
    /// Requests at a time.
    pub threads: usize,
    /// Progress.
    pub progress: ProgressFn<'a>,
}

impl std::fmt::Debug for GcOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GcOptions")
            .field("grace", &self.grace)
            .field("dry_run", &self.dry_run)
            .field("settle", &self.settle)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl Default for GcOptions<'_> {
    fn default() -> Self {
        Self {
            grace: GRACE,
            dry_run: false,
            settle: Duration::ZERO,
            threads: 8,
            progress: &|_, _| (),
        }
    }
}

/// What a run did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct GcReport {
    /// Whether this only says what would be done.
    pub dry_run: bool,
    /// Whether everything that was found unneeded was removed. What is left takes another run.
    pub complete: bool,
    /// What was removed, in that order.
    pub removed: Vec<Doomed>,
    /// Bytes of that.
    pub bytes_removed: u64,
    /// What is needed, and what is kept only because it is young.
    pub kept: mark::Kept,
}

/// Why nothing, or not everything, was collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GcError {
    /// The origin failed. What was removed until then was unneeded.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The origin's tags could not be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// Another collector is at work.
    #[error(
        "another `dsec gc` ({holder}) is at work on origin `{origin}`; nothing was removed; try again when it has ended (`{object}` says so, and runs out by itself)"
    )]
    Running {
        /// The origin.
        origin: String,
        /// Who.
        holder: String,
        /// Its record.
        object: String,
    },
    /// Something that says what is needed cannot be read.
    #[error(
        "nothing was removed from origin `{origin}`, because what is needed there cannot be told: {}; mend it (publish the layer again, or `dsec repair` from another origin), or take the tag away with `dsec untag`",
        .found.join("; ")
    )]
    Unreadable {
        /// The origin.
        origin: String,
        /// What cannot be read, and why.
        found: Vec<String>,
    },
}

/// Collects garbage.
///
/// # Errors
/// [`GcError`]; whatever was removed before was unneeded.
pub fn collect(origin: &dyn Origin, options: &GcOptions<'_>) -> Result<GcReport, GcError> {
    if options.dry_run {
        let now = clock::origin_now(origin).unwrap_or_else(|error| {
            tracing::warn!(%error, "the origin's clock cannot be read; using this host's");
            SystemTime::now()
        });
        let plan = look(origin, now, "", options)?;
        return Ok(report(plan.remove, plan.kept, true, options));
    }
    sweep::run(origin, options)
}

fn look(
    origin: &dyn Origin,
    now: SystemTime,
    own_record: &str,
    options: &GcOptions<'_>,
) -> Result<Plan, GcError> {
    let survey = survey::take(origin, now, own_record, options)?;
    Ok(mark::mark(&survey, options.grace))
}

fn report(
    removed: Vec<Doomed>,
    kept: mark::Kept,
    complete: bool,
    options: &GcOptions<'_>,
) -> GcReport {
    GcReport {
        dry_run: options.dry_run,
        complete,
        bytes_removed: removed.iter().map(|d| d.bytes).sum(),
        removed,
        kept,
    }
}
