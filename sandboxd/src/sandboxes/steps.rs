//! Steps of a sandbox: snapshots of its files, and the layers that were made of them. It can be forked from each.
//!
//! A snapshot is a copy of what the sandbox had changed, on this host, for as long as the sandbox lives; a layer is published and
//! stays. A name stands for the last that was made.

use std::sync::Arc;

use super::{Sandbox, Service, blocking, living, now_ms, on_disk};
use crate::api::{SnapshotReply, SnapshotRequest, Step, Steps};
use crate::error::{ApiError, ErrorKind};
use crate::store::KeptStep;

/// Snapshots of one sandbox; each may hold as much as the sandbox.
const SNAPSHOTS_MAX: usize = 64;
/// Layers that are remembered of one sandbox; older ones are still published.
const LAYERS_MAX: usize = 1000;
/// Most bytes of a snapshot's name.
const NAME_BYTES_MAX: usize = 128;

impl Step {
    pub(super) fn of_layer(name: &str, layer: &str) -> Self {
        Self {
            name: name.to_owned(),
            layer: Some(layer.to_owned()),
            created_ms: now_ms(),
        }
    }
}

impl Service {
    /// Keeps the sandbox's files as they are now.
    ///
    /// # Errors
    /// `Invalid` names, `Conflict` with a layer of that name, `Exhausted` when there are too many, or when its changes cannot be
    /// copied.
    pub(crate) async fn snapshot(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        request: SnapshotRequest,
    ) -> Result<SnapshotReply, ApiError> {
        check(&request.name)?;
        let _changing = sandbox.changing.lock().await;
        let (service, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        blocking(move || service.snapshot_now(&sandbox, request.name)).await
    }

    fn snapshot_now(&self, sandbox: &Sandbox, name: String) -> Result<SnapshotReply, ApiError> {
        let record = sandbox.record();
        let others = record.steps.iter().filter(|kept| kept.step.name != name);
        if others.filter(|kept| kept.folder.is_some()).count() >= SNAPSHOTS_MAX {
            let id = &record.info.id;
            let message = format!("sandbox `{id}` has {SNAPSHOTS_MAX} snapshots: remove one first");
            return Err(ApiError::new(ErrorKind::Exhausted, message));
        }
        let copy = self.copy_of(&record)?;
        let step = Step {
            name,
            layer: None,
            created_ms: now_ms(),
        };
        self.add_step(sandbox, step.clone(), Some(&copy.path))?;
        let copied = copy.copied;
        drop(copy);
        // One of the same name may have been replaced.
        self.remove_unused_frozen();
        Ok(SnapshotReply {
            step,
            frozen_ms: copied.frozen_ms,
            copied_ms: copied.copied_ms,
        })
    }

    /// Writes a step down; the caller holds `changing`.
    pub(super) fn add_step(
        &self,
        sandbox: &Sandbox,
        step: Step,
        folder: Option<&std::path::Path>,
    ) -> Result<(), ApiError> {
        let mut record = sandbox.record();
        record.steps.retain(|kept| kept.step.name != step.name);
        let folder = folder.map(std::path::Path::to_owned);
        record.steps.push(KeptStep { step, folder });
        let layers = record.steps.iter().filter(|kept| kept.folder.is_none());
        if layers.count() > LAYERS_MAX
            && let Some(oldest) = record.steps.iter().position(|kept| kept.folder.is_none())
        {
            record.steps.remove(oldest);
        }
        self.store.put(&record).map_err(on_disk)?;
        *sandbox.lock() = record;
        Ok(())
    }

    /// What a sandbox can be forked from.
    pub(crate) fn steps(sandbox: &Sandbox) -> Steps {
        let kept = sandbox.record().steps;
        let steps = kept.into_iter().map(|kept| kept.step).collect();
        Steps { steps }
    }

    /// Forgets a step; a layer stays published, and children that stand on a snapshot keep it.
    ///
    /// # Errors
    /// `NotFound`, `SandboxGone`.
    pub(crate) async fn forget_step(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        name: String,
    ) -> Result<(), ApiError> {
        let _changing = sandbox.changing.lock().await;
        let (service, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        blocking(move || {
            let mut record = sandbox.record();
            living(&record)?;
            let before = record.steps.len();
            record.steps.retain(|kept| kept.step.name != name);
            if record.steps.len() == before {
                let id = &record.info.id;
                let message = format!("sandbox `{id}` has no snapshot or layer `{name}`");
                return Err(ApiError::new(ErrorKind::NotFound, message));
            }
            service.store.put(&record).map_err(on_disk)?;
            *sandbox.lock() = record;
            service.remove_unused_frozen();
            Ok(())
        })
        .await
    }
}

/// A layer's name has a slash, so that no snapshot can be taken for one.
fn check(name: &str) -> Result<(), ApiError> {
    let plain = |c: char| !c.is_control() && c != '/';
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(plain) {
        return Ok(());
    }
    let shown: String = name.chars().take(40).flat_map(char::escape_debug).collect();
    let message = format!(
        "`{shown}` cannot be a snapshot's name: 1 to {NAME_BYTES_MAX} bytes without `/` and control characters are expected"
    );
    Err(ApiError::new(ErrorKind::Invalid, message))
}
