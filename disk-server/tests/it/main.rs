//! Tests of the disk server's protocols, in memory.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

#[path = "../../../imgstore/tests/it/fuzz/harness.rs"]
mod harness;
#[allow(
    dead_code,
    reason = "each of the test binaries with this file uses a part of it"
)]
#[path = "../../../imgstore/tests/it/rng.rs"]
mod rng;

mod fuzz;
mod memory;
mod nbd;
