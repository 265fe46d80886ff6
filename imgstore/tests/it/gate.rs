//! An origin whose every call passes a gate first: a test may run something else there, or end it all.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imgstore::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

/// A call that is about to be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) writes: bool,
    pub(crate) object: &'a str,
}

type Check = dyn Fn(Call<'_>) -> Result<(), OriginError> + Send + Sync;

/// See the head of this file.
pub(crate) struct Gate {
    inner: Arc<dyn Origin>,
    check: Box<Check>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Gate {
    pub(crate) fn new(
        inner: Arc<dyn Origin>,
        check: impl Fn(Call<'_>) -> Result<(), OriginError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            inner,
            check: Box::new(check),
        }
    }

    fn reads(&self, object: &str) -> Result<(), OriginError> {
        (self.check)(Call {
            writes: false,
            object,
        })
    }

    fn writes(&self, object: &str) -> Result<(), OriginError> {
        (self.check)(Call {
            writes: true,
            object,
        })
    }
}

/// What an origin says that is gone for good.
pub(crate) fn dead(object: &str) -> OriginError {
    OriginError::Unavailable {
        origin: "gate:".to_owned(),
        object: object.to_owned(),
        reason: "the process was killed".to_owned(),
    }
}

impl Origin for Gate {
    fn address(&self) -> String {
        self.inner.address()
    }
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.reads(object)?;
        self.inner.fetch(object, range)
    }
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.reads(object)?;
        self.inner.fetch_all(object, max_len)
    }
    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.writes(object)?;
        self.inner.create(object, content)
    }
    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        self.writes(object)?;
        self.inner.create_from_file(object, path)
    }
    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.writes(object)?;
        self.inner.replace(object, content)
    }
    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        self.writes(object)?;
        self.inner.replace_from_file(object, path)
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.reads(prefix)?;
        self.inner.list(prefix)
    }
    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.reads(prefix)?;
        self.inner.list_info(prefix)
    }
    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.reads(object)?;
        self.inner.size(object)
    }
    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.writes(object)?;
        self.inner.remove(object)
    }
    fn staging(&self) -> Option<PathBuf> {
        self.inner.staging()
    }
}
