//! Changes a tree by path, as an unpacker changes a directory.
//!
//! Rules (those of containerd and docker):
//! - The *parent* of a path is resolved with symbolic links followed inside the root: `bin/x` where `bin -> usr/bin`
//!   becomes `usr/bin/x`, an absolute target starts at the root, `..` stops there. The last part is never followed.
//! - Missing parents are made: mode 0755, owner 0:0, time 0. A parent that is a file is an error.
//! - A directory over a directory replaces its attributes and keeps its entries; anything else over anything else
//!   replaces the whole subtree. So a directory entry named like a symbolic link replaces the link.

use super::error::{EntryFault, shown};
use super::finish::SYMLINK_MAX;
use crate::tree::{Inode, InodeId, Kind, Meta, ROOT, Tree};

/// Symbolic links followed in one path, as in the kernel.
const LINKS_MAX: u32 = 40;

/// A place for a name: the directory and the name in it. The root has no place.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) dir: InodeId,
    pub(super) name: Vec<u8>,
}

/// A directory that no entry describes.
pub(super) fn default_dir() -> Meta {
    Meta {
        perm: 0o755,
        ..Meta::default()
    }
}

/// The slot of a path, its parents made where they are missing; `None` for the root.
pub(super) fn make_slot(tree: &mut Tree, parts: &[&[u8]]) -> Result<Option<Slot>, EntryFault> {
    let Some((name, parents)) = parts.split_last() else {
        return Ok(None);
    };
    let dir = resolve(tree, parents, Goal::Dir, &mut |tree, dir, name| {
        let id = tree.add(Inode {
            meta: default_dir(),
            kind: Kind::Dir(Default::default()),
        });
        put(tree, dir, name, id);
        Some(id)
    })?;
    Ok(dir.map(|dir| Slot {
        dir,
        name: name.to_vec(),
    }))
}

/// The slot of a path if its parent is there; `None` also for the root.
pub(super) fn find_slot(tree: &mut Tree, parts: &[&[u8]]) -> Result<Option<Slot>, EntryFault> {
    let Some((name, parents)) = parts.split_last() else {
        return Ok(None);
    };
    let dir = resolve(tree, parents, Goal::Dir, &mut |_, _, _| None)?;
    Ok(dir.map(|dir| Slot {
        dir,
        name: name.to_vec(),
    }))
}

/// What a path means with every symbolic link followed, the last too.
pub(super) fn find(tree: &mut Tree, parts: &[&[u8]]) -> Result<Option<InodeId>, EntryFault> {
    resolve(tree, parts, Goal::Any, &mut |_, _, _| None)
}

/// What is in a slot.
pub(super) fn in_slot(tree: &Tree, slot: &Slot) -> Option<InodeId> {
    match &tree.inode(slot.dir).kind {
        Kind::Dir(entries) => entries.get(&slot.name).copied(),
        _ => None,
    }
}

/// Gives the name to an inode.
pub(super) fn put(tree: &mut Tree, dir: InodeId, name: &[u8], id: InodeId) {
    if let Some(entries) = tree.dir_mut(dir) {
        entries.insert(name.to_vec(), id);
    }
}

/// Removes the name and all below it.
pub(super) fn remove(tree: &mut Tree, slot: &Slot) {
    if let Some(entries) = tree.dir_mut(slot.dir) {
        entries.remove(&slot.name);
    }
}

/// Places an inode: over a directory, a directory only replaces the attributes.
pub(super) fn place(tree: &mut Tree, slot: &Slot, inode: Inode) {
    let there = in_slot(tree, slot).filter(|id| matches!(tree.inode(*id).kind, Kind::Dir(_)));
    match (there, &inode.kind) {
        (Some(id), Kind::Dir(_)) => tree.inode_mut(id).meta = inode.meta,
        _ => {
            let id = tree.add(inode);
            put(tree, slot.dir, &slot.name, id);
        }
    }
}

type Missing<'f> = dyn FnMut(&mut Tree, InodeId, &[u8]) -> Option<InodeId> + 'f;

/// What a path may lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    Dir,
    Any,
}

/// Follows `parts` from the root to its goal. `missing` is asked for a directory where nothing is.
fn resolve(
    tree: &mut Tree,
    parts: &[&[u8]],
    goal: Goal,
    missing: &mut Missing<'_>,
) -> Result<Option<InodeId>, EntryFault> {
    let mut above = vec![ROOT];
    let mut todo: Vec<Vec<u8>> = parts.iter().rev().map(|part| part.to_vec()).collect();
    let mut links = 0;
    while let Some(part) = todo.pop() {
        let dir = above.last().copied().unwrap_or(ROOT);
        match part.as_slice() {
            b"" | b"." => continue,
            b".." => {
                if above.len() > 1 {
                    above.pop();
                }
                continue;
            }
            _ => {}
        }
        let slot = Slot { dir, name: part };
        let Some(id) = in_slot(tree, &slot).or_else(|| missing(tree, dir, &slot.name)) else {
            return Ok(None);
        };
        match &tree.inode(id).kind {
            Kind::Dir(_) => above.push(id),
            Kind::Symlink(target) => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(EntryFault::SymlinkLoop);
                }
                if target.len() > SYMLINK_MAX {
                    return Err(EntryFault::UnsafePath(
                        "a symbolic link in it has a target of more than 4095 bytes",
                    ));
                }
                if target.starts_with(b"/") {
                    above.truncate(1);
                }
                let target = target.split(|b| *b == b'/').rev().map(<[u8]>::to_vec);
                todo.extend(target);
            }
            _ if todo.is_empty() && goal == Goal::Any => return Ok(Some(id)),
            _ => return Err(EntryFault::ParentNotDirectory(shown(&slot.name))),
        }
    }
    Ok(above.last().copied())
}
