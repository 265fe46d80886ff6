//! The driver's threads, and the life of one device.

use std::path::{Path, PathBuf};

use crate::content::Content;
use crate::error::UblkError;
use crate::options::Options;
use crate::probe::probe;

/// The threads that talk to the kernel. One is enough for a process, however many devices it serves.
#[derive(Debug)]
pub struct Driver {}

impl Driver {
    /// Starts `loops` threads, one a CPU where it is 0.
    ///
    /// # Errors
    /// [`UblkError::WhyNot`] where ublk cannot be used.
    pub fn start(loops: usize) -> Result<Self, UblkError> {
        let _ = loops;
        probe()?;
        Ok(Self {})
    }

    /// Makes a device; it serves when this returns.
    ///
    /// # Errors
    /// Says what the kernel refused. Nothing is left behind.
    pub fn add(&self, content: Content, options: &Options) -> Result<Device, UblkError> {
        let _ = (content, options);
        Err(UblkError::NoDevice(0))
    }

    /// Serves a device again whose server died ([`crate::Recovery::Wait`]): requests that wait go on. The content must be what it
    /// was; options are taken from the device, except for `workers`.
    ///
    /// # Errors
    /// [`UblkError::NoDevice`], [`UblkError::Differs`], or what the kernel refused.
    pub fn recover(
        &self,
        id: u32,
        content: Content,
        options: &Options,
    ) -> Result<Device, UblkError> {
        let _ = (content, options);
        Err(UblkError::NoDevice(id))
    }
}

/// A device that this process serves. Dropping it takes it away, whoever uses it: they get EIO.
#[derive(Debug)]
pub struct Device {
    id: u32,
    path: PathBuf,
}

impl Device {
    /// The number N of `/dev/ublkbN`.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// `/dev/ublkbN`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the device away. Bytes that were written and not flushed are flushed by the kernel before.
    /// Whoever merely has it open gets errors from then on; its node goes with the last of them.
    ///
    /// # Errors
    /// [`UblkError::InUse`] while it is mounted or claimed: it is served on.
    pub fn remove(&self) -> Result<(), UblkError> {
        Err(UblkError::InUse(self.path.clone()))
    }
}
