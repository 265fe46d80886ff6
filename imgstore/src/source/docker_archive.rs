//! A `docker save` archive: a tar with `manifest.json`, a config and the layers as tars.
//!
//! The outer tar is read as any other tar; layers are then parts of it (or of the spool, if it was compressed), found by
//! path with the symbolic links that older writers used for layers stored once. Layers are checked against the config's
//! `diff_ids`, the config against the digest in its own name where it has one.

use std::path::Path;

use serde::Deserialize;

use super::content::ContentReader;
use super::image_config::{ImageConfig, JSON_BYTES_MAX};
use super::image_layers::{LayerBlob, compose, sha256_of};
use super::tar_input::FilePart;
use super::xattr_filter::OverlayXattrs;
use super::{Session, SourceError, tar_apply, tree_edit, tree_path};
use crate::ids::to_usize;
use crate::tree::{Content, Kind, Place, Tree};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Image {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

struct Outer {
    name: String,
    tree: Tree,
}

/// Loads the one image of an archive.
pub(super) fn load(
    path: &Path,
    session: &mut Session<'_>,
) -> Result<(Tree, OverlayXattrs), SourceError> {
    let (tree, _) = tar_apply::load_file(path, session)?;
    session.expansion.go_inside();
    let mut outer = Outer {
        name: format!("docker-archive:{}", path.display()),
        tree,
    };
    let manifest = outer.bytes("manifest.json")?;
    let images: Vec<Image> = serde_json::from_slice(&manifest)
        .map_err(|e| outer.wrong("its manifest.json is of an unknown form", e))?;
    let [image] = images.as_slice() else {
        return Err(outer.choice(&images));
    };
    let config = outer.bytes(&image.config)?;
    outer.check_config(&image.config, &config)?;
    let config = ImageConfig::parse(&config, &outer.name)?;
    let mut layers = Vec::new();
    for layer in &image.layers {
        layers.push(LayerBlob {
            name: layer.clone(),
            part: outer.part(layer)?,
            digest: None,
        });
    }
    let tree = compose(&outer.name, &config, &layers, session)?;
    Ok((tree, OverlayXattrs::Escape))
}

impl Outer {
    fn wrong(&self, what: &'static str, found: impl ToString) -> SourceError {
        SourceError::Image {
            image: self.name.clone(),
            what,
            found: found.to_string(),
        }
    }

    fn choice(&self, images: &[Image]) -> SourceError {
        let names = images.iter().map(|image| {
            let tags = image.repo_tags.clone().unwrap_or_default();
            tags.first()
                .cloned()
                .unwrap_or_else(|| image.config.clone())
        });
        SourceError::Choice {
            image: self.name.clone(),
            found: if images.is_empty() {
                "no image"
            } else {
                "more than one image"
            },
            wanted: "a build, which takes an archive of exactly one (`docker save IMAGE`)"
                .to_owned(),
            choices: names.take(20).collect::<Vec<_>>().join(", "),
        }
    }

    fn file(&mut self, path: &str) -> Result<Content, SourceError> {
        let parts = tree_path::parts(path.as_bytes())
            .and_then(|parts| tree_edit::find(&mut self.tree, &parts))
            .map_err(|fault| SourceError::Entry {
                archive: self.name.clone(),
                path: path.to_owned(),
                fault,
            })?;
        match parts.map(|id| &self.tree.inode(id).kind) {
            Some(Kind::File(content)) => Ok(content.clone()),
            Some(_) => Err(self.wrong("expected a file in the archive", path)),
            None => Err(self.wrong("a file is missing in the archive", path)),
        }
    }

    fn bytes(&mut self, path: &str) -> Result<Vec<u8>, SourceError> {
        let content = self.file(path)?;
        if content.len > JSON_BYTES_MAX {
            return Err(self.wrong("a JSON document of an image has at most 16 MiB", path));
        }
        let mut bytes = vec![0; to_usize(content.len)];
        ContentReader::open(&content)?.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    fn part(&mut self, path: &str) -> Result<FilePart, SourceError> {
        let content = self.file(path)?;
        match content.place {
            Place::Runs(file, runs) => match runs.as_slice() {
                [] if content.len == 0 => Ok(FilePart {
                    file,
                    base: 0,
                    len: 0,
                }),
                [run] if run.file_offset == 0 && run.len == content.len => Ok(FilePart {
                    file,
                    base: run.stored_offset,
                    len: run.len,
                }),
                _ => Err(self.wrong("layers must not be stored as sparse files", path)),
            },
            Place::Path(..) | Place::Layer => {
                Err(self.wrong("layers must be inside the archive", path))
            }
        }
    }

    /// Config files are named by their digest: `HEX.json` or `blobs/sha256/HEX`.
    fn check_config(&self, path: &str, bytes: &[u8]) -> Result<(), SourceError> {
        let name = path.rsplit('/').next().unwrap_or_default();
        let name = name.strip_suffix(".json").unwrap_or(name);
        let is_digest = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_digest {
            return Ok(());
        }
        let expected = format!("sha256:{name}");
        let found = sha256_of(bytes).map_err(|e| SourceError::io(&self.name, "hash", e))?;
        if found == expected {
            return Ok(());
        }
        Err(SourceError::Blob {
            image: self.name.clone(),
            what: "config",
            blob: path.to_owned(),
            expected,
            found,
        })
    }
}
