//! An OCI image layout directory: `oci-layout`, `index.json`, `blobs/sha256/…`.
//!
//! The image is chosen by its ref name where one is given, and among several by the platform of this host
//! (`linux/amd64` …). Every blob is checked against the digest and size of the descriptor that names it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::image_config::{ImageConfig, JSON_BYTES_MAX};
use super::image_layers::{LayerBlob, compose, sha256_of};
use super::tar_input::FilePart;
use super::xattr_filter::OverlayXattrs;
use super::{Archive, Session, SourceError, SourceSpec};
use crate::tree::Tree;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// How deep indexes may lie in indexes.
const INDEX_DEPTH_MAX: u32 = 4;
/// Most manifests looked at.
const MANIFESTS_MAX: usize = 10_000;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

impl Platform {
    fn name(&self) -> String {
        format!("{}/{}", self.os, self.architecture)
    }
}

#[derive(Debug, Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

impl Descriptor {
    fn ref_name(&self) -> Option<&str> {
        self.annotations.as_ref()?.get(REF_NAME).map(String::as_str)
    }

    fn is_index(&self) -> bool {
        self.media_type.contains("image.index") || self.media_type.contains("manifest.list")
    }

    /// Build records that buildkit stores beside the images.
    fn is_attestation(&self) -> bool {
        self.annotations
            .as_ref()
            .is_some_and(|notes| notes.contains_key("vnd.docker.reference.type"))
    }
}

/// `DIR[:TAG]`: the whole is a directory, or what stands before its last colon is.
pub(super) fn split_tag(text: &str) -> SourceSpec {
    match text.rsplit_once(':') {
        Some((dir, tag)) if !dir.is_empty() && !tag.is_empty() && !Path::new(text).is_dir() => {
            SourceSpec::Oci(dir.into(), Some(tag.to_owned()))
        }
        _ => SourceSpec::Oci(text.into(), None),
    }
}

/// The platform images are chosen for.
pub(crate) fn host_platform() -> String {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    };
    format!("linux/{arch}")
}

struct Layout<'a> {
    dir: &'a Path,
    name: String,
}

/// Loads one image of a layout.
pub(super) fn load(
    dir: &Path,
    tag: Option<&str>,
    session: &mut Session<'_>,
) -> Result<(Tree, OverlayXattrs), SourceError> {
    let layout = Layout {
        dir,
        name: format!("oci:{}", dir.display()),
    };
    let marker = dir.join("oci-layout");
    std::fs::metadata(&marker)
        .map_err(|e| SourceError::io(marker, "find the marker of an OCI image layout", e))?;
    let chosen = layout.choose(tag)?;
    let manifest: Manifest = layout.json(&chosen, "manifest")?;
    let config = layout.blob_bytes(&manifest.config, "config")?;
    let config = ImageConfig::parse(&config, &layout.name)?;
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        layers.push(layout.layer(layer, session)?);
    }
    let tree = compose(&layout.name, &config, &layers, session)?;
    Ok((tree, OverlayXattrs::Escape))
}

impl Layout<'_> {
    fn wrong(&self, what: &'static str, found: impl ToString) -> SourceError {
        SourceError::Image {
            image: self.name.clone(),
            what,
            found: found.to_string(),
        }
    }

    fn choose(&self, tag: Option<&str>) -> Result<Descriptor, SourceError> {
        let path = self.dir.join("index.json");
        let bytes = read_bounded(&path)?;
        let index: Index = serde_json::from_slice(&bytes)
            .map_err(|e| self.wrong("its index.json is no image index", e))?;
        let all = index.manifests;
        let named: Vec<Descriptor> = all
            .iter()
            .filter(|d| tag.is_none() || d.ref_name() == tag)
            .cloned()
            .collect();
        if named.is_empty() {
            return Err(self.choice("no image", tag.unwrap_or("any name"), &all));
        }
        let mut leaves = Vec::new();
        self.expand(named, 0, &mut leaves)?;
        let mut seen = std::collections::HashSet::new();
        leaves.retain(|d| !d.is_attestation() && seen.insert(d.digest.clone()));
        if leaves.len() == 1 {
            return Ok(leaves.swap_remove(0));
        }
        let host = host_platform();
        let mut fitting = Vec::new();
        for leaf in &leaves {
            if self.platform(leaf)? == host {
                fitting.push(leaf.clone());
            }
        }
        match fitting.len() {
            1 => Ok(fitting.swap_remove(0)),
            0 => Err(self.choice("no image", &host, &leaves)),
            _ => Err(self.choice("more than one image", &host, &fitting)),
        }
    }

    fn choice(&self, found: &'static str, wanted: &str, among: &[Descriptor]) -> SourceError {
        let mut choices: Vec<String> = among
            .iter()
            .take(20)
            .map(|d| {
                let platform = d.platform.as_ref().map(Platform::name);
                let name = d.ref_name().unwrap_or(&d.digest);
                platform.map_or_else(|| name.to_owned(), |p| format!("{name} ({p})"))
            })
            .collect();
        if choices.is_empty() {
            choices.push("the layout is empty".to_owned());
        }
        SourceError::Choice {
            image: self.name.clone(),
            found,
            wanted: wanted.to_owned(),
            choices: choices.join(", "),
        }
    }

    fn expand(
        &self,
        from: Vec<Descriptor>,
        depth: u32,
        leaves: &mut Vec<Descriptor>,
    ) -> Result<(), SourceError> {
        for descriptor in from {
            if leaves.len() >= MANIFESTS_MAX || depth > INDEX_DEPTH_MAX {
                return Err(
                    self.wrong("its indexes hold too much", "a loop or thousands of images")
                );
            }
            if descriptor.is_index() {
                let inner: Index = self.json(&descriptor, "index")?;
                self.expand(inner.manifests, depth + 1, leaves)?;
            } else {
                leaves.push(descriptor);
            }
        }
        Ok(())
    }

    fn platform(&self, leaf: &Descriptor) -> Result<String, SourceError> {
        if let Some(platform) = &leaf.platform {
            return Ok(platform.name());
        }
        let manifest: Manifest = self.json(leaf, "manifest")?;
        let config = self.blob_bytes(&manifest.config, "config")?;
        let config = ImageConfig::parse(&config, &self.name)?;
        Ok(format!("{}/{}", config.os, config.architecture))
    }

    fn json<T: for<'de> Deserialize<'de>>(
        &self,
        descriptor: &Descriptor,
        what: &'static str,
    ) -> Result<T, SourceError> {
        let bytes = self.blob_bytes(descriptor, what)?;
        serde_json::from_slice(&bytes)
            .map_err(|e| self.wrong("a manifest is of an unknown form", e))
    }

    fn blob_path(&self, digest: &str) -> Result<PathBuf, SourceError> {
        let hex = digest.strip_prefix("sha256:").filter(|hex| {
            hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        });
        match hex {
            Some(hex) => Ok(self.dir.join("blobs").join("sha256").join(hex)),
            None => Err(self.wrong(
                "digests must be `sha256:` and 64 hex digits",
                digest.chars().take(100).collect::<String>(),
            )),
        }
    }

    fn check_size(
        &self,
        descriptor: &Descriptor,
        what: &'static str,
        found: u64,
    ) -> Result<(), SourceError> {
        if found == descriptor.size {
            return Ok(());
        }
        Err(self.damaged(
            descriptor,
            what,
            format!("{} bytes", descriptor.size),
            format!("{found} bytes"),
        ))
    }

    fn damaged(
        &self,
        descriptor: &Descriptor,
        what: &'static str,
        expected: String,
        found: String,
    ) -> SourceError {
        SourceError::Blob {
            image: self.name.clone(),
            what,
            blob: descriptor.digest.clone(),
            expected,
            found,
        }
    }

    fn blob_bytes(
        &self,
        descriptor: &Descriptor,
        what: &'static str,
    ) -> Result<Vec<u8>, SourceError> {
        let bytes = read_bounded(&self.blob_path(&descriptor.digest)?)?;
        self.check_size(descriptor, what, crate::ids::to_u64(bytes.len()))?;
        let found = sha256_of(bytes.as_slice())
            .map_err(|e| SourceError::io(self.dir, "hash a blob of", e))?;
        if found == descriptor.digest {
            Ok(bytes)
        } else {
            Err(self.damaged(descriptor, what, descriptor.digest.clone(), found))
        }
    }

    fn layer(
        &self,
        descriptor: &Descriptor,
        session: &mut Session<'_>,
    ) -> Result<LayerBlob, SourceError> {
        if descriptor.media_type.contains("encrypted") {
            return Err(self.wrong(
                "encrypted layers are not supported, decrypt the image first",
                &descriptor.media_type,
            ));
        }
        let archive = Archive::open(&self.blob_path(&descriptor.digest)?)?;
        self.check_size(descriptor, "layer", archive.stamp.size)?;
        let part = FilePart {
            file: archive.file.clone(),
            base: 0,
            len: archive.stamp.size,
        };
        session.archives.push(archive);
        Ok(LayerBlob {
            name: descriptor.digest.clone(),
            part,
            digest: Some(descriptor.digest.clone()),
        })
    }
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, SourceError> {
    let fail = |e| SourceError::io(path, "read", e);
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(fail)?;
    file.take(JSON_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(fail)?;
    if crate::ids::to_u64(bytes.len()) > JSON_BYTES_MAX {
        return Err(SourceError::Image {
            image: path.display().to_string(),
            what: "a JSON document of an image has at most 16 MiB",
            found: "more".to_owned(),
        });
    }
    Ok(bytes)
}
