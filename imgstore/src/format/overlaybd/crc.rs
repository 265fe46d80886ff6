//! The checksum of ZFile: CRC-32C without the usual inversions.
//!
//! The register starts at the seed and is not inverted at the end; `crc32c` inverts at both ends, so both are undone.

/// Seed of the digests of headers and of the jump table.
pub const SEED_HEADER: u32 = 0;
/// Seed of the checksum behind every block.
pub const SEED_BLOCK: u32 = 100_007;

/// The checksum of `bytes`.
pub fn crc(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(crc(SEED_HEADER, b"123456789"), 0x58E3_FA20);
        assert_eq!(crc(SEED_BLOCK, b"123456789"), 0x3C9B_D4E0);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xE306_9283);
    }
}
