//! Writing layers as one committed file, compressed or not. The file has its name only when it is whole.

use std::fs;
use std::path::{Path, PathBuf};

use super::DiskError;
use super::layer::Layer;
use super::seal::commit;
use super::stack::Stack;
use super::state::file_name;
use super::zfile::{ZFileMedia, ZOptions, compress};
use crate::format::overlaybd::header::Header;
use crate::media::file::FileMedia;

/// The same name with something behind it.
pub(super) fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(end);
    path.with_file_name(name)
}

/// A file that is removed unless it got its name.
#[derive(Debug)]
pub(super) struct Partial(PathBuf);

impl Partial {
    pub(super) fn create(path: PathBuf) -> Result<(Self, FileMedia), DiskError> {
        let file = FileMedia::replace(&path).map_err(DiskError::io("create", &file_name(&path)))?;
        Ok((Self(path), file))
    }

    /// Gives it its name, which nobody else may have taken.
    fn publish(self, path: &Path) -> Result<(), DiskError> {
        // Never over a file that is there; the other name goes when this is dropped.
        fs::hard_link(&self.0, path)
            .and_then(|()| sync_folder_of(path))
            .map_err(DiskError::io("create", &file_name(path)))
    }

    /// Gives it its name, in place of what had it.
    pub(super) fn replace(self, path: &Path) -> Result<(), DiskError> {
        let renamed = fs::rename(&self.0, path).and_then(|()| sync_folder_of(path));
        renamed.map_err(DiskError::io("create", &file_name(path)))
    }
}

/// Makes the name of a file or folder survive a loss of power.
pub(super) fn sync_folder_of(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.0.display(), %error, "a temporary file stays");
        }
    }
}

/// Writes layers (bottom to top) as one committed layer file.
///
/// # Errors
/// When the layers do not fit each other, or the file exists or cannot be written.
pub fn write_merged(layers: &[Layer], path: &Path) -> Result<(), DiskError> {
    write_committed(layers, path, None)
}

/// The same, compressed with `zfile`. The new layer has the name of the newest of them and the parent of the lowest.
///
/// # Errors
/// As for [`write_merged`].
pub fn write_committed(
    layers: &[Layer],
    path: &Path,
    zfile: Option<ZOptions>,
) -> Result<(), DiskError> {
    let name = file_name(path);
    let taken = fs::exists(path).map_err(DiskError::io("create", &name))?;
    if taken {
        let exists = std::io::ErrorKind::AlreadyExists.into();
        return Err(DiskError::io("create", &name)(exists));
    }
    let stack = Stack::new(layers)?;
    let (Some(lowest), Some(newest)) = (layers.first(), layers.last()) else {
        return Err(DiskError::Invalid("no layers to merge".to_owned()));
    };
    let header = Header {
        virtual_size: stack.len(),
        parent: lowest.trailer.parent,
        ..newest.trailer.clone()
    };
    let (partial, out) = Partial::create(beside(path, ".partial"))?;
    let mut read = |record, buffer: &mut [u8]| stack.read_record(record, buffer);
    commit(stack.map(), &header, &mut read, &out, &name)?;
    let Some(options) = zfile else {
        return partial.publish(path);
    };
    let (packed, packed_out) = Partial::create(beside(path, ".packed"))?;
    compress(&out, &packed_out, options).map_err(DiskError::io("compress", &name))?;
    drop(ZFileMedia::open(std::sync::Arc::new(packed_out), &name)?);
    packed.publish(path)
}
