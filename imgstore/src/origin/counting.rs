//! Counts the requests and bytes that pass to another origin.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use crate::ids::to_u64;

/// Shortest answer, in bytes, that says something about the link's speed.
const PACE_BYTES_MIN: usize = 64 << 10;

/// What went over the wire.
#[derive(Debug, Default)]
pub struct Traffic {
    requests: AtomicU64,
    bytes: AtomicU64,
    /// Of the last long answer; 0 before the first.
    bytes_per_ms: AtomicU64,
}

impl Traffic {
    /// Requests sent, failed ones included.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// How fast the last answer came that was long enough to tell.
    pub fn bytes_per_ms(&self) -> Option<u64> {
        Some(self.bytes_per_ms.load(Ordering::Relaxed)).filter(|pace| *pace > 0)
    }

    /// Body bytes received.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// An origin whose reads are counted.
#[derive(Debug)]
pub struct CountingOrigin {
    inner: Arc<dyn Origin>,
    traffic: Arc<Traffic>,
}

impl CountingOrigin {
    /// Counts what is read from `inner` in `traffic`.
    pub fn new(inner: Arc<dyn Origin>, traffic: Arc<Traffic>) -> Self {
        Self { inner, traffic }
    }

    fn count(
        &self,
        fetch: impl FnOnce() -> Result<Vec<u8>, OriginError>,
    ) -> Result<Vec<u8>, OriginError> {
        let start = Instant::now();
        let reply = fetch();
        let us = u64::try_from(start.elapsed().as_micros())
            .unwrap_or(u64::MAX)
            .max(1);
        self.traffic.requests.fetch_add(1, Ordering::Relaxed);
        if let Ok(bytes) = &reply {
            self.traffic
                .bytes
                .fetch_add(to_u64(bytes.len()), Ordering::Relaxed);
            if bytes.len() >= PACE_BYTES_MIN {
                let pace = to_u64(bytes.len()).saturating_mul(1000) / us;
                self.traffic
                    .bytes_per_ms
                    .store(pace.max(1), Ordering::Relaxed);
            }
        }
        reply
    }
}

impl Origin for CountingOrigin {
    fn address(&self) -> String {
        self.inner.address()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.count(|| self.inner.fetch(object, range))
    }

    fn fetch_of(&self, object: &str, size: u64, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.count(|| self.inner.fetch_of(object, size, range))
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.count(|| self.inner.fetch_all(object, max_len))
    }

    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.count(|| self.inner.fetch_within(object, range, deadline))
    }

    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.count(|| self.inner.fetch_all_within(object, max_len, deadline))
    }

    fn lag(&self) -> Duration {
        self.inner.lag()
    }

    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        self.inner.check_size(object, size)
    }

    fn chunk_bytes(&self) -> Option<u64> {
        self.inner.chunk_bytes()
    }

    fn close(&self) {
        self.inner.close();
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.inner.create(object, content)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.inner.replace(object, content)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.inner.list(prefix)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        self.inner.list_info(prefix)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.inner.remove(object)
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.traffic.requests.fetch_add(1, Ordering::Relaxed);
        self.inner.size(object)
    }

    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        self.inner.create_from_file(object, path)
    }

    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        self.inner.replace_from_file(object, path)
    }

    fn staging(&self) -> Option<PathBuf> {
        self.inner.staging()
    }
}
