//! An origin in memory, for tests: the strictest one. Creating an object with other bytes than it has is a panic, unless it was tampered with.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use crate::format::names;
use crate::ids::{to_u64, to_usize};

/// Objects in a map.
#[derive(Debug, Default)]
pub struct MemOrigin {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// When objects were written. What is not here (tampered with) is as old as can be.
    written: Mutex<BTreeMap<String, SystemTime>>,
    /// After that an object may have any bytes.
    tampered: AtomicBool,
}

impl MemOrigin {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of all objects.
    pub fn snapshot(&self) -> BTreeMap<String, Vec<u8>> {
        self.lock().clone()
    }

    /// Changes objects behind the origin's back, to inject damage.
    pub fn tamper(&self, change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>)) {
        self.tampered.store(true, Ordering::Relaxed);
        change(&mut self.lock());
    }

    /// Makes an object as old as `modified` says.
    pub fn age(&self, object: &str, modified: SystemTime) {
        self.times().insert(object.to_owned(), modified);
    }

    fn times(&self) -> MutexGuard<'_, BTreeMap<String, SystemTime>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, object: &str) -> Result<Vec<u8>, OriginError> {
        self.lock()
            .get(object)
            .cloned()
            .ok_or_else(|| OriginError::NotFound {
                origin: self.address(),
                object: object.to_owned(),
            })
    }

    fn wrong(&self, object: &str, expected: String, found: usize) -> OriginError {
        OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected,
            found: format!("an object of {found} bytes"),
        }
    }
}

impl Origin for MemOrigin {
    fn address(&self) -> String {
        "mem:".to_owned()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        let bytes = self.get(object)?;
        let start = to_usize(range.start);
        let part = start
            .checked_add(to_usize(range.len))
            .and_then(|end| bytes.get(start..end));
        part.map(<[u8]>::to_vec).ok_or_else(|| {
            self.wrong(
                object,
                format!("{} bytes at offset {}", range.len, range.start),
                bytes.len(),
            )
        })
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        let bytes = self.get(object)?;
        if to_u64(bytes.len()) > max_len {
            return Err(self.wrong(object, format!("at most {max_len} bytes"), bytes.len()));
        }
        Ok(bytes)
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        let mut bytes = Vec::new();
        content
            .read_to_end(&mut bytes)
            .map_err(|e| OriginError::Unavailable {
                origin: self.address(),
                object: object.to_owned(),
                reason: e.to_string(),
            })?;
        let mut objects = self.lock();
        if let Some(old) = objects.get(object) {
            let mutable = object.starts_with(names::PLACEMENTS);
            assert!(
                *old == bytes || mutable || self.tampered.load(Ordering::Relaxed),
                "immutable object `{object}` created twice with different bytes"
            );
            return Ok(Created::Existed);
        }
        objects.insert(object.to_owned(), bytes);
        self.age(object, SystemTime::now());
        Ok(Created::New)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.lock().insert(object.to_owned(), content.to_vec());
        self.age(object, SystemTime::now());
        Ok(())
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let objects = self.lock();
        let times = self.times();
        Ok(objects
            .iter()
            .filter(|(name, _)| name.starts_with(prefix))
            .map(|(name, bytes)| ObjectInfo {
                name: name.clone(),
                size: to_u64(bytes.len()),
                modified: times.get(name).copied().unwrap_or(SystemTime::UNIX_EPOCH),
            })
            .collect())
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.lock().remove(object);
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        Ok(self
            .lock()
            .keys()
            .filter(|name| name.starts_with(prefix))
            .cloned()
            .collect())
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.get(object).map(|bytes| to_u64(bytes.len()))
    }
}
