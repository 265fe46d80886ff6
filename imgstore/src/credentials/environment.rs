//! The environment variables that say where credentials are, as one value: a test can have another one than the process.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Variables by name.
#[derive(Clone, Default)]
pub struct Environment {
    vars: BTreeMap<String, String>,
}

impl Environment {
    /// What this process was started with. Variables that are not UTF-8 are left out.
    pub fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self {
            vars: std::env::vars_os().filter_map(text).collect(),
        }
    }

    /// Exactly these.
    pub fn of<const N: usize>(pairs: [(&str, &str); N]) -> Self {
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Self {
            vars: pairs.into_iter().map(own).collect(),
        }
    }

    /// A variable; an empty one counts as none.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.vars.get(name).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// Whether a variable is there and says yes (`1`, `true`, `yes`).
    pub fn says_yes(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
    }

    /// A file in the home directory.
    pub fn in_home(&self, path: &str) -> Option<PathBuf> {
        Some(PathBuf::from(self.get("HOME")?).join(path))
    }
}

impl fmt::Debug for Environment {
    /// Names only: values may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.vars.keys()).finish()
    }
}
