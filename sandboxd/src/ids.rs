//! Names that nobody else has.

use std::fmt::Write as _;

/// Sixteen random hexadecimal digits.
///
/// # Panics
/// When the kernel has no random numbers, which it always has once it is up.
pub(crate) fn random() -> String {
    let mut bytes = [0; 8];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(filled, Ok(bytes.len()), "the kernel has random numbers");
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}
