//! Small files that nothing else names carry their own digest: one line of 64 hex digits, then the contents.
//!
//! A wrong offset in a kept placement could never become a wrong byte, but it would become EIO for ever; a damaged pin would
//! pin the wrong segments. With the seal, damage is found when the file is read, and the file is made anew.

use crate::format::FormatError;
use crate::ids::Digest;

/// Bytes in front of the contents.
const SEAL_BYTES: usize = 65;

/// Puts the seal in front.
pub fn seal(contents: &[u8]) -> Vec<u8> {
    let mut sealed = Digest::of(contents).to_hex().into_bytes();
    sealed.push(b'\n');
    sealed.extend_from_slice(contents);
    sealed
}

/// The contents behind the seal.
///
/// # Errors
/// [`FormatError`] when they are not what was sealed: treat the file as missing.
pub fn unseal<'a>(sealed: &'a [u8], what: &str) -> Result<&'a [u8], FormatError> {
    let (head, contents) = sealed.split_at_checked(SEAL_BYTES).unwrap_or_default();
    let found = Digest::of(contents).to_hex();
    if head.strip_suffix(b"\n") == Some(found.as_bytes()) {
        return Ok(contents);
    }
    let expected = String::from_utf8_lossy(head).trim_end().to_owned();
    Err(FormatError::new(what, expected, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_flipped_bit_or_cut_is_found() {
        let sealed = seal(b"{\"a\":1}");
        assert_eq!(unseal(&sealed, "x").unwrap(), b"{\"a\":1}");
        for bit in 0..sealed.len() * 8 {
            let mut bytes = sealed.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(unseal(&bytes, "x").is_err(), "bit {bit}");
        }
        for len in 0..sealed.len() {
            assert!(unseal(&sealed[..len], "x").is_err(), "{len} bytes");
        }
    }
}
