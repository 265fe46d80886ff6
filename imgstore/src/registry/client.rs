//! Requests to one repository of a registry.
//!
//! Who we are goes to the registry's own host and to the token server that it names over an encrypted connection (or on
//! this host), and nowhere else: redirections (blobs often lie on another server) are followed here, without it. What is
//! asked for is in `api` and `upload`.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName,
    HeaderValue, LOCATION,
};
use reqwest::{Client, Method, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::body::{Until, beginning, too_late};
use super::challenge::{self, Challenge};
use super::credentials::{Login, Logins, PLACES};
use super::error::RegistryError;
use super::reference::Repository;
use super::tokens::{Key, LIFE_UNSAID, Token, Tokens};
use crate::credentials::environment::Environment;
use crate::credentials::secret::Secret;

/// Longest wait for a TCP or TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the beginning of a reply.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// The same, where a part of an upload goes up first.
pub(super) const UPLOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Connections kept open for reuse.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// A connection that was not used for so long is not used again: servers and firewalls close them in silence.
const IDLE_MAX: Duration = Duration::from_secs(15);
/// Redirections followed for one request.
const REDIRECTS_MAX: usize = 5;
/// What a request needs to be allowed to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    Delete,
}

impl Access {
    const fn actions(self) -> &'static str {
        match self {
            Self::Read => "pull",
            Self::Write => "pull,push",
            Self::Delete => "pull,delete",
        }
    }
}

/// A request that can be sent again.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    method: Method,
    url: Url,
    access: Access,
    headers: HeaderMap,
    body: Option<Bytes>,
    timeout: Duration,
    until: Until,
}

impl Ask {
    pub(super) fn new(method: Method, url: Url, access: Access) -> Self {
        Self {
            method,
            url,
            access,
            headers: HeaderMap::new(),
            body: None,
            timeout: REPLY_TIMEOUT,
            until: Until::default(),
        }
    }

    pub(super) fn header(mut self, name: HeaderName, value: &str) -> Self {
        // What we set ourselves has no control characters; what has some could only be a mistake of ours.
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.insert(name, value);
        }
        self
    }

    pub(super) fn until(mut self, until: Until) -> Self {
        self.until = until;
        self
    }

    pub(super) fn body(mut self, body: Bytes, timeout: Duration) -> Self {
        self.body = Some(body);
        self.timeout = timeout;
        self
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct RegistryClient {
    repository: Repository,
    pub(super) base: Url,
    http: Client,
    /// Drives the connections with one thread; callers wait on their own. `None` only while it is being dropped.
    runtime: Option<Runtime>,
    logins: Logins,
    /// How the registry wants to be told who asks; none until it has said so.
    way: Mutex<Option<Challenge>>,
    tokens: Tokens,
}

/// What was sent along to say who asks.
enum Shown {
    Nothing,
    Token(Key, Token),
    Password,
}

#[derive(Deserialize)]
struct TokenReply {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

pub(super) fn same_server(a: &Url, b: &Url) -> bool {
    a.scheme() == b.scheme()
        && a.host_str() == b.host_str()
        && a.port_or_known_default() == b.port_or_known_default()
}

fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(crate::origin::s3::is_loopback)
}

impl RegistryClient {
    /// Prepares a client with what `env` says about credentials; nothing is sent yet.
    ///
    /// # Errors
    /// [`RegistryError::Unavailable`] when the client cannot be made.
    pub fn new(repository: &Repository, env: &Environment) -> Result<Self, RegistryError> {
        crate::origin::http::general::install_crypto();
        let http = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(IDLE_MAX)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            // Whatever features other crates switch on: what is stored is what is wanted.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(RegistryError::transport)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("registry")
            .enable_all()
            .build()
            .map_err(|e| RegistryError::Unavailable(e.to_string()))?;
        let base = Url::parse(&format!("{}/", repository.url()))
            .map_err(|e| RegistryError::Unavailable(format!("its address: {e}")))?;
        Ok(Self {
            repository: repository.clone(),
            base,
            http,
            runtime: Some(runtime),
            logins: Logins::new(env),
            way: Mutex::new(None),
            tokens: Tokens::default(),
        })
    }

    /// Where it asks.
    pub const fn repository(&self) -> &Repository {
        &self.repository
    }

    pub(super) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let runtime = self.runtime.as_ref().expect("taken by `drop` only");
        runtime.block_on(work)
    }

    /// Sends a request and waits for the reply's headers. A kept connection that the server has closed meanwhile is
    /// replaced by reqwest itself where that is safe.
    fn wait_for(
        &self,
        request: reqwest::RequestBuilder,
        limit: Duration,
        until: Until,
    ) -> Result<Response, RegistryError> {
        let limit = Until::left(until.begin, limit);
        self.block_on(async {
            match timeout(limit, request.send()).await {
                Ok(reply) => reply.map_err(RegistryError::transport),
                Err(_elapsed) => Err(too_late(limit)),
            }
        })
    }

    pub(super) fn url(&self, path: &str) -> Result<Url, RegistryError> {
        self.base
            .join(path)
            .map_err(|e| RegistryError::Unavailable(format!("the address of `{path}`: {e}")))
    }

    fn way(&self) -> Option<Challenge> {
        self.way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn login(&self) -> Result<Option<Login>, RegistryError> {
        self.logins
            .find(&self.repository)
            .map_err(RegistryError::Denied)
    }

    /// Adds who asks, in the way that the registry wants it.
    fn show(
        &self,
        way: Option<&Challenge>,
        ask: &Ask,
        headers: &mut HeaderMap,
    ) -> Result<Shown, RegistryError> {
        match way {
            None => Ok(Shown::Nothing),
            Some(Challenge::Basic) => match self.login()? {
                Some(Login::Basic(user, password)) => {
                    headers.insert(AUTHORIZATION, basic(&user, &password)?);
                    Ok(Shown::Password)
                }
                _ => Ok(Shown::Nothing),
            },
            Some(Challenge::Bearer { realm, service }) => {
                let key = Key {
                    registry: self.repository.server().to_owned(),
                    repository: self.repository.path.clone(),
                    actions: ask.access.actions(),
                };
                let token = self.tokens.current(&key, ask.until.begin, || {
                    self.new_token(realm, service.as_deref(), ask)
                })?;
                headers.insert(
                    AUTHORIZATION,
                    hidden(&format!("Bearer {}", token.value.reveal()))?,
                );
                Ok(Shown::Token(key, token))
            }
        }
    }

    /// Asks the token server.
    fn new_token(
        &self,
        realm: &str,
        service: Option<&str>,
        for_what: &Ask,
    ) -> Result<(Secret, Duration), RegistryError> {
        let denied = |text: String| RegistryError::Denied(text);
        let mut url = Url::parse(realm)
            .ok()
            .ok_or_else(|| denied("the registry names no address for tokens".to_owned()))?;
        // Where the user chose to go without encryption, that holds for the token server too.
        let chosen = self.repository.plain_http && !is_loopback(&self.base);
        let safe = url.scheme() == "https" || is_loopback(&url) || chosen;
        if !safe || !matches!(url.scheme(), "https" | "http") {
            return Err(denied(
                "the registry wants credentials sent over an unencrypted connection".to_owned(),
            ));
        }
        let scope = format!(
            "repository:{}:{}",
            self.repository.path,
            for_what.access.actions()
        );
        let login = self.login()?;
        let mut ask = match &login {
            Some(Login::Identity(identity)) => {
                // The query of an address has the form of a form.
                let mut form = self.base.clone();
                form.query_pairs_mut()
                    .append_pair("grant_type", "refresh_token")
                    .append_pair("refresh_token", identity.reveal())
                    .append_pair("client_id", "dsec")
                    .append_pair("scope", &scope);
                if let Some(service) = service {
                    form.query_pairs_mut().append_pair("service", service);
                }
                let form = form.query().unwrap_or_default().to_owned();
                self.http
                    .post(url)
                    .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                    .body(form)
            }
            _ => {
                url.query_pairs_mut().append_pair("scope", &scope);
                if let Some(service) = service {
                    url.query_pairs_mut().append_pair("service", service);
                }
                self.http.get(url)
            }
        };
        if let Some(Login::Basic(user, password)) = &login {
            ask = ask.header(AUTHORIZATION, basic(user, password)?);
        }
        let reply = self.wait_for(ask, REPLY_TIMEOUT, for_what.until)?;
        let (status, headers) = (reply.status(), reply.headers().clone());
        let body = self.block_on(beginning(reply, for_what.until));
        if status.is_redirection() {
            return Err(denied(
                "the token server points elsewhere, which is not followed".to_owned(),
            ));
        }
        if !status.is_success() {
            return Err(match RegistryError::refused(status, &headers, &body) {
                RegistryError::NotFound => denied(format!("token server: HTTP status {status}")),
                error => error,
            });
        }
        // serde's own message could quote the token.
        let parsed: Option<TokenReply> = serde_json::from_slice(&body).ok();
        let token = parsed.and_then(|p| Some((p.token.or(p.access_token)?, p.expires_in)));
        let Some((token, expires_in)) = token else {
            return Err(RegistryError::wrong(
                "a token from the token server",
                "another reply",
            ));
        };
        let life = expires_in.map_or(LIFE_UNSAID, |s| Duration::from_secs(s.max(1)));
        Ok((Secret::new(token), life))
    }

    /// Sends, says who asks where it must, follows redirections, and gives the reply if it is a success.
    pub(super) fn send(&self, ask: &Ask) -> Result<Response, RegistryError> {
        let mut ask = ask.clone();
        let (mut redirects, mut refusals) = (0, 0);
        loop {
            let ours = same_server(&ask.url, &self.base);
            let mut headers = ask.headers.clone();
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            let way = self.way();
            let shown = if ours {
                self.show(way.as_ref(), &ask, &mut headers)?
            } else {
                Shown::Nothing
            };
            let mut request = self
                .http
                .request(ask.method.clone(), ask.url.clone())
                .headers(headers);
            if let Some(body) = &ask.body {
                request = request.body(body.clone());
            }
            let reply = self.wait_for(request, ask.timeout, ask.until)?;
            let status = reply.status();
            if status.is_success() {
                return check_plain(reply);
            }
            if status.is_redirection() && redirects < REDIRECTS_MAX {
                redirects += 1;
                ask.url = self.redirected(&ask, &reply)?;
                continue;
            }
            let headers = reply.headers().clone();
            if status == StatusCode::UNAUTHORIZED
                && ours
                && refusals < 2
                && self.learn(&headers, way.as_ref(), &shown)
            {
                refusals += 1;
                continue;
            }
            return Err(RegistryError::refused(
                status,
                &headers,
                &self.block_on(beginning(reply, ask.until)),
            ));
        }
    }

    /// Takes in a refusal of a request that was sent in the way `tried`; says whether asking again can have another
    /// outcome.
    fn learn(&self, headers: &HeaderMap, tried: Option<&Challenge>, shown: &Shown) -> bool {
        if let Shown::Token(key, token) = shown {
            self.tokens.reject(key, token);
        }
        let Some(way) = challenge::choose(headers) else {
            return false;
        };
        let new = tried != Some(&way);
        *self.way.lock().unwrap_or_else(PoisonError::into_inner) = Some(way);
        // A password that is refused stays refused; nobody who is refused stays nobody.
        new || matches!(shown, Shown::Token(..))
    }

    fn redirected(&self, ask: &Ask, reply: &Response) -> Result<Url, RegistryError> {
        let target = reply.headers().get(LOCATION).and_then(|v| v.to_str().ok());
        let target = target.and_then(|text| ask.url.join(text).ok());
        let reads = matches!(ask.method, Method::GET | Method::HEAD);
        let Some(target) = target.filter(|_| reads) else {
            return Err(RegistryError::wrong(
                "an answer or a place where it is",
                format!("HTTP status {}", reply.status()),
            ));
        };
        self.check_target(&target)?;
        Ok(target)
    }

    /// A place that the registry names may be another server's, but not a less safe one.
    fn check_target(&self, target: &Url) -> Result<(), RegistryError> {
        let safe = target.scheme() == "https"
            || (target.scheme() == "http" && self.base.scheme() == "http");
        if safe {
            return Ok(());
        }
        Err(RegistryError::wrong(
            "a redirection to an encrypted connection",
            format!(
                "one to `{}://{}`",
                target.scheme(),
                target.host_str().unwrap_or_default()
            ),
        ))
    }

    /// The address in a `Location` header of an upload.
    pub(super) fn location(&self, reply: &Response) -> Result<Url, RegistryError> {
        let text = reply.headers().get(LOCATION).and_then(|v| v.to_str().ok());
        let target = text.and_then(|text| reply.url().join(text).ok());
        let target = target.ok_or_else(|| RegistryError::wrong("a `Location` header", "none"))?;
        self.check_target(&target)?;
        Ok(target)
    }
}

impl Drop for RegistryClient {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for its threads is not allowed everywhere, and there is nothing to wait for.
            runtime.shutdown_background();
        }
    }
}

fn hidden(text: &str) -> Result<HeaderValue, RegistryError> {
    let value = HeaderValue::from_str(text).ok();
    let mut value = value.ok_or_else(|| {
        RegistryError::Denied(format!(
            "credentials with characters that cannot be sent; {PLACES}"
        ))
    })?;
    // Then nothing below prints it.
    value.set_sensitive(true);
    Ok(value)
}

fn basic(user: &str, password: &Secret) -> Result<HeaderValue, RegistryError> {
    use base64::Engine as _;
    let pair = format!("{user}:{}", password.reveal());
    let encoded = base64::engine::general_purpose::STANDARD.encode(pair);
    hidden(&format!("Basic {encoded}"))
}

fn check_plain(reply: Response) -> Result<Response, RegistryError> {
    match reply.headers().get(CONTENT_ENCODING) {
        Some(encoding) if encoding.as_bytes() != b"identity" => {
            let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
            let found = format!("`Content-Encoding: {encoding}`");
            Err(RegistryError::wrong("an unencoded body", found))
        }
        _ => Ok(reply),
    }
}
