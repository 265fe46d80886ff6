//! An origin that cannot be opened yet.
//!
//! A restart must not lose mounts because a share is not mounted yet or credentials have expired: what is cached needs no
//! origin. So where an earlier layerd left something, an origin that cannot be opened is opened by the first request that
//! needs it, and every request until then fails with its reason.

use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use imgstore::origin::url::OriginUrl;
use imgstore::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

/// See the head of this file.
#[derive(Debug)]
pub(super) struct LateOrigin {
    url: OriginUrl,
    opened: Mutex<Option<Arc<dyn Origin>>>,
}

impl LateOrigin {
    pub(super) fn new(url: OriginUrl) -> Self {
        Self {
            url,
            opened: Mutex::new(None),
        }
    }

    fn origin(&self) -> Result<Arc<dyn Origin>, OriginError> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(origin) = &*opened {
            return Ok(Arc::clone(origin));
        }
        let origin = self.url.open()?;
        tracing::info!(origin = %self.url, "an origin can be opened now");
        Ok(Arc::clone(opened.insert(origin)))
    }
}

impl Origin for LateOrigin {
    fn address(&self) -> String {
        self.url.to_string()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch(object, range)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.origin()?.fetch_all(object, max_len)
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.origin()?.create(object, content)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.origin()?.replace(object, content)
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

    fn staging(&self) -> Option<PathBuf> {
        self.origin().ok()?.staging()
    }
}
