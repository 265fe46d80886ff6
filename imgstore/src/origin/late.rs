//! An origin that cannot be opened yet.
//!
//! A restart of a daemon must not lose mounts because a share is not mounted yet or credentials have expired: what is cached
//! needs no origin. So where an earlier process left something, an origin that cannot be opened is opened by the first request
//! that needs it, and every request until then fails with its reason.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::url::OriginUrl;
use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};

/// Opens it.
type Open = Box<dyn Fn() -> Result<Arc<dyn Origin>, OriginError> + Send + Sync>;

/// See the head of this file.
pub struct LateOrigin {
    address: String,
    open: Open,
    opened: OnceLock<Arc<dyn Origin>>,
    /// Held while it is being opened, which may hang; whether it has been closed.
    closed: Mutex<bool>,
}

impl fmt::Debug for LateOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateOrigin")
            .field("address", &self.address)
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

impl LateOrigin {
    /// One that is opened by its address.
    pub fn new(url: OriginUrl) -> Self {
        Self::opened_by(url.to_string(), Box::new(move || url.open()))
    }

    /// One that `open` opens.
    pub fn opened_by(address: String, open: Open) -> Self {
        Self {
            address,
            open,
            opened: OnceLock::new(),
            closed: Mutex::new(false),
        }
    }

    fn origin(&self) -> Result<&dyn Origin, OriginError> {
        if let Some(origin) = self.opened.get() {
            return Ok(&**origin);
        }
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(origin) = self.opened.get() {
            return Ok(&**origin);
        }
        if *closed {
            return Err(OriginError::Unavailable {
                origin: self.address.clone(),
                object: String::new(),
                reason: "it has been closed".to_owned(),
            });
        }
        let origin = (self.open)()?;
        tracing::info!(origin = self.address, "an origin can be opened now");
        Ok(&**self.opened.get_or_init(|| origin))
    }
}

impl Origin for LateOrigin {
    fn address(&self) -> String {
        self.address.clone()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch(object, range)
    }

    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        self.origin()?.check_size(object, size)
    }

    fn fetch_of(&self, object: &str, size: u64, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch_of(object, size, range)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch_all(object, max_len)
    }

    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch_within(object, range, deadline)
    }

    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch_all_within(object, max_len, deadline)
    }

    /// Of one that is not open: none, for it has not said that anything is missing.
    fn lag(&self) -> Duration {
        self.opened
            .get()
            .map_or(Duration::ZERO, |origin| origin.lag())
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.origin()?.create(object, content)
    }

    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        self.origin()?.create_from_file(object, path)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.origin()?.replace(object, content)
    }

    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        self.origin()?.replace_from_file(object, path)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.origin()?.list(prefix)
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.origin()?.size(object)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.origin()?.list_info(prefix)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.origin()?.remove(object)
    }

    fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        if let Some(origin) = self.opened.get() {
            origin.close();
        }
    }

    fn chunk_bytes(&self) -> Option<u64> {
        self.origin().ok()?.chunk_bytes()
    }

    fn staging(&self) -> Option<PathBuf> {
        self.origin().ok()?.staging()
    }
}
