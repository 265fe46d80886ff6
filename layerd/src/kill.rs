//! Processes that kill themselves, for tests.
//!
//! Everything that changes something outside a process (a mount, a file, a message) counts as a step. A test says at which
//! step a process is to die, and finds out what is left. Counting steps makes it possible to die at every one of them,
//! which no timer can. Only in debug builds; in others a step is nothing.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Signal, getpid, kill_process};

#[derive(Debug)]
struct Plan {
    step: u64,
    /// Only the process that removes this file dies, so that one dies and its successor does not.
    token: PathBuf,
}

static PLAN: OnceLock<Plan> = OnceLock::new();
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Takes a plan: number of the step, a colon, path of the token.
pub(crate) fn arm(plan: Option<OsString>) {
    if !cfg!(debug_assertions) {
        return;
    }
    let plan = plan.and_then(|plan| plan.into_string().ok());
    if let Some((step, token)) = plan.as_deref().and_then(|plan| plan.split_once(':'))
        && let Ok(step) = step.parse()
    {
        let token = PathBuf::from(token);
        if PLAN.set(Plan { step, token }).is_err() {
            tracing::error!("there is a plan to die already");
        }
    }
}

/// Something outside is about to be changed, or was.
pub(crate) fn step(what: &'static str) {
    if !cfg!(debug_assertions) {
        return;
    }
    let Some(plan) = PLAN.get() else { return };
    let now = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
    tracing::trace!(now, what, "step");
    if now == plan.step && std::fs::remove_file(&plan.token).is_ok() {
        tracing::error!(now, what, "dying as planned");
        if let Err(error) = kill_process(getpid(), Signal::KILL) {
            tracing::error!(%error, "cannot die");
        }
    }
}
