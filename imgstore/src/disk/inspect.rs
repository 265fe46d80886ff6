//! What a layer file says of itself, and what of that is true.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use super::DiskError;
use super::layer::{Layer, Wrapping, unwrap};
use super::open::{Opened, open_file};
use super::state::file_name;
use crate::format::overlaybd::header::{Header, Uuid};
use crate::format::overlaybd::record::Record;
use crate::format::overlaybd::zfile::{Algorithm, DIGEST, OVERWRITTEN};
use crate::format::overlaybd::{HEADER_BYTES, SECTOR};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;
use crate::media::file::FileMedia;

/// Bytes read at a time when all data is read.
const STEP_BYTES: u64 = 1 << 20;

/// One check and how it ended.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Whether it is right.
    pub ok: bool,
    /// What was found.
    pub text: String,
}

/// The fields of a header or trailer.
#[derive(Debug, Clone, Serialize)]
pub struct Fields {
    /// Flags as stored.
    pub flags: u32,
    /// Where the index starts, in bytes.
    pub index_offset: u64,
    /// Records of the index, padding included.
    pub index_records: u64,
    /// Bytes of the disk; 0 where it is that of the layers below.
    pub virtual_size: u64,
    /// The layer's name.
    pub uuid: Option<Uuid>,
    /// The layer below.
    pub parent: Option<Uuid>,
    /// The user tag, where it is text.
    pub user_tag: String,
}

impl Fields {
    fn of(header: &Header) -> Self {
        Self {
            flags: header.flags,
            index_offset: header.index_offset,
            index_records: header.index_records,
            virtual_size: header.virtual_size,
            uuid: header.uuid,
            parent: header.parent,
            user_tag: String::from_utf8_lossy(&header.user_tag).into_owned(),
        }
    }
}

/// The compression around a layer.
#[derive(Debug, Clone, Serialize)]
pub struct Compression {
    /// Of every block.
    pub algorithm: Algorithm,
    /// Original bytes of a block.
    pub block_size: u32,
    /// Blocks.
    pub blocks: u64,
    /// Original bytes.
    pub original_size: u64,
    /// Bytes of all stored blocks.
    pub stored: u64,
    /// Whether every block has a checksum.
    pub block_checksums: bool,
    /// Whether header and jump table have digests.
    pub digests: bool,
    /// Whether the header alone counts.
    pub header_overwritten: bool,
}

/// One mapping.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Extent {
    /// First sector.
    pub lba: u64,
    /// Sectors.
    pub sectors: u64,
    /// Where the data is in the layer, in sectors; `None` where it reads as zeros.
    pub place: Option<u64>,
}

/// What is known of a file.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// The file.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// `sealed`, `writable`, or `damaged`.
    pub kind: &'static str,
    /// Whether there is a tar around it.
    pub tar: bool,
    /// The compression around it.
    pub zfile: Option<Compression>,
    /// The fields that count: the trailer's, of a writable file and of a damaged one the header's.
    pub header: Option<Fields>,
    /// The index file of a writable one.
    pub index_file: Option<String>,
    /// The mappings in order.
    pub extents: Vec<Extent>,
    /// Sectors that hold data.
    pub data_sectors: u64,
    /// Sectors that read as zeros and hide what lies below.
    pub zero_sectors: u64,
    /// What was checked.
    pub checks: Vec<Check>,
}

impl Inspection {
    /// Whether all checks ended well.
    pub fn is_sound(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }

    fn check(&mut self, name: &'static str, result: Result<String, String>) {
        let (ok, text) = match result {
            Ok(text) => (true, text),
            Err(text) => (false, text),
        };
        self.checks.push(Check { name, ok, text });
    }

    fn wrapped(&mut self, wrapping: &Wrapping) {
        self.tar = wrapping.tar;
        if self.tar {
            self.check("tar", Ok("header and size are right".to_owned()));
        }
        let Some(zfile) = &wrapping.zfile else { return };
        let header = zfile.header();
        let stored = zfile.stored_lengths().iter().map(|n| u64::from(*n)).sum();
        self.zfile = Some(Compression {
            algorithm: header.algorithm,
            block_size: header.block_size,
            blocks: header.blocks,
            original_size: header.original_size,
            stored,
            block_checksums: header.verify,
            digests: header.flags & DIGEST != 0,
            header_overwritten: header.flags & OVERWRITTEN != 0,
        });
        let table = if header.flags & DIGEST == 0 {
            "lengths fit; it has no digest".to_owned()
        } else {
            "digests of header and table are right, lengths fit".to_owned()
        };
        self.check("zfile", Ok(table));
    }

    fn mapped(&mut self, layer: &Layer) {
        self.header = Some(Fields::of(&layer.trailer));
        let extent = |record: &Record| Extent {
            lba: record.lba(),
            sectors: record.sectors(),
            place: (!record.is_zeroed()).then(|| record.place()),
        };
        self.extents = layer.records.iter().map(extent).collect();
        let sum = |zeroed: bool| {
            let these = layer.records.iter().filter(|r| r.is_zeroed() == zeroed);
            these.map(|record| record.sectors()).sum()
        };
        (self.data_sectors, self.zero_sectors) = (sum(false), sum(true));
        let text = "in order, without overlaps, every place inside the data";
        self.check("index", Ok(text.to_owned()));
        let size = layer.trailer.virtual_size;
        let past = layer.records.iter().filter(|r| r.end() * SECTOR > size);
        let past = if size == 0 { 0 } else { past.count() };
        if past > 0 {
            let text = format!("{past} extents end past the disk; that part is not served");
            self.check("size", Ok(text));
        }
    }
}

/// Reads all data of a layer: every block is decompressed and its checksum compared.
fn read_all(layer: &Layer) -> Result<String, String> {
    let mut buffer = vec![0; to_usize(STEP_BYTES)];
    let mut read = 0;
    for record in layer.records.iter().filter(|r| !r.is_zeroed()) {
        let mut at = record.place() * SECTOR;
        let end = at + record.sectors() * SECTOR;
        while at < end {
            let step = (end - at).min(STEP_BYTES);
            let part = buffer.get_mut(..to_usize(step)).unwrap_or_default();
            layer
                .media
                .read_at(part, at)
                .map_err(|error| format!("at byte {at} of the layer: {error}"))?;
            read += step;
            at += step;
        }
    }
    Ok(format!("{read} bytes read"))
}

/// What can still be said of a file that does not open.
fn damaged(found: &mut Inspection, media: Arc<dyn Media>, error: &DiskError) {
    found.kind = "damaged";
    if let Ok((plain, wrapping)) = unwrap(media, &found.file) {
        found.wrapped(&wrapping);
        let len = plain.size().unwrap_or(0).min(to_u64(HEADER_BYTES));
        let mut head = vec![0; to_usize(len)];
        let read = plain.read_at(&mut head, 0).is_ok();
        let header = Header::parse(&head).ok().filter(|_| read);
        found.header = header.as_ref().map(Fields::of);
    }
    found.check("layer", Err(error.to_string()));
}

/// Looks at one file. `deep` reads all of its data.
///
/// # Errors
/// When the file cannot be read at all; what is wrong in it is in the result.
pub fn inspect(path: &Path, index: Option<&Path>, deep: bool) -> Result<Inspection, DiskError> {
    let name = file_name(path);
    let media = FileMedia::open(path).map_err(DiskError::io("open", &name))?;
    let bytes = media.size().map_err(DiskError::io("read", &name))?;
    let mut found = Inspection {
        file: name,
        bytes,
        kind: "sealed",
        tar: false,
        zfile: None,
        header: None,
        index_file: None,
        extents: Vec::new(),
        data_sectors: 0,
        zero_sectors: 0,
        checks: Vec::new(),
    };
    let Opened { layer, pair } = match open_file(path, index) {
        Ok(opened) => opened,
        Err(error) => {
            damaged(&mut found, Arc::new(media), &error);
            return Ok(found);
        }
    };
    found.wrapped(&layer.wrapping);
    match &pair {
        None => found.check("trailer", Ok("there, complete and sealed".to_owned())),
        Some((index, recovered)) => {
            found.kind = "writable";
            found.index_file = Some(file_name(index));
            let text = match recovered.dropped_bytes {
                0 => format!("{} records, all whole", recovered.records.len()),
                torn => format!(
                    "{} records; the last {torn} bytes were never flushed and do not count",
                    recovered.records.len()
                ),
            };
            found.check("index file", Ok(text));
        }
    }
    found.mapped(&layer);
    if deep {
        found.check("data", read_all(&layer));
    }
    Ok(found)
}
