//! A disk as a folder: what its layers are, and the pair that takes writes.
//!
//! ```text
//! DISK/disk.json           the layers, bottom to top, and the size: replaced atomically
//! DISK/lock                held by whoever has the disk open
//! DISK/NAME.data, .index   pairs
//! DISK/NAME.recent0, 1     what a pair has not flushed, while the disk is open
//! DISK/NAME.lsmt           sealed layers of this disk
//! DISK/lowers/             where published layers are mounted that the disk lies on
//! ```
//! `disk.json` is always written before files get a new meaning and after they are complete: whatever is killed in between,
//! what it names opens. Files that it does not name are leftovers and are removed when the disk is opened.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::DiskError;
use super::committed::sync_folder_of;
pub use super::committed::write_merged;
use super::compare::first_difference;
use super::device::BlockDevice;
use super::import::import_raw;
use super::layer::Layer;
use super::live::{LiveDisk, View};
use super::map::Map;
use super::pair::Pair;
use super::seal::{commit, seal};
use super::stack::{LAYERS_MAX, Stack};
pub use super::state::{DiskState, Lower, open_lower, read_state};
use super::state::{
    FORMAT, STATE, create_pair, file_name, header_of, is_disk, open_pair, pair_paths, random_uuid,
    remove_leftovers, remove_recent, take_lock, write_state,
};
use crate::format::FormatError;
use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::header::Uuid;
use crate::format::overlaybd::record::Record;
use crate::media::Media;
use crate::media::file::FileMedia;

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

fn newest_uuid(layers: &[Layer]) -> Option<Uuid> {
    layers.last().and_then(|layer| layer.trailer.uuid)
}

fn stack(layers: &[Layer]) -> Result<Option<Arc<Stack>>, DiskError> {
    if layers.is_empty() {
        return Ok(None);
    }
    Ok(Some(Arc::new(Stack::new(layers)?)))
}

/// What a snapshot did.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The layer's file.
    pub layer: PathBuf,
    /// How long writes were held.
    pub held: Duration,
}

/// Checks that each pair names what lies below it as its parent, where both have names.
fn check_pairs<'a>(
    base: &[Layer],
    pairs: impl Iterator<Item = &'a Arc<Pair>>,
) -> Result<(), DiskError> {
    let mut lower = base
        .last()
        .map(|layer| (layer.name.clone(), layer.trailer.uuid));
    for pair in pairs {
        if let Some((name, Some(found))) = &lower
            && let Some(expected) = pair.header().parent
            && expected != *found
        {
            return Err(DiskError::WrongParent {
                upper: pair.name().to_owned(),
                lower: name.clone(),
                expected: expected.to_string(),
                found: found.to_string(),
            });
        }
        lower = Some((pair.name().to_owned(), pair.header().uuid));
    }
    Ok(())
}

fn checked_size(wanted: Option<u64>, below: u64) -> Result<u64, DiskError> {
    let size = wanted.unwrap_or(below).next_multiple_of(SECTOR);
    if size == 0 || size < below {
        return Err(DiskError::Invalid(format!(
            "a disk of {size} bytes cannot lie on layers of {below} bytes; give a size of at least that"
        )));
    }
    Ok(size)
}

/// Makes a folder and those above it that are missing, with names that survive a loss of power.
fn make_folder(folder: &Path) -> std::io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let above = folder.parent().filter(|above| *above != Path::new(""));
            make_folder(above.ok_or(error)?)?;
            fs::create_dir(folder)?;
        }
        // Whoever made it may not have synced it.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    sync_folder_of(folder)
}

/// An empty folder for a disk, locked.
fn new_folder(folder: &Path) -> Result<File, DiskError> {
    let failed = |error| DiskError::io("create", &file_name(folder))(error);
    make_folder(folder).map_err(failed)?;
    let lock = take_lock(folder)?;
    if is_disk(folder).map_err(failed)? {
        let text = format!("`{}` is a disk already", folder.display());
        return Err(DiskError::Invalid(text));
    }
    remove_leftovers(folder, None).map_err(failed)?;
    Ok(lock)
}

/// The pair that takes writes, and the state, which makes the folder a disk.
fn finish(
    folder: &Path,
    virtual_size: u64,
    layers: Vec<Lower>,
    parent: Option<Uuid>,
    number: u64,
) -> Result<(), DiskError> {
    let top = format!("w{number}");
    create_pair(folder, &top, virtual_size, parent)?;
    remove_recent(folder, &top).map_err(DiskError::io("clean", &file_name(folder)))?;
    let state = DiskState {
        format: FORMAT,
        virtual_size,
        layers,
        top,
        next: number + 1,
    };
    write_state(folder, &state)
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
        let size = checked_size(virtual_size, below)?;
        let _lock = new_folder(folder)?;
        finish(folder, size, layers, newest_uuid(&opened), 0)
    }

    /// Makes a disk that begins with the contents of a raw image, copied: nobody needs the image afterwards. Holes and zeros
    /// take no room.
    ///
    /// # Errors
    /// As for [`DiskFolder::create`].
    pub fn create_from_raw(
        folder: &Path,
        image: &FileMedia,
        virtual_size: Option<u64>,
    ) -> Result<(), DiskError> {
        let there = image
            .size()
            .map_err(DiskError::io("read", &file_name(image.path())))?;
        let size = checked_size(virtual_size, there)?;
        let _lock = new_folder(folder)?;
        let path = folder.join("w0.lsmt");
        let name = file_name(&path);
        let out = FileMedia::replace(&path).map_err(DiskError::io("create", &name))?;
        let uuid = random_uuid()?;
        import_raw(image, &out, header_of(size, Some(uuid), None), &name)?;
        let layers = vec![Lower::Lsmt(PathBuf::from("w0.lsmt"))];
        finish(folder, size, layers, Some(uuid), 1)
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
        let top = Arc::new(open_pair(folder, &state.top)?);
        check_pairs(&base, frozen.iter().chain([&top]))?;
        let view = View {
            base: stack(&base)?,
            frozen,
            top,
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
    pub fn snapshot(&self) -> Result<Snapshot, DiskError> {
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
        let held = self.disk.freeze(Arc::new(pair));
        self.seal_frozen(&mut guarded)?;
        Ok(Snapshot {
            layer: self.folder.join(format!("{old}.data")),
            held,
        })
    }

    /// A snapshot where something was written since the last one.
    ///
    /// # Errors
    /// As for [`DiskFolder::snapshot`].
    pub fn snapshot_if_written(&self) -> Result<Option<Snapshot>, DiskError> {
        self.snapshot_beyond(0)
    }

    /// A snapshot where what was written since the last one has more than so many extents: the map of a writable layer costs
    /// several times the memory of a sealed one's.
    ///
    /// # Errors
    /// As for [`DiskFolder::snapshot`].
    pub fn snapshot_beyond(&self, extents: usize) -> Result<Option<Snapshot>, DiskError> {
        if self.disk.view().top.extents() <= extents {
            return Ok(None);
        }
        self.snapshot().map(Some)
    }

    /// Seals the pairs that take no writes any more, and puts them under the merged index.
    fn seal_frozen(&self, guarded: &mut Guarded) -> Result<(), DiskError> {
        while let Some(pair) = self.disk.view().frozen.first().cloned() {
            let at = guarded.base.len();
            let Some(Lower::Pair(name)) = guarded.state.layers.get(at).cloned() else {
                return Ok(());
            };
            let (data, index) = pair_paths(&self.folder, &name);
            let lower = match self.seal_one(&pair, &name) {
                Ok(lower) => lower,
                Err(error @ DiskError::TooManyExtents { .. }) => {
                    // It is read as it is; the disk works, with one more map to look through.
                    tracing::warn!(%error, "a layer cannot be sealed");
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
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
            remove_leftovers(&self.folder, Some(&guarded.state))
                .map_err(DiskError::io("clean", &file_name(&self.folder)))?;
        }
        Ok(())
    }

    /// Seals a pair where it lies; where its extents are too many, in a new file, in which data that was written apart
    /// lies together.
    fn seal_one(&self, pair: &Pair, name: &str) -> Result<Lower, DiskError> {
        match seal(pair) {
            Ok(()) => Ok(Lower::Lsmt(PathBuf::from(format!("{name}.data")))),
            Err(DiskError::TooManyExtents { .. }) => {
                let lower = PathBuf::from(format!("{name}.lsmt"));
                let path = self.folder.join(&lower);
                let out = FileMedia::replace(&path)
                    .map_err(DiskError::io("create", &file_name(&path)))?;
                let map = Map::new(pair.records());
                let data = pair.data();
                let mut read = |record: Record, buffer: &mut [u8]| {
                    data.read_at(buffer, record.place() * SECTOR)
                };
                commit(&map, pair.header(), &mut read, &out, &file_name(&path))?;
                Ok(Lower::Lsmt(lower))
            }
            Err(error) => Err(error),
        }
    }

    /// Lets the lowest `count` layers be `lowers` from now on, whose contents are the same: that is checked, sector by
    /// sector. I/O goes on.
    ///
    /// # Errors
    /// When they differ, with the first place; when a layer above names another parent; what the disk said.
    pub fn restack(&self, count: usize, lowers: Vec<Lower>) -> Result<(), DiskError> {
        let mut guarded = self.lock();
        let Some(old) = guarded.base.get(..count).filter(|old| !old.is_empty()) else {
            return Err(DiskError::Invalid(format!(
                "expected 1 to {} sealed layers to replace, found {count}",
                guarded.base.len()
            )));
        };
        let new = lowers
            .iter()
            .map(|lower| open_lower(&self.folder, lower))
            .collect::<Result<Vec<_>, _>>()?;
        let (before, after) = (Stack::new(old)?, Stack::new(&new)?);
        if let Some(offset) = first_difference(&before, &after)? {
            return Err(DiskError::Invalid(format!(
                "the new layers are not equal to the lowest {count} of the disk: they differ in the sector at byte {offset}"
            )));
        }
        let mut base = guarded.base.clone();
        base.splice(..count, new);
        let merged = stack(&base)?;
        let view = self.disk.view();
        check_pairs(&base, view.frozen.iter().chain([&view.top]))?;
        let mut state = guarded.state.clone();
        state.layers.splice(..count, lowers);
        self.exchange(&mut guarded, state, base, merged)
    }

    /// The state first, then what requests see; then what is not needed any more goes.
    fn exchange(
        &self,
        guarded: &mut Guarded,
        state: DiskState,
        base: Vec<Layer>,
        merged: Option<Arc<Stack>>,
    ) -> Result<(), DiskError> {
        write_state(&self.folder, &state)?;
        self.disk.switch(|view| view.base = merged);
        guarded.state = state;
        guarded.base = base;
        remove_leftovers(&self.folder, Some(&guarded.state))
            .map_err(DiskError::io("clean", &file_name(&self.folder)))
    }

    /// The sealed layers, bottom to top.
    pub fn sealed_layers(&self) -> Vec<Layer> {
        self.lock().base.clone()
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
        self.exchange(&mut guarded, state, base, merged)?;
        Ok(path)
    }
}

impl Drop for DiskFolder {
    fn drop(&mut self) {
        // Whoever needs to know that it worked flushes before closing.
        if let Err(error) = self.disk.flush() {
            tracing::error!(disk = %self.folder.display(), %error, "what was not flushed is lost");
            return;
        }
        let state = self.state();
        let pairs = state.layers.iter().filter_map(|lower| match lower {
            Lower::Pair(name) => Some(name),
            Lower::Lsmt(_) | Lower::Raw(_) | Lower::Published { .. } => None,
        });
        for name in pairs.chain([&state.top]) {
            if let Err(error) = remove_recent(&self.folder, name) {
                tracing::warn!(disk = %self.folder.display(), %error, "side files stay");
            }
        }
    }
}
