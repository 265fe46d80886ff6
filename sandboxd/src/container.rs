//! Sandboxes as containers: namespaces, an overlay of layers, control groups, a filter of system calls.
//!
//! Four processes take part. The *daemon* has threads and an HTTP server, makes mounts, and never forks. The `spawner`
//! makes first processes. Each sandbox has an *agent* (pid 1, `agent`) that serves the daemon, and a `launcher` that execs are
//! born from. `shell` tells how an empty sandbox is set up ahead of its use, `backend` how the daemon drives it all.

mod agent;
pub mod backend;
pub mod cgroup;
mod child;
mod dial;
pub mod files;
pub(crate) mod fs;
mod launcher;
pub mod link;
mod message;
pub mod protocol;
mod quiet;
pub mod rootfs;
mod seccomp;
mod shell;
pub mod spawner;
pub mod spool;
mod users;
pub mod watch;
