//! The two files of AWS tools: `~/.aws/credentials` and `~/.aws/config`.
//!
//! Both have `[section]` lines and `key = value` lines; a profile is `[name]` in the first and `[profile name]` (or
//! `[default]`) in the second. Where both set a key, the first wins, as it does for other tools. A missing file counts as
//! empty; one that cannot be read is an error, since to go on without would be to ask as somebody else.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::credentials::environment::Environment;
use crate::ids::to_u64;

/// Largest file that is read (bytes).
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Where the files are and which profile counts.
#[derive(Debug, Clone)]
pub(super) struct ProfileFiles {
    pub(super) credentials: Option<PathBuf>,
    pub(super) config: Option<PathBuf>,
    pub(super) profile: String,
    /// Whether the user named the profile: then it must exist.
    pub(super) named: bool,
}

/// Keys of one profile. Values may be secret, so there is no `Debug`.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Profile(BTreeMap<String, String>);

impl Profile {
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }
}

impl ProfileFiles {
    pub(super) fn new(env: &Environment) -> Self {
        let file = |variable: &str, default: &str| {
            env.get(variable)
                .map(PathBuf::from)
                .or_else(|| env.in_home(default))
        };
        let named = env.get("AWS_PROFILE");
        Self {
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"),
            config: file("AWS_CONFIG_FILE", ".aws/config"),
            profile: named.unwrap_or("default").to_owned(),
            named: named.is_some(),
        }
    }

    /// Reads both files.
    pub(super) fn read(&self) -> Result<Profile, String> {
        let mut found = false;
        let mut profile = Profile::default();
        let long = format!("profile {}", self.profile);
        for (path, headings) in [
            (
                &self.credentials,
                [self.profile.as_str(), self.profile.as_str()],
            ),
            (&self.config, [long.as_str(), "default"]),
        ] {
            let Some(path) = path else { continue };
            let text = read(path)?;
            for (heading, key, value) in lines(&text) {
                let ours = heading == headings[0]
                    || (heading == headings[1] && self.profile == headings[1]);
                found |= ours;
                if ours && !key.is_empty() {
                    profile
                        .0
                        .entry(key.to_ascii_lowercase())
                        .or_insert_with(|| value.to_owned());
                }
            }
        }
        if self.named && !found {
            return Err(format!(
                "`AWS_PROFILE` names the profile `{}`, which neither `{}` nor `{}` has",
                self.profile,
                shown(self.credentials.as_deref()),
                shown(self.config.as_deref()),
            ));
        }
        Ok(profile)
    }
}

fn shown(path: Option<&Path>) -> String {
    path.map_or_else(|| "~/.aws".to_owned(), |path| path.display().to_string())
}

fn read(path: &Path) -> Result<String, String> {
    let fail = |e: std::io::Error| format!("cannot read `{}`: {e}", path.display());
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(String::new()),
        Err(e) => return Err(fail(e)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(fail)?;
    if to_u64(bytes.len()) > FILE_BYTES_MAX {
        return Err(format!("`{}` has more than 1 MiB", path.display()));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// (section, key, value) of every line; the key of a section's own line is empty. Indented lines (nested settings) are
/// left out.
fn lines(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    let mut section = "";
    text.lines().filter_map(move |line| {
        let indented = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            return None;
        }
        if let Some(heading) = line.strip_prefix('[') {
            section = heading.split(']').next().unwrap_or_default().trim();
            return Some((section, "", ""));
        }
        let (key, value) = line.split_once('=')?;
        // A comment may follow behind a space.
        let value = value.split(" #").next().unwrap_or_default();
        (!indented).then(|| (section, key.trim(), value.trim()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path, profile: Option<&str>) -> ProfileFiles {
        ProfileFiles {
            credentials: Some(dir.join("credentials")),
            config: Some(dir.join("config")),
            profile: profile.unwrap_or("default").to_owned(),
            named: profile.is_some(),
        }
    }

    #[test]
    fn profiles_of_both_files_are_one() {
        let dir = tempfile::tempdir().unwrap();
        assert!(files(dir.path(), None).read().unwrap() == Profile::default());
        std::fs::write(
            dir.path().join("credentials"),
            "# x\n[default]\naws_access_key_id=one\n\n[ci]\nAWS_ACCESS_KEY_ID = two\naws_secret_access_key = a=b/+ # mine\n",
        )
        .unwrap();
        std::fs::write(
            dir.path().join("config"),
            "[default]\nregion = eu-1\naws_access_key_id = late\n[profile ci]\nregion=us-2\ns3 =\n  endpoint_url = nested\n[ci]\nregion = no\n",
        )
        .unwrap();
        let profile = files(dir.path(), None).read().unwrap();
        assert_eq!(profile.get("aws_access_key_id"), Some("one"));
        assert_eq!(profile.get("region"), Some("eu-1"));
        let profile = files(dir.path(), Some("ci")).read().unwrap();
        assert_eq!(profile.get("aws_access_key_id"), Some("two"));
        assert_eq!(profile.get("aws_secret_access_key"), Some("a=b/+"));
        assert_eq!(profile.get("region"), Some("us-2"));
        assert_eq!(profile.get("endpoint_url"), None);
        let error = files(dir.path(), Some("nobody")).read().err().unwrap();
        assert!(error.contains("`nobody`"), "{error}");
    }
}
