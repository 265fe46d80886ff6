//! What is made of a living sandbox's changes: children, and layers.
//!
//! Both begin with a copy of what it wrote, taken while its processes stand still. The copy is ours alone: nothing in it changes
//! while it is worked on.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::mirror::{Mirror, MirrorError};
use super::{Sandbox, Service, blocking, living, ms, now_ms, on_disk};
use crate::api::{ForkReply, ForkRequest, Forked, PackReply, PackRequest, State};
use crate::backend::Place;
use crate::error::{ApiError, ErrorKind};
use crate::ids;
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
struct Copied {
    frozen_ms: u64,
    copied_ms: u64,
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
        blocking(move || service.fork_now(&parent, request.count, lifetime_ms)).await
    }

    fn fork_now(
        &self,
        parent: &Sandbox,
        count: u32,
        lifetime_ms: Option<u64>,
    ) -> Result<ForkReply, ApiError> {
        let record = parent.record();
        if record.frozen.len() >= GENERATIONS_MAX {
            let message = format!(
                "{GENERATIONS_MAX} generations lie under this sandbox; pack it and start from the layer"
            );
            return Err(ApiError::new(ErrorKind::Conflict, message));
        }
        let held = parent
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let frozen = self.state.join("frozen").join(ids::random());
        let forking = || self.forking.lock().unwrap_or_else(PoisonError::into_inner);
        forking().push(frozen.clone());
        let copied = self.copy_changes(&record, &frozen);
        if copied.is_err() {
            forking().retain(|path| *path != frozen);
        }
        let copied = copied?;
        let child = || {
            let mut child = record.clone();
            child.info.id = format!("sb-{}", ids::random());
            child.info.parent = Some(record.info.id.clone());
            child.info.request_id = None;
            child.info.state = State::Creating;
            child.info.created_ms = now_ms();
            child.info.ends_ms = None;
            child.lifetime_ms = lifetime_ms.or(record.lifetime_ms);
            child.place = None;
            child.frozen.push(frozen.clone());
            let asked = Asked {
                method: "FORK".to_owned(),
                path: String::new(),
                body: Some(serde_json::json!({ "parent": record.info.id })),
            };
            match self.make_now(child, held.clone(), asked) {
                Ok(info) => Forked::Child(Box::new(info)),
                Err(error) => Forked::Failed(error),
            }
        };
        let children = (0..count).map(|_| child()).collect();
        forking().retain(|path| *path != frozen);
        self.remove_unused_frozen();
        Ok(ForkReply {
            children,
            frozen_ms: copied.frozen_ms,
            copied_ms: copied.copied_ms,
        })
    }

    /// Publishes the sandbox's changes as a layer.
    ///
    /// # Errors
    /// When they cannot be copied or published.
    pub(crate) async fn pack_diff(
        self: &Arc<Self>,
        sandbox: Arc<Sandbox>,
        request: PackRequest,
    ) -> Result<PackReply, ApiError> {
        let service = Arc::clone(self);
        let _changing = sandbox.changing.lock().await;
        let parent = Arc::clone(&sandbox);
        blocking(move || {
            let copy = service.state.join("packing").join(ids::random());
            let packed = service.pack_now(&parent, &request, &copy);
            fs::remove_dir_all(&copy)
                .or_else(ignore_missing)
                .map_err(on_disk)?;
            packed
        })
        .await
    }

    fn pack_now(
        &self,
        parent: &Sandbox,
        request: &PackRequest,
        copy: &Path,
    ) -> Result<PackReply, ApiError> {
        let invalid = |message: String| ApiError::new(ErrorKind::Invalid, message);
        let record = parent.record();
        let Some(origin) = &self.packer.origin else {
            return Err(invalid(
                "this daemon publishes nowhere: start it with `--origin`".to_owned(),
            ));
        };
        let parts = request.name.split_once('/').and_then(|(axis, rest)| {
            let (name, version) = rest.rsplit_once(':')?;
            Some((axis, name, version))
        });
        let Some((axis, name, version)) = parts else {
            return Err(invalid(format!(
                "`{}` is not `axis/name:version`",
                request.name
            )));
        };
        let plain = |part: &&str| {
            part.len() <= 128
                && part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._+-".contains(c))
        };
        if ![axis, name, version].iter().all(plain) {
            return Err(invalid(format!(
                "`{}`: axis, name and version are made of letters, digits, `.`, `_`, `+` and `-`, 128 at most, and begin with a letter or digit",
                request.name
            )));
        }
        // What its ancestors changed belongs to it too; a child's whiteouts must win over them.
        if !record.frozen.is_empty() {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "packing a forked sandbox is not available yet: pack its parent before forking",
            ));
        }
        let copied = self.copy_changes(&record, copy)?;
        for path in &request.scrub {
            scrub(copy, Path::new(path))?;
        }
        let mut command = Command::new(&self.packer.program);
        command
            .arg("build")
            .arg(format!("upper:{}", copy.display()))
            .args(["--axis", axis, "--name", name, "--version", version])
            .args(["--origin", origin, "--json"])
            .arg("--tmp")
            .arg(self.state.join("packing"));
        for layer in &record.info.layers {
            command.args(["--dict", layer]);
        }
        let ran = command.output().map_err(|e| {
            let program = self.packer.program.display();
            ApiError::new(
                ErrorKind::InfraFailed,
                format!("cannot run `{program}`: {e}"),
            )
        })?;
        if !ran.status.success() {
            let said = String::from_utf8_lossy(&ran.stderr);
            return Err(ApiError::new(
                ErrorKind::InfraFailed,
                said.trim().to_owned(),
            ));
        }
        let build: serde_json::Value = serde_json::from_slice(&ran.stdout)
            .map_err(|e| ApiError::new(ErrorKind::InfraFailed, format!("`dsec build`: {e}")))?;
        let layer = build.get("layer").and_then(|l| l.as_str());
        Ok(PackReply {
            name: request.name.clone(),
            layer: layer.unwrap_or_default().to_owned(),
            frozen_ms: copied.frozen_ms,
            build: build.clone(),
        })
    }

    /// Copies what a sandbox wrote, as it was at one moment. One that is paused stays so.
    fn copy_changes(&self, record: &Record, to: &Path) -> Result<Copied, ApiError> {
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
            .flat_map(|s| s.record().frozen)
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

fn ignore_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound {
        Ok(())
    } else {
        Err(error)
    }
}

/// Removes `path` (as the sandbox names it) from a copy. Never through a link: the copy holds links that its sandbox made, and
/// we are root.
fn scrub(copy: &Path, path: &Path) -> Result<(), ApiError> {
    let mut real = copy.to_owned();
    let mut below = path
        .components()
        .filter(|c| *c != Component::RootDir)
        .peekable();
    while let Some(part) = below.next() {
        let Component::Normal(name) = part else {
            let message = format!(
                "`{}` cannot be left out: not a plain absolute path",
                path.display()
            );
            return Err(ApiError::new(ErrorKind::Invalid, message));
        };
        real.push(name);
        match fs::symlink_metadata(&real) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(on_disk(e)),
            Ok(meta) if below.peek().is_none() => {
                let removed = if meta.is_dir() {
                    fs::remove_dir_all(&real)
                } else {
                    fs::remove_file(&real)
                };
                return removed.map_err(on_disk);
            }
            // What lies behind a link was not written under this name.
            Ok(meta) if !meta.is_dir() => return Ok(()),
            Ok(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation: following links removes the file outside.
    #[test]
    fn scrubbing_never_leaves_the_copy() {
        let folder = tempfile::tempdir().unwrap();
        let (copy, outside) = (folder.path().join("copy"), folder.path().join("outside"));
        fs::create_dir_all(copy.join("tmp/deep")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), b"precious").unwrap();
        fs::write(copy.join("tmp/deep/file"), b"x").unwrap();
        std::os::unix::fs::symlink(&outside, copy.join("link")).unwrap();
        scrub(&copy, Path::new("/link/file")).unwrap();
        scrub(&copy, Path::new("/tmp/deep")).unwrap();
        scrub(&copy, Path::new("/none/at/all")).unwrap();
        assert!(scrub(&copy, Path::new("/tmp/../../outside")).is_err());
        assert!(!copy.join("tmp/deep").exists());
        scrub(&copy, Path::new("/link")).unwrap();
        assert!(fs::symlink_metadata(copy.join("link")).is_err());
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"precious");
    }
}
