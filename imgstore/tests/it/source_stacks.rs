//! Random stacks of layers made by real operations on real overlay mounts, compared with the model.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use imgstore::build::BuildOptions;
use imgstore::origin::mem::MemOrigin;
use imgstore::source::merge::merge_stack;
use imgstore::tree::Tree;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, mknodat};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::build::build_as;
use crate::kernel_mount::KernelMount;
use crate::model::{lines, load_path, load_text};
use crate::random_tree::Rng;

/// An overlay mount that is gone when it is dropped.
struct Overlay(PathBuf);

impl Overlay {
    /// Lowers from the top down; without an upper it is read-only. Volatile: no sync of the whole disk at each unmount.
    fn mount(at: &Path, lowers: &[PathBuf], upper: Option<(&Path, &Path)>) -> Self {
        let lowers: Vec<&str> = lowers.iter().map(|path| path.to_str().unwrap()).collect();
        let mut options = format!("lowerdir={}", lowers.join(":"));
        if let Some((upper, work)) = upper {
            options.push_str(&format!(
                ",upperdir={},workdir={},metacopy=off,redirect_dir=off,index=off,volatile",
                upper.display(),
                work.display()
            ));
        }
        let options = std::ffi::CString::new(options).unwrap();
        mount("none", at, "overlay", MountFlags::empty(), &*options).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        // Detached: a process that another test starts at this moment holds our descriptors until it executes.
        unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

fn path(rng: &mut Rng, root: &Path) -> PathBuf {
    let depth = 1 + rng.below(3);
    (0..depth).fold(root.to_owned(), |path, _| {
        path.join(format!("n{}", rng.below(4)))
    })
}

fn remove(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// One operation; many fail, which changes nothing or half of it, as in life.
fn operate(rng: &mut Rng, root: &Path) -> io::Result<()> {
    let (a, b) = (path(rng, root), path(rng, root));
    match rng.below(12) {
        0 | 1 => fs::create_dir_all(&a),
        2 => {
            // Not into a fifo, which would wait for a reader.
            let writable = a.metadata().is_ok_and(|m| m.is_file()) || a.symlink_metadata().is_err();
            if writable {
                fs::write(&a, rng.below(1000).to_string())
            } else {
                Ok(())
            }
        }
        3 => {
            fs::create_dir_all(&a)?;
            fs::write(a.join(format!("f{}", rng.below(3))), b"")
        }
        4 => fs::hard_link(&a, &b),
        5 => symlink(format!("n{}", rng.below(4)), &a),
        6 | 7 => remove(&a),
        8 => {
            remove(&a)?;
            fs::create_dir(&a)?;
            fs::write(a.join("n0"), b"again")
        }
        9 => fs::rename(&a, &b),
        10 => {
            if a.symlink_metadata()?.is_symlink() {
                return Ok(());
            }
            let mode = u32::try_from(rng.below(0o10000)).unwrap();
            fs::set_permissions(&a, Permissions::from_mode(mode))?;
            let value = rng.below(100).to_string();
            Ok(lsetxattr(
                &a,
                "trusted.k",
                value.as_bytes(),
                XattrFlags::empty(),
            )?)
        }
        _ => {
            mknodat(CWD, &a, FileType::Fifo, Mode::RUSR, 0)?;
            lchown(&a, Some(u32::try_from(rng.below(9)).unwrap()), Some(7))
        }
    }
}

/// Two to four layers: the lowest a plain directory, each other one the upper of a mount over all before it.
pub(crate) fn random_stack(dir: &Path, rng: &mut Rng) -> Vec<Tree> {
    let mut lowers: Vec<PathBuf> = Vec::new();
    let mut trees = Vec::new();
    for layer in 0..2 + rng.below(3) {
        let make = |name: &str| {
            let path = dir.join(format!("{name}{layer}"));
            fs::create_dir(&path).unwrap();
            path
        };
        let (upper, work, at) = (make("u"), make("w"), make("m"));
        let mounted =
            (!lowers.is_empty()).then(|| Overlay::mount(&at, &lowers, Some((&upper, &work))));
        let root = if mounted.is_some() { &at } else { &upper };
        let mut done = 0;
        for _ in 0..25 {
            done += u32::from(operate(rng, root).is_ok());
        }
        assert!(done > 0, "some operation works");
        drop(mounted);
        trees.push(
            load_text(&format!("upper:{}", upper.display()))
                .unwrap()
                .tree,
        );
        lowers.insert(0, upper);
    }
    trees
}

/// Compares one stack; gives its numbers of whiteouts and opaque directories.
fn compare(seed: u64) -> [usize; 2] {
    let dir = tempfile::tempdir().unwrap();
    let trees = random_stack(dir.path(), &mut Rng::new(seed));
    // The layers as they are published and mounted, read-only, over an empty directory.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let mut lowers = vec![empty];
    let mut counts = [0, 0];
    let origin = MemOrigin::default();
    let mut layers = Vec::new();
    for (index, tree) in trees.iter().enumerate() {
        let options = BuildOptions {
            threads: 1,
            ..BuildOptions::default()
        };
        let built = build_as(tree, &format!("{index}"), &origin, &options);
        let layer = KernelMount::of(&origin, &built.layer);
        lowers.insert(0, layer.path().to_owned());
        layers.push(layer);
        for inode in &tree.inodes {
            let opaque = b"trusted.overlay.opaque".as_slice();
            counts[0] += usize::from(inode.is_whiteout());
            counts[1] += usize::from(inode.meta.xattrs.contains_key(opaque));
        }
    }
    let at = dir.path().join("m0");
    let mounted = Overlay::mount(&at, &lowers, None);
    let shown = lines(&load_path(&at).tree);
    drop(mounted);
    assert_eq!(lines(&merge_stack(&trees)), shown, "seed {seed}");
    counts
}

#[test]
fn the_model_equals_the_kernel_on_500_random_stacks() {
    // Mounting and unmounting mostly waits, so several stacks go on at once.
    const THREADS: u64 = 10;
    let counts: Vec<[usize; 2]> = std::thread::scope(|scope| {
        let seeds = |first| (first..=500).step_by(10);
        let work = |first| scope.spawn(move || seeds(first).map(compare).collect::<Vec<_>>());
        let threads: Vec<_> = (1..=THREADS).map(work).collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    assert_eq!(counts.len(), 500);
    let sum = |of: usize| counts.iter().map(|c| c[of]).sum::<usize>();
    assert!(sum(0) > 500 && sum(1) > 100, "{} {}", sum(0), sum(1));
}
