//! The reference model of OverlayFS: what a mount of some layers shows.
//!
//! Pure and simple; the kernel does the real thing. Tests compare the two. Rules, from the lowest layer up:
//! - a whiteout (character device 0:0) hides the name below and is not shown;
//! - a directory over a directory merges: entries of both, attributes of the upper; with `trusted.overlay.opaque` = `y` the
//!   lower one is hidden whole;
//! - anything else replaces;
//! - names of one inode in one layer stay names of one inode; layers share none;
//! - attributes `trusted.overlay.*` are not shown, escaped ones (`trusted.overlay.overlay.*`) with one level less.

use std::collections::HashMap;

use super::tree_edit::default_dir;
use super::upper::OPAQUE;
use crate::tree::{Inode, InodeId, Kind, Meta, ROOT, Tree};

/// What a mount of these layers shows, lowest first.
pub fn merge_stack<'t>(layers: impl IntoIterator<Item = &'t Tree>) -> Tree {
    layers
        .into_iter()
        .fold(Tree::new(default_dir()), |view, layer| {
            apply_overlay(&view, layer)
        })
}

/// What is seen when `upper`, a layer, lies over `view`, the view of the layers below.
pub fn apply_overlay(view: &Tree, upper: &Tree) -> Tree {
    let mut merge = Merge {
        view,
        upper,
        out: Tree::new(shown_meta(&upper.inode(ROOT).meta)),
        from_view: HashMap::new(),
        from_upper: HashMap::new(),
    };
    let mut todo = vec![(Some(ROOT), Some(ROOT), ROOT)];
    while let Some((lower, upper, out)) = todo.pop() {
        merge.dir(lower, upper, out, &mut todo);
    }
    merge.out
}

/// A directory to fill: in the view, in the upper layer, in the result.
type Todo = (Option<InodeId>, Option<InodeId>, InodeId);

struct Merge<'t> {
    view: &'t Tree,
    upper: &'t Tree,
    out: Tree,
    from_view: HashMap<InodeId, InodeId>,
    from_upper: HashMap<InodeId, InodeId>,
}

impl Merge<'_> {
    fn dir(
        &mut self,
        lower: Option<InodeId>,
        upper: Option<InodeId>,
        out: InodeId,
        todo: &mut Vec<Todo>,
    ) {
        let (view, layer) = (self.view, self.upper);
        let hidden = upper.is_some_and(|id| is_opaque(layer.inode(id)));
        let lower = lower.filter(|_| !hidden);
        let uppers: HashMap<&[u8], InodeId> =
            upper.into_iter().flat_map(|id| layer.entries(id)).collect();
        for (name, id) in lower.into_iter().flat_map(|id| view.entries(id)) {
            if !uppers.contains_key(name) {
                let copy = self.copy_lower(id, todo);
                self.name(out, name, copy);
            }
        }
        let below: HashMap<&[u8], InodeId> =
            lower.into_iter().flat_map(|id| view.entries(id)).collect();
        for (name, id) in uppers {
            let inode = layer.inode(id);
            if inode.is_whiteout() {
                continue;
            }
            let under = below.get(name).copied();
            let copy = self.copy_upper(id, under, todo);
            self.name(out, name, copy);
        }
    }

    fn name(&mut self, dir: InodeId, name: &[u8], id: InodeId) {
        if let Some(entries) = self.out.dir_mut(dir) {
            entries.insert(name.to_vec(), id);
        }
    }

    fn copy_lower(&mut self, id: InodeId, todo: &mut Vec<Todo>) -> InodeId {
        if let Some(copy) = self.from_view.get(&id) {
            return *copy;
        }
        let inode = self.view.inode(id);
        let is_dir = matches!(inode.kind, Kind::Dir(_));
        let copy = self.out.add(Inode {
            meta: inode.meta.clone(),
            kind: emptied(&inode.kind),
        });
        self.from_view.insert(id, copy);
        if is_dir {
            todo.push((Some(id), None, copy));
        }
        copy
    }

    fn copy_upper(&mut self, id: InodeId, under: Option<InodeId>, todo: &mut Vec<Todo>) -> InodeId {
        if let Some(copy) = self.from_upper.get(&id) {
            return *copy;
        }
        let inode = self.upper.inode(id);
        let copy = self.out.add(Inode {
            meta: shown_meta(&inode.meta),
            kind: emptied(&inode.kind),
        });
        self.from_upper.insert(id, copy);
        if matches!(inode.kind, Kind::Dir(_)) {
            let is_dir = |id: &InodeId| matches!(self.view.inode(*id).kind, Kind::Dir(_));
            todo.push((under.filter(is_dir), Some(id), copy));
        }
        copy
    }
}

fn emptied(kind: &Kind) -> Kind {
    match kind {
        Kind::Dir(_) => Kind::Dir(Default::default()),
        other => other.clone(),
    }
}

fn is_opaque(inode: &Inode) -> bool {
    inode.meta.xattrs.get(OPAQUE).is_some_and(|v| v == b"y")
}

fn shown_meta(meta: &Meta) -> Meta {
    let mut shown = meta.clone();
    shown.xattrs.clear();
    for (name, value) in &meta.xattrs {
        let private = name.strip_prefix(b"trusted.overlay.");
        let name = match private.map(|rest| rest.strip_prefix(b"overlay.")) {
            None => name.clone(),
            Some(Some(inner)) => [b"trusted.overlay.", inner].concat(),
            Some(None) => continue,
        };
        shown.xattrs.insert(name, value.clone());
    }
    shown
}
