//! How layers reach the kernel: as files of a FUSE mount, or as block devices through ublk.

use serde::{Deserialize, Serialize};

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DriverChoice {
    /// ublk where it can be used, else FUSE.
    Auto,
    /// Files of a FUSE mount. Needs Linux 6.13, which can mount EROFS from one.
    Fuse,
    /// Block devices. Needs the kernel module `ublk_drv`, Linux 6.5 or later.
    Ublk,
}

/// What is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Driver {
    /// Files of a FUSE mount.
    #[default]
    Fuse,
    /// Block devices.
    Ublk,
}

impl Driver {
    /// As it is written on the command line and in statistics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fuse => "fuse",
            Self::Ublk => "ublk",
        }
    }
}

/// What is used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) driver: Driver,
    pub(crate) reason: String,
}

/// Chooses. What is asked for and cannot work is an error, not something else.
///
/// # Errors
/// Why ublk cannot be used.
pub(crate) fn choose(
    choice: DriverChoice,
    probe: impl FnOnce() -> Result<(), ublk_driver::WhyNot>,
) -> Result<Chosen, ublk_driver::WhyNot> {
    let asked = || "asked for".to_owned();
    let (driver, reason) = match choice {
        DriverChoice::Fuse => (Driver::Fuse, asked()),
        DriverChoice::Ublk => {
            probe()?;
            (Driver::Ublk, asked())
        }
        DriverChoice::Auto => match probe() {
            Ok(()) => (Driver::Ublk, "this kernel has ublk".to_owned()),
            Err(why) => (Driver::Fuse, format!("ublk cannot be used here: {why}")),
        },
    };
    Ok(Chosen { driver, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ublk_driver::WhyNot;

    /// Mutation seen red: `Ublk` treated like `Auto`.
    #[test]
    fn auto_takes_what_works_and_says_why_and_a_wish_is_never_replaced() {
        let no = || Err(WhyNot::NoControl);
        let driver = |choice, works: bool| {
            let chosen = choose(choice, || if works { Ok(()) } else { no() });
            chosen.map(|chosen| (chosen.driver, chosen.reason))
        };
        let auto = driver(DriverChoice::Auto, false).unwrap();
        assert_eq!(auto.0, Driver::Fuse);
        assert!(auto.1.contains("modprobe ublk_drv"), "{}", auto.1);
        assert_eq!(driver(DriverChoice::Auto, true).unwrap().0, Driver::Ublk);
        assert_eq!(driver(DriverChoice::Ublk, false), Err(WhyNot::NoControl));
        assert_eq!(driver(DriverChoice::Ublk, true).unwrap().0, Driver::Ublk);
        assert_eq!(driver(DriverChoice::Fuse, true).unwrap().0, Driver::Fuse);
    }
}
