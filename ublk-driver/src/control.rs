//! Commands to `/dev/ublk-control`, each bounded in time.

use std::fs::File;
use std::io;
use std::time::Duration;

use crate::error::UblkError;
use crate::probe::WhyNot;
use crate::sys::ControlRing;
use crate::wire::{Command, DEV_INFO_BYTES, DevInfo, PARAMS_BYTES, Params};

/// The control device.
pub(crate) const CONTROL: &str = "/dev/ublk-control";
/// Longest wait for a command that depends on nobody but the kernel.
pub(crate) const COMMAND_PATIENCE: Duration = Duration::from_secs(20);
/// The kernel chooses a number.
const ANY_ID: u32 = u32::MAX;

/// Sends one command after the other. After [`UblkError::Silent`] it must not be used again.
#[derive(Debug)]
pub(crate) struct Control {
    file: File,
    ring: ControlRing,
}

impl Control {
    /// Opens the control device.
    ///
    /// # Errors
    /// [`UblkError::WhyNot`].
    pub(crate) fn open() -> Result<Self, UblkError> {
        let file = File::options().read(true).write(true).open(CONTROL);
        let file = file.map_err(|error| match error.kind() {
            // Without the driver, or with a node left by a driver that is gone.
            io::ErrorKind::NotFound => WhyNot::NoControl,
            _ if error.raw_os_error() == Some(nix::libc::ENXIO) => WhyNot::NoControl,
            _ => WhyNot::Closed(error.to_string()),
        })?;
        let ring = ControlRing::new().map_err(|e| WhyNot::NoIoUring(e.to_string()))?;
        Ok(Self { file, ring })
    }

    fn issue(
        &mut self,
        command: Command,
        id: u32,
        data: u64,
        memory: Vec<u8>,
        patience: Duration,
    ) -> Result<Vec<u8>, UblkError> {
        let shown = if id == ANY_ID { -1 } else { i64::from(id) };
        let failed = |source| UblkError::Command {
            command: command.name,
            id: shown,
            source,
        };
        let args = (command.op, id, data);
        let ended = self.ring.command(&self.file, args, memory, patience);
        match ended.map_err(failed)? {
            None => Err(UblkError::Silent {
                command: command.name,
                id: shown,
                waited: patience,
            }),
            Some((result, _)) if result == -nix::libc::ENODEV && id != ANY_ID => {
                Err(UblkError::NoDevice(id))
            }
            Some((result, _)) if result < 0 => Err(failed(io::Error::from_raw_os_error(
                result.saturating_neg(),
            ))),
            Some((_, memory)) => Ok(memory),
        }
    }

    /// The features of the kernel's driver.
    pub(crate) fn features(&mut self) -> Result<u64, UblkError> {
        let memory = vec![0; size_of::<u64>()];
        let bytes = self.issue(Command::GET_FEATURES, ANY_ID, 0, memory, COMMAND_PATIENCE)?;
        let bytes = bytes.first_chunk().copied().unwrap_or_default();
        Ok(u64::from_le_bytes(bytes))
    }

    /// Makes a device; what the kernel made of it, its number above all.
    pub(crate) fn add(&mut self, info: &DevInfo, id: Option<u32>) -> Result<DevInfo, UblkError> {
        let id = id.unwrap_or(ANY_ID);
        let info = DevInfo { id, ..*info };
        let memory = info.encode().to_vec();
        let memory = self.issue(Command::ADD_DEV, id, 0, memory, COMMAND_PATIENCE)?;
        Ok(DevInfo::decode(&memory))
    }

    pub(crate) fn info(&mut self, id: u32) -> Result<DevInfo, UblkError> {
        let memory = vec![0; DEV_INFO_BYTES];
        let memory = self.issue(Command::GET_DEV_INFO, id, 0, memory, COMMAND_PATIENCE)?;
        Ok(DevInfo::decode(&memory))
    }

    pub(crate) fn set_params(&mut self, id: u32, params: &Params) -> Result<(), UblkError> {
        let memory = params.encode().to_vec();
        self.issue(Command::SET_PARAMS, id, 0, memory, COMMAND_PATIENCE)?;
        Ok(())
    }

    pub(crate) fn params(&mut self, id: u32) -> Result<Params, UblkError> {
        let mut memory = vec![0; PARAMS_BYTES];
        // The kernel wants to be told how much it may write.
        let len = u32::try_from(PARAMS_BYTES).unwrap_or_default();
        if let Some(head) = memory.first_chunk_mut() {
            *head = len.to_le_bytes();
        }
        let memory = self.issue(Command::GET_PARAMS, id, 0, memory, COMMAND_PATIENCE)?;
        Ok(Params::decode(&memory))
    }

    /// A command without memory. `data` is the server's process for those that start serving.
    pub(crate) fn plain(
        &mut self,
        command: Command,
        id: u32,
        data: u64,
        patience: Duration,
    ) -> Result<(), UblkError> {
        self.issue(command, id, data, Vec::new(), patience)?;
        Ok(())
    }
}
