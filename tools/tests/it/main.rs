//! Tests of the command line as users and scripts meet it: real programs, a real web server, real mounts. Needs root.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking and say why, as tests do"
)]

mod daemon;
#[path = "../../../imgstore/tests/it/oci/docker_registry.rs"]
mod docker_registry;
mod nbd_client;
mod nginx;
mod power_disk;
mod sandboxd;
mod world;

mod cache;
mod collecting;
mod contract;
mod disk_attach;
mod disk_files;
mod disk_power;
mod disk_published;
mod disk_random;
mod disk_vm;
mod e2b;
mod images;
mod import;
mod killed;
mod logins;
mod openapi;
mod same_name;
mod sandbox_disk;
mod sandbox_keys;
mod sandbox_layers;
mod sandbox_life;
mod sandboxes;
mod seaweed;
mod served;
mod testvm;
mod tidy;
mod traces;
mod trajectory;
mod two_origins;
mod unit;
mod wrong_use;
