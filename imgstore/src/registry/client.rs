//! Requests to one repository of a registry.
//!
//! Who we are goes to the registry's own host and to the token server that it names over an encrypted connection (or on
//! this host), and nowhere else: redirections (blobs often lie on another server) are followed here, without it. Replies
//! are trusted for nothing: manifests are compared with their digests, ranges with `Content-Range` and length.

use std::io::{Read, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use reqwest::blocking::{Client, Response};
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LINK, LOCATION, RANGE,
};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::challenge::{self, Challenge};
use super::credentials::{Login, Logins, PLACES};
use super::error::RegistryError;
use super::reference::{Repository, is_sha256};
use super::tokens::{Key, LIFE_UNSAID, Token, Tokens};
use crate::credentials::environment::Environment;
use crate::credentials::secret::Secret;
use crate::ids::{to_u64, to_usize};
use crate::origin::ByteRange;

/// Longest wait for a TCP or TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for one request with a small reply.
const SMALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time for one part of an upload.
pub(super) const UPLOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time for a whole blob of an image.
const BLOB_TIMEOUT: Duration = Duration::from_secs(3600);
/// Connections kept open for reuse.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// Redirections followed for one request.
const REDIRECTS_MAX: usize = 5;
/// Most bytes of an error document or a token.
const SMALL_BYTES_MAX: u64 = 1 << 20;
/// Largest manifest: registries themselves take no more.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;
/// Tags asked for at once, and most pages of them.
const TAGS_PER_PAGE: u32 = 1000;
const TAG_PAGES_MAX: u32 = 10_000;
/// Bytes of a page of tags.
const TAGS_BYTES_MAX: u64 = 32 << 20;
/// Bytes copied at once.
const COPY_BYTES: usize = 128 << 10;

/// Manifests that are understood.
const MANIFEST_TYPES: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

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
}

impl Ask {
    pub(super) fn new(method: Method, url: Url, access: Access) -> Self {
        Self {
            method,
            url,
            access,
            headers: HeaderMap::new(),
            body: None,
            timeout: SMALL_TIMEOUT,
        }
    }

    pub(super) fn header(mut self, name: HeaderName, value: &str) -> Self {
        // What we set ourselves has no control characters; what has some could only be a mistake of ours.
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.insert(name, value);
        }
        self
    }

    pub(super) fn body(mut self, body: Bytes, timeout: Duration) -> Self {
        self.body = Some(body);
        self.timeout = timeout;
        self
    }
}

/// A manifest as the registry has it.
#[derive(Debug, Clone)]
pub struct RawManifest {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Their `sha256:…`, computed here.
    pub digest: String,
    /// What kind of manifest the registry says it is.
    pub media_type: String,
}

/// See the head of this file.
#[derive(Debug)]
pub struct RegistryClient {
    repository: Repository,
    base: Url,
    http: Client,
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

#[derive(Deserialize)]
struct TagsReply {
    tags: Option<Vec<String>>,
}

pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    digest_text(Sha256::new_with_prefix(bytes))
}

pub(super) fn digest_text(hasher: Sha256) -> String {
    let mut text = "sha256:".to_owned();
    for byte in hasher.finalize() {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn same_server(a: &Url, b: &Url) -> bool {
    a.scheme() == b.scheme()
        && a.host_str() == b.host_str()
        && a.port_or_known_default() == b.port_or_known_default()
}

fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(crate::origin::s3::is_loopback)
}

/// The beginning of a body; a body that breaks off is as good.
fn beginning(reply: Response) -> Vec<u8> {
    let mut out = Vec::new();
    reply.take(SMALL_BYTES_MAX).read_to_end(&mut out).ok();
    out
}

fn read_all(reply: Response, max: u64) -> Result<Vec<u8>, RegistryError> {
    let announced = reply.headers().get(CONTENT_LENGTH).cloned();
    let announced: Option<u64> = announced.and_then(|v| v.to_str().ok()?.parse().ok());
    let too_long = |found: String| RegistryError::wrong(format!("at most {max} bytes"), found);
    if let Some(n) = announced.filter(|n| *n > max) {
        return Err(too_long(format!("{n} bytes announced")));
    }
    let mut out = Vec::new();
    let read = reply.take(max.saturating_add(1)).read_to_end(&mut out);
    read.map_err(|e| {
        RegistryError::Unavailable(format!("body cut off after {} bytes: {e}", out.len()))
    })?;
    let len = to_u64(out.len());
    if len > max {
        return Err(too_long("more".to_owned()));
    }
    match announced {
        Some(n) if n != len => Err(RegistryError::wrong(
            format!("{n} bytes"),
            format!("{len} bytes"),
        )),
        _ => Ok(out),
    }
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
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(RegistryError::transport)?;
        let base = Url::parse(&format!("{}/", repository.url()))
            .map_err(|e| RegistryError::Unavailable(format!("its address: {e}")))?;
        Ok(Self {
            repository: repository.clone(),
            base,
            http,
            logins: Logins::new(env),
            way: Mutex::new(None),
            tokens: Tokens::default(),
        })
    }

    /// Where it asks.
    pub const fn repository(&self) -> &Repository {
        &self.repository
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
        access: Access,
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
                    actions: access.actions(),
                };
                let token = self
                    .tokens
                    .current(&key, || self.new_token(realm, service.as_deref(), access))?;
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
        access: Access,
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
        let scope = format!("repository:{}:{}", self.repository.path, access.actions());
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
        let reply = ask
            .timeout(SMALL_TIMEOUT)
            .send()
            .map_err(RegistryError::transport)?;
        let (status, headers) = (reply.status(), reply.headers().clone());
        let body = beginning(reply);
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
                self.show(way.as_ref(), ask.access, &mut headers)?
            } else {
                Shown::Nothing
            };
            let mut request = self
                .http
                .request(ask.method.clone(), ask.url.clone())
                .headers(headers)
                .timeout(ask.timeout);
            if let Some(body) = &ask.body {
                request = request.body(body.clone());
            }
            let reply = request.send().map_err(RegistryError::transport)?;
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
            return Err(RegistryError::refused(status, &headers, &beginning(reply)));
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

    /// A manifest by tag or digest.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`] and others; bytes that are not those of the digest are [`RegistryError::Wrong`].
    pub fn manifest(&self, reference: &str) -> Result<RawManifest, RegistryError> {
        let url = self.url(&format!("manifests/{reference}"))?;
        let ask = Ask::new(Method::GET, url, Access::Read).header(ACCEPT, MANIFEST_TYPES);
        let reply = self.send(&ask)?;
        let text = |name: HeaderName| {
            let value = reply.headers().get(name)?;
            Some(value.to_str().ok()?.to_owned())
        };
        let media_type = text(CONTENT_TYPE).unwrap_or_default();
        let said = text(CONTENT_DIGEST).filter(|said| is_sha256(said));
        let bytes = read_all(reply, MANIFEST_BYTES_MAX)?;
        let digest = sha256_hex(&bytes);
        let by_name = is_sha256(reference).then(|| reference.to_owned());
        for wanted in [said, by_name].into_iter().flatten() {
            if wanted != digest {
                return Err(RegistryError::wrong(
                    format!("a manifest with the digest {wanted}"),
                    digest,
                ));
            }
        }
        Ok(RawManifest {
            bytes,
            digest,
            media_type,
        })
    }

    /// Stores a manifest under a tag.
    ///
    /// # Errors
    /// As [`RegistryError`] says.
    pub fn put_manifest(
        &self,
        tag: &str,
        media_type: &str,
        bytes: Vec<u8>,
    ) -> Result<(), RegistryError> {
        let url = self.url(&format!("manifests/{tag}"))?;
        let ask = Ask::new(Method::PUT, url, Access::Write)
            .header(CONTENT_TYPE, media_type)
            .body(bytes.into(), SMALL_TIMEOUT);
        self.send(&ask).map(drop)
    }

    /// Removes a manifest and all tags that point to it; one that is gone already is no error.
    ///
    /// # Errors
    /// [`RegistryError::Unsupported`] where the registry does not allow it.
    pub fn delete_manifest(&self, digest: &str) -> Result<(), RegistryError> {
        let url = self.url(&format!("manifests/{digest}"))?;
        match self.send(&Ask::new(Method::DELETE, url, Access::Delete)) {
            Ok(_) | Err(RegistryError::NotFound) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Exactly a range of a blob.
    ///
    /// # Errors
    /// As [`RegistryError`] says; anything but the range is [`RegistryError::Wrong`].
    pub fn blob_range(&self, digest: &str, range: ByteRange) -> Result<Vec<u8>, RegistryError> {
        let last = range.start.saturating_add(range.len).saturating_sub(1);
        let asked = format!("bytes={}-{last}", range.start);
        let url = self.url(&format!("blobs/{digest}"))?;
        let ask = Ask::new(Method::GET, url, Access::Read).header(RANGE, &asked);
        let reply = self.send(&ask)?;
        if reply.status() != StatusCode::PARTIAL_CONTENT {
            return Err(RegistryError::wrong(
                format!("HTTP status 206 for `Range: {asked}`"),
                format!("HTTP status {}", reply.status()),
            ));
        }
        let header = reply.headers().get(CONTENT_RANGE);
        let header = header.map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
        let wanted = format!("bytes {}-{last}/", range.start);
        if !header.as_deref().is_some_and(|h| h.starts_with(&wanted)) {
            return Err(RegistryError::wrong(
                format!("`Content-Range: {wanted}…`"),
                header.unwrap_or_else(|| "none".to_owned()),
            ));
        }
        let bytes = read_all(reply, range.len)?;
        if to_u64(bytes.len()) == range.len {
            return Ok(bytes);
        }
        Err(RegistryError::wrong(
            format!("{} bytes", range.len),
            format!("{} bytes", bytes.len()),
        ))
    }

    /// Writes a whole blob of `size` bytes to `out`, and compares it with its digest. `progress` is told of bytes as they
    /// come.
    ///
    /// # Errors
    /// As [`RegistryError`] says; other bytes are [`RegistryError::Wrong`], and `out` then holds them.
    pub fn blob(
        &self,
        digest: &str,
        size: u64,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RegistryError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let mut ask = Ask::new(Method::GET, url, Access::Read);
        ask.timeout = BLOB_TIMEOUT;
        let mut reply = self.send(&ask)?.take(size.saturating_add(1));
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; COPY_BYTES];
        let mut done = 0;
        loop {
            let n = reply.read(&mut buffer).map_err(|e| {
                RegistryError::Unavailable(format!("blob cut off after {done} bytes: {e}"))
            })?;
            let bytes = buffer.get(..n).unwrap_or_default();
            if bytes.is_empty() {
                break;
            }
            hasher.update(bytes);
            out.write_all(bytes)
                .map_err(|e| RegistryError::Unavailable(format!("cannot keep a blob: {e}")))?;
            done += to_u64(n);
            progress(to_u64(n));
        }
        if done != size {
            let found = if done > size {
                "more".to_owned()
            } else {
                done.to_string()
            };
            return Err(RegistryError::wrong(format!("{size} bytes"), found));
        }
        let found = digest_text(hasher);
        if found == digest {
            return Ok(());
        }
        Err(RegistryError::wrong(
            format!("a blob with the digest {digest}"),
            found,
        ))
    }

    /// A whole small blob, compared with its digest.
    ///
    /// # Errors
    /// As [`RegistryClient::blob`].
    pub fn small_blob(&self, digest: &str, size: u64) -> Result<Vec<u8>, RegistryError> {
        let mut out = Vec::with_capacity(to_usize(size.min(SMALL_BYTES_MAX)));
        self.blob(digest, size, &mut out, &mut |_| ())?;
        Ok(out)
    }

    /// Whether the registry has a blob.
    ///
    /// # Errors
    /// As [`RegistryError`] says.
    pub fn has_blob(&self, digest: &str) -> Result<bool, RegistryError> {
        self.head_blob(digest, Access::Read)
    }

    pub(super) fn head_blob(&self, digest: &str, access: Access) -> Result<bool, RegistryError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        match self.send(&Ask::new(Method::HEAD, url, access)) {
            Ok(_) => Ok(true),
            Err(RegistryError::NotFound) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// All tags of the repository; none if there is no repository of that name yet.
    ///
    /// # Errors
    /// As [`RegistryError`] says.
    pub fn tags(&self) -> Result<Vec<String>, RegistryError> {
        let mut url = self.url(&format!("tags/list?n={TAGS_PER_PAGE}"))?;
        let mut out = Vec::new();
        for _ in 0..TAG_PAGES_MAX {
            let reply = match self.send(&Ask::new(Method::GET, url.clone(), Access::Read)) {
                Ok(reply) => reply,
                Err(RegistryError::NotFound) => return Ok(out),
                Err(e) => return Err(e),
            };
            let next = next_page(&url, reply.headers());
            let body = read_all(reply, TAGS_BYTES_MAX)?;
            let page: TagsReply = serde_json::from_slice(&body)
                .map_err(|e| RegistryError::wrong("a list of tags", e))?;
            out.extend(page.tags.unwrap_or_default());
            match next {
                Some(next) if same_server(&next, &self.base) => url = next,
                Some(_) => return Err(RegistryError::wrong("more tags", "another server's")),
                None => return Ok(out),
            }
        }
        Err(RegistryError::wrong("an end of the list of tags", "none"))
    }
}

/// `Link: <address>; rel="next"`.
fn next_page(base: &Url, headers: &HeaderMap) -> Option<Url> {
    let text = headers.get(LINK)?.to_str().ok()?;
    let (address, rest) = text.trim().strip_prefix('<')?.split_once('>')?;
    let next = rest.contains("rel=\"next\"") || rest.contains("rel=next");
    next.then(|| base.join(address).ok()).flatten()
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
