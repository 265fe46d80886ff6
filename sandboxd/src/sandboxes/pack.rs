//! A sandbox's changes as a layer: copied, what is to be left out removed, built and published by `dsec build`.

use std::fs;
use std::path::{Component, Path};
use std::process::Command;
use std::sync::Arc;

use super::derive::ignore_missing;
use super::{Sandbox, Service, blocking, mirror, on_disk};
use crate::api::{PackReply, PackRequest, Step};
use crate::error::{ApiError, ErrorKind};
use crate::ids;

/// Most paths that one request leaves out.
const SCRUB_MAX: usize = 10_000;
/// Most bytes of each part of a layer's name.
const PART_BYTES_MAX: usize = 128;

impl Service {
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
            let folder = service.state.join("packing").join(ids::random());
            let packed = service.pack_now(&parent, &request, &folder);
            fs::remove_dir_all(&folder)
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
        folder: &Path,
    ) -> Result<PackReply, ApiError> {
        let invalid = |message: String| ApiError::new(ErrorKind::Invalid, message);
        let record = parent.record();
        let Some(origin) = &self.packer.origin else {
            return Err(invalid(
                "this daemon publishes nowhere: start it with `--origin`".to_owned(),
            ));
        };
        let (axis, name, version) = parts(&request.name)?;
        if request.scrub.len() > SCRUB_MAX {
            let message = format!("`scrub` has more than {SCRUB_MAX} paths");
            return Err(invalid(message));
        }
        let (own, all) = (folder.join("own"), folder.join("all"));
        let copied = self.copy_changes(&record, &own)?;
        if record.frozen.is_empty() {
            fs::rename(&own, &all).map_err(on_disk)?;
        } else {
            // What its ancestors changed belongs to it too.
            mirror::join(&[&*record.frozen, &[own]].concat(), &all)?;
        }
        for path in &request.scrub {
            scrub(&all, Path::new(path))?;
        }
        let mut command = Command::new(&self.packer.program);
        command
            .arg("build")
            .arg(format!("upper:{}", all.display()))
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
        let layer = layer.ok_or_else(|| {
            let message = "`dsec build` did not say which layer it made";
            ApiError::new(ErrorKind::InfraFailed, message)
        })?;
        self.add_step(parent, Step::of_layer(&request.name, layer), None)?;
        Ok(PackReply {
            name: request.name.clone(),
            layer: layer.to_owned(),
            frozen_ms: copied.frozen_ms,
            build: build.clone(),
        })
    }
}

/// Axis, name and version of a layer that is to be published.
fn parts(tag: &str) -> Result<(&str, &str, &str), ApiError> {
    let invalid = |message: String| Err(ApiError::new(ErrorKind::Invalid, message));
    let parts = tag.split_once('/').and_then(|(axis, rest)| {
        let (name, version) = rest.rsplit_once(':')?;
        Some((axis, name, version))
    });
    let Some((axis, name, version)) = parts else {
        return invalid(format!("`{tag}` is not `axis/name:version`"));
    };
    let plain = |part: &str| {
        part.len() <= PART_BYTES_MAX
            && part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._+-".contains(c))
    };
    if ![axis, name, version].into_iter().all(plain) {
        return invalid(format!(
            "`{tag}`: axis, name and version are made of letters, digits, `.`, `_`, `+` and `-`, {PART_BYTES_MAX} at most, and begin with a letter or digit"
        ));
    }
    Ok((axis, name, version))
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
