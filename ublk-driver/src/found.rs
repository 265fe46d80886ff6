//! Devices that are there, also those whose server died.

use std::fs;
use std::io;
use std::path::Path;

use crate::control::{COMMAND_PATIENCE, Control};
use crate::device::claim;
use crate::error::UblkError;
use crate::wire::Command;

/// Where the kernel lists its devices.
const CLASS: &str = "/sys/class/ublk-char";

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

impl State {
    /// From `struct ublksrv_ctrl_dev_info`.
    pub(crate) const fn from_kernel(state: u16) -> Self {
        match state {
            0 => Self::Dead,
            1 => Self::Live,
            2 => Self::Waiting,
            3 => Self::Failing,
            other => Self::Other(other),
        }
    }
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

/// All devices that were made by this driver and are still there, by number. Those of other programs are left out.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn devices() -> Result<Vec<Found>, UblkError> {
    let failed = |source| UblkError::Io {
        what: "list",
        path: Path::new(CLASS).to_owned(),
        source,
    };
    let entries = match fs::read_dir(CLASS) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    let mut control = Control::open()?;
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let id = name.to_str().and_then(|n| n.strip_prefix("ublkc"));
        let Some(id) = id.and_then(|id| id.parse().ok()) else {
            continue;
        };
        let info = match control.info(id) {
            // It went meanwhile.
            Err(UblkError::NoDevice(_)) => continue,
            info => info?,
        };
        if let Some(owner) = info.owner() {
            found.push(Found {
                id,
                owner,
                state: State::from_kernel(info.state),
                server_pid: info.server_pid,
            });
        }
    }
    found.sort_by_key(|device| device.id);
    Ok(found)
}

/// Deletes a device whose server is dead. Requests that wait for another server fail with EIO.
///
/// # Errors
/// [`UblkError::InUse`] while it is mounted or served, [`UblkError::NoDevice`], [`UblkError::NotOurs`].
pub fn delete(id: u32) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    let info = control.info(id)?;
    if info.owner().is_none() {
        return Err(UblkError::NotOurs(id));
    }
    if State::from_kernel(info.state) == State::Live {
        return Err(UblkError::InUse(crate::device::block_path(id)));
    }
    let claimed = claim(id)?;
    // Stopping first gives up what waits; the claim must be gone before the device can be.
    control.plain(Command::STOP_DEV, id, 0, COMMAND_PATIENCE)?;
    drop(claimed);
    control.plain(Command::DEL_DEV_ASYNC, id, 0, COMMAND_PATIENCE)
}
