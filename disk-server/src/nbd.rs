//! The NBD protocol, as a server: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.
//!
//! `wire` has the numbers, `handshake` agrees on the disk, `transmission` answers requests, `server` has the sockets and threads.
//! A client is not trusted: whatever it sends that the protocol does not allow ends its connection with an error in the log,
//! and sizes, numbers and times are bounded before anything is allocated or waited for.

pub mod handshake;
pub mod server;
pub mod transmission;
pub mod wire;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use imgstore::disk::bytewise::Bytewise;

/// What is offered to clients.
#[derive(Debug, Clone)]
pub struct Export {
    /// Its name; clients that ask for the empty name get it too.
    pub name: String,
    /// The disk.
    pub disk: Arc<Bytewise>,
}

/// Whether the next of these messages is written to the log: the first hundred, then each that doubles their number. A client can
/// make as many as it likes, and the log must not grow with them.
fn is_loud(so_far: &AtomicU64) -> bool {
    let count = so_far.fetch_add(1, Ordering::Relaxed);
    count < 100 || count.is_power_of_two()
}

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The client sent what the protocol does not allow.
    #[error("NBD client: {what}: expected {expected}, found {found}")]
    Malformed {
        /// The field.
        what: &'static str,
        /// What is allowed.
        expected: String,
        /// What came.
        found: String,
    },
    /// The client let the server wait in the middle of something, or took no answers.
    #[error("NBD client: nothing came or went for {0} seconds in the middle of a message")]
    Stalled(u64),
    /// The socket failed.
    #[error("NBD client: {0}")]
    Io(#[from] io::Error),
}

impl NbdError {
    fn malformed(
        what: &'static str,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Malformed {
            what,
            expected: expected.into(),
            found: found.to_string(),
        }
    }
}
