//! Whether two stacks show the same.

use super::DiskError;
use super::stack::Stack;
use crate::format::overlaybd::SECTOR;
use crate::ids::{to_u64, to_usize};

/// Sectors compared at a time.
const STEP: u64 = 2048;

/// Reads sectors; past the end there are zeros.
fn read(stack: &Stack, lba: u64, buffer: &mut [u8]) -> Result<(), DiskError> {
    let offset = lba * SECTOR;
    let there = stack.len().saturating_sub(offset).min(to_u64(buffer.len()));
    let (inside, past) = buffer.split_at_mut(to_usize(there));
    past.fill(0);
    if inside.is_empty() {
        return Ok(());
    }
    stack
        .read_at(inside, offset)
        .map_err(DiskError::io("compare", "layers"))
}

/// The offset of the first sector in which two stacks differ. All that either maps is read.
///
/// # Errors
/// What a layer said.
pub fn first_difference(a: &Stack, b: &Stack) -> Result<Option<u64>, DiskError> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut records: Vec<_> = [a, b]
        .iter()
        .flat_map(|stack| stack.map().records())
        .map(|record| (record.lba(), record.end()))
        .collect();
    records.sort_unstable();
    let mut at = 0;
    for (start, end) in records {
        at = start.max(at);
        while at < end {
            let step = (end - at).min(STEP);
            for (stack, buffer) in [(a, &mut left), (b, &mut right)] {
                buffer.resize(to_usize(step * SECTOR), 0);
                read(stack, at, buffer)?;
            }
            let sector = to_usize(SECTOR);
            let pairs = left.chunks(sector).zip(right.chunks(sector));
            if let Some(wrong) = pairs.into_iter().position(|(a, b)| a != b) {
                return Ok(Some((at + to_u64(wrong)) * SECTOR));
            }
            at += step;
        }
    }
    Ok(None)
}
