//! The benchmark's own instruments, tested as programs.

#![expect(clippy::unwrap_used, reason = "test code")]

mod origin;
