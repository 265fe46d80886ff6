//! Who holds something that outlives it: a process, named so that others on the host can tell whether it is gone.
//!
//! A token has the boot, the pid namespace, the pid and the time at which the process began. Only a process of the same
//! boot and namespace can judge it; everybody else must wait until what it holds is old enough.

use std::fmt;
use std::fs;
use std::str::FromStr;
use std::sync::OnceLock;

/// A process of one boot of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The first digits of the boot's random id.
    boot: String,
    /// Inode of the pid namespace.
    namespace: u64,
    pid: u32,
    /// When it began, in clock ticks since the boot: tells it from a later one with the same pid.
    start: u64,
}

/// A text that names no process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` does not name a process")]
pub struct ProcessError(String);

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            boot,
            namespace,
            pid,
            start,
        } = self;
        write!(f, "{boot}.{namespace}.{pid}.{start}")
    }
}

impl FromStr for Process {
    type Err = ProcessError;

    fn from_str(text: &str) -> Result<Self, ProcessError> {
        let bad = || ProcessError(text.chars().take(80).collect());
        let parts: Vec<&str> = text.split('.').collect();
        let [boot, namespace, pid, start] = *parts else {
            return Err(bad());
        };
        if boot.len() != BOOT_DIGITS || !boot.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let number = |text: &str| text.parse::<u64>().ok().ok_or_else(bad);
        Ok(Self {
            boot: boot.to_owned(),
            namespace: number(namespace)?,
            pid: pid.parse().ok().ok_or_else(bad)?,
            start: number(start)?,
        })
    }
}

/// Digits kept of the boot's id: enough to tell the machines that share an origin apart.
const BOOT_DIGITS: usize = 12;

impl Process {
    /// This process; `None` where `/proc` does not say.
    pub fn me() -> Option<&'static Self> {
        static ME: OnceLock<Option<Process>> = OnceLock::new();
        let me = ME.get_or_init(|| {
            let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
            let digits = id.chars().filter(char::is_ascii_hexdigit);
            let pid = std::process::id();
            Some(Self {
                boot: digits.take(BOOT_DIGITS).collect(),
                namespace: namespace()?,
                pid,
                start: started(pid)?,
            })
        });
        me.as_ref()
    }

    /// Whether this process can judge that one.
    fn is_near(&self) -> bool {
        Self::me().is_some_and(|me| me.boot == self.boot && me.namespace == self.namespace)
    }

    /// Whether the process has certainly ended. `false` also when this host cannot know.
    pub fn is_gone(&self) -> bool {
        self.is_near() && started(self.pid) != Some(self.start)
    }

    /// Whether the process certainly lives.
    pub fn is_here(&self) -> bool {
        self.is_near() && started(self.pid) == Some(self.start)
    }

    /// The process that made a temporary file of this name: names begin with the token and a `-`.
    pub fn of_file_name(name: &str) -> Option<Self> {
        name.split_once('-')?.0.parse().ok()
    }

    /// How the names of this process' temporary files begin.
    pub fn file_prefix() -> String {
        Self::me().map_or_else(
            || format!("{}-", std::process::id()),
            |process| format!("{process}-"),
        )
    }
}

/// `pid:[4026531836]`.
fn namespace() -> Option<u64> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    let text = link.to_str()?;
    let digits = text.strip_prefix("pid:[")?.strip_suffix(']')?;
    digits.parse().ok()
}

/// Field 22 of `/proc/PID/stat`; the second may contain anything, in parentheses. A zombie has ended.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_and_tells_the_dead_from_the_living_and_the_unknown() {
        let me = Process::me().unwrap();
        assert_eq!(me.to_string().parse::<Process>().as_ref(), Ok(me));
        assert!(!me.is_gone());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let theirs = Process {
            pid: child.id(),
            start: started(child.id()).unwrap_or(me.start),
            ..me.clone()
        };
        child.wait().unwrap();
        assert!(theirs.is_gone());
        let reused = Process {
            start: me.start + 1,
            ..me.clone()
        };
        assert!(reused.is_gone(), "another process has this pid now");
        let elsewhere = Process {
            boot: "0123456789ab".to_owned(),
            ..theirs.clone()
        };
        assert!(!elsewhere.is_gone(), "another host cannot know");
        let contained = Process {
            namespace: 1,
            ..theirs
        };
        assert!(!contained.is_gone(), "nor can another container");
    }

    #[test]
    fn names_of_temporary_files() {
        let name = format!("{}pack-x1", Process::file_prefix());
        assert_eq!(Process::of_file_name(&name).as_ref(), Process::me());
        for other in ["123-4", "pack-abc", "", "a.b.c.d-1", "0123456789ab.1.2-3"] {
            assert_eq!(Process::of_file_name(other), None, "{other}");
        }
    }
}
