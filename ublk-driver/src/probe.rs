//! Whether ublk can be used on this machine, and why not.

/// Why ublk cannot be used here. The text says what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WhyNot {
    /// There is no control device.
    #[error(
        "`/dev/ublk-control` is missing; load the kernel module (`modprobe ublk_drv`) if the kernel has it"
    )]
    NoControl,
    /// The control device cannot be opened.
    #[error("`/dev/ublk-control` cannot be opened: {0}")]
    Closed(String),
    /// A kernel that is known to crash when a device is added.
    #[error("kernel {0} is known to crash when a ublk device is added; use a later one")]
    Kernel(String),
    /// The kernel has a ublk without what is needed.
    #[error("the kernel's ublk lacks {0}; Linux 6.5 or later has it")]
    Feature(&'static str),
    /// `io_uring` is forbidden or missing.
    #[error("io_uring cannot be used: {0}; see the sysctl `kernel.io_uring_disabled`")]
    NoIoUring(String),
}

/// Says whether ublk can be used here.
///
/// # Errors
/// The first thing that is in the way.
pub fn probe() -> Result<(), WhyNot> {
    Err(WhyNot::Feature("a driver that is written yet"))
}
