//! Directory blocks: 12-byte entries, then their names; names strictly sorted over the whole directory.

use crate::ids::to_usize;

/// Bytes of one entry before its name: nid u64, name offset u16, type u8, 0.
const ENTRY_SIZE: usize = 12;
/// Bytes of a directory block.
const BLOCK: usize = 4096;

/// A directory entry.
#[derive(Debug, Clone)]
pub struct Entry<'a> {
    /// Name, also `.` and `..`.
    pub name: &'a [u8],
    /// Inode number.
    pub nid: u64,
    /// EROFS file type (1 file … 7 symlink).
    pub kind: u8,
}

/// How many entries go into each block, in order. Only names count, so that sizes are known before inode numbers are.
fn split(name_lens: impl Iterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut blocks: Vec<(usize, usize)> = Vec::new();
    for len in name_lens {
        let need = ENTRY_SIZE + len;
        match blocks.last_mut() {
            Some((count, used)) if *used + need <= BLOCK => {
                *count += 1;
                *used += need;
            }
            _ => blocks.push((1, need)),
        }
    }
    blocks
}

/// Bytes of a directory with names of these lengths (sorted, with `.` and `..`): whole blocks and the used part of the last.
pub fn size(name_lens: impl Iterator<Item = usize>) -> u64 {
    let blocks = split(name_lens);
    let last = blocks.last().map_or(0, |(_, used)| *used);
    crate::ids::to_u64(blocks.len().saturating_sub(1) * BLOCK + last)
}

/// The bytes of a directory, as long as [`size`] said. Entries are sorted by name.
pub fn encode(entries: &[Entry<'_>]) -> Vec<u8> {
    let blocks = split(entries.iter().map(|e| e.name.len()));
    let mut out = Vec::with_capacity(blocks.len() * BLOCK);
    let mut rest = entries;
    for (count, used) in blocks {
        out.resize(out.len().next_multiple_of(BLOCK), 0);
        let (now, later) = rest.split_at(count);
        rest = later;
        let mut name_offset = count * ENTRY_SIZE;
        for entry in now {
            out.extend_from_slice(&entry.nid.to_le_bytes());
            out.extend_from_slice(
                &u16::try_from(name_offset)
                    .expect("inside a block")
                    .to_le_bytes(),
            );
            out.extend_from_slice(&[entry.kind, 0]);
            name_offset += entry.name.len();
        }
        for entry in now {
            out.extend_from_slice(entry.name);
        }
        debug_assert_eq!(name_offset, used);
    }
    debug_assert_eq!(
        out.len(),
        to_usize(size(entries.iter().map(|e| e.name.len())))
    );
    out
}
