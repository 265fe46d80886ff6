//! Writing a stack as an image without format, with holes where it has zeros.

use std::io;
use std::path::Path;

use super::DiskError;
use super::committed::{Partial, beside};
use super::stack::Stack;
use super::state::file_name;
use crate::format::overlaybd::SECTOR;
use crate::ids::{BLOCK_SIZE, to_u64, to_usize};
use crate::media::Media;

/// Bytes read at a time.
const STEP_BYTES: u64 = 1 << 20;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Exported {
    /// Bytes of the disk.
    pub virtual_size: u64,
    /// Bytes of it that were written; the rest are holes.
    pub written: u64,
}

/// Writes the runs of `bytes` that are not zeros, in blocks of 4 KiB counted from the disk's start.
fn write_sparse(bytes: &[u8], offset: u64, out: &dyn Media) -> io::Result<u64> {
    let mut written = 0;
    let mut at = 0;
    // From block edge to block edge, and one longer run for blocks that follow each other.
    let mut run = 0..0;
    while at < bytes.len() {
        let into = (offset + to_u64(at)) % BLOCK_SIZE;
        let end = (at + to_usize(BLOCK_SIZE - into)).min(bytes.len());
        let block = bytes.get(at..end).unwrap_or_default();
        if block.iter().any(|byte| *byte != 0) {
            if run.end != at {
                written += write_run(bytes, &run, offset, out)?;
                run = at..at;
            }
            run.end = end;
        }
        at = end;
    }
    Ok(written + write_run(bytes, &run, offset, out)?)
}

fn write_run(
    bytes: &[u8],
    run: &std::ops::Range<usize>,
    offset: u64,
    out: &dyn Media,
) -> io::Result<u64> {
    let part = bytes.get(run.clone()).unwrap_or_default();
    if !part.is_empty() {
        out.write_at(part, offset + to_u64(run.start))?;
    }
    Ok(to_u64(part.len()))
}

/// Writes all of a stack into `out`, which is empty; synced when this returns. `progress` is told how many bytes of how
/// many mapped ones are done.
///
/// # Errors
/// What a layer or `out` said.
pub fn export(stack: &Stack, out: &dyn Media, progress: &dyn Fn(u64, u64)) -> io::Result<Exported> {
    let size = stack.len();
    out.set_len(size)?;
    let data = || stack.map().records().iter().filter(|r| !r.is_zeroed());
    let total = data().map(|record| record.sectors() * SECTOR).sum();
    let mut done = 0;
    let mut written = 0;
    let mut buffer = vec![0; to_usize(STEP_BYTES)];
    for record in data() {
        let mut at = record.lba() * SECTOR;
        let end = (record.end() * SECTOR).min(size);
        while at < end {
            let step = (end - at).min(STEP_BYTES);
            let part = buffer.get_mut(..to_usize(step)).unwrap_or_default();
            stack.read_at(part, at)?;
            written += write_sparse(part, at, out)?;
            at += step;
            done += step;
            progress(done, total);
        }
    }
    out.sync()?;
    Ok(Exported {
        virtual_size: size,
        written,
    })
}

/// Writes all of a stack as the file `path`, in place of what was there, and only when it is whole.
///
/// # Errors
/// As for [`export`], with the file's name.
pub fn export_file(
    stack: &Stack,
    path: &Path,
    progress: &dyn Fn(u64, u64),
) -> Result<Exported, DiskError> {
    let (partial, out) = Partial::create(beside(path, ".partial"))?;
    let done = export(stack, &out, progress);
    let done = done.map_err(DiskError::io("export to", &file_name(path)))?;
    partial.replace(path)?;
    Ok(done)
}
