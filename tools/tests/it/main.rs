//! Tests of the command line as users and scripts meet it: real programs, a real web server, real mounts. Needs root.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

mod tidy;
