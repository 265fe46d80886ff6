//! Pulling an image into an OCI layout directory, from where it is a source like any other.
//!
//! The image is chosen by tag or digest, and among several by platform. Every manifest and blob is compared with the digest
//! and size of the descriptor that names it while it comes in; nothing longer than its descriptor says is kept. Blobs come
//! in a few at a time, each tried again a few times.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::api::RawManifest;
use super::client::RegistryClient;
use super::error::RegistryError;
use super::reference::{ImageReference, Version, is_sha256};
use crate::credentials::environment::Environment;
use crate::ids::to_u64;
use crate::source::host_platform;

/// Blobs that come in at a time.
const THREADS: usize = 3;
/// How often a request is tried in all.
const ATTEMPTS_MAX: u32 = 5;
/// First pause between tries; it doubles.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest pause that a busy registry can ask for.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How deep indexes may lie in indexes.
const INDEX_DEPTH_MAX: u32 = 4;
/// Most layers of an image.
const LAYERS_MAX: usize = 4096;
/// Largest configuration.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Most choices that a message lists.
const CHOICES_SHOWN_MAX: usize = 20;

/// Why an image could not be pulled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The registry.
    #[error("image `{image}`: {what}: {source}")]
    Registry {
        /// The image.
        image: String,
        /// What was asked for.
        what: String,
        /// The answer.
        #[source]
        source: RegistryError,
    },
    /// The image has no part for this platform, or several.
    #[error("image `{image}` has {found} for `{wanted}`; choose one with --platform: {choices}")]
    Platform {
        /// The image.
        image: String,
        /// How many fit.
        found: &'static str,
        /// The platform.
        wanted: String,
        /// What there is.
        choices: String,
    },
    /// It is no image, or one that cannot be read.
    #[error("image `{image}`: {what}: {found}")]
    Image {
        /// The image.
        image: String,
        /// What was looked for.
        what: &'static str,
        /// What is there.
        found: String,
    },
    /// The folder for temporary files.
    #[error("could not {what} `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The refusal.
        #[source]
        source: std::io::Error,
    },
    /// It does not fit.
    #[error(
        "image `{image}` has {needed} bytes, and {free} are free in `{}`; use another folder with --tmp",
        dir.display()
    )]
    Space {
        /// The image.
        image: String,
        /// Bytes of all blobs.
        needed: u64,
        /// Free bytes.
        free: u64,
        /// The folder.
        dir: PathBuf,
    },
}

/// Called with bytes that have come in and bytes in all.
pub type PullProgress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// What was pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// Digest of the image's manifest (of the chosen platform).
    pub manifest: String,
    /// Its layers.
    pub layers: usize,
    /// Bytes of its blobs.
    pub bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing)]
    platform: Option<Platform>,
    #[serde(default, skip_serializing)]
    annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    variant: String,
}

/// A manifest of one image, or an index of several.
#[derive(Debug, Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LayoutIndex {
    schema_version: u32,
    manifests: Vec<Descriptor>,
}

impl Platform {
    fn name(&self) -> String {
        let mut name = format!("{}/{}", self.os, self.architecture);
        if !self.variant.is_empty() {
            name = format!("{name}/{}", self.variant);
        }
        name
    }

    /// `linux/arm` fits every variant, `linux/arm/v7` only that one.
    fn fits(&self, wanted: &str) -> bool {
        let name = self.name();
        name == wanted
            || name
                .strip_prefix(wanted)
                .is_some_and(|rest| rest.starts_with('/'))
    }
}

/// A pull in progress.
struct Pull<'a> {
    image: &'a ImageReference,
    client: RegistryClient,
    dir: &'a Path,
}

/// Pulls `image` into the empty folder `dir`. `platform` is `os/architecture[/variant]`; without it, that of this host is
/// taken where there is a choice.
///
/// # Errors
/// [`PullError`]; the folder then holds a part of the image, and no `index.json`.
pub fn pull(
    image: &ImageReference,
    platform: Option<&str>,
    dir: &Path,
    env: &Environment,
    progress: PullProgress<'_>,
) -> Result<Pulled, PullError> {
    let client = RegistryClient::new(&image.repository, env);
    let client = client.map_err(|source| PullError::Registry {
        image: image.to_string(),
        what: "cannot be asked for".to_owned(),
        source,
    })?;
    let pull = Pull { image, client, dir };
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(|e| io(&blobs, "make", e))?;
    let (manifest, document, chosen) = pull.choose(platform)?;
    let config = document
        .config
        .clone()
        .ok_or_else(|| pull.wrong("it is neither an image nor an index", &manifest.media_type))?;
    if config.size > CONFIG_BYTES_MAX {
        return Err(pull.wrong("its configuration has at most 16 MiB", config.size));
    }
    if document.layers.len() > LAYERS_MAX {
        return Err(pull.wrong("it has at most 4096 layers", document.layers.len()));
    }
    pull.write(&manifest.digest, &manifest.bytes)?;
    let mut seen = BTreeSet::new();
    let all = std::iter::once(&config).chain(&document.layers);
    let blobs: Vec<&Descriptor> = all.filter(|d| seen.insert(&d.digest)).collect();
    let bytes = pull.fetch(&blobs, progress)?;
    if let Some(wanted) = platform.filter(|_| !chosen) {
        pull.check_platform(&config, wanted)?;
    }
    pull.finish(&manifest)?;
    Ok(Pulled {
        manifest: manifest.digest,
        layers: document.layers.len(),
        bytes,
    })
}

fn io(path: &Path, what: &'static str, source: std::io::Error) -> PullError {
    PullError::Io {
        path: path.to_owned(),
        what,
        source,
    }
}

impl Pull<'_> {
    fn wrong(&self, what: &'static str, found: impl ToString) -> PullError {
        PullError::Image {
            image: self.image.to_string(),
            what,
            found: found.to_string(),
        }
    }

    fn patiently<T>(
        what: &str,
        attempt: impl Fn() -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let mut pause = PAUSE;
        for _ in 1..ATTEMPTS_MAX {
            let error = match attempt() {
                Err(e) if e.is_transient() => e,
                done => return done,
            };
            let asked = match &error {
                RegistryError::Busy { retry_after, .. } => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            tracing::warn!(what, %error, "tried again");
            std::thread::sleep(pause.max(asked.min(PAUSE_MAX)));
            pause *= 2;
        }
        attempt()
    }

    fn manifest(&self, reference: &str) -> Result<(RawManifest, Document), PullError> {
        let what = format!("manifest `{reference}`");
        let manifest = Self::patiently(&what, || self.client.manifest(reference));
        let manifest = manifest.map_err(|source| PullError::Registry {
            image: self.image.to_string(),
            what,
            source,
        })?;
        let document = serde_json::from_slice(&manifest.bytes)
            .map_err(|e| self.wrong("a manifest is of an unknown form", e))?;
        Ok((manifest, document))
    }

    /// The manifest of one image, and whether it was chosen by its platform.
    fn choose(&self, platform: Option<&str>) -> Result<(RawManifest, Document, bool), PullError> {
        let reference = match &self.image.version {
            Version::Tag(text) | Version::Digest(text) => text,
        };
        let (mut manifest, mut document) = self.manifest(reference)?;
        let wanted = platform.map_or_else(host_platform, str::to_owned);
        let mut chosen = false;
        for _ in 0..INDEX_DEPTH_MAX {
            let Some(choices) = document.manifests.take() else {
                return Ok((manifest, document, chosen));
            };
            let next = self.pick(&choices, &wanted)?;
            chosen |= next.platform.is_some();
            if !is_sha256(&next.digest) {
                return Err(self.wrong("digests must be `sha256:` and 64 hex digits", "another"));
            }
            (manifest, document) = self.manifest(&next.digest)?;
            if to_u64(manifest.bytes.len()) != next.size {
                let found = format!("{} bytes in place of {}", manifest.bytes.len(), next.size);
                return Err(self.wrong("a manifest has another size than its index says", found));
            }
        }
        Err(self.wrong(
            "its indexes hold too much",
            "an index in an index in an index",
        ))
    }

    fn pick<'a>(
        &self,
        choices: &'a [Descriptor],
        wanted: &str,
    ) -> Result<&'a Descriptor, PullError> {
        // Build records that buildkit stores beside the images.
        let record = |d: &&Descriptor| !d.annotations.contains_key("vnd.docker.reference.type");
        let images: Vec<&Descriptor> = choices.iter().filter(record).collect();
        let named = |d: &&&Descriptor| d.platform.as_ref().is_some_and(|p| p.fits(wanted));
        let exact = |d: &&&Descriptor| d.platform.as_ref().is_some_and(|p| p.name() == wanted);
        let mut fitting: Vec<&Descriptor> = images.iter().filter(exact).copied().collect();
        if fitting.is_empty() {
            fitting = images.iter().filter(named).copied().collect();
        }
        if let ([only], true) = (images.as_slice(), fitting.is_empty())
            && only.platform.is_none()
        {
            return Ok(only);
        }
        match fitting.as_slice() {
            [one] => Ok(one),
            none_or_many => {
                let name = |d: &&Descriptor| {
                    d.platform
                        .as_ref()
                        .map_or_else(|| d.digest.clone(), Platform::name)
                };
                let choices: Vec<String> =
                    images.iter().take(CHOICES_SHOWN_MAX).map(name).collect();
                Err(PullError::Platform {
                    image: self.image.to_string(),
                    found: if none_or_many.is_empty() {
                        "nothing"
                    } else {
                        "more than one part"
                    },
                    wanted: wanted.to_owned(),
                    choices: choices.join(", "),
                })
            }
        }
    }

    fn path(&self, digest: &str) -> Result<PathBuf, PullError> {
        match digest.strip_prefix("sha256:").filter(|_| is_sha256(digest)) {
            Some(hex) => Ok(self.dir.join("blobs/sha256").join(hex)),
            None => {
                let shown: String = digest.chars().take(100).collect();
                Err(self.wrong("digests must be `sha256:` and 64 hex digits", shown))
            }
        }
    }

    fn write(&self, digest: &str, bytes: &[u8]) -> Result<(), PullError> {
        let path = self.path(digest)?;
        fs::write(&path, bytes).map_err(|e| io(&path, "write", e))
    }

    /// Brings in all blobs; gives their bytes.
    fn fetch(&self, blobs: &[&Descriptor], progress: PullProgress<'_>) -> Result<u64, PullError> {
        let add = |sum: u64, d: &&Descriptor| sum.checked_add(d.size);
        let total = blobs.iter().try_fold(0, add);
        let total =
            total.ok_or_else(|| self.wrong("its blobs have a size", "more than any disk"))?;
        let space = rustix::fs::statvfs(self.dir).map_err(|e| io(self.dir, "stat", e.into()))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if total > free {
            return Err(PullError::Space {
                image: self.image.to_string(),
                needed: total,
                free,
                dir: self.dir.to_owned(),
            });
        }
        let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
        let failure: Mutex<Option<PullError>> = Mutex::new(None);
        let lock = || {
            failure
                .lock()
                .expect("no thread panics while it holds the lock")
        };
        let work = || {
            while let Some(blob) = blobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                if lock().is_some() {
                    break;
                }
                let told = |n| progress(done.fetch_add(n, Ordering::Relaxed) + n, total);
                if let Err(error) = self.fetch_one(blob, &told) {
                    lock().get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS {
                scope.spawn(work);
            }
            work();
        });
        let failed = lock().take();
        failed.map_or(Ok(total), Err)
    }

    fn fetch_one(&self, blob: &Descriptor, told: &dyn Fn(u64)) -> Result<(), PullError> {
        let path = self.path(&blob.digest)?;
        let what = format!("blob `{}`", blob.digest);
        // What comes in twice is told once.
        let most = std::cell::Cell::new(0);
        let attempt = || {
            let unwritable = |e: std::io::Error| {
                RegistryError::Unavailable(format!("`{}`: {e}", path.display()))
            };
            let mut file = File::create(&path).map_err(unwritable)?;
            let mut at = 0;
            self.client
                .blob(&blob.digest, blob.size, &mut file, &mut |n| {
                    at += n;
                    told(at.saturating_sub(most.get().max(at - n)));
                    most.set(most.get().max(at));
                })
        };
        Self::patiently(&what, attempt).map_err(|source| PullError::Registry {
            image: self.image.to_string(),
            what: what.clone(),
            source,
        })
    }

    /// An image that is not in an index says in its configuration what it is for.
    fn check_platform(&self, config: &Descriptor, wanted: &str) -> Result<(), PullError> {
        let path = self.path(&config.digest)?;
        let bytes = fs::read(&path).map_err(|e| io(&path, "read", e))?;
        let platform: Platform = serde_json::from_slice(&bytes)
            .map_err(|e| self.wrong("its configuration is of an unknown form", e))?;
        if platform.fits(wanted) {
            return Ok(());
        }
        Err(PullError::Platform {
            image: self.image.to_string(),
            found: "nothing",
            wanted: wanted.to_owned(),
            choices: platform.name(),
        })
    }

    fn finish(&self, manifest: &RawManifest) -> Result<(), PullError> {
        let index = LayoutIndex {
            schema_version: 2,
            manifests: vec![Descriptor {
                media_type: manifest.media_type.clone(),
                digest: manifest.digest.clone(),
                size: to_u64(manifest.bytes.len()),
                platform: None,
                annotations: BTreeMap::new(),
            }],
        };
        let index = serde_json::to_vec(&index).expect("texts and numbers are JSON");
        for (name, bytes) in [
            ("oci-layout", &br#"{"imageLayoutVersion":"1.0.0"}"#[..]),
            ("index.json", &index),
        ] {
            let path = self.dir.join(name);
            fs::write(&path, bytes).map_err(|e| io(&path, "write", e))?;
        }
        Ok(())
    }
}
