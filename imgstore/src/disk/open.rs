//! Opening a file that somebody named: a sealed layer, or the data file of a writable pair with its index beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::DiskError;
use super::layer::Layer;
use super::pair::Recovered;
use super::state::file_name;
use crate::format::overlaybd::HEADER_BYTES;
use crate::format::overlaybd::header::{Header, SEALED};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;
use crate::media::file::FileMedia;

/// A file that was opened to be read.
#[derive(Debug)]
pub struct Opened {
    /// What it holds.
    pub layer: Layer,
    /// The index file and what it held, where the file is a writable pair's.
    pub pair: Option<(PathBuf, Recovered)>,
}

/// Where the index of a writable data file lies: `NAME.index` beside `NAME.data`, `NAME_index` beside `NAME_data`.
pub fn index_beside(data: &Path) -> Option<PathBuf> {
    let name = data.file_name()?.to_str()?;
    let beside = [(".data", ".index"), ("_data", "_index")];
    let (stem, end) = beside
        .iter()
        .find_map(|(data, index)| Some((name.strip_suffix(data)?, index)))?;
    Some(data.with_file_name(format!("{stem}{end}")))
}

fn is_unsealed(media: &dyn Media) -> bool {
    let len = media.size().unwrap_or(0).min(to_u64(HEADER_BYTES));
    let mut head = vec![0; to_usize(len)];
    let read = media.read_at(&mut head, 0).is_ok();
    read && Header::parse(&head).is_ok_and(|header| header.flags & SEALED == 0)
}

/// Opens a layer file, whoever wrote it. `index` is the index of a writable data file; without it the file beside is taken,
/// where the data file is not sealed.
///
/// # Errors
/// What is out of place, and where.
pub fn open_file(path: &Path, index: Option<&Path>) -> Result<Opened, DiskError> {
    let name = file_name(path);
    let open = |path: &Path| -> Result<Arc<dyn Media>, DiskError> {
        let file = FileMedia::open(path).map_err(DiskError::io("open", &file_name(path)))?;
        Ok(Arc::new(file))
    };
    let media = open(path)?;
    let pair = |index: PathBuf| -> Result<Opened, DiskError> {
        let found = Recovered::read(&*media, &*open(&index)?, &name)?;
        Ok(Opened {
            layer: Layer::of_pair(Arc::clone(&media), &found, &name),
            pair: Some((index, found)),
        })
    };
    if let Some(index) = index {
        return pair(index.to_owned());
    }
    // A trailer counts, whatever the header says: a layer that was sealed in place begins as a pair does.
    let sealed = Layer::open(Arc::clone(&media), &name);
    match (sealed, index_beside(path)) {
        (Ok(layer), _) => Ok(Opened { layer, pair: None }),
        (Err(_), Some(index)) if is_unsealed(&*media) && index.is_file() => pair(index),
        (Err(error), _) => Err(error),
    }
}
