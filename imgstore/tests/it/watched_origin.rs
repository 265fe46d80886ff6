//! An origin whose writes are counted, and which dies after some of them.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

/// A memory origin that is watched.
#[derive(Debug)]
pub(crate) struct WatchedOrigin {
    pub(crate) inner: Arc<MemOrigin>,
    writes: AtomicU64,
    /// Writes until everything fails, reads too: the process is dead.
    left: AtomicU64,
    lists: bool,
}

impl WatchedOrigin {
    pub(crate) fn new(inner: &Arc<MemOrigin>) -> Self {
        Self::dying_after(inner, u64::MAX)
    }

    /// The write after `writes` others fails, and so does whatever comes then.
    pub(crate) fn dying_after(inner: &Arc<MemOrigin>, writes: u64) -> Self {
        Self {
            inner: Arc::clone(inner),
            writes: AtomicU64::new(0),
            left: AtomicU64::new(writes),
            lists: true,
        }
    }

    /// One that cannot be listed.
    pub(crate) fn without_lists(inner: &Arc<MemOrigin>) -> Self {
        Self {
            lists: false,
            ..Self::new(inner)
        }
    }

    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    fn dead(&self) -> OriginError {
        OriginError::Unavailable {
            origin: self.address(),
            object: "x".into(),
            reason: "dead".into(),
        }
    }

    fn alive(&self) -> Result<(), OriginError> {
        if self.writes() > self.left.load(Ordering::Relaxed) {
            return Err(self.dead());
        }
        Ok(())
    }

    fn write(&self) -> Result<(), OriginError> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.alive()
    }
}

impl Origin for WatchedOrigin {
    fn address(&self) -> String {
        "mem:".into()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.alive()?;
        self.inner.fetch(object, range)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.alive()?;
        self.inner.fetch_all(object, max_len)
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.write()?;
        self.inner.create(object, content)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.write()?;
        self.inner.replace(object, content)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.alive()?;
        if !self.lists {
            return Err(OriginError::Unsupported {
                origin: self.address(),
                what: "be listed",
            });
        }
        self.inner.list(prefix)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.alive()?;
        self.inner.list_info(prefix)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.write()?;
        self.inner.remove(object)
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.alive()?;
        self.inner.size(object)
    }
}
