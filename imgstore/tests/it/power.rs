//! Power loss under a directory origin, at every system call.
//!
//! A model of the disk listens to the steps that the origin makes. Bytes that were not synced are torn: any beginning of
//! them, or zeros. Names that were not synced are there or not, each by itself, in the order in which they were made. A
//! folder whose own name is not durable is gone with all that is in it. What the disk can look like is written out, and a
//! fresh reader looks at it: no visible tag points to something that is missing or torn.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use imgstore::origin::Origin;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::dir::steps::{Step, Steps};
use imgstore::store::tags;

use crate::collected::{collect, index_is_right, memory_folder, publish, tag, tags_are_right};
use crate::random_tree::Rng;

/// A file's bytes, and whether they would survive.
#[derive(Debug, Clone)]
struct Bytes {
    bytes: Arc<Vec<u8>>,
    durable: bool,
}

/// A change of one name that would not survive for certain.
#[derive(Debug, Clone)]
enum Change {
    Put(PathBuf, Bytes),
    Gone(PathBuf),
    Folder(PathBuf),
}

impl Change {
    fn path(&self) -> &Path {
        match self {
            Self::Put(path, _) | Self::Gone(path) | Self::Folder(path) => path,
        }
    }
}

/// What is on the disk for certain, and what is on its way.
#[derive(Debug, Clone, Default)]
struct Disk {
    files: BTreeMap<PathBuf, Bytes>,
    folders: Vec<PathBuf>,
    pending: Vec<Change>,
    /// Files that were synced under a temporary name.
    synced: BTreeMap<PathBuf, Arc<Vec<u8>>>,
}

impl Disk {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Put(path, bytes) => {
                self.files.insert(path, bytes);
            }
            Change::Gone(path) => {
                self.files.remove(&path);
            }
            Change::Folder(path) => self.folders.push(path),
        }
    }

    fn content(&self, path: &Path) -> Bytes {
        let bytes = fs::read(path).unwrap();
        match self.synced.get(path) {
            Some(synced) if **synced == bytes => Bytes {
                bytes: Arc::clone(synced),
                durable: true,
            },
            _ => Bytes {
                bytes: Arc::new(bytes),
                durable: false,
            },
        }
    }

    fn take(&mut self, step: Step<'_>) {
        match step {
            Step::Create(_) => {}
            Step::Sync(path) => {
                let bytes = Arc::new(fs::read(path).unwrap());
                self.synced.insert(path.to_owned(), bytes);
            }
            // The name may be taken: then nothing happens.
            Step::Link(_, to) if to.exists() => {}
            Step::Link(from, to) | Step::Rename(from, to) => {
                let content = self.content(from);
                self.pending.push(Change::Put(to.to_owned(), content));
            }
            Step::Remove(path) => self.pending.push(Change::Gone(path.to_owned())),
            Step::MakeDir(path) if path.exists() => {}
            Step::MakeDir(path) => self.pending.push(Change::Folder(path.to_owned())),
            Step::SyncDir(folder) => {
                let pending = std::mem::take(&mut self.pending);
                for change in pending {
                    if change.path().parent() == Some(folder) {
                        self.apply(change);
                    } else {
                        self.pending.push(change);
                    }
                }
            }
        }
    }

    /// Writes what might be found after a power loss to an empty folder.
    fn write_out(&self, root: &Path, to: &Path, rng: &mut Rng) {
        let mut found = self.clone();
        found.pending.clear();
        for change in &self.pending {
            if rng.below(2) == 0 {
                found.apply(change.clone());
            }
        }
        let there = |path: &Path| {
            let mut above = path.ancestors().skip(1).take_while(|up| *up != root);
            above.all(|up| found.folders.iter().any(|f| f == up))
        };
        for (path, content) in found.files.iter().filter(|(path, _)| there(path)) {
            let place = to.join(path.strip_prefix(root).unwrap());
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, torn(content, rng)).unwrap();
        }
    }
}

fn torn(content: &Bytes, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = content.bytes.to_vec();
    if !content.durable {
        let len = usize::try_from(rng.below(u64::try_from(bytes.len()).unwrap() + 1)).unwrap();
        if rng.below(2) == 0 {
            bytes.truncate(len);
        } else {
            bytes[len..].fill(0);
        }
    }
    bytes
}

/// Keeps what is known of the disk before each step.
#[derive(Debug, Default)]
struct Power {
    disk: Mutex<Disk>,
    moments: Mutex<Vec<Disk>>,
}

impl Steps for Power {
    fn before(&self, step: Step<'_>) -> io::Result<()> {
        let mut disk = self.disk.lock().unwrap();
        self.moments.lock().unwrap().push(disk.clone());
        disk.take(step);
        Ok(())
    }
}

fn history(origin: &dyn Origin) {
    publish(origin, 0b0_0011, "1").unwrap();
    publish(origin, 0b0_0110, "2").unwrap();
    tags::untag(origin, &tag("2")).unwrap();
    publish(origin, 0b0_1100, "1").unwrap();
    collect(origin, Duration::ZERO).unwrap();
    publish(origin, 0b0_0011, "3").unwrap();
}

/// Mutations, each seen red: no sync of a temporary file; no sync of the folder behind a link, a rename, or a tag that goes; no
/// sync of the folder that a new folder is in.
#[test]
fn power_is_lost_at_every_step() {
    let folder = memory_folder();
    let more = std::env::var("DSEC_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    let (cases, again) = more.map_or((6, 16), |n: u64| (n, 1));
    let root = folder.path().join("origin");
    let power = Arc::new(Power::default());
    let origin = DirOrigin::create_root(&root)
        .unwrap()
        .with_steps(Arc::clone(&power) as _);
    history(&origin);
    let moments = power.moments.lock().unwrap();
    assert!(moments.len() > 200, "{} steps", moments.len());
    let mut rng = Rng::new(7);
    for (n, disk) in moments.iter().enumerate() {
        for case in 0..cases {
            let found = folder.path().join(format!("found-{n}-{case}"));
            fs::create_dir(&found).unwrap();
            disk.write_out(&root, &found, &mut rng);
            let when = format!("power lost before step {n}, case {case}");
            look(&found, &when, case == 0 && n % again == 0);
            fs::remove_dir_all(&found).unwrap();
        }
    }
}

/// All that is visible is whole, and all can be done again.
fn look(found: &Path, when: &str, again: bool) {
    let origin = DirOrigin::open(found).unwrap();
    tags_are_right(&origin, when);
    // The index is a help for those who cannot list; it is right again with the next change.
    let index = origin.fetch_all("index.json", 1 << 20);
    assert!(
        !matches!(index, Ok(bytes) if serde_json::from_slice::<serde_json::Value>(&bytes).is_err()),
        "{when}"
    );
    if !again {
        return;
    }
    // What a collector left says that it is this process, which did not end.
    for name in origin.list("gc/").unwrap() {
        origin.remove(&name).unwrap();
    }
    publish(&origin, 0b0_0011, "1").unwrap_or_else(|e| panic!("{when}: {e}"));
    tags_are_right(&origin, when);
    index_is_right(&origin);
    collect(&origin, Duration::ZERO).unwrap_or_else(|e| panic!("{when}: {e}"));
    tags_are_right(&origin, when);
}
