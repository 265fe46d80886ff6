//! The tar wrapping of a layer file: where the payload lies.
//!
//! Writers put one file into a ustar archive, in one of two forms: a PAX header of one record (`size=…`) before it, so that
//! the payload starts at byte 1,536; or the plain form with the size in the octal field and the payload at byte 512.
//! What is not exactly that is taken as not wrapped.

use crate::origin::ByteRange;

/// Bytes of the start of a file that tell.
pub const HEAD_BYTES: usize = 1536;
const BLOCK: usize = 512;

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches(['\0', ' ']), 8).ok()
}

/// Whether a block is a ustar header with a right sum.
fn is_header(block: &[u8]) -> bool {
    let sum: u64 = block
        .iter()
        .enumerate()
        .map(|(at, byte)| {
            u64::from(if (148..156).contains(&at) {
                b' '
            } else {
                *byte
            })
        })
        .sum();
    block.get(257..262) == Some(b"ustar")
        && block.get(263..265) == Some(b"00")
        && block.get(148..156).and_then(octal) == Some(sum)
}

/// The payload of a wrapped layer whose file begins with `head` (its first 1,536 bytes, or all of it if it is shorter);
/// `None` if it is not wrapped.
pub fn payload(head: &[u8]) -> Option<ByteRange> {
    let block = |n: usize| head.get(n * BLOCK..(n + 1) * BLOCK);
    let first = block(0).filter(|b| is_header(b))?;
    let size = first.get(124..136)?;
    if first.get(156) != Some(&b'x') {
        let len = octal(size)?;
        return (len > 0).then_some(ByteRange { start: 512, len });
    }
    block(2).filter(|b| is_header(b))?;
    let record = usize::try_from(octal(size)?).ok()?;
    let text = std::str::from_utf8(block(1)?.get(..record)?).ok()?;
    let value = text.trim_end_matches('\n').split_once(" size=")?.1;
    let len = value.parse().ok()?;
    (len > 0).then_some(ByteRange { start: 1536, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u8, size: u64) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        block[..4].copy_from_slice(b"name");
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|b| u64::from(*b)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn wrapped(record: &str) -> Vec<u8> {
        let mut pax = [0; BLOCK];
        pax[..record.len()].copy_from_slice(record.as_bytes());
        let size = record.len().try_into().unwrap();
        [header(b'x', size), pax, header(b'0', 0)].concat()
    }

    #[test]
    fn both_forms_are_found() {
        let plain = header(b'0', 6716);
        assert_eq!(
            payload(&plain),
            Some(ByteRange {
                start: 512,
                len: 6716
            })
        );
        let pax = wrapped("13 size=6716\n");
        assert_eq!(
            payload(&pax),
            Some(ByteRange {
                start: 1536,
                len: 6716
            })
        );
    }

    #[test]
    fn anything_else_is_not_wrapped() {
        assert_eq!(payload(b""), None);
        assert_eq!(payload(&[0; 1536]), None);
        let mut bad = header(b'0', 6716);
        bad[0] = b'N';
        assert_eq!(payload(&bad), None, "a wrong sum");
        assert_eq!(payload(&header(b'0', 0)), None);
        assert_eq!(payload(&wrapped("13 size=67x6\n")), None);
        assert_eq!(payload(&wrapped("13 size=0\n")), None);
        assert_eq!(payload(&wrapped("13 size=6716\n")[..1024]), None);
    }
}
