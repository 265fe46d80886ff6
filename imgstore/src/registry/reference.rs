//! Names of registries, repositories and images, as users write them.

use std::fmt;
use std::str::FromStr;

use crate::origin::s3::is_loopback;

/// Docker's own registry has three names: the one users write, the one that serves, the one credentials are kept under.
const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_SERVER: &str = "registry-1.docker.io";
/// Longest name of a repository.
const PATH_BYTES_MAX: usize = 255;
/// Longest tag.
const TAG_BYTES_MAX: usize = 128;

/// A repository of a registry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Repository {
    /// `host[:port]` as the user wrote it.
    pub host: String,
    /// `name/space/name`.
    pub path: String,
    /// Whether requests go out unencrypted: on this host, or where the user says so.
    pub plain_http: bool,
}

/// What follows a repository's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// `:tag`.
    Tag(String),
    /// `@sha256:…`.
    Digest(String),
}

/// An image on a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageReference {
    /// Where.
    pub repository: Repository,
    /// Which.
    pub version: Version,
}

/// A text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not an image on a registry: expected `docker://HOST[:PORT]/REPOSITORY[:TAG|@sha256:DIGEST]`"
)]
pub struct ImageReferenceError(String);

fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(v6) => match v6.split_once(']') {
            Some((name, rest)) => (
                name,
                rest.strip_prefix(':').or((rest.is_empty()).then_some("")),
            ),
            None => return false,
        },
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, Some("")),
        },
    };
    let fine = |b: u8| b.is_ascii_alphanumeric() || b"-._:".contains(&b);
    let port_fine = match port {
        None => false,
        Some("") => !text.ends_with(':'),
        Some(port) => port.parse::<u16>().is_ok(),
    };
    !name.is_empty() && name.bytes().all(fine) && !name.starts_with('-') && port_fine
}

fn is_component(text: &str) -> bool {
    let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().copied().is_some_and(letter)
        && bytes.last().copied().is_some_and(letter)
        && bytes.iter().all(|b| letter(*b) || b"._-".contains(b))
}

fn is_path(text: &str) -> bool {
    text.len() <= PATH_BYTES_MAX && text.split('/').all(is_component)
}

fn is_tag(text: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= TAG_BYTES_MAX
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

/// Whether a text is `sha256:` and 64 lower-case hex digits.
pub fn is_sha256(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    })
}

impl Repository {
    /// Parses `host[:port]/repository`.
    pub fn parse(text: &str, plain_http: bool) -> Option<Self> {
        let (host, path) = text.split_once('/')?;
        (is_host(host) && is_path(path)).then(|| Self {
            host: host.to_owned(),
            path: path.to_owned(),
            plain_http: plain_http || is_loopback(host),
        })
    }

    /// The host that serves it.
    pub fn server(&self) -> &str {
        if self.host == DOCKER_HUB {
            DOCKER_HUB_SERVER
        } else {
            &self.host
        }
    }

    /// The beginning of all its addresses: `https://host/v2/repository`.
    pub fn url(&self) -> String {
        let scheme = if self.plain_http { "http" } else { "https" };
        format!("{scheme}://{}/v2/{}", self.server(), self.path)
    }

    /// Whether this is Docker's own registry.
    pub fn is_docker_hub(&self) -> bool {
        self.host == DOCKER_HUB
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forced = self.plain_http && !is_loopback(&self.host);
        let scheme = if forced { "oci+http" } else { "oci" };
        write!(f, "{scheme}://{}/{}", self.host, self.path)
    }
}

impl FromStr for ImageReference {
    type Err = ImageReferenceError;

    /// As other tools: a first part without dot, port or `localhost` is no host, and then the host is `docker.io`.
    fn from_str(text: &str) -> Result<Self, ImageReferenceError> {
        let parse = || {
            let (rest, plain_http) = match text.strip_prefix("docker://") {
                Some(rest) => (rest, false),
                None => (text.strip_prefix("docker+http://")?, true),
            };
            let (rest, digest) = match rest.split_once('@') {
                Some((rest, digest)) => (rest, Some(digest)),
                None => (rest, None),
            };
            // A colon behind the last slash is a tag's, one before it a port's.
            let last = rest.rfind('/').map_or(0, |at| at + 1);
            let (name, tag) = match rest.get(last..)?.split_once(':') {
                Some((end, tag)) => (rest.get(..last + end.len())?, Some(tag)),
                None => (rest, None),
            };
            let version = match (digest, tag) {
                // With both, the digest decides.
                (Some(digest), tag) => {
                    let fine = is_sha256(digest) && tag.is_none_or(is_tag);
                    fine.then(|| Version::Digest(digest.to_owned()))?
                }
                (None, tag) => {
                    let tag = tag.unwrap_or("latest");
                    is_tag(tag).then(|| Version::Tag(tag.to_owned()))?
                }
            };
            let first = name.split('/').next()?;
            let has_host = name.contains('/')
                && (first.contains(['.', ':']) || first == "localhost" || first.starts_with('['));
            let full = match (has_host, name.contains('/')) {
                (true, _) => name.to_owned(),
                (false, true) => format!("{DOCKER_HUB}/{name}"),
                (false, false) => format!("{DOCKER_HUB}/library/{name}"),
            };
            let repository = Repository::parse(&full, plain_http)?;
            Some(Self {
                repository,
                version,
            })
        };
        parse().ok_or_else(|| ImageReferenceError(text.to_owned()))
    }
}

impl fmt::Display for ImageReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Repository {
            host,
            path,
            plain_http,
        } = &self.repository;
        let forced = *plain_http && !is_loopback(host);
        let scheme = if forced { "docker+http" } else { "docker" };
        match &self.version {
            Version::Tag(tag) => write!(f, "{scheme}://{host}/{path}:{tag}"),
            Version::Digest(digest) => write!(f, "{scheme}://{host}/{path}@{digest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        let full = format!("docker://h.example/a/b:x@{digest}");
        let short = format!("docker://h.example/a/b@{digest}");
        let cases = [
            (
                "docker://127.0.0.1:5000/a/b:1.2",
                "docker://127.0.0.1:5000/a/b:1.2",
            ),
            ("docker://localhost/a", "docker://localhost/a:latest"),
            ("docker://debian:12", "docker://docker.io/library/debian:12"),
            ("docker://me/tool", "docker://docker.io/me/tool:latest"),
            ("docker+http://reg:80/a", "docker+http://reg:80/a:latest"),
            ("docker://[::1]:5000/a", "docker://[::1]:5000/a:latest"),
            (&full, &short),
        ];
        for (text, shown) in cases {
            let parsed: ImageReference = text.parse().unwrap();
            assert_eq!(parsed.to_string(), shown);
            assert_eq!(shown.parse::<ImageReference>().unwrap(), parsed);
        }
        let bad = [
            "debian",
            "docker://",
            "docker://h.x/",
            "docker://h.x/A",
            "docker://h.x/a:",
            "docker://h.x/a@sha256:0",
            "docker://h.x/../b",
            "docker://h.x:99999/b",
            "docker://u:p@h.x/b",
            "docker://h.x/a//b",
            "docker://h.x/a?b",
        ];
        for text in bad {
            assert!(text.parse::<ImageReference>().is_err(), "{text}");
        }
    }

    #[test]
    fn encryption_is_left_out_on_this_host_only() {
        let url = |text: &str| Repository::parse(text, false).unwrap().url();
        assert_eq!(url("127.0.0.1:5000/a/b"), "http://127.0.0.1:5000/v2/a/b");
        assert_eq!(url("localhost:5000/a"), "http://localhost:5000/v2/a");
        assert_eq!(url("reg.example/a"), "https://reg.example/v2/a");
        assert_eq!(url("localhost.example/a"), "https://localhost.example/v2/a");
        assert_eq!(url("docker.io/a/b"), "https://registry-1.docker.io/v2/a/b");
        let forced = Repository::parse("reg.example/a", true).unwrap();
        assert_eq!(forced.url(), "http://reg.example/v2/a");
        assert_eq!(forced.to_string(), "oci+http://reg.example/a");
    }
}
