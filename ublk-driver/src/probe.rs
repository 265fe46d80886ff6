//! Whether ublk can be used on this machine, and why not.

use crate::control::Control;
use crate::error::UblkError;
use crate::wire::features;

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
    #[error("kernel {0} is known to crash when a ublk device is added; use another one")]
    Kernel(String),
    /// The kernel has a ublk without what is needed.
    #[error("the kernel's ublk lacks {0}; Linux 6.5 or later has it")]
    Feature(&'static str),
    /// `io_uring` is forbidden or missing.
    #[error("io_uring cannot be used: {0}; see the sysctl `kernel.io_uring_disabled`")]
    NoIoUring(String),
    /// The kernel does not answer as expected.
    #[error("the kernel's ublk does not say what it can do: {0}")]
    Silent(String),
}

/// What is needed of the kernel's driver, and what it is called.
const NEEDED: [(u64, &str); 2] = [
    (features::CMD_IOCTL_ENCODE, "UBLK_F_CMD_IOCTL_ENCODE"),
    (features::USER_COPY, "UBLK_F_USER_COPY"),
];

/// Releases on which adding a device crashes the machine: 6.18.4 and 6.18.5, and Ubuntu's 6.17 for Azure
/// (kvcache-ai/AgentENV issue 20).
pub(crate) fn is_crashing(release: &str) -> bool {
    let is = |version: &str| {
        let rest = release.strip_prefix(version);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    is("6.18.4") || is("6.18.5") || (release.starts_with("6.17.") && release.ends_with("-azure"))
}

/// Says whether ublk can be used here. No device is made.
///
/// # Errors
/// The first thing that is in the way.
pub fn probe() -> Result<(), WhyNot> {
    features_here().map(|_| ())
}

/// The features of the kernel's driver, if it can be used.
///
/// # Errors
/// As [`probe`].
pub(crate) fn features_here() -> Result<u64, WhyNot> {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    if is_crashing(&release) {
        return Err(WhyNot::Kernel(release));
    }
    let found = Control::open().and_then(|mut control| control.features());
    let found = found.map_err(|error| match error {
        UblkError::WhyNot(why) => why,
        other => WhyNot::Silent(other.to_string()),
    })?;
    for (bit, name) in NEEDED {
        if found & bit == 0 {
            return Err(WhyNot::Feature(name));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_that_crash_are_known_and_no_others() {
        for bad in [
            "6.18.4",
            "6.18.5-amd64",
            "6.18.5+deb14-amd64",
            "6.17.0-1004-azure",
        ] {
            assert!(is_crashing(bad), "{bad}");
        }
        for good in [
            "6.18.44-fc-v857",
            "6.18.3",
            "6.18.6",
            "6.18.50",
            "6.12.117+deb12-amd64",
            "6.17.0-5-generic",
            "6.8.0-azure",
        ] {
            assert!(!is_crashing(good), "{good}");
        }
    }
}
