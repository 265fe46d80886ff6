//! Storing blobs: what fits into a part in one request, the rest part by part with one part in memory.

use std::io::Read;

use bytes::Bytes;
use reqwest::header::{CONTENT_RANGE, CONTENT_TYPE};
use reqwest::{Method, Url};
use sha2::{Digest as _, Sha256};

use super::api::{digest_text, sha256_hex};
use super::client::{Access, Ask, RegistryClient, UPLOAD_TIMEOUT};
use super::error::RegistryError;
use crate::ids::to_u64;

/// Bytes of a part: what is in memory of a blob that is stored.
const PART_BYTES: u64 = 8 << 20;
const OCTETS: &str = "application/octet-stream";

/// A stored blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlob {
    /// `sha256:…`.
    pub digest: String,
    /// Bytes.
    pub size: u64,
}

fn read_part(content: &mut dyn Read) -> Result<Bytes, RegistryError> {
    let mut part = Vec::new();
    content
        .take(PART_BYTES)
        .read_to_end(&mut part)
        .map_err(|e| RegistryError::Unavailable(format!("cannot read its content: {e}")))?;
    Ok(part.into())
}

impl RegistryClient {
    /// Stores what `content` gives.
    ///
    /// # Errors
    /// As [`RegistryError`] says; nothing refers to a blob whose upload failed, and the registry drops it by itself.
    pub fn upload(&self, content: &mut dyn Read) -> Result<StoredBlob, RegistryError> {
        let first = read_part(content)?;
        if to_u64(first.len()) < PART_BYTES {
            return self.upload_small(first);
        }
        let mut hasher = Sha256::new();
        let mut place = self.begin()?;
        let mut size = 0;
        let mut part = first;
        while !part.is_empty() {
            hasher.update(&part);
            let last = size + to_u64(part.len()) - 1;
            let ask = Ask::new(Method::PATCH, place, Access::Write)
                .header(CONTENT_TYPE, OCTETS)
                .header(CONTENT_RANGE, &format!("{size}-{last}"))
                .body(part.clone(), UPLOAD_TIMEOUT);
            place = self.location(&self.send(&ask)?)?;
            size = last + 1;
            part = read_part(content)?;
        }
        let digest = digest_text(hasher);
        self.finish(place, &digest, Bytes::new())?;
        Ok(StoredBlob { digest, size })
    }

    /// Stores bytes that are in memory; what the registry has already is not sent.
    fn upload_small(&self, bytes: Bytes) -> Result<StoredBlob, RegistryError> {
        let digest = sha256_hex(&bytes);
        let size = to_u64(bytes.len());
        if !self.head_blob(&digest, Access::Write)? {
            let place = self.begin()?;
            self.finish(place, &digest, bytes)?;
        }
        Ok(StoredBlob { digest, size })
    }

    fn begin(&self) -> Result<Url, RegistryError> {
        let ask = Ask::new(Method::POST, self.url("blobs/uploads/")?, Access::Write)
            .body(Bytes::new(), UPLOAD_TIMEOUT);
        self.location(&self.send(&ask)?)
    }

    fn finish(&self, mut place: Url, digest: &str, rest: Bytes) -> Result<(), RegistryError> {
        place.query_pairs_mut().append_pair("digest", digest);
        let ask = Ask::new(Method::PUT, place, Access::Write)
            .header(CONTENT_TYPE, OCTETS)
            .body(rest, UPLOAD_TIMEOUT);
        self.send(&ask).map(drop)
    }
}
