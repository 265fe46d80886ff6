//! Who we are to an S3 server, kept current.
//!
//! Looked for in this order: `AWS_ACCESS_KEY_ID` + `AWS_SECRET_ACCESS_KEY` (+ `AWS_SESSION_TOKEN`), then the profile
//! `AWS_PROFILE` (or `default`) of `~/.aws/credentials` and `~/.aws/config`: its keys, or its `credential_process`. If
//! there is none, requests are not signed: public buckets can be read.
//!
//! Files are read again every minute, and at once when the server refused what they said; a `credential_process` runs
//! again before what it gave expires. One caller does that, the others wait for it.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use tokio::sync::Mutex;

use super::profile::{Profile, ProfileFiles};
use crate::credentials::environment::Environment;
use crate::credentials::program;

/// How long keys of files are used before the files are read again.
const FILES_FRESH: Duration = Duration::from_secs(60);
/// How long what a `credential_process` gave is used if it does not say when it expires.
const PROCESS_FRESH: Duration = Duration::from_secs(15 * 60);
/// So long before they expire, credentials are renewed (a tenth of their life if that is shorter).
const RENEW_BEFORE: Duration = Duration::from_secs(5 * 60);

/// Where to look, for messages.
pub(super) const PLACES: &str = "credentials are taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, else from the \
     profile AWS_PROFILE (or `default`) of ~/.aws/credentials and ~/.aws/config";

/// Why there are no credentials, although there should be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NoCredentials(String);

/// Credentials, or the knowledge that there are none.
pub(super) type Held = Option<Arc<AwsCredential>>;

struct State {
    held: Held,
    fresh_until: Instant,
    expires: Option<SystemTime>,
}

/// See the head of this file.
pub(super) struct Credentials {
    from_env: Held,
    files: ProfileFiles,
    state: Mutex<Option<State>>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

/// What a `credential_process` prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

fn keys(id: &str, secret: &str, token: Option<&str>) -> Arc<AwsCredential> {
    Arc::new(AwsCredential {
        key_id: id.to_owned(),
        secret_key: secret.to_owned(),
        token: token.map(str::to_owned),
    })
}

impl Credentials {
    pub(super) fn new(env: &Environment) -> Self {
        let id = env.get("AWS_ACCESS_KEY_ID");
        let from_env = id.zip(env.get("AWS_SECRET_ACCESS_KEY"));
        Self {
            from_env: from_env.map(|(id, secret)| keys(id, secret, env.get("AWS_SESSION_TOKEN"))),
            files: ProfileFiles::new(env),
            state: Mutex::new(None),
        }
    }

    /// The credentials to use now.
    pub(super) async fn now(&self) -> Result<Held, NoCredentials> {
        if let Some(held) = &self.from_env {
            return Ok(Some(Arc::clone(held)));
        }
        let mut state = self.state.lock().await;
        if let Some(state) = &*state
            && Instant::now() < state.fresh_until
        {
            return Ok(state.held.clone());
        }
        let files = self.files.clone();
        let loaded = tokio::task::spawn_blocking(move || load(&files)).await;
        let loaded = loaded.unwrap_or_else(|e| Err(NoCredentials(e.to_string())));
        match (loaded, &mut *state) {
            (Ok(new), state) => {
                let held = new.held.clone();
                *state = Some(new);
                Ok(held)
            }
            // The old ones may be good for a while yet.
            (Err(error), Some(old)) if old.expires.is_some_and(|at| SystemTime::now() < at) => {
                tracing::warn!(%error, "credentials could not be renewed");
                old.fresh_until = Instant::now() + RENEW_BEFORE / 10;
                Ok(old.held.clone())
            }
            (Err(error), _) => Err(error),
        }
    }

    /// The server refused `used`: look again. Says whether there are others now.
    pub(super) async fn changed_since(&self, used: &Held) -> bool {
        {
            let mut state = self.state.lock().await;
            match &mut *state {
                // Somebody else has looked in the meantime.
                Some(state) if state.held != *used => return true,
                Some(state) => state.fresh_until = Instant::now(),
                None => {}
            }
        }
        self.now().await.is_ok_and(|now| now != *used)
    }
}

#[async_trait]
impl CredentialProvider for Credentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let generic = |source| object_store::Error::Generic {
            store: "S3",
            source,
        };
        match self.now().await {
            Ok(Some(held)) => Ok(held),
            Ok(None) => Err(generic(Box::new(NoCredentials(PLACES.to_owned())))),
            Err(error) => Err(generic(Box::new(error))),
        }
    }
}

fn load(files: &ProfileFiles) -> Result<State, NoCredentials> {
    let profile = files.read().map_err(NoCredentials)?;
    let id = profile.get("aws_access_key_id");
    if let Some((id, secret)) = id.zip(profile.get("aws_secret_access_key")) {
        return Ok(State {
            held: Some(keys(id, secret, profile.get("aws_session_token"))),
            fresh_until: Instant::now() + FILES_FRESH,
            expires: None,
        });
    }
    if let Some(command) = profile.get("credential_process") {
        return run_process(&files.profile, command);
    }
    refuse_unknown(&files.profile, &profile)?;
    Ok(State {
        held: None,
        fresh_until: Instant::now() + FILES_FRESH,
        expires: None,
    })
}

/// A profile that needs a way to log in which is not here must not silently become nobody.
fn refuse_unknown(name: &str, profile: &Profile) -> Result<(), NoCredentials> {
    let way = [
        "sso_session",
        "sso_start_url",
        "role_arn",
        "web_identity_token_file",
    ];
    match way.iter().find(|key| profile.get(key).is_some()) {
        None => Ok(()),
        Some(key) => Err(NoCredentials(format!(
            "the profile `{name}` logs in with `{key}`, which is not supported here; give it \
             `credential_process = aws configure export-credentials --profile NAME --format process`"
        ))),
    }
}

fn run_process(profile: &str, command: &str) -> Result<State, NoCredentials> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]);
    // The command line may hold secrets: messages name the profile.
    let name = format!("credential_process of the profile {profile}");
    let output = program::run(shell, &name, "").map_err(|e| NoCredentials(e.to_string()))?;
    let wrong = |what: &str| NoCredentials(format!("`{name}` printed {what}"));
    // serde's own message could quote what it read.
    let printed: Printed = serde_json::from_str(output.reveal())
        .ok()
        .ok_or_else(|| wrong("no JSON object with Version, AccessKeyId and SecretAccessKey"))?;
    if printed.version != 1 {
        return Err(wrong("a Version that is not 1"));
    }
    let parse = |text: &str| chrono::DateTime::parse_from_rfc3339(text).map(SystemTime::from);
    let expires = match printed.expiration.as_deref().map(parse) {
        Some(Ok(at)) => Some(at),
        Some(Err(_)) => return Err(wrong("an Expiration that is no RFC 3339 time")),
        None => None,
    };
    let fresh = match expires.map(|at| at.duration_since(SystemTime::now())) {
        None => PROCESS_FRESH,
        Some(Ok(life)) => life - RENEW_BEFORE.min(life / 10),
        Some(Err(_)) => return Err(wrong("credentials that have expired")),
    };
    Ok(State {
        held: Some(keys(
            &printed.access_key_id,
            &printed.secret_access_key,
            printed.session_token.as_deref(),
        )),
        fresh_until: Instant::now() + fresh,
        expires,
    })
}
