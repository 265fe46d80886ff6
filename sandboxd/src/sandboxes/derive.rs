//! Children of a sandbox: with its files of now, of a snapshot, or of a layer that was made of it.
//!
//! What is made of a living sandbox begins with a copy of what it wrote, taken while its processes stand still. The copy is ours alone: nothing
//! in it changes while it is worked on, and children stand on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::mirror::{Mirror, MirrorError};
use super::{Sandbox, Service, blocking, living, ms, now_ms, on_disk};
use crate::api::{ForkReply, ForkRequest, Forked, State};
use crate::backend::Place;
use crate::error::{ApiError, ErrorKind};
use crate::ids;
use crate::layers::Held;
use crate::store::Record;
use crate::trajectory::event::Asked;

/// Children of one request.
const CHILDREN_MAX: u32 = 1000;
/// Ancestors whose changes lie on top of each other.
const GENERATIONS_MAX: usize = 200;

/// Most steps of a copy while its sandbox goes on; and a step that copied no more is the last one.
const STEPS_MAX: usize = 4;
const FEW: usize = 32;

/// What a copy took, in milliseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Copied {
    pub(super) frozen_ms: u64,
    pub(super) copied_ms: u64,
}

/// A copy that is not written down anywhere yet: it stays until this is dropped and longer if somebody stands on it then.
#[derive(Debug)]
pub(super) struct Copy<'a> {
    pub(super) path: PathBuf,
    pub(super) copied: Copied,
    kept: &'a Mutex<Vec<PathBuf>>,
}

impl<'a> Copy<'a> {
    fn new(kept: &'a Mutex<Vec<PathBuf>>, path: PathBuf) -> Self {
        kept.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(path.clone());
        Self {
            path,
            copied: Copied::default(),
            kept,
        }
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        self.kept
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|path| *path != self.path);
    }
}

impl Sandbox {
    fn held(&self) -> Option<Arc<Held>> {
        let held = self.held.lock();
        held.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What children stand on.
struct Ground<'a> {
    refs: Vec<String>,
    held: Option<Arc<Held>>,
    frozen: Vec<PathBuf>,
    copied: Copied,
    copy: Option<Copy<'a>>,
}

fn elapsed_ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Service {
    /// Makes children with the sandbox's files as they are now.
    ///
    /// # Errors
    /// When its changes cannot be copied. A child that cannot be made is an error of its own.
    pub(crate) async fn fork(
        self: &Arc<Self>,
        sandbox: Arc<Sandbox>,
        request: ForkRequest,
    ) -> Result<ForkReply, ApiError> {
        if request.count == 0 || request.count > CHILDREN_MAX {
            let message = format!(
                "`count` of {}: 1 to {CHILDREN_MAX} are expected",
                request.count
            );
            return Err(ApiError::new(ErrorKind::Invalid, message));
        }
        let lifetime_ms = request.timeout.map(ms).transpose()?;
        let _changing = sandbox.changing.lock().await;
        let (service, parent) = (Arc::clone(self), Arc::clone(&sandbox));
        blocking(move || service.fork_now(&parent, &request, lifetime_ms)).await
    }

    fn fork_now(
        &self,
        parent: &Sandbox,
        request: &ForkRequest,
        lifetime_ms: Option<u64>,
    ) -> Result<ForkReply, ApiError> {
        let record = parent.record();
        living(&record)?;
        let from = match &request.from {
            None => self.ground_of_now(parent, &record)?,
            Some(name) => self.ground_of_step(parent, &record, name)?,
        };
        let child = || {
            let mut child = record.clone();
            child.info.id = format!("sb-{}", ids::random());
            child.info.parent = Some(record.info.id.clone());
            child.info.request_id = None;
            child.info.state = State::Creating;
            child.info.created_ms = now_ms();
            child.info.ends_ms = None;
            child.info.refs.clone_from(&from.refs);
            child.lifetime_ms = lifetime_ms.or(record.lifetime_ms);
            child.place = None;
            child.steps = Vec::new();
            child.frozen.clone_from(&from.frozen);
            let body = serde_json::json!({ "parent": record.info.id, "from": request.from });
            let asked = Asked {
                method: "FORK".to_owned(),
                path: String::new(),
                body: Some(body),
            };
            match self.make_now(child, from.held.clone(), asked) {
                Ok(info) => Forked::Child(Box::new(info)),
                Err(error) => Forked::Failed(error),
            }
        };
        let children = (0..request.count).map(|_| child()).collect();
        drop(from.copy);
        self.remove_unused_frozen();
        Ok(ForkReply {
            children,
            frozen_ms: from.copied.frozen_ms,
            copied_ms: from.copied.copied_ms,
        })
    }

    /// What children stand on that have the files of now.
    fn ground_of_now(&self, parent: &Sandbox, record: &Record) -> Result<Ground<'_>, ApiError> {
        if record.frozen.len() >= GENERATIONS_MAX {
            let message = format!(
                "{GENERATIONS_MAX} generations lie under this sandbox; pack it and start from the layer"
            );
            return Err(ApiError::new(ErrorKind::Conflict, message));
        }
        let copy = self.copy_of(record)?;
        Ok(Ground {
            refs: record.info.refs.clone(),
            held: parent.held(),
            frozen: [&*record.frozen, std::slice::from_ref(&copy.path)].concat(),
            copied: copy.copied,
            copy: Some(copy),
        })
    }

    /// What children stand on that have the files of a step.
    fn ground_of_step(
        &self,
        parent: &Sandbox,
        record: &Record,
        name: &str,
    ) -> Result<Ground<'_>, ApiError> {
        let found = record.steps.iter().find(|kept| kept.step.name == name);
        let kept = found.ok_or_else(|| {
            let names = record.steps.iter().map(|kept| &*kept.step.name);
            let names = names.collect::<Vec<_>>().join("`, `");
            let known = if names.is_empty() {
                "it has none".to_owned()
            } else {
                format!("it has `{names}`")
            };
            let id = &record.info.id;
            let message = format!("sandbox `{id}` has no snapshot or layer `{name}`: {known}");
            ApiError::new(ErrorKind::NotFound, message)
        })?;
        let mut from = Ground {
            refs: record.info.refs.clone(),
            held: parent.held(),
            frozen: record.frozen.clone(),
            copied: Copied::default(),
            copy: None,
        };
        match (&kept.folder, &kept.step.layer) {
            (Some(folder), _) => from.frozen.push(folder.clone()),
            (None, Some(layer)) => {
                // By digest: names may have been given to other layers since.
                let digests = [&*record.info.layers, std::slice::from_ref(layer)].concat();
                from.held = Some(self.layers.acquire(&digests)?);
                from.refs.push(name.to_owned());
                // The layer holds what its ancestors changed too.
                from.frozen = Vec::new();
            }
            (None, None) => {
                let message = format!("what snapshot `{name}` had is gone");
                return Err(ApiError::new(ErrorKind::InfraFailed, message));
            }
        }
        Ok(from)
    }

    /// A copy of what a sandbox wrote, for others to stand on; removed if nobody does.
    pub(super) fn copy_of(&self, record: &Record) -> Result<Copy<'_>, ApiError> {
        let path = self.state.join("frozen").join(ids::random());
        let mut copy = Copy::new(&self.forking, path);
        copy.copied = self.copy_changes(record, &copy.path)?;
        Ok(copy)
    }

    /// Copies what a sandbox wrote, as it was at one moment. One that is paused stays so.
    pub(super) fn copy_changes(&self, record: &Record, to: &Path) -> Result<Copied, ApiError> {
        let place = living(record)?;
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(on_disk)?;
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            fs::set_permissions(folder, private).map_err(on_disk)?;
        }
        let paused = record.info.state == State::Paused;
        let from = self.store.rw(&record.info.id).join("upper");
        let copying = Instant::now();
        let copied = self.copy_in_steps((&from, to), (&place, paused));
        if copied.is_err() {
            fs::remove_dir_all(to)
                .or_else(ignore_missing)
                .map_err(on_disk)?;
        }
        let frozen_ms = copied?;
        let copied_ms = elapsed_ms(copying);
        Ok(Copied {
            frozen_ms,
            copied_ms,
        })
    }

    /// Copies most while the sandbox goes on, and what changed meanwhile while it stands still; how long that was, in ms.
    fn copy_in_steps(
        &self,
        (from, to): (&Path, &Path),
        (place, paused): (&Place, bool),
    ) -> Result<u64, ApiError> {
        let mut mirror = Mirror::new(from, to)?;
        if paused {
            mirror.step(true)?;
            return Ok(0);
        }
        for _ in 0..STEPS_MAX {
            if mirror.step(false)? <= FEW {
                break;
            }
        }
        let began = Instant::now();
        let backend = self.backends.of(place)?;
        backend.freeze(place)?;
        let copied = mirror.step(true);
        backend.resume(place)?;
        let frozen_ms = elapsed_ms(began);
        copied?;
        Ok(frozen_ms)
    }

    /// Removes copies that no living sandbox stands on.
    pub(super) fn remove_unused_frozen(&self) {
        let folder = self.state.join("frozen");
        let Ok(entries) = fs::read_dir(&folder) else {
            return;
        };
        // Looked at before the table: a copy that appears meanwhile belongs to a fork that is not in the table yet.
        let entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        let used: Vec<PathBuf> = self
            .table()
            .values()
            .flat_map(|s| s.record().stands_on())
            .collect();
        for path in entries {
            if !used.contains(&path)
                && !self.is_forking(&path)
                && let Err(error) = fs::remove_dir_all(&path)
            {
                tracing::warn!(path = %path.display(), %error, "changes of a sandbox that is gone stay");
            }
        }
    }

    fn is_forking(&self, path: &Path) -> bool {
        self.forking
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .any(|p| p == path)
    }
}

impl From<MirrorError> for ApiError {
    fn from(error: MirrorError) -> Self {
        let kind = match error {
            MirrorError::TooMany => ErrorKind::Exhausted,
            MirrorError::File { .. } => ErrorKind::InfraFailed,
        };
        Self::new(kind, error.to_string())
    }
}

pub(super) fn ignore_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}
