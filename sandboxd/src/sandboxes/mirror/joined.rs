//! What several generations of a sandbox wrote, as if one had written it all: the changes of a sandbox that was forked.
//!
//! What lies above decides, by the rules of an overlay: a folder over a folder joins with it, unless it is opaque; everything
//! else hides all below its name. Marks for the layers below all of them stay: a whiteout stays one, and a folder that hid something
//! of an earlier generation is opaque, since what it hid, hid the layers.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use super::{Mirror, On as _, Result, Stamp, folder, walk};

/// The overlay's mark of a folder that hides what lies below.
const OPAQUE: &str = "trusted.overlay.opaque";
/// Longest value of the mark that is looked at.
const MARK_BYTES_MAX: usize = 8;

/// One entry of joined changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Joined {
    /// The generation that it is of.
    pub(in super::super) of: usize,
    /// It is a folder that hides what the layers have under its name.
    pub(in super::super) opaque: bool,
    /// Names that it has among these entries.
    pub(in super::super) names: usize,
    stamp: Stamp,
}

impl Joined {
    fn is_folder(self) -> bool {
        self.stamp.kind() == FileType::Directory
    }

    fn inode(self) -> (usize, u64) {
        (self.of, self.stamp.ino)
    }
}

/// The entries of all generations (lowest first) that are left when each lies on the one before. Nobody changes them meanwhile.
pub(in super::super) fn joined(generations: &[PathBuf]) -> Result<BTreeMap<PathBuf, Joined>> {
    let mut all = BTreeMap::new();
    for (of, generation) in generations.iter().enumerate() {
        let root = open_root(generation)?;
        let mut found = BTreeMap::new();
        walk(&root, &mut found)?;
        for (path, (stamp, _)) in found {
            let is_folder = stamp.kind() == FileType::Directory;
            let opaque = is_folder && is_opaque(&root, &path)?;
            let entry = Joined {
                of,
                opaque,
                names: 1,
                stamp,
            };
            lay(&mut all, path, entry);
        }
    }
    let mut names: HashMap<(usize, u64), usize> = HashMap::new();
    for entry in all.values() {
        *names.entry(entry.inode()).or_default() += 1;
    }
    for entry in all.values_mut() {
        entry.names = names.get(&entry.inode()).copied().unwrap_or(1);
    }
    Ok(all)
}

/// Lays one entry on what is there. Pure.
fn lay(all: &mut BTreeMap<PathBuf, Joined>, path: PathBuf, mut entry: Joined) {
    let below = all.get(&path).copied();
    let joins = entry.is_folder() && !entry.opaque && below.is_none_or(Joined::is_folder);
    if joins {
        entry.opaque = below.is_some_and(|below| below.opaque);
    } else {
        // What is below a path comes right after it.
        let hidden = all.range(path.clone()..).map(|(name, _)| name);
        let hidden: Vec<PathBuf> = hidden
            .take_while(|name| name.starts_with(&path))
            .cloned()
            .collect();
        for name in hidden {
            all.remove(&name);
        }
        entry.opaque = entry.is_folder();
    }
    all.insert(path, entry);
}

/// Copies all generations, lowest first, to one folder at `to`, which must not exist.
pub(in super::super) fn join(generations: &[PathBuf], to: &Path) -> Result<()> {
    let entries = joined(generations)?;
    std::fs::create_dir(to).on(to)?;
    let mirrors = generations.iter().map(|from| {
        Ok(Mirror {
            from: open_root(from)?,
            to: open_root(to)?,
            entries: BTreeMap::new(),
        })
    });
    let mirrors: Vec<Mirror> = mirrors.collect::<Result<_>>()?;
    let mut links: HashMap<(usize, u64), &Path> = HashMap::new();
    for (path, entry) in &entries {
        let mirror = mirrors.get(entry.of).ok_or(Errno::NOENT).on(path)?;
        match (entry.stamp.kind(), links.get(&entry.inode())) {
            (FileType::Directory, _) => mirror.make_folder(path)?,
            (_, Some(first)) => mirror.link(first, path)?,
            (FileType::RegularFile, None) => mirror.copy_file(path, entry.stamp, true)?,
            (_, None) => mirror.copy_special(path, entry.stamp)?,
        }
        if entry.names > 1 {
            links.entry(entry.inode()).or_insert(path);
        }
    }
    // Children first: making something in a folder changes its times.
    let folders = entries.iter().rev().filter(|(_, entry)| entry.is_folder());
    for (path, entry) in folders {
        let mirror = mirrors.get(entry.of).ok_or(Errno::NOENT).on(path)?;
        mirror.copy_folder_attributes(path)?;
        if entry.opaque {
            let at = folder(&mirror.to, path)?;
            rustix::fs::fsetxattr(&at, OPAQUE, b"y", XattrFlags::empty()).on(path)?;
        }
    }
    Ok(())
}

fn open_root(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).on(path)
}

fn is_opaque(root: &OwnedFd, path: &Path) -> Result<bool> {
    let opened = folder(root, path)?;
    let mut value = [0; MARK_BYTES_MAX];
    match rustix::fs::fgetxattr(&opened, OPAQUE, &mut value) {
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(false),
        len => Ok(value.get(..len.on(path)?) == Some(b"y")),
    }
}

#[cfg(test)]
mod tests;
