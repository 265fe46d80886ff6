//! An OverlayFS upper directory as a layer: its marks stay marks, in the one form a lower of a `trusted.*` mount needs.
//!
//! Which attributes are OverlayFS's depends on how the upper was mounted. If anything in it has a `trusted.overlay.*`
//! attribute that is not escaped, it was a normal mount: those count, and `user.overlay.*` is data of files. If not, it was
//! mounted with `userxattr` (or has no marks): `user.overlay.*` counts.
//!
//! | in the upper (`P` is `trusted` or `user`) | in the layer |
//! |---|---|
//! | character device 0:0 | whiteout |
//! | empty file with `P.overlay.whiteout` in a directory with `P.overlay.opaque` = `x` | whiteout |
//! | directory with `P.overlay.opaque` = `y` | `trusted.overlay.opaque` = `y` |
//! | directory that holds whiteouts and is not opaque | `trusted.overlay.origin`, empty: without it OverlayFS lists whiteouts of a directory that no lower layer has |
//! | whiteout in an opaque directory | nothing: it hides nothing |
//! | `P.overlay.` `origin`, `impure`, `nlink`, `upper`, `uuid`, `protattr` | dropped: they speak of the mount that was |
//! | `trusted.overlay.overlay.*` | as it is: data, escaped for the mount to come |
//! | `user.overlay.overlay.*` of a `userxattr` upper | one level less: the mount to come does not escape it |
//! | `P.overlay.metacopy`, `P.overlay.redirect`, anything else | an error |
//!
//! Every whiteout is its own inode without owner, mode, time or attributes: it is the absence of a name, and the kernel's
//! habit of hard-linking whiteouts must not show in digests.

use std::collections::BTreeMap;

use super::SourceError;
use super::error::shown;
use crate::tree::{Inode, InodeId, Kind, Meta, Tree};

const TRUSTED: &[u8] = b"trusted.overlay.";
const USER: &[u8] = b"user.overlay.";
const ESCAPED: &[u8] = b"overlay.";
pub(super) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
const ORIGIN: &[u8] = b"trusted.overlay.origin";
const DROPPED: [&str; 6] = ["origin", "impure", "nlink", "upper", "uuid", "protattr"];

/// Marks of one inode.
#[derive(Debug, Default, Clone, Copy)]
struct Marks {
    opaque: bool,
    /// The directory may hold whiteouts in the form of empty files.
    xwhiteouts: bool,
    whiteout: bool,
}

/// Turns the raw tree of an upper directory into the tree of a layer.
pub(super) fn convert(tree: &mut Tree) -> Result<(), SourceError> {
    let prefix = prefix_of(tree);
    let paths = tree.walk();
    let mut marks: BTreeMap<InodeId, Marks> = BTreeMap::new();
    for (path, id) in &paths {
        if !marks.contains_key(id) {
            let found = take_marks(&mut tree.inode_mut(*id).meta, path, prefix)?;
            marks.insert(*id, found);
        }
    }
    let mut done = std::collections::HashSet::new();
    for (path, id) in paths {
        if done.insert(id) && matches!(tree.inode(id).kind, Kind::Dir(_)) {
            convert_dir(tree, id, &path, &marks)?;
        }
    }
    Ok(())
}

fn prefix_of(tree: &Tree) -> &'static [u8] {
    let is_mark = |name: &Vec<u8>| {
        name.strip_prefix(TRUSTED)
            .is_some_and(|rest| !rest.starts_with(ESCAPED))
    };
    let trusted = tree
        .inodes
        .iter()
        .any(|inode| inode.meta.xattrs.keys().any(is_mark));
    let user = tree
        .inodes
        .iter()
        .any(|inode| inode.meta.xattrs.keys().any(|name| name.starts_with(USER)));
    if user && !trusted { USER } else { TRUSTED }
}

fn take_marks(meta: &mut Meta, path: &[u8], prefix: &[u8]) -> Result<Marks, SourceError> {
    let mut marks = Marks::default();
    for (name, value) in std::mem::take(&mut meta.xattrs) {
        let Some(rest) = name.strip_prefix(prefix) else {
            meta.xattrs.insert(name, value);
            continue;
        };
        let refuse = |advice| SourceError::Overlay {
            path: shown(path),
            xattr: shown(&name),
            advice,
        };
        match rest {
            b"opaque" if value == b"y" => marks.opaque = true,
            b"opaque" if value == b"x" => marks.xwhiteouts = true,
            b"opaque" => return Err(refuse("its value is neither `y` nor `x`")),
            b"whiteout" => marks.whiteout = true,
            b"metacopy" | b"redirect" => {
                return Err(refuse(
                    "mount the overlay with `metacopy=off,redirect_dir=off` and make the changes again",
                ));
            }
            _ if DROPPED.iter().any(|known| known.as_bytes() == rest) => {}
            _ if rest.starts_with(ESCAPED) && prefix == USER => {
                let inner = rest.strip_prefix(ESCAPED).unwrap_or_default();
                meta.xattrs.insert([USER, inner].concat(), value);
            }
            _ if rest.starts_with(ESCAPED) => {
                meta.xattrs.insert(name, value);
            }
            _ => return Err(refuse("this version does not know the attribute")),
        }
    }
    Ok(marks)
}

fn convert_dir(
    tree: &mut Tree,
    dir: InodeId,
    path: &[u8],
    marks: &BTreeMap<InodeId, Marks>,
) -> Result<(), SourceError> {
    let own = marks.get(&dir).copied().unwrap_or_default();
    let mut whiteouts = Vec::new();
    for (name, child) in tree.entries(dir) {
        let marked = marks.get(&child).is_some_and(|marks| marks.whiteout);
        let inode = tree.inode(child);
        let empty = matches!(&inode.kind, Kind::File(content) if content.len == 0);
        if marked && !(empty && own.xwhiteouts) {
            return Err(SourceError::Overlay {
                path: shown(&[path, b"/", name].concat()),
                xattr: "overlay.whiteout".to_owned(),
                advice: "it counts only on an empty file in a directory whose overlay.opaque is `x`",
            });
        }
        if marked || inode.is_whiteout() {
            whiteouts.push(name.to_vec());
        }
    }
    if own.opaque {
        let xattrs = &mut tree.inode_mut(dir).meta.xattrs;
        xattrs.insert(OPAQUE.to_vec(), b"y".to_vec());
    } else if !whiteouts.is_empty() {
        let xattrs = &mut tree.inode_mut(dir).meta.xattrs;
        xattrs.insert(ORIGIN.to_vec(), Vec::new());
    }
    for name in whiteouts {
        let new = (!own.opaque).then(|| {
            tree.add(Inode {
                meta: Meta::default(),
                kind: Kind::Char(0, 0),
            })
        });
        let Some(entries) = tree.dir_mut(dir) else {
            continue;
        };
        match new {
            Some(id) => entries.insert(name, id),
            None => entries.remove(&name),
        };
    }
    Ok(())
}
