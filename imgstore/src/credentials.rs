//! What origins that know who asks have in common: secrets that cannot be printed, the environment, helper programs.
//!
//! Where credentials are looked for is written where they are used: `origin/s3/credentials.rs` and
//! `registry/credentials.rs`. None of them is ever part of an error message, a log line or a `Debug` output.

pub mod environment;
pub mod program;
pub mod secret;
