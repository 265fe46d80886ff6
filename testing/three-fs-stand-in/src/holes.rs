//! What a read gives of a file some of whose chunks are lost. Pure.

/// A chunk that is missing, or of which only the first bytes are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// Number of the chunk.
    pub chunk: u64,
    /// Its first bytes that are there.
    pub keep: u64,
}

/// A hole with data behind it, where holes are errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hole;

/// Turns the `bytes` at `offset` into what one request gives: a hole with data behind it is zeros (or an error), a hole at
/// the end is left out. So a request inside of one lost chunk gives nothing, and that is never an error.
///
/// # Errors
/// [`Hole`] if `forbid`.
pub fn apply(
    bytes: &mut Vec<u8>,
    offset: u64,
    chunk_bytes: u64,
    lost: &[Lost],
    forbid: bool,
) -> Result<(), Hole> {
    let missing = |at: u64| {
        let (chunk, inside) = (at / chunk_bytes, at % chunk_bytes);
        lost.iter().any(|l| l.chunk == chunk && inside >= l.keep)
    };
    let positions = offset..offset + u64::try_from(bytes.len()).unwrap();
    let present = positions.clone().rev().find(|at| !missing(*at));
    let len = present.map_or(0, |at| at + 1 - offset);
    bytes.truncate(usize::try_from(len).unwrap());
    let mut hole = false;
    for (byte, at) in bytes.iter_mut().zip(positions) {
        if missing(at) {
            hole = true;
            *byte = 0;
        }
    }
    if hole && forbid { Err(Hole) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(offset: u64, len: usize, lost: &[(u64, u64)], forbid: bool) -> Option<Vec<u8>> {
        let lost: Vec<Lost> = lost
            .iter()
            .map(|(chunk, keep)| Lost {
                chunk: *chunk,
                keep: *keep,
            })
            .collect();
        let mut bytes = vec![1; len];
        apply(&mut bytes, offset, 4, &lost, forbid).ok()?;
        Some(bytes)
    }

    #[test]
    fn a_hole_is_zeros_in_the_middle_and_a_short_read_at_the_end() {
        assert_eq!(
            read(2, 8, &[(1, 0)], false).unwrap(),
            [1, 1, 0, 0, 0, 0, 1, 1]
        );
        assert_eq!(
            read(2, 8, &[(1, 3)], false).unwrap(),
            [1, 1, 1, 1, 1, 0, 1, 1]
        );
        assert_eq!(read(2, 8, &[(1, 0)], true), None);
        assert_eq!(read(2, 6, &[(1, 0)], true).unwrap(), [1, 1]);
        assert_eq!(read(4, 4, &[(1, 0)], true).unwrap(), []);
        assert_eq!(read(0, 8, &[(1, 2)], true).unwrap(), [1; 6]);
    }
}
