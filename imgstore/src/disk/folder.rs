//! A disk as a folder: what its layers are, and the pair that takes writes.
//!
//! ```text
//! DISK/disk.json           the layers, bottom to top, and the size: replaced atomically
//! DISK/lock                held by whoever has the disk open
//! DISK/NAME.data, .index   pairs
//! DISK/NAME.lsmt           sealed layers of this disk
//! ```
//! `disk.json` is always written before files get a new meaning and after they are complete: whatever is killed in between,
//! what it names opens. Files that it does not name are leftovers and are removed when the disk is opened.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::DiskError;
use super::device::BlockDevice;
use super::layer::Layer;
use super::live::{LiveDisk, View};
use super::pair::Pair;
use super::seal::{commit, seal};
use super::stack::{LAYERS_MAX, Stack};
use crate::format::FormatError;
use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::header::{Header, Uuid};
use crate::media::Media;
use crate::media::file::FileMedia;

/// Format of `disk.json`.
const FORMAT: u32 = 1;
const STATE: &str = "disk.json";
const LOCK: &str = "lock";

/// How a layer lies on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Lower {
    /// An OverlayBD file: LSMT, ZFile or tar around either.
    Lsmt(PathBuf),
    /// An image without format.
    Raw(PathBuf),
    /// A pair of this disk that is not sealed yet: `NAME.data` and `NAME.index`.
    Pair(String),
}

/// `disk.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskState {
    /// 1.
    pub format: u32,
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Layers that are not written to, bottom to top. Relative paths are below the folder.
    pub layers: Vec<Lower>,
    /// The pair that takes writes.
    pub top: String,
    /// Number of the next pair.
    pub next: u64,
}

/// A disk that is open; nobody else can open it meanwhile.
#[derive(Debug)]
pub struct DiskFolder {
    folder: PathBuf,
    disk: Arc<LiveDisk>,
    /// The state, and the open layers of the base in the same order as its first entries.
    guarded: Mutex<Guarded>,
    /// Unlocked when it is closed.
    _lock: File,
}

#[derive(Debug)]
struct Guarded {
    state: DiskState,
    base: Vec<Layer>,
}

fn file_name(path: &Path) -> String {
    path.display().to_string()
}

fn random_uuid() -> Result<Uuid, DiskError> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 16];
    FileMedia::open(path)
        .and_then(|file| file.read_at(&mut bytes, 0))
        .map_err(DiskError::io("read", &file_name(path)))?;
    Ok(Uuid::random(bytes))
}

/// Reads `disk.json` of a folder.
///
/// # Errors
/// When it is missing, damaged, or of another format.
pub fn read_state(folder: &Path) -> Result<DiskState, DiskError> {
    let path = folder.join(STATE);
    let bytes = fs::read(&path).map_err(DiskError::io("read", &file_name(&path)))?;
    let wrong = |found: String| {
        let expected = format!("the state of a disk of format {FORMAT}");
        DiskError::damaged(&file_name(&path))(FormatError::new(STATE, expected, found))
    };
    let state: DiskState =
        serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    let named = state.layers.iter().filter_map(|lower| match lower {
        Lower::Pair(name) => Some(name),
        _ => None,
    });
    for name in named.chain([&state.top]) {
        if !is_pair_name(name) {
            return Err(wrong(format!("a pair `{name}`")));
        }
    }
    if state.format != FORMAT || !state.virtual_size.is_multiple_of(SECTOR) {
        let found = format!("format {}, size {}", state.format, state.virtual_size);
        return Err(wrong(found));
    }
    Ok(state)
}

/// `w` and a number: what this file makes and may remove.
fn is_pair_name(name: &str) -> bool {
    let digits = name.strip_prefix('w').unwrap_or_default();
    !digits.is_empty() && digits.len() <= 20 && digits.bytes().all(|b| b.is_ascii_digit())
}

fn write_state(folder: &Path, state: &DiskState) -> Result<(), DiskError> {
    let path = folder.join(STATE);
    let tmp = folder.join("disk.json.tmp");
    let write = || {
        let mut file = File::create(&tmp)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        file.sync_all()?;
        fs::rename(&tmp, &path)?;
        File::open(folder)?.sync_all()
    };
    write().map_err(DiskError::io("write", &file_name(&path)))
}

fn pair_paths(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    (
        folder.join(format!("{name}.data")),
        folder.join(format!("{name}.index")),
    )
}

fn open_pair(folder: &Path, name: &str) -> Result<Pair, DiskError> {
    let (data, index) = pair_paths(folder, name);
    let open = |path: &Path| -> Result<Arc<dyn Media>, DiskError> {
        let file =
            FileMedia::open_writable(path).map_err(DiskError::io("open", &file_name(path)))?;
        Ok(Arc::new(file))
    };
    Pair::open(open(&data)?, open(&index)?, &file_name(&data))
}

fn create_pair(
    folder: &Path,
    name: &str,
    virtual_size: u64,
    parent: Option<Uuid>,
) -> Result<Pair, DiskError> {
    let (data, index) = pair_paths(folder, name);
    let create = |path: &Path| -> Result<Arc<dyn Media>, DiskError> {
        let file = FileMedia::create(path).map_err(DiskError::io("create", &file_name(path)))?;
        Ok(Arc::new(file))
    };
    let header = Header {
        flags: 0,
        index_offset: 0,
        index_records: 0,
        virtual_size,
        uuid: Some(random_uuid()?),
        parent,
        user_tag: Vec::new(),
    };
    Pair::create(create(&data)?, create(&index)?, header, &file_name(&data))
}

/// Opens a layer that is not written to.
///
/// # Errors
/// As for [`Layer::open`].
pub fn open_lower(folder: &Path, lower: &Lower) -> Result<Layer, DiskError> {
    let open = |path: &Path| -> Result<(Arc<dyn Media>, String), DiskError> {
        let path = folder.join(path);
        let name = file_name(&path);
        let file = FileMedia::open(&path).map_err(DiskError::io("open", &name))?;
        Ok((Arc::new(file), name))
    };
    match lower {
        Lower::Lsmt(path) => {
            let (file, name) = open(path)?;
            Layer::open(file, &name)
        }
        Lower::Raw(path) => {
            let (file, name) = open(path)?;
            Layer::raw(file, &name)
        }
        Lower::Pair(name) => {
            let (data, _) = pair_paths(folder, name);
            let (file, name) = open(&data)?;
            Layer::open(file, &name)
        }
    }
}

fn newest_uuid(layers: &[Layer]) -> Option<Uuid> {
    layers.last().and_then(|layer| layer.trailer.uuid)
}

fn stack(layers: &[Layer]) -> Result<Option<Arc<Stack>>, DiskError> {
    if layers.is_empty() {
        return Ok(None);
    }
    Ok(Some(Arc::new(Stack::new(layers)?)))
}

fn take_lock(folder: &Path) -> Result<File, DiskError> {
    let path = folder.join(LOCK);
    let failed = DiskError::io("lock", &file_name(&path));
    let open = File::options().create(true).append(true).open(&path);
    let file = match open {
        Ok(file) => file,
        Err(error) => return Err(failed(error)),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(DiskError::Invalid(format!(
            "disk `{}` is open in another process; detach it there first",
            folder.display()
        ))),
        Err(error) => Err(failed(error.into())),
    }
}

impl DiskFolder {
    /// Makes a disk of `virtual_size` bytes over `layers` (bottom to top) in a folder that does not exist or is empty.
    /// Without a size it has that of the newest layer that has one, in whole sectors.
    ///
    /// # Errors
    /// When a layer cannot be opened, or the folder is taken.
    pub fn create(
        folder: &Path,
        layers: Vec<Lower>,
        virtual_size: Option<u64>,
    ) -> Result<(), DiskError> {
        let failed = |error| DiskError::io("create", &file_name(folder))(error);
        if layers.len() >= LAYERS_MAX {
            let text = format!(
                "expected fewer than {LAYERS_MAX} layers, found {}",
                layers.len()
            );
            return Err(DiskError::Invalid(text));
        }
        let opened = layers
            .iter()
            .map(|lower| open_lower(folder, lower))
            .collect::<Result<Vec<_>, _>>()?;
        let below = stack(&opened)?.map_or(0, |stack| stack.len());
        let size = virtual_size.unwrap_or(below).next_multiple_of(SECTOR);
        if size == 0 || size < below {
            return Err(DiskError::Invalid(format!(
                "a disk of {size} bytes cannot lie on layers of {below} bytes; give a size of at least that"
            )));
        }
        fs::create_dir_all(folder).map_err(failed)?;
        let _lock = take_lock(folder)?;
        if fs::exists(folder.join(STATE)).map_err(failed)? {
            let text = format!("`{}` is a disk already", folder.display());
            return Err(DiskError::Invalid(text));
        }
        remove_leftovers(folder, None).map_err(failed)?;
        create_pair(folder, "w0", size, newest_uuid(&opened))?;
        let state = DiskState {
            format: FORMAT,
            virtual_size: size,
            layers,
            top: "w0".to_owned(),
            next: 1,
        };
        write_state(folder, &state)
    }

    /// Opens a disk, after whatever happened to it.
    ///
    /// # Errors
    /// When it is open elsewhere, or a layer is missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, DiskError> {
        let lock = take_lock(folder)?;
        let state = read_state(folder)?;
        remove_leftovers(folder, Some(&state))
            .map_err(DiskError::io("clean", &file_name(folder)))?;
        let sealed = |lower: &&Lower| !matches!(lower, Lower::Pair(_));
        let base = state
            .layers
            .iter()
            .take_while(sealed)
            .map(|lower| open_lower(folder, lower))
            .collect::<Result<Vec<_>, _>>()?;
        let mut frozen = Vec::new();
        for lower in state.layers.iter().skip(base.len()) {
            let Lower::Pair(name) = lower else {
                let text = format!("a sealed layer above a pair: {lower:?}");
                let error = FormatError::new(STATE, "sealed layers below", text);
                return Err(DiskError::damaged(&file_name(&folder.join(STATE)))(error));
            };
            frozen.push(Arc::new(open_pair(folder, name)?));
        }
        let view = View {
            base: stack(&base)?,
            frozen,
            top: Arc::new(open_pair(folder, &state.top)?),
        };
        let disk = Arc::new(LiveDisk::new(view, state.virtual_size));
        let opened = Self {
            folder: folder.to_owned(),
            disk,
            guarded: Mutex::new(Guarded { state, base }),
            _lock: lock,
        };
        // What a snapshot that was cut off left to do.
        opened.seal_frozen(&mut opened.lock())?;
        Ok(opened)
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, to be read and written.
    pub fn disk(&self) -> Arc<LiveDisk> {
        Arc::clone(&self.disk)
    }

    /// The state as it is on disk.
    pub fn state(&self) -> DiskState {
        self.lock().state.clone()
    }

    /// Seals what was written so far as one more layer and goes on with an empty pair; the layer's file. I/O goes on: new
    /// writes are held only while one pointer is exchanged.
    ///
    /// # Errors
    /// What the disk said. The disk is as it was, or the layer is sealed when the disk is opened the next time.
    pub fn snapshot(&self) -> Result<PathBuf, DiskError> {
        let mut guarded = self.lock();
        if guarded.state.layers.len() + 1 >= LAYERS_MAX {
            let text = format!("the disk has {LAYERS_MAX} layers; merge some first");
            return Err(DiskError::Invalid(text));
        }
        let old = guarded.state.top.clone();
        let name = format!("w{}", guarded.state.next);
        let parent = self.disk.view().top.header().uuid;
        let pair = create_pair(&self.folder, &name, guarded.state.virtual_size, parent)?;
        // Most of it is synced before anybody waits.
        self.disk
            .flush()
            .map_err(DiskError::io("flush", &file_name(&self.folder)))?;
        let mut state = guarded.state.clone();
        state.layers.push(Lower::Pair(old.clone()));
        state.top = name;
        state.next += 1;
        // Before the switch: a pair that is written to after this is opened as what lies below.
        write_state(&self.folder, &state)?;
        guarded.state = state;
        self.disk.freeze(Arc::new(pair));
        self.seal_frozen(&mut guarded)?;
        Ok(self.folder.join(format!("{old}.data")))
    }

    /// Seals the pairs that take no writes any more, and puts them under the merged index.
    fn seal_frozen(&self, guarded: &mut Guarded) -> Result<(), DiskError> {
        while let Some(pair) = self.disk.view().frozen.first().cloned() {
            let at = guarded.base.len();
            let Some(Lower::Pair(name)) = guarded.state.layers.get(at).cloned() else {
                return Ok(());
            };
            let (data, index) = pair_paths(&self.folder, &name);
            let lower = Lower::Lsmt(PathBuf::from(format!("{name}.data")));
            seal(&pair)?;
            let layer = open_lower(&self.folder, &lower)?;
            let mut base = guarded.base.clone();
            base.push(layer);
            let merged = stack(&base)?;
            let mut state = guarded.state.clone();
            if let Some(entry) = state.layers.get_mut(at) {
                *entry = lower;
            }
            write_state(&self.folder, &state)?;
            guarded.state = state;
            guarded.base = base;
            self.disk.switch(|view| {
                view.base = merged;
                view.frozen.remove(0);
            });
            if let Err(error) = fs::remove_file(&index) {
                tracing::warn!(path = %data.display(), %error, "the index of a sealed layer stays");
            }
        }
        Ok(())
    }

    /// Merges the sealed layers `range` (counted from the bottom) into one file. I/O goes on. Files of this disk that are
    /// not needed any more are removed.
    ///
    /// # Errors
    /// What the disk said; the disk is as it was then.
    pub fn merge(&self, range: std::ops::Range<usize>) -> Result<PathBuf, DiskError> {
        let mut guarded = self.lock();
        let layers = guarded.base.get(range.clone()).filter(|l| l.len() > 1);
        let Some(layers) = layers else {
            return Err(DiskError::Invalid(format!(
                "expected at least two sealed layers of {}, found {range:?}",
                guarded.base.len()
            )));
        };
        let name = format!("w{}.lsmt", guarded.state.next);
        let path = self.folder.join(&name);
        write_merged(layers, &path)?;
        let lower = Lower::Lsmt(PathBuf::from(name));
        let mut base = guarded.base.clone();
        base.splice(range.clone(), [open_lower(&self.folder, &lower)?]);
        let merged = stack(&base)?;
        let mut state = guarded.state.clone();
        state.layers.splice(range, [lower]);
        state.next += 1;
        write_state(&self.folder, &state)?;
        self.disk.switch(|view| view.base = merged);
        guarded.state = state;
        guarded.base = base;
        remove_leftovers(&self.folder, Some(&guarded.state))
            .map_err(DiskError::io("clean", &file_name(&self.folder)))?;
        Ok(path)
    }
}

/// Writes layers (bottom to top) as one committed layer file.
///
/// # Errors
/// When the layers do not fit each other, or the file exists or cannot be written.
pub fn write_merged(layers: &[Layer], path: &Path) -> Result<(), DiskError> {
    let name = file_name(path);
    let stack = Stack::new(layers)?;
    let (Some(lowest), Some(newest)) = (layers.first(), layers.last()) else {
        return Err(DiskError::Invalid("no layers to merge".to_owned()));
    };
    let header = Header {
        virtual_size: stack.len(),
        parent: lowest.trailer.parent,
        ..newest.trailer.clone()
    };
    let out = FileMedia::create(path).map_err(DiskError::io("create", &name))?;
    let mut read = |record, buffer: &mut [u8]| stack.read_record(record, buffer);
    commit(stack.map(), &header, &mut read, &out, &name)
}

/// Removes pairs and merged layers that the state does not name, and nothing else.
fn remove_leftovers(folder: &Path, state: Option<&DiskState>) -> std::io::Result<()> {
    let named = |file: &str| {
        let Some(state) = state else { return false };
        let of_pair = |name: &String| {
            file.strip_prefix(&**name)
                .is_some_and(|e| e.starts_with('.'))
        };
        of_pair(&state.top)
            || state.layers.iter().any(|lower| match lower {
                Lower::Pair(name) => of_pair(name),
                Lower::Lsmt(path) | Lower::Raw(path) => path == Path::new(file),
            })
    };
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(file) = entry.file_name().into_string() else {
            continue;
        };
        let ours = file
            .split_once('.')
            .is_some_and(|(name, e)| is_pair_name(name) && matches!(e, "data" | "index" | "lsmt"));
        if ours && !named(&file) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl Drop for DiskFolder {
    fn drop(&mut self) {
        // Whoever needs to know that it worked flushes before closing.
        if let Err(error) = self.disk.flush() {
            tracing::error!(disk = %self.folder.display(), %error, "what was not flushed is lost");
        }
    }
}
