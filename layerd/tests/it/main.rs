//! layerd as its users meet it: real processes, real kernel mounts, an origin that misbehaves. Needs root.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

#[allow(
    dead_code,
    reason = "each of the test binaries with this file uses a part of it"
)]
#[path = "../../../imgstore/tests/it/bad_web.rs"]
mod bad_web;
mod daemon;
mod faults;
mod fixture;
mod web;

mod axes;
mod cache;
mod composing;
mod damage;
mod deaths;
mod killing;
mod kills;
mod leases;
mod lifecycle;
mod metrics;
mod outage;
mod reading;
mod space;
mod three_fs;
mod traces;
mod ublk;
mod upgrades;
