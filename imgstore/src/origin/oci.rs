//! A repository of an OCI registry.
//!
//! A registry knows blobs by their SHA-256 and keeps those that a manifest refers to. So each object of ours is a blob and a
//! manifest of one layer (`record`) under a tag made of the object's name (`tags`): reading is one request for the manifest
//! and one for the blob, listing is listing tags, replacing is moving the tag, and the registry's own garbage collection
//! keeps what we keep. The decision record `oci-origin` says what this costs and what a registry cannot do.
//!
//! Where immutable objects lie is remembered for a minute, so that a pack's manifest is not asked for with each range.

mod record;
mod tags;

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use record::Record;
use tags::Meaning;

use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use crate::credentials::environment::Environment;
use crate::ids::to_u64;
use crate::registry::RegistryError;
use crate::registry::body::Until;
use crate::registry::client::RegistryClient;
use crate::registry::reference::Repository;
use crate::registry::upload::StoredBlob;

/// How long the place of an immutable object is believed: repair may put another blob there.
const PLACE_FRESH: Duration = Duration::from_secs(60);
/// Most places remembered.
const PLACES_MAX: usize = 8192;
/// Folders of objects that are named by their contents.
const IMMUTABLE: [&str; 4] = ["packs/", "meta/", "chunks/", "manifests/"];
/// How often a write is tried in all.
const WRITE_ATTEMPTS_MAX: u32 = 5;
/// First pause between tries; it doubles.
const WRITE_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause that a busy registry can ask for.
const WRITE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Manifests asked for at once while ages are listed.
const LIST_THREADS: usize = 8;

/// See the head of this file.
#[derive(Debug)]
pub struct OciOrigin {
    client: RegistryClient,
    places: Mutex<HashMap<String, (Record, Instant)>>,
    /// Set once the empty configuration is in the repository.
    empty: OnceLock<StoredBlob>,
}

impl OciOrigin {
    /// Prepares a client with what `env` says about credentials; nothing is sent yet.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the client cannot be made.
    pub fn open(repository: &Repository, env: &Environment) -> Result<Self, OriginError> {
        let client = RegistryClient::new(repository, env);
        let client = client.map_err(|e| explain(e, repository.to_string(), ""))?;
        Ok(Self {
            client,
            places: Mutex::default(),
            empty: OnceLock::new(),
        })
    }

    fn error(&self, object: &str) -> impl Fn(RegistryError) -> OriginError {
        let (origin, object) = (self.address(), object.to_owned());
        move |error| explain(error, origin.clone(), &object)
    }

    fn places(&self) -> MutexGuard<'_, HashMap<String, (Record, Instant)>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, object: &str) {
        self.places().remove(object);
    }

    /// Asks the registry for an object's manifest; gives its digest too.
    fn look_up(&self, object: &str, until: Until) -> Result<(Record, String), RegistryError> {
        let manifest = self.client.manifest_until(&tags::tag(object), until)?;
        let wrong = |found: String| RegistryError::wrong("the manifest of the object", found);
        let record = Record::parse(&manifest.bytes).map_err(wrong)?;
        if record.object != object {
            return Err(wrong(format!("the one of `{}`", record.object)));
        }
        Ok((record, manifest.digest))
    }

    /// Where an object is, and whether that was only remembered.
    fn place(&self, object: &str, until: Until) -> Result<(Record, bool), RegistryError> {
        if let Some((record, until)) = self.places().get(object)
            && Instant::now() < *until
        {
            return Ok((record.clone(), true));
        }
        let (record, _) = self.look_up(object, until)?;
        if IMMUTABLE.iter().any(|folder| object.starts_with(folder)) {
            let mut places = self.places();
            if places.len() >= PLACES_MAX {
                places.clear();
            }
            let until = Instant::now() + PLACE_FRESH;
            places.insert(object.to_owned(), (record.clone(), until));
        }
        Ok((record, false))
    }

    /// Reads an object's blob; what was remembered and is not there is looked up again.
    fn read<T>(
        &self,
        object: &str,
        until: Until,
        read: impl Fn(&Record) -> Result<T, RegistryError>,
    ) -> Result<T, OriginError> {
        let (record, remembered) = self.place(object, until).map_err(self.error(object))?;
        let done = match read(&record) {
            Err(RegistryError::NotFound) if remembered => {
                self.forget(object);
                let (record, _) = self.place(object, until).map_err(self.error(object))?;
                read(&record)
            }
            done => done,
        };
        done.map_err(self.error(object))
    }

    /// Repeats what failed in a way that may pass.
    fn patiently<T>(
        &self,
        object: &str,
        mut attempt: impl FnMut() -> Result<T, RegistryError>,
    ) -> Result<T, OriginError> {
        let mut pause = WRITE_PAUSE;
        for _ in 1..WRITE_ATTEMPTS_MAX {
            let error = match attempt() {
                Err(e) if e.is_transient() => e,
                done => return done.map_err(self.error(object)),
            };
            let asked = match &error {
                RegistryError::Busy { retry_after, .. } => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            tracing::debug!(object, %error, "tried again");
            std::thread::sleep(pause.max(asked.min(WRITE_PAUSE_MAX)));
            pause *= 2;
        }
        attempt().map_err(self.error(object))
    }

    fn range(&self, object: &str, range: ByteRange, until: Until) -> Result<Vec<u8>, OriginError> {
        self.read(object, until, |record| {
            let end = range.start.saturating_add(range.len);
            if end > record.size {
                return Err(RegistryError::wrong(
                    format!("{} bytes at offset {}", range.len, range.start),
                    format!("an object of {} bytes", record.size),
                ));
            }
            self.client.blob_range(&record.digest, range, until)
        })
    }

    fn all(&self, object: &str, max_len: u64, until: Until) -> Result<Vec<u8>, OriginError> {
        self.read(object, until, |record| {
            if record.size > max_len {
                return Err(RegistryError::wrong(
                    format!("at most {max_len} bytes"),
                    format!("{} bytes", record.size),
                ));
            }
            self.client.small_blob(&record.digest, record.size, until)
        })
    }

    fn is_there(&self, object: &str) -> Result<bool, OriginError> {
        match self.patiently(object, || self.look_up(object, Until::default())) {
            Ok(_) => Ok(true),
            Err(OriginError::NotFound { .. }) => Ok(false),
            // A tag that points to something else: the build finds that it is damaged and replaces it.
            Err(OriginError::WrongAnswer { .. }) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// Points an object's tag at a blob.
    fn point(&self, object: &str, blob: &StoredBlob) -> Result<(), OriginError> {
        if self.empty.get().is_none() {
            let stored = self.patiently(object, || self.client.upload(&mut &*record::EMPTY))?;
            self.empty.get_or_init(|| stored);
        }
        let record = Record {
            object: object.to_owned(),
            digest: blob.digest.clone(),
            size: blob.size,
            created: SystemTime::now(),
        };
        let tag = tags::tag(object);
        let put = || {
            self.client
                .put_manifest(&tag, record::MEDIA_TYPE, record.to_bytes())
        };
        let done = self.patiently(object, put);
        self.forget(object);
        done
    }

    /// Stores content that can be read once: repeated only by who can read it again.
    fn store(&self, object: &str, content: &mut dyn Read) -> Result<(), OriginError> {
        let blob = self.client.upload(content).map_err(self.error(object))?;
        self.point(object, &blob)
    }

    fn store_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        let unreadable =
            |e: std::io::Error| RegistryError::Unavailable(format!("`{}`: {e}", path.display()));
        let blob = self.patiently(object, || {
            let mut file = std::fs::File::open(path).map_err(unreadable)?;
            self.client.upload(&mut file)
        })?;
        self.point(object, &blob)
    }

    /// Names under a prefix. A tag with a hash for a name costs a request.
    fn names(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        let mut out = Vec::new();
        for tag in self.patiently(prefix, || self.client.tags())? {
            let name = match tags::meaning(&tag) {
                Meaning::Object(name) => name,
                Meaning::Foreign => continue,
                Meaning::Hashed => match self.patiently(prefix, || self.client.manifest(&tag)) {
                    Ok(manifest) => match Record::parse(&manifest.bytes) {
                        Ok(record) if tags::tag(&record.object) == tag => record.object,
                        _ => continue,
                    },
                    // Removed since it was listed.
                    Err(OriginError::NotFound { .. }) => continue,
                    Err(e) => return Err(e),
                },
            };
            if name.starts_with(prefix) {
                out.push(name);
            }
        }
        out.sort();
        Ok(out)
    }
}

fn explain(error: RegistryError, origin: String, object: &str) -> OriginError {
    let object = object.to_owned();
    match error {
        RegistryError::NotFound => OriginError::NotFound { origin, object },
        RegistryError::Denied(reason) => OriginError::Denied {
            origin,
            object,
            reason,
        },
        RegistryError::Busy {
            reason,
            retry_after,
        } => OriginError::Busy {
            origin,
            object,
            reason,
            retry_after,
        },
        RegistryError::Unavailable(reason) => OriginError::Unavailable {
            origin,
            object,
            reason,
        },
        RegistryError::Wrong { expected, found } => OriginError::WrongAnswer {
            origin,
            object,
            expected,
            found,
        },
        RegistryError::Unsupported(_) => OriginError::Unsupported {
            origin,
            what: "remove objects: the registry does not allow it (`storage.delete.enabled`)",
        },
    }
}

impl Origin for OciOrigin {
    fn address(&self) -> String {
        self.client.repository().to_string()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.range(object, range, Until::default())
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.all(object, max_len, Until::default())
    }

    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.range(object, range, Until::ended(deadline))
    }

    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let begin = Some(deadline);
        self.all(object, max_len, Until { begin, end: None })
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        if self.is_there(object)? {
            return Ok(Created::Existed);
        }
        self.store(object, content).map(|()| Created::New)
    }

    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        if self.is_there(object)? {
            return Ok(Created::Existed);
        }
        self.store_file(object, path).map(|()| Created::New)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        let blob = self.patiently(object, || self.client.upload(&mut &*content))?;
        self.point(object, &blob)
    }

    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        self.store_file(object, path)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.names(prefix)
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        let place = self.place(object, Until::default());
        let (record, _) = place.map_err(self.error(object))?;
        if self
            .client
            .has_blob(&record.digest)
            .map_err(self.error(object))?
        {
            return Ok(record.size);
        }
        self.forget(object);
        Err(self.error(object)(RegistryError::NotFound))
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let names = self.names(prefix)?;
        let next = AtomicUsize::new(0);
        let work = || {
            let mut out: Vec<ObjectInfo> = Vec::new();
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                match self.patiently(name, || self.look_up(name, Until::default())) {
                    Ok((record, _)) => out.push(ObjectInfo {
                        name: record.object,
                        size: record.size,
                        modified: record.created,
                    }),
                    // Removed since it was listed, or a tag of somebody else's.
                    Err(OriginError::NotFound { .. } | OriginError::WrongAnswer { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(out)
        };
        let parts: Vec<Result<Vec<ObjectInfo>, OriginError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..LIST_THREADS).map(|_| scope.spawn(work)).collect();
            let joined = threads.into_iter().map(|t| t.join());
            joined
                .map(|part| part.expect("it does not panic"))
                .collect()
        });
        let mut out = Vec::new();
        for part in parts {
            out.extend(part?);
        }
        out.sort_by(|a, b| a.name.cmp(&b.name));
        debug_assert!(to_u64(out.len()) <= to_u64(names.len()));
        Ok(out)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        let digest = match self.patiently(object, || self.look_up(object, Until::default())) {
            Ok((_, digest)) => digest,
            Err(OriginError::NotFound { .. }) => return Ok(()),
            Err(e) => return Err(e),
        };
        self.forget(object);
        self.patiently(object, || self.client.delete_manifest(&digest))
    }
}
