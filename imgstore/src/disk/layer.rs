//! Opening a layer file: out of its tar, out of its ZFile, then header, trailer and index.

use std::sync::Arc;

use super::DiskError;
use super::map::Map;
use super::pair::Recovered;
use super::zfile::ZFileMedia;
use crate::format::overlaybd::header::Header;
use crate::format::overlaybd::record::{Record, SECTORS_MAX, parse_sealed};
use crate::format::overlaybd::{HEADER_BYTES, SECTOR, wrap, zfile};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;
use crate::media::padded::PaddedMedia;
use crate::media::slice::SliceMedia;

/// A sealed layer: its records, and the medium their places are in.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The file's name, for messages.
    pub name: String,
    /// The LSMT bytes, unwrapped.
    pub media: Arc<dyn Media>,
    /// The header's and, where they differ, the trailer's fields: the trailer counts.
    pub trailer: Header,
    /// Sorted, without overlaps.
    pub records: Arc<[Record]>,
    /// What it was wrapped in.
    pub wrapping: Wrapping,
}

/// What a layer was wrapped in, outside in.
#[derive(Debug, Clone, Default)]
pub struct Wrapping {
    /// Whether there was a tar around it.
    pub tar: bool,
    /// The compressed file, if it was one.
    pub zfile: Option<Arc<ZFileMedia>>,
}

/// Takes tar and ZFile off. What is neither is left as it is.
///
/// # Errors
/// When it is a ZFile but a damaged one, or cut off.
pub fn unwrap(file: Arc<dyn Media>, name: &str) -> Result<(Arc<dyn Media>, Wrapping), DiskError> {
    let mut media = file;
    let mut wrapping = Wrapping::default();
    let head = |media: &dyn Media| -> Result<Vec<u8>, DiskError> {
        let len = media.size().map_err(DiskError::io("read", name))?;
        let mut head = vec![0; to_usize(len.min(to_u64(wrap::HEAD_BYTES)))];
        media
            .read_at(&mut head, 0)
            .map_err(DiskError::io("read", name))?;
        Ok(head)
    };
    if let Some(range) = wrap::payload(&head(&*media)?) {
        let slice = SliceMedia::new(media, range).map_err(DiskError::io("read", name))?;
        media = Arc::new(slice);
        wrapping.tar = true;
    }
    if zfile::has_magic(&head(&*media)?) {
        let plain = Arc::new(ZFileMedia::open(media, name)?);
        wrapping.zfile = Some(Arc::clone(&plain));
        media = plain;
    }
    Ok((media, wrapping))
}

impl Layer {
    /// Opens a sealed layer, whoever wrote it; `name` is for messages.
    ///
    /// # Errors
    /// [`DiskError::Damaged`] names what is out of place.
    pub fn open(file: Arc<dyn Media>, name: &str) -> Result<Self, DiskError> {
        let (media, wrapping) = unwrap(file, name)?;
        let read = |offset: u64, len: u64| -> Result<Vec<u8>, DiskError> {
            let mut bytes = vec![0; to_usize(len)];
            media
                .read_at(&mut bytes, offset)
                .map_err(DiskError::io("read", name))?;
            Ok(bytes)
        };
        let damaged = DiskError::damaged;
        let len = media.size().map_err(DiskError::io("read", name))?;
        let header_bytes = to_u64(HEADER_BYTES);
        let header = read(0, header_bytes.min(len))?;
        let header = Header::parse(&header).map_err(damaged(name))?;
        header.must_begin_data().map_err(damaged(name))?;
        let at = len.saturating_sub(header_bytes).max(header_bytes.min(len));
        let trailer = read(at, len - at)?;
        let trailer = Header::parse(&trailer).map_err(damaged(name))?;
        let (offset, bytes) = trailer.sealed_index(len).map_err(damaged(name))?;
        let records =
            parse_sealed(&read(offset, bytes)?, offset / SECTOR).map_err(damaged(name))?;
        Ok(Self {
            name: name.to_owned(),
            media,
            trailer,
            records: records.into(),
            wrapping,
        })
    }

    /// What a writable pair holds now, as a layer that is read: the pair must not be written to meanwhile.
    pub fn of_pair(data: Arc<dyn Media>, found: &Recovered, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            media: data,
            trailer: found.header.clone(),
            records: Map::new(found.map.records()).records().into(),
            wrapping: Wrapping::default(),
        }
    }

    /// Sectors of the layer's own disk; all there can be, where it leaves the size to the layers below.
    pub fn sectors(&self) -> u64 {
        match self.trailer.virtual_size {
            0 => u64::MAX,
            size => size.div_ceil(SECTOR),
        }
    }
}

/// A disk image without any format, as the lowest layer: every sector maps to itself.
impl Layer {
    /// A raw image; `name` is for messages.
    ///
    /// # Errors
    /// What the medium said.
    pub fn raw(file: Arc<dyn Media>, name: &str) -> Result<Self, DiskError> {
        let virtual_size = file.size().map_err(DiskError::io("read", name))?;
        let media = PaddedMedia::new(file).map_err(DiskError::io("read", name))?;
        let sectors = virtual_size.div_ceil(SECTOR);
        let mut records = Vec::new();
        let mut at = 0;
        while at < sectors {
            let step = (sectors - at).min(SECTORS_MAX);
            records.push(Record::data(at, step, at, 0));
            at += step;
        }
        Ok(Self {
            name: name.to_owned(),
            media: Arc::new(media),
            trailer: Header {
                flags: 0,
                index_offset: 0,
                index_records: 0,
                virtual_size,
                uuid: None,
                parent: None,
                user_tag: Vec::new(),
            },
            records: records.into(),
            wrapping: Wrapping::default(),
        })
    }
}
