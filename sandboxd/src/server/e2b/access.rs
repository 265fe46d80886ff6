//! Whose request to envd it is, and for which sandbox: told by headers, since one address stands for all of them.

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use sha2::{Digest as _, Sha256};

use super::{App, Refused};
use crate::api::State as Life;
use crate::keys;
use crate::sandboxes::{Sandbox, now_ms};

/// Header that names the sandbox.
pub(super) const SANDBOX: &str = "e2b-sandbox-id";
/// Purposes of tokens.
pub(super) const ENVD: &str = "envd";
pub(super) const TRAFFIC: &str = "traffic";

pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// A sandbox, asked for by someone who may use it, and the user that things are done as.
#[derive(Debug)]
pub(super) struct Envd {
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) user: Option<String>,
}

impl Envd {
    /// Who does it: as asked, or the sandbox's own choice.
    pub(super) fn user(&self) -> String {
        let own = || self.sandbox.record().user;
        self.user.clone().unwrap_or_else(own)
    }
}

fn named(headers: &HeaderMap) -> Result<&str, Refused> {
    header(headers, SANDBOX).ok_or_else(|| {
        Refused::new(
            StatusCode::BAD_REQUEST,
            "which sandbox? `E2b-Sandbox-Id` or a host name `49983-ID.DOMAIN` tells (URLs of `download_url` and `upload_url` have neither when E2B_SANDBOX_URL is set)",
        )
    })
}

/// A sandbox that lives, for a request whose sender has shown that he may.
fn living(app: &App, id: &str) -> Result<Arc<Sandbox>, Refused> {
    let gone = |why: &str| {
        Refused::new(
            StatusCode::BAD_GATEWAY,
            format!("sandbox `{id}` is gone{why}"),
        )
    };
    let sandbox = app.service.find_any(id).ok_or_else(|| gone(""))?;
    let info = sandbox.info();
    if info.state == Life::Gone {
        let reason = info.reason.unwrap_or_default();
        return Err(gone(&format!(": {reason}")));
    }
    Ok(sandbox)
}

/// `username:` of HTTP Basic.
fn basic_user(headers: &HeaderMap) -> Option<String> {
    let coded = header(headers, "authorization")?.strip_prefix("Basic ")?;
    let text = String::from_utf8(STANDARD.decode(coded).ok()?).ok()?;
    let user = text.split(':').next()?;
    (!user.is_empty()).then(|| user.to_owned())
}

/// What a signed address carries.
#[derive(Debug, Default)]
pub(super) struct Signature<'a> {
    pub(super) path: &'a str,
    pub(super) operation: &'a str,
    pub(super) user: &'a str,
    pub(super) signature: Option<&'a str>,
    pub(super) expiration: Option<u64>,
}

impl Signature<'_> {
    /// `v1_` and the base64 of SHA-256 over `path:operation:user:token[:expiration]`, as E2B's clients make it.
    fn is_of(&self, token: &str) -> bool {
        let Some(signature) = self.signature.and_then(|s| s.strip_prefix("v1_")) else {
            return false;
        };
        let Self {
            path,
            operation,
            user,
            ..
        } = self;
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(end) = self.expiration {
            if end <= now_ms() / 1000 {
                return false;
            }
            text = format!("{text}:{end}");
        }
        let expected = STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes()));
        keys::same(
            expected.as_bytes(),
            signature.trim_end_matches('=').as_bytes(),
        )
    }
}

/// The sandbox of a request to envd, if its sender may: with the sandbox's token, a signed address, or a key of its project.
pub(super) fn admit(
    app: &App,
    headers: &HeaderMap,
    signature: &Signature<'_>,
) -> Result<Envd, Refused> {
    let id = named(headers)?;
    let user = basic_user(headers);
    let token = app.e2b.secret.token(ENVD, id);
    let shown = header(headers, "x-access-token").unwrap_or_default();
    if app.keys.are_open()
        || keys::same(shown.as_bytes(), token.as_bytes())
        || signature.is_of(&token)
    {
        return Ok(Envd {
            sandbox: living(app, id)?,
            user,
        });
    }
    let project = app.keys.project_of(headers).map_err(|_no_key| {
        let message = "the sandbox's access token is needed: `X-Access-Token`, an API key, or a signed address that has not ended";
        Refused::new(StatusCode::UNAUTHORIZED, message)
    })?;
    app.service.find(&project, id)?;
    Ok(Envd {
        sandbox: living(app, id)?,
        user,
    })
}

impl FromRequestParts<App> for Envd {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refused> {
        admit(app, &parts.headers, &Signature::default())
    }
}

/// `GET /health`: of the daemon, or of the sandbox that is named. A paused one stays so.
pub(super) async fn health(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<StatusCode, Refused> {
    let Some(id) = header(&headers, SANDBOX) else {
        return Ok(StatusCode::NO_CONTENT);
    };
    let found = living(&app, id)?;
    match found.info().state {
        Life::Running => Ok(StatusCode::NO_CONTENT),
        state => {
            let message = format!("sandbox `{id}` is {state:?}").to_lowercase();
            Err(Refused::new(StatusCode::BAD_GATEWAY, message))
        }
    }
}
