//! What a disk's folder holds: `disk.json`, the lock, the names of files, and what may be removed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::DiskError;
use super::layer::Layer;
use super::open::open_file;
use super::pair::Pair;
use crate::format::FormatError;
use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::header::{Header, Uuid};
use crate::ids::Digest;
use crate::media::Media;
use crate::media::file::FileMedia;

/// Format of `disk.json`.
pub(super) const FORMAT: u32 = 1;
pub(super) const STATE: &str = "disk.json";
const LOCK: &str = "lock";
/// How often, and how long apart, a lock is tried.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// Where published layers that lie below are mounted, in the folder.
pub const LOWERS: &str = "lowers";

/// How a published layer lies below a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// It holds a disk's layer, as the file `disk.lsmt` in its tree.
    Disk,
    /// It holds files: its whole EROFS image is the lowest part of the disk.
    Image,
}

/// How a layer lies on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Lower {
    /// An OverlayBD file: LSMT, ZFile or tar around either.
    Lsmt(PathBuf),
    /// An image without format.
    Raw(PathBuf),
    /// A published layer, which is read where somebody has mounted it: see [`Lower::published_path`].
    Published {
        /// The layer.
        layer: Digest,
        /// What is read of it.
        form: Form,
    },
    /// A pair of this disk that is not sealed yet: `NAME.data` and `NAME.index`.
    Pair(String),
}

impl Lower {
    /// Where a published layer's bytes are, below the disk's folder: the file in the mounted layer, or a link to its image.
    pub fn published_path(layer: &Digest, form: Form) -> PathBuf {
        let at = Path::new(LOWERS);
        match form {
            Form::Disk => at.join(layer.to_hex()).join(DISK_FILE),
            Form::Image => at.join(format!("{layer}.image")),
        }
    }

    /// Whether the disk itself wrote it.
    pub fn is_own(&self) -> bool {
        match self {
            Self::Pair(_) => true,
            Self::Lsmt(path) => path.to_str().is_some_and(is_own_file),
            Self::Raw(_) | Self::Published { .. } => false,
        }
    }
}

/// The layer file in the tree of a published disk.
pub const DISK_FILE: &str = "disk.lsmt";

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

impl DiskState {
    /// How many of the layers, from the bottom, the disk did not write itself.
    pub fn base(&self) -> usize {
        self.layers.iter().take_while(|l| !l.is_own()).count()
    }
}

pub(super) fn file_name(path: &Path) -> String {
    path.display().to_string()
}

pub(super) fn random_uuid() -> Result<Uuid, DiskError> {
    let path = Path::new("/dev/urandom");
    let mut bytes = [0; 16];
    FileMedia::open(path)
        .and_then(|file| file.read_at(&mut bytes, 0))
        .map_err(DiskError::io("read", &file_name(path)))?;
    Ok(Uuid::random(bytes))
}

/// Whether a folder holds a disk.
///
/// # Errors
/// What the file system said.
pub fn is_disk(folder: &Path) -> std::io::Result<bool> {
    fs::exists(folder.join(STATE))
}

/// Whether somebody has the disk open.
///
/// # Errors
/// What the file system said.
pub fn is_held(folder: &Path) -> Result<bool, DiskError> {
    let path = folder.join(LOCK);
    let failed = DiskError::io("open", &file_name(&path));
    match File::options().append(true).open(&path) {
        Ok(file) => {
            // Taken and given back: whoever opens the disk in this moment tries for longer.
            Ok(rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(error)),
    }
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
        Lower::Lsmt(_) | Lower::Raw(_) | Lower::Published { .. } => None,
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

/// What this disk makes and may remove: `wN.data`, `wN.index`, `wN.recent0`, `wN.lsmt` …
fn is_own_file(file: &str) -> bool {
    let ends = [
        "data",
        "index",
        "lsmt",
        "lsmt.partial",
        "lsmt.packed",
        "recent0",
        "recent1",
    ];
    file.split_once('.')
        .is_some_and(|(name, end)| is_pair_name(name) && ends.contains(&end))
}

pub(super) fn write_state(folder: &Path, state: &DiskState) -> Result<(), DiskError> {
    let path = folder.join(STATE);
    let tmp = folder.join("disk.json.tmp");
    let write = || {
        let mut file = File::create(&tmp)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        file.sync_all()?;
        // The names of the files that it speaks of first.
        let folder = File::open(folder)?;
        folder.sync_all()?;
        fs::rename(&tmp, &path)?;
        folder.sync_all()
    };
    write().map_err(DiskError::io("write", &file_name(&path)))
}

pub(super) fn pair_paths(folder: &Path, name: &str) -> (PathBuf, PathBuf) {
    (
        folder.join(format!("{name}.data")),
        folder.join(format!("{name}.index")),
    )
}

pub(super) fn open_pair(folder: &Path, name: &str) -> Result<Pair, DiskError> {
    let (data, index) = pair_paths(folder, name);
    let open = |path: &Path| -> Result<Arc<dyn Media>, DiskError> {
        let file =
            FileMedia::open_writable(path).map_err(DiskError::io("open", &file_name(path)))?;
        Ok(Arc::new(file))
    };
    let pair = Pair::open(open(&data)?, open(&index)?, &file_name(&data))?;
    with_recent(folder, name, pair)
}

fn recent_paths(folder: &Path, name: &str) -> [PathBuf; 2] {
    ["recent0", "recent1"].map(|end| folder.join(format!("{name}.{end}")))
}

fn with_recent(folder: &Path, name: &str, pair: Pair) -> Result<Pair, DiskError> {
    let open = |path: PathBuf| -> Result<Arc<dyn Media>, DiskError> {
        let file = FileMedia::open_or_create(&path);
        Ok(Arc::new(
            file.map_err(DiskError::io("open", &file_name(&path)))?,
        ))
    };
    let [first, second] = recent_paths(folder, name);
    pair.with_recent([open(first)?, open(second)?])
}

/// Removes the side files of a pair that is flushed and that nobody writes to any more.
pub(super) fn remove_recent(folder: &Path, name: &str) -> std::io::Result<()> {
    for path in recent_paths(folder, name) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn header_of(virtual_size: u64, uuid: Option<Uuid>, parent: Option<Uuid>) -> Header {
    Header {
        flags: 0,
        index_offset: 0,
        index_records: 0,
        virtual_size,
        uuid,
        parent,
        user_tag: Vec::new(),
    }
}

pub(super) fn create_pair(
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
    let header = header_of(virtual_size, Some(random_uuid()?), parent);
    Pair::create(create(&data)?, create(&index)?, header, &file_name(&data))
        .and_then(|pair| with_recent(folder, name, pair))
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
        Lower::Published { layer, form } => {
            let (file, name) = open(&Lower::published_path(layer, *form))?;
            match form {
                Form::Disk => Layer::open(file, &name),
                Form::Image => Layer::raw(file, &name),
            }
        }
        Lower::Pair(name) => {
            let (data, _) = pair_paths(folder, name);
            let (file, name) = open(&data)?;
            Layer::open(file, &name)
        }
    }
}

pub(super) fn take_lock(folder: &Path) -> Result<File, DiskError> {
    let path = folder.join(LOCK);
    let failed = DiskError::io("lock", &file_name(&path));
    let open = File::options().create(true).append(true).open(&path);
    let file = match open {
        Ok(file) => file,
        Err(error) => return Err(failed(error)),
    };
    // Somebody may only be looking whether it is held ([`is_held`]).
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            Err(error) => return Err(failed(error.into())),
        }
    }
    Err(DiskError::Invalid(format!(
        "disk `{}` is open in another process; detach it there first",
        folder.display()
    )))
}

/// Removes pairs and merged layers that the state does not name, and nothing else.
pub(super) fn remove_leftovers(folder: &Path, state: Option<&DiskState>) -> std::io::Result<()> {
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
                Lower::Published { .. } => false,
            })
    };
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(file) = entry.file_name().into_string() else {
            continue;
        };
        if is_own_file(&file) && !named(&file) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The layers of a disk that nobody has open, to be read.
#[derive(Debug)]
pub struct Held {
    /// The state.
    pub state: DiskState,
    /// All layers bottom to top, the writable one last.
    pub layers: Vec<Layer>,
    /// Nobody opens the disk while this is held.
    _lock: File,
}

/// Opens a disk's layers for reading only: nothing is mended, sealed or removed.
///
/// # Errors
/// When it is open elsewhere, or a layer is missing or damaged.
pub fn hold(folder: &Path) -> Result<Held, DiskError> {
    let state = read_state(folder)?;
    let lock = take_lock(folder)?;
    let pair = |name: &String| -> Result<Layer, DiskError> {
        let (data, index) = pair_paths(folder, name);
        let sealed = open_lower(folder, &Lower::Lsmt(PathBuf::from(format!("{name}.data"))));
        match sealed {
            Err(_) if index.is_file() => Ok(open_file(&data, Some(&index))?.layer),
            sealed => sealed,
        }
    };
    let open = |lower: &Lower| match lower {
        Lower::Pair(name) => pair(name),
        Lower::Lsmt(_) | Lower::Raw(_) | Lower::Published { .. } => open_lower(folder, lower),
    };
    let mut layers = state
        .layers
        .iter()
        .map(open)
        .collect::<Result<Vec<_>, _>>()?;
    layers.push(pair(&state.top)?);
    Ok(Held {
        state,
        layers,
        _lock: lock,
    })
}
