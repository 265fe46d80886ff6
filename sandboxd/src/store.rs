//! What is known of sandboxes, on disk: one folder and one small record each.
//!
//! `STATE/sandboxes/ID/record.json` is written before anything is made, and again when its place is known; replaced atomically.
//! `STATE/sandboxes/ID/rw` is what the sandbox writes. After its end the record stays for a while, so that people can ask why.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::api::{SandboxInfo, State, Step};
use crate::backend::Place;
use crate::container::cgroup::Limits;
use crate::network::policy::Rule;

/// Records of ended sandboxes that are kept.
pub(crate) const ENDED_MAX: usize = 1000;

/// One sandbox, as it is written down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What everybody may see.
    #[serde(flatten)]
    pub info: SandboxInfo,
    /// Whose it is.
    pub project: String,
    /// What it may use.
    pub limits: Limits,
    /// Environment of what runs in it.
    pub envs: BTreeMap<String, String>,
    /// Who runs things.
    pub user: String,
    /// Where things run.
    pub cwd: String,
    /// Milliseconds without a request until it is killed.
    pub idle_ms: Option<u64>,
    /// Milliseconds that it lives from when it is ready.
    pub lifetime_ms: Option<u64>,
    /// Where it is, once it is somewhere.
    pub place: Option<Place>,
    /// The composition it stands on.
    pub hold: Option<PathBuf>,
    /// What it may reach.
    #[serde(default)]
    pub network: Vec<Rule>,
    /// Folders with the changes of its ancestors, lowest first, on top of the layers.
    pub frozen: Vec<PathBuf>,
    /// Its snapshots and the layers that were made of it, by time.
    #[serde(default)]
    pub steps: Vec<KeptStep>,
}

/// A step, and where it is kept if it is a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStep {
    /// What everybody may see.
    #[serde(flatten)]
    pub step: Step,
    /// The copy of what the sandbox had changed.
    pub folder: Option<PathBuf>,
}

impl Record {
    /// Copies of changes that must stay.
    pub(crate) fn stands_on(self) -> Vec<PathBuf> {
        let kept = self.steps.into_iter().filter_map(|kept| kept.folder);
        self.frozen.into_iter().chain(kept).collect()
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// Opens (or makes) the folder.
    ///
    /// # Errors
    /// What the disk says.
    pub fn open(state: &Path) -> io::Result<Self> {
        let folder = state.join("sandboxes");
        fs::create_dir_all(&folder)?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(&folder, private)?;
        Ok(Self { folder })
    }

    /// A sandbox's folder.
    pub fn folder(&self, id: &str) -> PathBuf {
        self.folder.join(id)
    }

    /// What a sandbox writes.
    pub fn rw(&self, id: &str) -> PathBuf {
        self.folder(id).join("rw")
    }

    /// The file that a sandbox's disk is in, if it has a limit.
    pub fn image(&self, id: &str) -> PathBuf {
        self.folder(id).join("disk.ext4")
    }

    /// Writes a record.
    ///
    /// # Errors
    /// What the disk says.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        let folder = self.folder(&record.info.id);
        fs::create_dir_all(&folder)?;
        let temporary = folder.join("record.tmp");
        let mut file = fs::File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(record)?)?;
        fs::rename(&temporary, folder.join("record.json"))
    }

    /// Removes all of a sandbox.
    ///
    /// # Errors
    /// What the disk says; that nothing is there is none.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        crate::disk::detach(&self.rw(id))?;
        gone_already(fs::remove_dir_all(self.folder(id)))
    }

    /// Removes what a sandbox wrote.
    ///
    /// # Errors
    /// What the disk says; that nothing is there is none.
    pub fn remove_rw(&self, id: &str) -> io::Result<()> {
        crate::disk::detach(&self.rw(id))?;
        gone_already(fs::remove_file(self.image(id)))?;
        gone_already(fs::remove_dir_all(self.rw(id)))
    }

    /// All records, by creation. One that cannot be read is reported and left alone; ended ones above the bound are removed.
    ///
    /// # Errors
    /// What the disk says.
    pub fn all(&self) -> io::Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let folder = entry?.path();
            let path = folder.join("record.json");
            gone_already(fs::remove_file(folder.join("record.tmp")))?;
            if !path.try_exists()? {
                // It is the first to be written and goes with the rest, after the sandbox: this is the rest.
                crate::disk::detach(&folder.join("rw"))?;
                gone_already(fs::remove_dir_all(&folder))?;
                continue;
            }
            let read = fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
            match read {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "a record cannot be read; that sandbox is not adopted");
                }
            }
        }
        records.sort_by_key(|record| record.info.created_ms);
        let ended = records.iter().filter(|r| r.info.state == State::Gone);
        let over = ended.clone().count().saturating_sub(ENDED_MAX);
        let old: Vec<String> = ended.take(over).map(|r| r.info.id.clone()).collect();
        for id in &old {
            self.remove(id)?;
        }
        records.retain(|record| !old.contains(&record.info.id));
        Ok(records)
    }
}

fn gone_already(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
