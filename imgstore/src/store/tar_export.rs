//! Writes a tree as a PAX tar that GNU tar, libarchive and Python read, and that loads as the same tree again.
//!
//! Entries come depth first in byte order, `./` first. What the 512-byte header cannot hold goes into PAX records: times
//! with nanoseconds, before 1970 or after 2242, owners above 2,097,151, sizes from 8 GiB, long or non-ASCII paths,
//! attributes (`SCHILY.xattr.`). A further name of an inode is a hard link entry, whatever the inode's type. Files with
//! holes of 1 MiB or more are written in GNU's PAX sparse form 1.0. Sockets cannot be in a tar.
//!
//! A layer's `trusted.overlay.*` attributes are written as stored; a global comment says so, and our own reader then does
//! not escape them a second time.

use std::collections::HashMap;
use std::io::{self, Write};

use crate::ids::{to_u64, to_usize};
use crate::source::{LAYER_COMMENT, shown};
use crate::tree::{DataRun, Inode, InodeId, Kind, Meta, Mtime, Tree};

const BLOCK: usize = 512;
/// Smaller holes are written as zeros.
const HOLE_BYTES_MIN: u64 = 1 << 20;
/// Bytes read at a time.
const COPY_BYTES: u64 = 1 << 20;
/// Largest value of 11 octal digits.
const OCTAL_11_MAX: u64 = 0o77_777_777_777;
/// Largest value of 7 octal digits.
const OCTAL_7_MAX: u64 = 0o7_777_777;
const NAME_MAX: usize = 100;

/// Any failure of whoever gives the contents.
pub type ContentError = Box<dyn std::error::Error + Send + Sync>;

/// Fills a buffer from an offset of a file; holes give zeros.
pub type ReadAt<'a> = Box<dyn FnMut(u64, &mut [u8]) -> Result<(), ContentError> + 'a>;

/// An opened regular file.
pub struct OpenFile<'a> {
    /// Runs that may hold data, in order; the rest is zeros.
    pub runs: Vec<DataRun>,
    /// Reads the file.
    pub read_at: ReadAt<'a>,
}

impl std::fmt::Debug for OpenFile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenFile")
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}

/// How to export.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExportOptions {
    /// Leave out sockets instead of failing.
    pub skip_sockets: bool,
}

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExportReport {
    /// Entries written.
    pub entries: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Paths of sockets that were left out.
    pub skipped_sockets: Vec<Vec<u8>>,
}

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The output could not be written.
    #[error("could not write the tar: {0}")]
    Write(#[source] io::Error),
    /// A content could not be read.
    #[error("could not read `{path}` of the layer: {source}")]
    Content {
        /// The file.
        path: String,
        /// The failure.
        #[source]
        source: ContentError,
    },
    /// A tar has no form for sockets.
    #[error("a tar cannot hold sockets, and the layer has {}: {}; pass --skip-sockets to leave them out", .0.len(), .0.join(", "))]
    Sockets(Vec<String>),
}

/// Writes `tree` to `out`; `open` opens a regular file of it.
///
/// # Errors
/// [`ExportError::Sockets`] before anything is written, if there are sockets and they are not to be skipped; failures of
/// reading and writing as they come.
pub fn write_tar<'a>(
    tree: &Tree,
    open: &dyn Fn(InodeId) -> Result<OpenFile<'a>, ContentError>,
    out: &mut dyn Write,
    options: &ExportOptions,
) -> Result<ExportReport, ExportError> {
    let walk = tree.walk();
    let is_socket = |id: InodeId| matches!(tree.inode(id).kind, Kind::Socket);
    let sockets = walk.iter().filter(|(_, id)| is_socket(*id));
    let sockets: Vec<Vec<u8>> = sockets.map(|(path, _)| path.clone()).collect();
    if !sockets.is_empty() && !options.skip_sockets {
        let paths = sockets.iter().map(|path| shown(path)).collect();
        return Err(ExportError::Sockets(paths));
    }
    let mut writer = TarWriter {
        out,
        report: ExportReport {
            skipped_sockets: sockets,
            ..ExportReport::default()
        },
    };
    if has_overlay_marks(tree, &walk) {
        let mut records = Records::default();
        records.add(b"comment", LAYER_COMMENT.as_bytes());
        writer.extended(b'g', b"./PaxHeaders/layer", &records)?;
    }
    let mut first_names: HashMap<InodeId, Vec<u8>> = HashMap::new();
    for (path, id) in &walk {
        if is_socket(*id) {
            continue;
        }
        let inode = tree.inode(*id);
        let name = entry_name(path, &inode.kind);
        if let Some(first) = first_names.get(id) {
            writer.link(&name, first, &inode.meta)?;
            continue;
        }
        match &inode.kind {
            Kind::File(content) => {
                let failed = |source| ExportError::Content {
                    path: shown(path),
                    source,
                };
                let file = open(*id).map_err(failed)?;
                writer.file(&name, &inode.meta, content.len, file)?;
            }
            _ => writer.plain(&name, inode)?,
        }
        if !matches!(inode.kind, Kind::Dir(_)) {
            first_names.insert(*id, name);
        }
    }
    writer.write(&[0; 2 * BLOCK])?;
    writer.out.flush().map_err(ExportError::Write)?;
    Ok(writer.report)
}

fn has_overlay_marks(tree: &Tree, walk: &[(Vec<u8>, InodeId)]) -> bool {
    walk.iter().any(|(_, id)| {
        let mut names = tree.inode(*id).meta.xattrs.keys();
        names.any(|name| name.starts_with(b"trusted.overlay."))
    })
}

/// `./path`, with a slash behind directories.
fn entry_name(path: &[u8], kind: &Kind) -> Vec<u8> {
    let mut name = b"./".to_vec();
    name.extend_from_slice(path);
    if matches!(kind, Kind::Dir(_)) && !path.is_empty() {
        name.push(b'/');
    }
    name
}

/// PAX records in the order they were added.
#[derive(Debug, Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        // The length counts its own digits.
        let body = key.len() + value.len() + 3;
        let mut len = body + 1;
        while body + len.to_string().len() != len {
            len = body + len.to_string().len();
        }
        self.0.extend_from_slice(format!("{len} ").as_bytes());
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }

    fn number(&mut self, key: &str, n: impl ToString) {
        self.add(key.as_bytes(), n.to_string().as_bytes());
    }

    /// A path or link target, if the header cannot hold it.
    fn path(&mut self, key: &str, path: &[u8]) {
        if path.len() > NAME_MAX || !path.is_ascii() {
            self.add(key.as_bytes(), path);
        }
    }

    /// Non-UTF-8 bytes are told apart by readers that decode paths.
    fn charset(&mut self, paths: [&[u8]; 2]) {
        if paths.iter().any(|path| std::str::from_utf8(path).is_err()) {
            self.add(b"hdrcharset", b"BINARY");
        }
    }

    fn meta(&mut self, meta: &Meta) {
        for (key, id) in [("uid", meta.uid), ("gid", meta.gid)] {
            if u64::from(id) > OCTAL_7_MAX {
                self.number(key, id);
            }
        }
        let in_header = u64::try_from(meta.mtime.sec).is_ok_and(|sec| sec <= OCTAL_11_MAX);
        if !in_header || meta.mtime.nsec != 0 {
            self.add(b"mtime", time_text(meta.mtime).as_bytes());
        }
    }

    fn xattrs(&mut self, meta: &Meta) {
        for (name, value) in &meta.xattrs {
            let mut key = b"SCHILY.xattr.".to_vec();
            for byte in name {
                match byte {
                    b'=' => key.extend_from_slice(b"%3D"),
                    b'%' => key.extend_from_slice(b"%25"),
                    other => key.push(*other),
                }
            }
            self.add(&key, value);
        }
    }
}

/// Decimal seconds; before 1970 the fraction counts away from zero, as PAX has it.
fn time_text(mtime: Mtime) -> String {
    if mtime.nsec == 0 {
        return mtime.sec.to_string();
    }
    let (sign, sec, nsec) = if mtime.sec < 0 {
        (
            "-",
            (mtime.sec + 1).unsigned_abs(),
            1_000_000_000 - mtime.nsec,
        )
    } else {
        ("", mtime.sec.unsigned_abs(), mtime.nsec)
    };
    let fraction = format!("{nsec:09}");
    format!("{sign}{sec}.{}", fraction.trim_end_matches('0'))
}

/// What goes into a header block.
struct Header<'h> {
    entry_type: u8,
    name: &'h [u8],
    link: &'h [u8],
    meta: &'h Meta,
    size: u64,
    device: Option<(u32, u32)>,
}

struct TarWriter<'o> {
    out: &'o mut dyn Write,
    report: ExportReport,
}

impl TarWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        self.report.bytes += to_u64(bytes.len());
        self.out.write_all(bytes).map_err(ExportError::Write)
    }

    fn pad(&mut self, len: u64) -> Result<(), ExportError> {
        let block = to_u64(BLOCK);
        let pad = to_usize((block - len % block) % block);
        self.write([0; BLOCK].get(..pad).unwrap_or_default())
    }

    fn extended(
        &mut self,
        entry_type: u8,
        name: &[u8],
        records: &Records,
    ) -> Result<(), ExportError> {
        let size = to_u64(records.0.len());
        self.write(&block(&Header {
            entry_type,
            name,
            link: b"",
            meta: &Meta {
                perm: 0o644,
                ..Meta::default()
            },
            size,
            device: None,
        }))?;
        self.write(&records.0)?;
        self.pad(size)
    }

    fn entry(&mut self, header: &Header<'_>, records: &Records) -> Result<(), ExportError> {
        if !records.0.is_empty() {
            self.extended(b'x', b"./PaxHeaders/entry", records)?;
        }
        self.report.entries += 1;
        self.write(&block(header))
    }

    fn link(&mut self, name: &[u8], target: &[u8], meta: &Meta) -> Result<(), ExportError> {
        let mut records = Records::default();
        records.charset([name, target]);
        records.path("path", name);
        records.path("linkpath", target);
        records.meta(meta);
        let header = Header {
            entry_type: b'1',
            name,
            link: target,
            meta,
            size: 0,
            device: None,
        };
        self.entry(&header, &records)
    }

    /// Anything without data.
    fn plain(&mut self, name: &[u8], inode: &Inode) -> Result<(), ExportError> {
        let (entry_type, link, device) = match &inode.kind {
            Kind::Symlink(target) => (b'2', target.as_slice(), None),
            Kind::Char(major, minor) => (b'3', b"".as_slice(), Some((*major, *minor))),
            Kind::Block(major, minor) => (b'4', b"".as_slice(), Some((*major, *minor))),
            Kind::Dir(_) => (b'5', b"".as_slice(), None),
            Kind::Fifo => (b'6', b"".as_slice(), None),
            Kind::File(_) | Kind::Socket => return Ok(()),
        };
        let mut records = Records::default();
        records.charset([name, link]);
        records.path("path", name);
        records.path("linkpath", link);
        records.meta(&inode.meta);
        records.xattrs(&inode.meta);
        let header = Header {
            entry_type,
            name,
            link,
            meta: &inode.meta,
            size: 0,
            device,
        };
        self.entry(&header, &records)
    }

    fn file(
        &mut self,
        name: &[u8],
        meta: &Meta,
        len: u64,
        mut file: OpenFile<'_>,
    ) -> Result<(), ExportError> {
        let pieces = pieces(&file.runs, len);
        let data: u64 = pieces.iter().map(|(_, len)| len).sum();
        let sparse = (data < len).then(|| sparse_map(&pieces, len));
        let map = sparse.unwrap_or_default();
        let size = to_u64(map.len()) + data;
        let mut records = Records::default();
        records.charset([name, b""]);
        if map.is_empty() {
            records.path("path", name);
        } else {
            records.number("GNU.sparse.major", 1);
            records.number("GNU.sparse.minor", 0);
            records.add(b"GNU.sparse.name", name);
            records.number("GNU.sparse.realsize", len);
        }
        if size > OCTAL_11_MAX {
            records.number("size", size);
        }
        records.meta(meta);
        records.xattrs(meta);
        let header = Header {
            entry_type: b'0',
            name: if map.is_empty() {
                name
            } else {
                b"./GNUSparseFile.0/file"
            },
            link: b"",
            meta,
            size,
            device: None,
        };
        self.entry(&header, &records)?;
        self.write(&map)?;
        for (offset, len) in pieces {
            self.copy(name, offset, len, &mut file)?;
        }
        self.pad(size)
    }

    fn copy(
        &mut self,
        name: &[u8],
        offset: u64,
        len: u64,
        file: &mut OpenFile<'_>,
    ) -> Result<(), ExportError> {
        let mut buf = vec![0; to_usize(len.min(COPY_BYTES))];
        let mut at = 0;
        while at < len {
            let n = to_usize((len - at).min(COPY_BYTES));
            let part = buf.get_mut(..n).unwrap_or_default();
            (file.read_at)(offset + at, part).map_err(|source| ExportError::Content {
                path: shown(name),
                source,
            })?;
            self.write(part)?;
            at += to_u64(n);
        }
        Ok(())
    }
}

/// Runs as (offset, length), in whole blocks but for the end of the file: GNU tar starts each piece at a block. Holes
/// under [`HOLE_BYTES_MIN`] are filled.
fn pieces(runs: &[DataRun], len: u64) -> Vec<(u64, u64)> {
    let block = to_u64(BLOCK);
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    let mut end = 0;
    for run in runs {
        let start = run.file_offset - run.file_offset % block;
        let stop = (run.file_offset + run.len).next_multiple_of(block).min(len);
        if start.saturating_sub(end) < HOLE_BYTES_MIN {
            let (first, _) = pieces.pop().unwrap_or((0, 0));
            pieces.push((first, stop - first));
        } else {
            pieces.push((start, stop - start));
        }
        end = stop;
    }
    if end < len && len - end < HOLE_BYTES_MIN {
        let (first, _) = pieces.pop().unwrap_or((0, 0));
        pieces.push((first, len - first));
    }
    pieces
}

/// Count, then offset and length of each piece, one number a line, padded to a block. An empty piece marks the end of
/// the file: GNU tar cuts a hole there without it.
fn sparse_map(pieces: &[(u64, u64)], file_len: u64) -> Vec<u8> {
    let mut text = format!("{}\n", pieces.len() + 1).into_bytes();
    for (offset, len) in pieces.iter().chain([&(file_len, 0)]) {
        text.extend_from_slice(format!("{offset}\n{len}\n").as_bytes());
    }
    text.resize(text.len().next_multiple_of(BLOCK), 0);
    text
}

fn block(header: &Header<'_>) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let meta = header.meta;
    put(&mut block, 0, 100, header.name);
    octal(&mut block, 100, 8, u64::from(meta.perm & 0o7777));
    octal(&mut block, 108, 8, or_zero(meta.uid.into(), OCTAL_7_MAX));
    octal(&mut block, 116, 8, or_zero(meta.gid.into(), OCTAL_7_MAX));
    octal(&mut block, 124, 12, or_zero(header.size, OCTAL_11_MAX));
    let sec = u64::try_from(meta.mtime.sec).unwrap_or(0);
    octal(&mut block, 136, 12, or_zero(sec, OCTAL_11_MAX));
    put(&mut block, 148, 8, b"        ");
    put(&mut block, 156, 1, &[header.entry_type]);
    put(&mut block, 157, 100, header.link);
    put(&mut block, 257, 8, b"ustar\x0000");
    if let Some((major, minor)) = header.device {
        octal(&mut block, 329, 8, major.into());
        octal(&mut block, 337, 8, minor.into());
    }
    let sum: u64 = block.iter().map(|b| u64::from(*b)).sum();
    put(&mut block, 148, 8, format!("{sum:06o}\0 ").as_bytes());
    block
}

/// Values that do not fit stand in a PAX record.
const fn or_zero(n: u64, max: u64) -> u64 {
    if n > max { 0 } else { n }
}

fn put(block: &mut [u8; BLOCK], at: usize, len: usize, bytes: &[u8]) {
    let bytes = bytes.get(..bytes.len().min(len)).unwrap_or_default();
    if let Some(field) = block.get_mut(at..at + bytes.len()) {
        field.copy_from_slice(bytes);
    }
}

fn octal(block: &mut [u8; BLOCK], at: usize, len: usize, n: u64) {
    let digits = format!("{n:0width$o}\0", width = len - 1);
    put(block, at, len, digits.as_bytes());
}
