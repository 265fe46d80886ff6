//! A disk that stops after a number of operations, and one whose power fails: what was not synced may be lost or torn.
//!
//! The operations are carried out in a real folder and written down. A stop (SIGKILL) leaves what was carried out. A power cut
//! is played from the list into another folder, worse than any file system: contents that were not synced may be
//! missing, zeros, cut off, or garbage behind a good start, and changes of names may be lost one by one, not only
//! the last ones.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use imgstore::store::cache::disk::{CacheDisk, RealDisk, Space, Stat};

use crate::random_tree::Rng;

/// One operation that was carried out. Paths are below the root.
#[derive(Debug, Clone)]
enum Op {
    Create(PathBuf, Vec<u8>),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    Folder(PathBuf),
    RemoveFolder(PathBuf),
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct StoppingDisk {
    root: PathBuf,
    steps: AtomicUsize,
    stop_at: usize,
    ops: Mutex<Vec<Op>>,
}

impl StoppingDisk {
    /// Nothing happens any more from step `stop_at` on.
    pub(crate) fn new(root: &Path, stop_at: usize) -> Self {
        Self {
            root: root.to_owned(),
            steps: AtomicUsize::new(0),
            stop_at,
            ops: Mutex::default(),
        }
    }

    /// Steps that were tried.
    pub(crate) fn steps(&self) -> usize {
        self.steps.load(Ordering::Relaxed)
    }

    /// Whether everything that was asked was done.
    pub(crate) fn ran_through(&self) -> bool {
        self.steps() <= self.stop_at
    }

    fn step(&self) -> io::Result<()> {
        if self.steps.fetch_add(1, Ordering::Relaxed) < self.stop_at {
            return Ok(());
        }
        Err(io::Error::other("stopped"))
    }

    fn done(&self, op: impl FnOnce(&dyn Fn(&Path) -> PathBuf) -> Op) {
        let below = |path: &Path| path.strip_prefix(&self.root).unwrap().to_owned();
        self.ops.lock().unwrap().push(op(&below));
    }

    /// What a power cut now may leave, written below `to`.
    pub(crate) fn cut_power(&self, rng: &mut Rng, to: &Path) {
        let ops = self.ops.lock().unwrap();
        let mut left = Left::new(&ops, rng);
        for (at, op) in ops.iter().enumerate() {
            left.play(at, op, rng);
        }
        left.write(to);
    }
}

impl CacheDisk for StoppingDisk {
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<u64> {
        self.step()?;
        let mut file = fs::File::create_new(path)?;
        self.done(|below| Op::Create(below(path), Vec::new()));
        // Half of it, and all of it, are steps of their own.
        for end in [bytes.len() / 2, bytes.len()] {
            self.step()?;
            file.write_all(&bytes[usize::try_from(file.metadata()?.len()).unwrap()..end])?;
            self.done(|below| Op::Create(below(path), bytes[..end].to_vec()));
        }
        Ok(RealDisk.stat(path)?.unwrap().bytes)
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        self.done(|below| Op::Sync(below(path)));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        RealDisk.rename(from, to)?;
        self.done(|below| Op::Rename(below(from), below(to)));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        RealDisk.remove(path)?;
        self.done(|below| Op::Remove(below(path)));
        Ok(())
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        RealDisk.create_folder(path)?;
        self.done(|below| Op::Folder(below(path)));
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        RealDisk.remove_folder(path)?;
        self.done(|below| Op::RemoveFolder(below(path)));
        Ok(())
    }

    fn list(&self, folder: &Path, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        RealDisk.list(folder, each)
    }

    fn stat(&self, path: &Path) -> io::Result<Option<Stat>> {
        RealDisk.stat(path)
    }

    fn read(&self, path: &Path, len_max: u64) -> io::Result<Option<Vec<u8>>> {
        RealDisk.read(path, len_max)
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        RealDisk.space(path)
    }
}

/// The folder after the power cut, as it is being put together.
struct Left {
    files: BTreeMap<PathBuf, (Vec<u8>, bool)>,
    folders: Vec<PathBuf>,
    /// Changes of names before this operation are durable: a folder was synced, and with it, on a journaling file
    /// system, all that came before. In the other half of the cases only those in that folder.
    durable: Vec<(PathBuf, usize)>,
    journaled: bool,
    /// Changes of names from this operation on are lost, where names are journaled.
    lost_from: usize,
}

impl Left {
    fn new(ops: &[Op], rng: &mut Rng) -> Self {
        let is_folder = |path: &Path| {
            let below = |op: &Op| matches!(op, Op::Rename(_, to) if to.parent() == Some(path));
            ops.iter().any(below)
        };
        let synced = ops.iter().enumerate();
        let durable: Vec<_> = synced
            .filter_map(|(at, op)| match op {
                Op::Sync(path) if is_folder(path) => Some((path.clone(), at)),
                _ => None,
            })
            .collect();
        let journaled = rng.below(2) == 0;
        let last = durable.iter().map(|(_, at)| *at).max().unwrap_or(0);
        let behind = u64::try_from(ops.len() - last).unwrap();
        let lost_from = last + usize::try_from(rng.below(behind + 1)).unwrap();
        Self {
            files: BTreeMap::new(),
            folders: Vec::new(),
            durable,
            journaled,
            lost_from,
        }
    }

    /// Whether a change of a name survives.
    fn survives(&self, at: usize, path: &Path, rng: &mut Rng) -> bool {
        if self.journaled {
            return at < self.lost_from;
        }
        let mut durable = self.durable.iter();
        durable.any(|(folder, until)| path.parent() == Some(folder) && at < *until)
            || rng.below(10) < 7
    }

    fn play(&mut self, at: usize, op: &Op, rng: &mut Rng) {
        match op {
            Op::Create(path, bytes) => {
                // A file that was not created is lost with all that happens to it.
                if bytes.is_empty() || self.files.contains_key(path) {
                    self.files.insert(path.clone(), (bytes.clone(), false));
                }
            }
            Op::Sync(path) => {
                if let Some((_, synced)) = self.files.get_mut(path) {
                    *synced = true;
                }
            }
            Op::Rename(from, to) => {
                if self.survives(at, to, rng)
                    && let Some(file) = self.files.remove(from)
                {
                    self.files.insert(to.clone(), file);
                }
            }
            Op::Remove(path) => {
                if self.survives(at, path, rng) {
                    self.files.remove(path);
                }
            }
            Op::Folder(path) => self.folders.push(path.clone()),
            Op::RemoveFolder(path) => self.folders.retain(|folder| folder != path),
        }
    }

    fn write(&self, to: &Path) {
        for folder in &self.folders {
            fs::create_dir_all(to.join(folder)).unwrap();
        }
        for (path, (bytes, synced)) in &self.files {
            let path = to.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let seed = path.file_name().unwrap().len() + bytes.len() + self.lost_from;
            let mut rng = Rng::new(u64::try_from(seed).unwrap());
            let left = if *synced {
                bytes.clone()
            } else {
                torn(bytes, &mut rng)
            };
            fs::write(path, left).unwrap();
        }
    }
}

/// What may be left of bytes that were not synced.
fn torn(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let cut = usize::try_from(rng.below(u64::try_from(bytes.len()).unwrap() + 1)).unwrap();
    match rng.below(7) {
        0 => Vec::new(),
        1 => vec![0; bytes.len()],
        2 => bytes[..cut].to_vec(),
        3 => {
            let mut left = bytes.to_vec();
            left[cut..].fill(0);
            left
        }
        4 => {
            let mut left = bytes.to_vec();
            left[..cut].fill(0);
            left
        }
        5 => {
            let mut left = bytes.to_vec();
            left[cut..].iter_mut().for_each(|b| *b ^= 0x5a);
            left
        }
        _ => bytes.to_vec(),
    }
}
