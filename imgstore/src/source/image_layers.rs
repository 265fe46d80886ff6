//! Applies the layers of an image in order, with OCI whiteouts.
//!
//! A layer is applied in two steps, so that the order of its entries does not matter:
//! 1. its whiteouts remove what *lower* layers have: `.wh.NAME` removes `NAME`, `.wh..wh..opq` all entries of its directory;
//! 2. its other entries are placed by the rules of [`super::tar_apply`]. Hard links may point into lower layers.
//!
//! Whatever else starts with `.wh..wh.` is a control file of AUFS: links to it work while the layer is applied, then it goes.
//! A `.wh.` name without a name behind it is an error. Every layer's bytes are checked against the digests the image states,
//! before decompression and behind it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::rc::Rc;

use sha2::{Digest as _, Sha256};

use super::decompress::{Compression, peek};
use super::error::{EntryFault, shown};
use super::image_config::ImageConfig;
use super::tar_apply::{Applier, INODES_MAX};
use super::tar_input::{FilePart, TarInput};
use super::tar_read::{TarEntry, TarReader};
use super::{Session, SourceError, tree_edit, tree_path};
use crate::tree::Tree;

const WHITEOUT: &[u8] = b".wh.";
const CONTROL: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// One layer as the image stores it.
#[derive(Debug)]
pub(super) struct LayerBlob {
    /// What messages call it.
    pub(super) name: String,
    pub(super) part: FilePart,
    /// `sha256:…` of the stored bytes, where the image states it.
    pub(super) digest: Option<String>,
}

/// Applies all layers and notes the config's labels.
pub(super) fn compose(
    image: &str,
    config: &ImageConfig,
    layers: &[LayerBlob],
    session: &mut Session<'_>,
) -> Result<Tree, SourceError> {
    let diff_ids = &config.rootfs.diff_ids;
    if diff_ids.len() != layers.len() {
        return Err(SourceError::Image {
            image: image.to_owned(),
            what: "its config and manifest must list the same number of layers",
            found: format!("{} and {}", diff_ids.len(), layers.len()),
        });
    }
    let mut tree = Tree::new(tree_edit::default_dir());
    for (layer, diff_id) in layers.iter().zip(diff_ids) {
        let entries = read_layer(image, layer, diff_id, session)?;
        apply_layer(&mut tree, entries, &layer.name)?;
    }
    session.labels = config.labels();
    Ok(tree)
}

fn read_layer(
    image: &str,
    layer: &LayerBlob,
    diff_id: &str,
    session: &mut Session<'_>,
) -> Result<Vec<TarEntry>, SourceError> {
    let failed = |e| SourceError::io(&layer.name, "read", e);
    let damaged = |expected: &str, found: String| SourceError::Blob {
        image: image.to_owned(),
        what: "layer",
        blob: layer.name.clone(),
        expected: expected.to_owned(),
        found,
    };
    let stored = sha256_of(layer.part.reader().map_err(failed)?).map_err(failed)?;
    if let Some(expected) = layer.digest.as_deref().filter(|digest| *digest != stored) {
        return Err(damaged(expected, stored));
    }
    let (first, stream) = peek(Box::new(layer.part.reader().map_err(failed)?)).map_err(failed)?;
    let compression = Compression::of(&first, &layer.name)?;
    if compression == Compression::None {
        if stored != diff_id {
            return Err(damaged(diff_id, stored));
        }
        let input = TarInput::file(&layer.part, &layer.name)?;
        return read_entries(TarReader::new(input), &mut session.meter);
    }
    let hash = Rc::new(RefCell::new(Sha256::new()));
    let plain = HashingReader {
        inner: compression
            .reader(stream, &session.expansion)
            .map_err(failed)?,
        hash: Rc::clone(&hash),
    };
    let input = TarInput::stream(Box::new(plain), &layer.name, &mut session.spool);
    let entries = read_entries(TarReader::new(input), &mut session.meter)?;
    let found = hex(&hash.borrow_mut().finalize_reset());
    if found == diff_id {
        Ok(entries)
    } else {
        Err(damaged(diff_id, found))
    }
}

fn read_entries(
    mut reader: TarReader<'_>,
    meter: &mut super::Meter<'_>,
) -> Result<Vec<TarEntry>, SourceError> {
    let mut entries = Vec::new();
    let mut passed = 0;
    while let Some(entry) = reader.next()? {
        if entries.len() >= INODES_MAX {
            return Err(SourceError::Entry {
                archive: reader.name().to_owned(),
                path: shown(&entry.path),
                fault: EntryFault::TooMany,
            });
        }
        entries.push(entry);
        meter.count(1, reader.at() - passed);
        passed = reader.at();
    }
    Ok(entries)
}

/// What an entry of a layer does.
enum Role {
    Whiteout(Vec<u8>),
    Opaque,
    /// The parts up to and with the control name.
    Control(Vec<Vec<u8>>),
    Entry,
}

fn role(parts: &[&[u8]]) -> Result<Role, EntryFault> {
    let Some(name) = parts.last() else {
        return Ok(Role::Entry);
    };
    if *name == OPAQUE {
        return Ok(Role::Opaque);
    }
    if let Some(at) = parts.iter().position(|part| part.starts_with(CONTROL)) {
        let path = parts.iter().take(at + 1).map(|part| part.to_vec());
        return Ok(Role::Control(path.collect()));
    }
    match name.strip_prefix(WHITEOUT) {
        None => Ok(Role::Entry),
        Some(b"" | b"." | b"..") => Err(EntryFault::Whiteout),
        Some(hidden) => Ok(Role::Whiteout(hidden.to_vec())),
    }
}

/// Applies one layer's entries to what the lower layers made.
pub(super) fn apply_layer(
    tree: &mut Tree,
    entries: Vec<TarEntry>,
    archive: &str,
) -> Result<(), SourceError> {
    let at = |path: &[u8], fault| SourceError::Entry {
        archive: archive.to_owned(),
        path: shown(path),
        fault,
    };
    let mut controls = BTreeSet::new();
    let mut placed = Vec::new();
    for entry in entries {
        let parts = tree_path::parts(&entry.path).map_err(|f| at(&entry.path, f))?;
        match role(&parts).map_err(|f| at(&entry.path, f))? {
            Role::Whiteout(hidden) => {
                hide(tree, &parts, Some(&hidden)).map_err(|f| at(&entry.path, f))?;
                continue;
            }
            Role::Opaque => {
                hide(tree, &parts, None).map_err(|f| at(&entry.path, f))?;
                continue;
            }
            Role::Control(path) => {
                controls.insert(path);
            }
            Role::Entry => {}
        }
        placed.push(entry);
    }
    let mut applier = Applier::new(tree, archive.to_owned());
    for entry in placed {
        applier.apply(entry)?;
    }
    applier.finish()?;
    for path in controls {
        let parts: Vec<&[u8]> = path.iter().map(Vec::as_slice).collect();
        let slot = tree_edit::find_slot(tree, &parts).map_err(|f| at(&parts.join(&b'/'), f))?;
        if let Some(slot) = slot {
            tree_edit::remove(tree, &slot);
        }
    }
    Ok(())
}

/// Removes `hidden`, or everything, from the directory of a whiteout. Where there is no such directory nothing is hidden.
fn hide(tree: &mut Tree, parts: &[&[u8]], hidden: Option<&[u8]>) -> Result<(), EntryFault> {
    let slot = match tree_edit::find_slot(tree, parts) {
        Ok(slot) => slot,
        Err(EntryFault::ParentNotDirectory(_)) => None,
        Err(e) => return Err(e),
    };
    let Some(entries) = slot.and_then(|slot| tree.dir_mut(slot.dir)) else {
        return Ok(());
    };
    match hidden {
        Some(name) => {
            entries.remove(name);
        }
        None => entries.clear(),
    }
    Ok(())
}

/// `sha256:` and 64 hex digits of everything a reader gives.
pub(super) fn sha256_of(mut reader: impl Read) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut reader, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

fn hex(digest: &[u8]) -> String {
    let mut text = "sha256:".to_owned();
    for byte in digest {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Hashes what passes.
struct HashingReader<'r> {
    inner: Box<dyn Read + 'r>,
    hash: Rc<RefCell<Sha256>>,
}

impl Read for HashingReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        let passed = buf.get(..n).unwrap_or_default();
        self.hash.borrow_mut().update(passed);
        Ok(n)
    }
}
