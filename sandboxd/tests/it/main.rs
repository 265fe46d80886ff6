//! Sandboxes as their users meet them: real namespaces, real mounts, real processes. Needs root.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

mod host;

mod exec;
mod files;
mod isolation;
mod life;
mod network;
