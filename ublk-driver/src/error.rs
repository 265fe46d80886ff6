//! What can go wrong with a device.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::probe::WhyNot;

/// See the head of this file.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// This machine has no ublk that can be used.
    #[error("ublk cannot be used here: {0}")]
    WhyNot(#[from] WhyNot),
    /// An option is out of range.
    #[error("{0}")]
    Invalid(String),
    /// A command to the kernel's driver failed.
    #[error("ublk command `{command}` for device {id} failed: {source}")]
    Command {
        /// Its name.
        command: &'static str,
        /// The device, -1 where the kernel was to choose.
        id: i64,
        /// The kernel's error number.
        #[source]
        source: io::Error,
    },
    /// A command did not end; the kernel may carry it out later.
    #[error(
        "ublk command `{command}` for device {id} did not end within {waited:?}; the kernel may still carry it out"
    )]
    Silent {
        /// Its name.
        command: &'static str,
        /// The device, -1 where the kernel was to choose.
        id: i64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The device is mounted, or somebody has claimed it. It is served on.
    #[error(
        "`{0}` is in use; unmount it or end what uses it (`fuser -vm {0}` lists it) and try again"
    )]
    InUse(PathBuf),
    /// There is no such device.
    #[error("there is no ublk device {0}")]
    NoDevice(u32),
    /// Another program made the device, or another owner.
    #[error("ublk device {0} belongs to somebody else; it is left alone")]
    NotOurs(u32),
    /// What is to be served again is not what the device was made for.
    #[error(
        "device {id} was made with {what} {expected}, not {found}; serve what it was made for, or delete it"
    )]
    Differs {
        /// The device.
        id: u32,
        /// The property.
        what: &'static str,
        /// As the kernel has it.
        expected: u64,
        /// As it was given.
        found: u64,
    },
    /// A file of the device could not be used.
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A thread or a ring could not be made.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}
