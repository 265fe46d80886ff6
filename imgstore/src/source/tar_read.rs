//! Reads the entries of a tar one after the other: framing, long names, PAX records, sparse maps.
//!
//! Our own reader instead of the `tar` crate's: sizes, times and owners of PAX records must win over the header in every
//! place, contents must keep their offsets, and every limit is ours. The format is small.

use super::error::TarFault;
use super::pax::PaxRecords;
use super::tar_header::{self, Block, Field, Header};
use super::tar_input::TarInput;
use super::{SourceError, tar_sparse};
use crate::ids::to_u64;
use crate::tree::{Content, DataRun, Meta, Mtime, Place};

/// Largest extended header: some 200 full-size attributes, or a sparse map of a million pieces.
const EXTENDED_BYTES_MAX: u64 = 16 << 20;
/// Largest extended header that holds for all entries, in all: every entry carries what it says, so little of it makes much.
/// Real ones hold a comment.
const GLOBAL_BYTES_MAX: u64 = 4096;
/// Longest GNU long name or link target.
const LONG_NAME_BYTES_MAX: u64 = 1 << 20;
/// The comment by which `dsec export` says that overlay attributes are written as stored.
pub(crate) const LAYER_COMMENT: &str = "dsec layer: trusted.overlay attributes as stored";

/// One entry with everything about it gathered; contents are already placed.
#[derive(Debug)]
pub(super) struct TarEntry {
    pub(super) path: Vec<u8>,
    pub(super) meta: Meta,
    pub(super) kind: EntryKind,
    /// ACLs in text form (access, default), where no attribute holds them.
    pub(super) acl: [Option<Vec<u8>>; 2],
}

/// What an entry is.
#[derive(Debug)]
pub(super) enum EntryKind {
    File(Content),
    Dir,
    Symlink(Vec<u8>),
    /// Another name of the inode at this path.
    Link(Vec<u8>),
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
}

/// The entries of one tar.
pub(super) struct TarReader<'r> {
    input: TarInput<'r>,
    global: PaxRecords,
    global_bytes: u64,
    started: bool,
}

/// What came before an entry's header.
#[derive(Default)]
struct Prelude {
    pax: Option<PaxRecords>,
    pax_bytes: u64,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl Prelude {
    const fn is_empty(&self) -> bool {
        self.pax.is_none() && self.long_name.is_none() && self.long_link.is_none()
    }
}

impl<'r> TarReader<'r> {
    pub(super) fn new(input: TarInput<'r>) -> Self {
        Self {
            input,
            global: PaxRecords::default(),
            global_bytes: 0,
            started: false,
        }
    }

    /// What messages call the archive.
    pub(super) fn name(&self) -> &str {
        self.input.name()
    }

    /// Bytes of the archive that were passed.
    pub(super) const fn at(&self) -> u64 {
        self.input.at()
    }

    /// Whether not even end blocks were there.
    pub(super) const fn is_empty(&self) -> bool {
        !self.started
    }

    /// Whether `dsec export` wrote it from a layer with overlay attributes.
    pub(super) fn is_layer(&self) -> bool {
        self.global.text("comment") == Some(LAYER_COMMENT.as_bytes())
    }

    /// The next entry; `None` after the end blocks, or where the archive ends between two entries without them. A
    /// stream is then read to its end.
    pub(super) fn next(&mut self) -> Result<Option<TarEntry>, SourceError> {
        let mut prelude = Prelude::default();
        loop {
            let start = self.input.at();
            let Some(header) = self.header(start)? else {
                if !prelude.is_empty() {
                    return Err(self.input.fault(start, TarFault::Dangling));
                }
                self.input.drain()?;
                return Ok(None);
            };
            match header.entry_type() {
                b'x' | b'X' => {
                    // One entry may have several, and all together have the limit.
                    let left = EXTENDED_BYTES_MAX - prelude.pax_bytes;
                    let data = self.extended(&header, left, start)?;
                    prelude.pax_bytes += to_u64(data.len());
                    let records = prelude.pax.get_or_insert_default();
                    records.add(&data).map_err(|f| self.input.fault(start, f))?;
                }
                b'g' => {
                    let left = GLOBAL_BYTES_MAX - self.global_bytes;
                    let data = self.extended(&header, left, start)?;
                    self.global_bytes += to_u64(data.len());
                    self.global
                        .add(&data)
                        .map_err(|f| self.input.fault(start, f))?;
                }
                b'L' => prelude.long_name = Some(self.long_name(&header, start)?),
                b'K' => prelude.long_link = Some(self.long_name(&header, start)?),
                // A volume label: a name without meaning.
                b'V' => self.skip_data(&header, start)?,
                _ => return self.entry(&header, prelude, start).map(Some),
            }
        }
    }

    fn header(&mut self, start: u64) -> Result<Option<Box<Header>>, SourceError> {
        let Some(block) = self.input.block()? else {
            return Ok(None);
        };
        self.started = true;
        match Block::parse(block).map_err(|f| self.input.fault(start, f))? {
            Block::Header(header) => Ok(Some(header)),
            Block::Zeros => match self.input.block()? {
                Some(next) if next.iter().any(|b| *b != 0) => {
                    Err(self.input.fault(start, TarFault::LoneZeroBlock))
                }
                _ => Ok(None),
            },
        }
    }

    fn skip_data(&mut self, header: &Header, start: u64) -> Result<(), SourceError> {
        let size = self.unsigned(header, tar_header::SIZE, start)?;
        self.input.skip(size)
    }

    fn extended(&mut self, header: &Header, max: u64, start: u64) -> Result<Vec<u8>, SourceError> {
        let found = self.unsigned(header, tar_header::SIZE, start)?;
        if found > max {
            let fault = TarFault::ExtendedHeader { found, max };
            return Err(self.input.fault(start, fault));
        }
        self.input.bytes(found)
    }

    fn long_name(&mut self, header: &Header, start: u64) -> Result<Vec<u8>, SourceError> {
        let mut name = self.extended(header, LONG_NAME_BYTES_MAX, start)?;
        while name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    fn unsigned(&self, header: &Header, field: Field, start: u64) -> Result<u64, SourceError> {
        header
            .unsigned(field)
            .map_err(|f| self.input.fault(start, f))
    }

    fn entry(
        &mut self,
        header: &Header,
        prelude: Prelude,
        start: u64,
    ) -> Result<TarEntry, SourceError> {
        let records = self.global.overlaid(prelude.pax.unwrap_or_default());
        let path = records
            .text("GNU.sparse.name")
            .or_else(|| records.text("path"))
            .map(<[u8]>::to_vec)
            .or(prelude.long_name)
            .unwrap_or_else(|| header.path());
        let link = records
            .text("linkpath")
            .map(<[u8]>::to_vec)
            .or(prelude.long_link)
            .unwrap_or_else(|| header.link());
        let meta = self.meta(header, &records, start)?;
        let kind = self.kind(header, &records, (&path, link), start)?;
        let acl = ["SCHILY.acl.access", "SCHILY.acl.default"]
            .map(|key| records.text(key).map(<[u8]>::to_vec));
        Ok(TarEntry {
            path,
            meta,
            kind,
            acl,
        })
    }

    fn meta(&self, header: &Header, records: &PaxRecords, start: u64) -> Result<Meta, SourceError> {
        let read = || -> Result<Meta, TarFault> {
            let mtime = match records.time("mtime")? {
                Some(mtime) => mtime,
                None => header_time(header)?,
            };
            let perm = header.unsigned(tar_header::MODE)? & 0o7777;
            Ok(Meta {
                perm: u16::try_from(perm).unwrap_or(0),
                uid: owner(header, records, "uid", tar_header::UID)?,
                gid: owner(header, records, "gid", tar_header::GID)?,
                mtime,
                xattrs: records.xattrs()?,
            })
        };
        read().map_err(|f| self.input.fault(start, f))
    }

    fn kind(
        &mut self,
        header: &Header,
        records: &PaxRecords,
        (path, link): (&[u8], Vec<u8>),
        start: u64,
    ) -> Result<EntryKind, SourceError> {
        let size = match records
            .number("size")
            .map_err(|f| self.input.fault(start, f))?
        {
            Some(size) => size,
            None => self.unsigned(header, tar_header::SIZE, start)?,
        };
        // Only these types have data. Others may carry a size that means nothing (GNU tar and Go agree).
        match header.entry_type() {
            // Old writers mark a directory by a slash behind the name of an empty file.
            0 | b'0' | b'7' if path.ends_with(b"/") && size == 0 => Ok(EntryKind::Dir),
            0 | b'0' | b'7' => self.file(records, size, start).map(EntryKind::File),
            b'S' => {
                let map = tar_sparse::gnu_map(header, size, &mut self.input, start)?;
                self.sparse_file(&map, start).map(EntryKind::File)
            }
            b'1' => Ok(EntryKind::Link(link)),
            b'2' => Ok(EntryKind::Symlink(link)),
            b'3' => self
                .device(header, start)
                .map(|(a, b)| EntryKind::Char(a, b)),
            b'4' => self
                .device(header, start)
                .map(|(a, b)| EntryKind::Block(a, b)),
            b'5' => Ok(EntryKind::Dir),
            b'6' => Ok(EntryKind::Fifo),
            // GNU's dump of a directory: the names follow as data and say nothing new.
            b'D' => {
                self.input.skip(size)?;
                Ok(EntryKind::Dir)
            }
            other => {
                let fault = TarFault::Type(char::from(other).escape_default().to_string());
                Err(self.input.fault(start, fault))
            }
        }
    }

    fn device(&self, header: &Header, start: u64) -> Result<(u32, u32), SourceError> {
        let number = |field| {
            let n = self.unsigned(header, field, start)?;
            u32::try_from(n).map_err(|_out_of_range| {
                let fault = TarFault::Range {
                    field: "device number",
                    expected: "0 to 2^32-1",
                    found: n.to_string(),
                };
                self.input.fault(start, fault)
            })
        };
        Ok((number(tar_header::MAJOR)?, number(tar_header::MINOR)?))
    }

    fn file(
        &mut self,
        records: &PaxRecords,
        size: u64,
        start: u64,
    ) -> Result<Content, SourceError> {
        if let Some(map) = tar_sparse::pax_map(records, size, &mut self.input, start)? {
            return self.sparse_file(&map, start);
        }
        let (file, stored_offset) = self.input.place(size)?;
        let run = DataRun {
            file_offset: 0,
            len: size,
            stored_offset,
        };
        let runs = if size == 0 { Vec::new() } else { vec![run] };
        Ok(Content {
            len: size,
            place: Place::Runs(file, runs),
        })
    }

    fn sparse_file(
        &mut self,
        map: &tar_sparse::SparseMap,
        start: u64,
    ) -> Result<Content, SourceError> {
        let (file, stored_offset) = self.input.place(map.stored)?;
        let runs = map
            .runs(stored_offset)
            .map_err(|f| self.input.fault(start, f))?;
        Ok(Content {
            len: map.real_size,
            place: Place::Runs(file, runs),
        })
    }
}

fn header_time(header: &Header) -> Result<Mtime, TarFault> {
    let n = header.number(tar_header::MTIME)?;
    let sec = i64::try_from(n).map_err(|_out_of_range| TarFault::Range {
        field: "mtime",
        expected: "64-bit seconds",
        found: n.to_string(),
    })?;
    Ok(Mtime { sec, nsec: 0 })
}

fn owner(
    header: &Header,
    records: &PaxRecords,
    key: &'static str,
    field: Field,
) -> Result<u32, TarFault> {
    let n = match records.number(key)? {
        Some(n) => n,
        None => header.unsigned(field)?,
    };
    u32::try_from(n).map_err(|_out_of_range| TarFault::Range {
        field: key,
        expected: "0 to 4294967294",
        found: n.to_string(),
    })
}
