//! Puts the entries of a tar into a tree.
//!
//! - The last entry of a path wins, with the rules of [`super::tree_edit`]; names that start with `.wh.` mean nothing here.
//! - A hard link is another name of whatever inode its target path has: also of symbolic links, fifos, devices. It may stand
//!   before its target: then it is resolved at the end. A link to itself changes nothing. A target that never comes is an
//!   error. Attributes of link entries are ignored, the inode has its own.
//! - A character device 0:0 is kept as one: in a composition it hides the name below.
//! - Numeric owners count, names do not.

use std::io::Read;
use std::path::Path;

use super::decompress::{Compression, peek};
use super::error::{EntryFault, TarFault, shown};
use super::tar_input::{FilePart, TarInput};
use super::tar_read::{EntryKind, TarEntry, TarReader};
use super::tree_edit::{self, Slot};
use super::xattr_filter::OverlayXattrs;
use super::{Archive, Session, SourceError, acl_text, tree_path};
use crate::tree::{Inode, InodeId, Kind, ROOT, Tree};

/// A tar file. A plain regular file is referred to by offset, anything else goes through the spool.
pub(super) fn load_file(
    path: &Path,
    session: &mut Session<'_>,
) -> Result<(Tree, OverlayXattrs), SourceError> {
    let archive = Archive::open(path)?;
    let name = path.display().to_string();
    let failed = |e| SourceError::io(path, "read", e);
    if !archive.is_regular()? {
        let file = archive.file.try_clone().map_err(failed)?;
        return load_stream(Box::new(std::fs::File::from(file)), &name, session);
    }
    let part = FilePart {
        file: archive.file.clone(),
        base: 0,
        len: archive.stamp.size,
    };
    session.archives.push(archive);
    let (first, stream) = peek(Box::new(part.reader().map_err(failed)?)).map_err(failed)?;
    match Compression::of(&first, &name)? {
        Compression::None => read_tree(TarInput::file(&part, &name)?, &mut session.meter),
        _ => load_stream(stream, &name, session),
    }
}

/// A tar that comes as a stream.
pub(super) fn load_stream(
    stream: Box<dyn Read + '_>,
    name: &str,
    session: &mut Session<'_>,
) -> Result<(Tree, OverlayXattrs), SourceError> {
    let failed = |source| SourceError::ArchiveRead {
        archive: name.to_owned(),
        offset: 0,
        source,
    };
    let (first, stream) = peek(stream).map_err(failed)?;
    let plain = Compression::of(&first, name)?
        .reader(stream, &session.expansion)
        .map_err(failed)?;
    let input = TarInput::stream(plain, name, &mut session.spool);
    read_tree(input, &mut session.meter)
}

fn read_tree(
    input: TarInput<'_>,
    meter: &mut super::Meter<'_>,
) -> Result<(Tree, OverlayXattrs), SourceError> {
    let mut reader = TarReader::new(input);
    let mut tree = Tree::new(tree_edit::default_dir());
    let mut applier = Applier::new(&mut tree, reader.name().to_owned());
    let mut passed = 0;
    while let Some(entry) = reader.next()? {
        applier.apply(entry)?;
        meter.count(1, reader.at() - passed);
        passed = reader.at();
    }
    if reader.is_empty() {
        return Err(SourceError::Archive {
            archive: reader.name().to_owned(),
            offset: 0,
            fault: TarFault::Empty,
        });
    }
    applier.finish()?;
    let overlay = if reader.is_layer() {
        OverlayXattrs::AsStored
    } else {
        OverlayXattrs::Escape
    };
    Ok((tree, overlay))
}

/// Most inodes that are made of one source, replaced ones too: a metadata image of the largest size has no place for more.
pub(super) const INODES_MAX: usize = 16 << 20;

/// A link whose target is not there yet.
#[derive(Debug)]
struct Pending {
    slot: Slot,
    path: Vec<u8>,
    target: Vec<u8>,
}

/// Applies entries to a tree.
#[derive(Debug)]
pub(super) struct Applier<'t> {
    tree: &'t mut Tree,
    archive: String,
    pending: Vec<Pending>,
}

impl<'t> Applier<'t> {
    pub(super) const fn new(tree: &'t mut Tree, archive: String) -> Self {
        Self {
            tree,
            archive,
            pending: Vec::new(),
        }
    }

    fn at(&self, path: &[u8], fault: EntryFault) -> SourceError {
        SourceError::Entry {
            archive: self.archive.clone(),
            path: shown(path),
            fault,
        }
    }

    pub(super) fn apply(&mut self, entry: TarEntry) -> Result<(), SourceError> {
        let path = entry.path.clone();
        self.try_apply(entry).map_err(|fault| self.at(&path, fault))
    }

    fn try_apply(&mut self, entry: TarEntry) -> Result<(), EntryFault> {
        let parts = tree_path::parts(&entry.path)?;
        let slot = tree_edit::make_slot(self.tree, &parts)?;
        if self.tree.inodes.len() > INODES_MAX || self.pending.len() > INODES_MAX {
            return Err(EntryFault::TooMany);
        }
        let kind = match entry.kind {
            EntryKind::Link(target) => {
                let slot = slot.ok_or(EntryFault::RootNotDirectory)?;
                return self.link(slot, entry.path, target);
            }
            EntryKind::File(content) => Kind::File(content),
            EntryKind::Dir => Kind::Dir(Default::default()),
            EntryKind::Symlink(target) => Kind::Symlink(target),
            EntryKind::Char(major, minor) => Kind::Char(major, minor),
            EntryKind::Block(major, minor) => Kind::Block(major, minor),
            EntryKind::Fifo => Kind::Fifo,
        };
        let mut meta = entry.meta;
        acl_text::add(&mut meta.xattrs, &entry.acl)?;
        match (slot, kind) {
            (Some(slot), kind) => {
                tree_edit::place(self.tree, &slot, Inode { meta, kind });
                Ok(())
            }
            (None, Kind::Dir(_)) => {
                self.tree.inode_mut(ROOT).meta = meta;
                Ok(())
            }
            (None, _) => Err(EntryFault::RootNotDirectory),
        }
    }

    fn link(&mut self, slot: Slot, path: Vec<u8>, target: Vec<u8>) -> Result<(), EntryFault> {
        match self.target(&target)? {
            Some(id) => tree_edit::put(self.tree, slot.dir, &slot.name, id),
            None => {
                tree_edit::remove(self.tree, &slot);
                self.pending.push(Pending { slot, path, target });
            }
        }
        Ok(())
    }

    /// The inode a link means, if it is there.
    fn target(&mut self, target: &[u8]) -> Result<Option<InodeId>, EntryFault> {
        let parts = tree_path::parts(target)?;
        let found = match tree_edit::find_slot(self.tree, &parts) {
            Ok(slot) => slot.and_then(|slot| tree_edit::in_slot(self.tree, &slot)),
            // A parent that is a file may become a directory yet.
            Err(EntryFault::ParentNotDirectory(_)) => None,
            Err(e) => return Err(e),
        };
        match found {
            Some(id) if matches!(self.tree.inode(id).kind, Kind::Dir(_)) => {
                Err(EntryFault::LinkToDirectory(shown(target)))
            }
            found => Ok(found),
        }
    }

    /// Resolves what is left, in rounds, since links may point to links.
    pub(super) fn finish(mut self) -> Result<(), SourceError> {
        loop {
            let pending = std::mem::take(&mut self.pending);
            let before = pending.len();
            for link in pending {
                // A later entry of the same path has won.
                if tree_edit::in_slot(self.tree, &link.slot).is_some() {
                    continue;
                }
                let Pending { slot, path, target } = link;
                self.link(slot, path.clone(), target)
                    .map_err(|fault| self.at(&path, fault))?;
            }
            if self.pending.is_empty() {
                return Ok(());
            }
            if self.pending.len() == before {
                break;
            }
        }
        let first = self.pending.swap_remove(0);
        let fault = EntryFault::MissingLinkTarget(shown(&first.target));
        Err(self.at(&first.path, fault))
    }
}
