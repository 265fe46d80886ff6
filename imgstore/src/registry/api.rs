//! What can be asked of a repository: manifests, blobs, tags. Manifests and whole blobs are compared with their digests,
//! ranges with `Content-Range` and length.

use std::io::Write;

use reqwest::header::{ACCEPT, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName, LINK, RANGE};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::body::{Body, SMALL_BYTES_MAX, Until, read_all};
use super::client::{Access, Ask, REPLY_TIMEOUT, RegistryClient, same_server};
use super::error::RegistryError;
use super::reference::is_sha256;
use crate::ids::{to_u64, to_usize};
use crate::origin::ByteRange;

/// Largest manifest: registries themselves take no more.
pub const MANIFEST_BYTES_MAX: u64 = 4 << 20;
/// Tags asked for at once, and most pages of them.
const TAGS_PER_PAGE: u32 = 1000;
const TAG_PAGES_MAX: u32 = 10_000;
/// Bytes of a page of tags.
const TAGS_BYTES_MAX: u64 = 32 << 20;

/// Manifests that are understood.
const MANIFEST_TYPES: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

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

/// `Link: <address>; rel="next"`.
fn next_page(base: &Url, headers: &HeaderMap) -> Option<Url> {
    let text = headers.get(LINK)?.to_str().ok()?;
    let (address, rest) = text.trim().strip_prefix('<')?.split_once('>')?;
    let next = rest.contains("rel=\"next\"") || rest.contains("rel=next");
    next.then(|| base.join(address).ok()).flatten()
}

impl RegistryClient {
    /// A manifest by tag or digest.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`] and others; bytes that are not those of the digest are [`RegistryError::Wrong`].
    pub fn manifest(&self, reference: &str) -> Result<RawManifest, RegistryError> {
        self.manifest_until(reference, Until::default())
    }

    pub(crate) fn manifest_until(
        &self,
        reference: &str,
        until: Until,
    ) -> Result<RawManifest, RegistryError> {
        let url = self.url(&format!("manifests/{reference}"))?;
        let ask = Ask::new(Method::GET, url, Access::Read)
            .header(ACCEPT, MANIFEST_TYPES)
            .until(until);
        let reply = self.send(&ask)?;
        let text = |name: HeaderName| {
            let value = reply.headers().get(name)?;
            Some(value.to_str().ok()?.to_owned())
        };
        let media_type = text(CONTENT_TYPE).unwrap_or_default();
        let said = text(CONTENT_DIGEST).filter(|said| is_sha256(said));
        let bytes = self.block_on(read_all(reply, MANIFEST_BYTES_MAX, until))?;
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
            .body(bytes.into(), REPLY_TIMEOUT);
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
    pub(crate) fn blob_range(
        &self,
        digest: &str,
        range: ByteRange,
        until: Until,
    ) -> Result<Vec<u8>, RegistryError> {
        let last = range.start.saturating_add(range.len).saturating_sub(1);
        let asked = format!("bytes={}-{last}", range.start);
        let url = self.url(&format!("blobs/{digest}"))?;
        let ask = Ask::new(Method::GET, url, Access::Read)
            .header(RANGE, &asked)
            .until(until);
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
        let bytes = self.block_on(read_all(reply, range.len, until))?;
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
        self.blob_until(digest, size, out, progress, Until::default())
    }

    fn blob_until(
        &self,
        digest: &str,
        size: u64,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
        until: Until,
    ) -> Result<(), RegistryError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let ask = Ask::new(Method::GET, url, Access::Read).until(until);
        let mut body = Body::new(self.send(&ask)?, until);
        let mut hasher = Sha256::new();
        loop {
            let bytes = self.block_on(body.next())?;
            if bytes.is_empty() || body.all > size {
                break;
            }
            hasher.update(&bytes);
            out.write_all(&bytes)
                .map_err(|e| RegistryError::Unavailable(format!("cannot keep a blob: {e}")))?;
            progress(to_u64(bytes.len()));
        }
        let done = body.all;
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
    pub(crate) fn small_blob(
        &self,
        digest: &str,
        size: u64,
        until: Until,
    ) -> Result<Vec<u8>, RegistryError> {
        let mut out = Vec::with_capacity(to_usize(size).min(SMALL_BYTES_MAX));
        self.blob_until(digest, size, &mut out, &mut |_| (), until)?;
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
            let body = self.block_on(read_all(reply, TAGS_BYTES_MAX, Until::default()))?;
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
