//! Who we are to a registry.
//!
//! Looked for in this order: `DSEC_REGISTRY_USERNAME` + `DSEC_REGISTRY_PASSWORD` (only for the host `DSEC_REGISTRY`, if that
//! is set); then the files of other tools: `REGISTRY_AUTH_FILE`, `$DOCKER_CONFIG/config.json` (usually
//! `~/.docker/config.json`), `$XDG_RUNTIME_DIR/containers/auth.json`. In a file: the helper that `credHelpers` names for the
//! host, the most exact entry of `auths` (`host/name/space` before `host`), the helper `credsStore`. Files are read, and
//! helpers run, each time a token is needed; so what `docker login` writes is seen without a restart.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::reference::Repository;
use crate::credentials::environment::Environment;
use crate::credentials::program::{self, ProgramError};
use crate::credentials::secret::Secret;
use crate::ids::to_u64;

/// Largest file that is read (bytes).
const FILE_BYTES_MAX: u64 = 1 << 20;
/// What helpers call the user when the secret is a token.
const TOKEN_USER: &str = "<token>";
/// What Docker's own registry is called in files.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// Where to look, for messages.
pub(super) const PLACES: &str = "credentials are taken from DSEC_REGISTRY_USERNAME and DSEC_REGISTRY_PASSWORD, \
     REGISTRY_AUTH_FILE, ~/.docker/config.json (`docker login`) or $XDG_RUNTIME_DIR/containers/auth.json";

/// What a file or helper says about us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Login {
    /// User and password.
    Basic(String, Secret),
    /// A token that buys other tokens.
    Identity(Secret),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct File {
    auths: BTreeMap<String, Entry>,
    creds_store: String,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    username: String,
    secret: String,
}

/// Finds logins.
#[derive(Debug, Clone)]
pub(super) struct Logins {
    env: Environment,
}

/// `https://host/v1/` and `host/` are the same key.
fn normal(key: &str) -> &str {
    let key = key.strip_prefix("https://").unwrap_or(key);
    let key = key.strip_prefix("http://").unwrap_or(key);
    let key = key.trim_end_matches('/');
    let key = key.strip_suffix("/v1").unwrap_or(key);
    key.strip_suffix("/v2").unwrap_or(key)
}

/// Keys that may stand for a repository, the most exact first.
fn keys(repository: &Repository) -> Vec<String> {
    let mut hosts = vec![repository.host.clone()];
    if repository.is_docker_hub() {
        hosts.extend(["index.docker.io".to_owned(), repository.server().to_owned()]);
    }
    let mut out = Vec::new();
    let mut path = repository.path.as_str();
    loop {
        out.extend(hosts.iter().map(|host| format!("{host}/{path}")));
        match path.rsplit_once('/') {
            Some((parent, _)) => path = parent,
            None => break,
        }
    }
    out.extend(hosts);
    out
}

impl Entry {
    fn login(&self, file: &Path) -> Result<Option<Login>, String> {
        if !self.identitytoken.is_empty() {
            return Ok(Some(Login::Identity(Secret::new(&self.identitytoken))));
        }
        if !self.username.is_empty() {
            let password = Secret::new(&self.password);
            return Ok(Some(Login::Basic(self.username.clone(), password)));
        }
        if self.auth.is_empty() {
            return Ok(None);
        }
        let bytes = STANDARD.decode(self.auth.trim()).unwrap_or_default();
        let text = String::from_utf8(bytes).unwrap_or_default();
        match text.trim_end_matches('\0').split_once(':') {
            Some((user, password)) => {
                Ok(Some(Login::Basic(user.to_owned(), Secret::new(password))))
            }
            None => Err(format!(
                "an `auth` in `{}` is not the base64 of `user:password`",
                file.display()
            )),
        }
    }
}

impl Logins {
    pub(super) fn new(env: &Environment) -> Self {
        Self { env: env.clone() }
    }

    fn files(&self) -> Vec<PathBuf> {
        let env = &self.env;
        let docker = env
            .get("DOCKER_CONFIG")
            .map(|dir| PathBuf::from(dir).join("config.json"))
            .or_else(|| env.in_home(".docker/config.json"));
        let runtime = env.get("XDG_RUNTIME_DIR");
        [
            env.get("REGISTRY_AUTH_FILE").map(PathBuf::from),
            docker,
            runtime.map(|dir| PathBuf::from(dir).join("containers/auth.json")),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// The login for a repository; none means to ask as nobody.
    pub(super) fn find(&self, repository: &Repository) -> Result<Option<Login>, String> {
        let env = &self.env;
        let meant = env
            .get("DSEC_REGISTRY")
            .is_none_or(|host| host == repository.host);
        let named = env.get("DSEC_REGISTRY_USERNAME").filter(|_| meant);
        if let Some((user, password)) = named.zip(env.get("DSEC_REGISTRY_PASSWORD")) {
            return Ok(Some(Login::Basic(user.to_owned(), Secret::new(password))));
        }
        for path in self.files() {
            if let Some(login) = self.find_in(&path, repository)? {
                return Ok(Some(login));
            }
        }
        Ok(None)
    }

    fn find_in(&self, path: &Path, repository: &Repository) -> Result<Option<Login>, String> {
        let Some(file) = read(path)? else {
            return Ok(None);
        };
        let keys = keys(repository);
        let hosts = |key: &&String| !key.contains('/');
        for key in keys.iter().filter(hosts) {
            let helper = file.cred_helpers.iter().find(|(k, _)| normal(k) == key);
            if let Some((_, helper)) = helper {
                return self.ask(helper, repository);
            }
        }
        for key in &keys {
            let entry = file.auths.iter().find(|(k, _)| normal(k) == key);
            if let Some((_, entry)) = entry
                && let Some(login) = entry.login(path)?
            {
                return Ok(Some(login));
            }
        }
        if file.creds_store.is_empty() {
            return Ok(None);
        }
        self.ask(&file.creds_store, repository)
    }

    /// Runs `docker-credential-NAME get`.
    fn ask(&self, helper: &str, repository: &Repository) -> Result<Option<Login>, String> {
        let fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if helper.is_empty() || !helper.bytes().all(fine) {
            return Err("a credential helper in docker's config.json has an odd name".to_owned());
        }
        let name = format!("docker-credential-{helper}");
        let mut command = Command::new(&name);
        command.arg("get");
        if let Some(path) = self.env.get("PATH") {
            command.env("PATH", path);
        }
        let server = if repository.is_docker_hub() {
            DOCKER_HUB_KEY
        } else {
            &repository.host
        };
        let output = match program::run(command, &name, server) {
            Ok(output) => output,
            // The protocol's way to say that it knows nobody there.
            Err(ProgramError::Failed { output, .. })
                if output.reveal().contains("credentials not found") =>
            {
                return Ok(None);
            }
            Err(e) => return Err(e.to_string()),
        };
        // serde's own message could quote what it read.
        let printed: Option<Printed> = serde_json::from_str(output.reveal()).ok();
        let printed = printed
            .ok_or_else(|| format!("`{name}` printed no JSON object with Username and Secret"))?;
        let secret = Secret::new(printed.secret);
        Ok(Some(if printed.username == TOKEN_USER {
            Login::Identity(secret)
        } else {
            Login::Basic(printed.username, secret)
        }))
    }
}

fn read(path: &Path) -> Result<Option<File>, String> {
    let fail = |e: std::io::Error| format!("cannot read `{}`: {e}", path.display());
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(fail)?;
    let small = to_u64(bytes.len()) <= FILE_BYTES_MAX;
    // serde's own message could quote a password.
    let parsed = small.then(|| serde_json::from_slice(&bytes).ok()).flatten();
    parsed.map(Some).ok_or_else(|| {
        format!(
            "`{}` is no docker configuration: expected a JSON object",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(dir: &Path, config: &str, image: &str) -> Result<Option<Login>, String> {
        std::fs::write(dir.join("config.json"), config).unwrap();
        let dir = dir.display().to_string();
        let path = format!("{dir}:/usr/bin:/bin");
        let env = Environment::of([("DOCKER_CONFIG", &dir), ("PATH", &path)]);
        Logins::new(&env).find(&Repository::parse(image, false).unwrap())
    }

    fn basic(user: &str, password: &str) -> Option<Login> {
        Some(Login::Basic(user.to_owned(), Secret::new(password)))
    }

    #[test]
    fn the_most_exact_entry_counts() {
        let dir = tempfile::tempdir().unwrap();
        let auth = |text: &str| STANDARD.encode(text);
        let config = format!(
            r#"{{"auths":{{"https://r.example/v2/":{{"auth":"{}"}},"r.example/team":{{"auth":"{}"}},
              "other.example:5000":{{"identitytoken":"id"}},"https://index.docker.io/v1/":{{"username":"h","password":"p"}},
              "empty.example":{{}}}},"HttpHeaders":{{}}}}"#,
            auth("host:a:b"),
            auth("team:x")
        );
        let find = |image| found(dir.path(), &config, image).unwrap();
        assert_eq!(find("r.example/a"), basic("host", "a:b"));
        assert_eq!(find("r.example/team/a"), basic("team", "x"));
        assert_eq!(find("r.example/teams/a"), basic("host", "a:b"));
        assert_eq!(find("docker.io/library/debian"), basic("h", "p"));
        assert_eq!(
            find("other.example:5000/a"),
            Some(Login::Identity(Secret::new("id")))
        );
        for nobody in [
            "other.example/a",
            "empty.example/a",
            "example/a",
            "xr.example/a",
        ] {
            assert_eq!(find(nobody), None, "{nobody}");
        }
        for bad in ["{", "7", r#"{"auths":{"r.example":{"auth":"c2VjcmV0"}}}"#] {
            let error = found(dir.path(), bad, "r.example/a").unwrap_err();
            assert!(
                error.contains("config.json") && !error.contains("c2Vj"),
                "{error}"
            );
        }
    }

    #[test]
    fn helpers_are_asked_by_their_protocol() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let script = "#!/bin/sh\nread host; case $1.$host in
            get.r.example) echo '{\"ServerURL\":\"r.example\",\"Username\":\"u\",\"Secret\":\"pw\"}';;
            get.t.example) echo '{\"ServerURL\":\"\",\"Username\":\"<token>\",\"Secret\":\"tok\"}';;
            get.odd.example) echo 'pw pw pw';;
            get.bad.example) echo 'pw pw pw'; exit 2;;
            *) echo 'credentials not found in native keychain'; exit 1;; esac\n";
        let helper = dir.path().join("docker-credential-test");
        std::fs::write(&helper, script).unwrap();
        std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
        let store = r#"{"credsStore":"test","auths":{"r.example":{},"x.example":{"username":"x","password":"y"}}}"#;
        let find = |image| found(dir.path(), store, image);
        assert_eq!(find("r.example/a").unwrap(), basic("u", "pw"));
        assert_eq!(
            find("t.example/a").unwrap(),
            Some(Login::Identity(Secret::new("tok")))
        );
        assert_eq!(find("nobody.example/a").unwrap(), None);
        assert_eq!(find("x.example/a").unwrap(), basic("x", "y"));
        for odd in ["odd.example/a", "bad.example/a"] {
            let error = find(odd).unwrap_err();
            assert!(
                error.contains("docker-credential-test") && !error.contains("pw"),
                "{error}"
            );
        }
        let one =
            r#"{"credHelpers":{"r.example":"test","gone.example":"gone","evil.example":"../sh"}}"#;
        assert_eq!(
            found(dir.path(), one, "r.example/a").unwrap(),
            basic("u", "pw")
        );
        assert_eq!(found(dir.path(), one, "t.example/a").unwrap(), None);
        assert!(found(dir.path(), one, "gone.example/a").is_err());
        assert!(found(dir.path(), one, "evil.example/a").is_err());
    }

    #[test]
    fn the_environment_comes_first_and_can_be_for_one_host() {
        let vars = [
            ("DSEC_REGISTRY_USERNAME", "u"),
            ("DSEC_REGISTRY_PASSWORD", "p"),
            ("DSEC_REGISTRY", "r.example"),
        ];
        let logins = Logins::new(&Environment::of(vars));
        let find = |image| {
            logins
                .find(&Repository::parse(image, false).unwrap())
                .unwrap()
        };
        assert_eq!(find("r.example/a"), basic("u", "p"));
        assert_eq!(find("s.example/a"), None);
        assert!(!format!("{:?} {logins:?}", find("r.example/a")).contains("\"p\""));
    }
}
