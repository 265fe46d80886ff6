//! Writing objects: small ones in one request, large ones in parts, with one part in memory.
//!
//! A small object is created with `If-None-Match: *`, so that of two writers one is told that it lost. An object of several
//! parts is looked for first and appears whole when its parts are joined; two writers at the same moment can both win,
//! which is harmless for objects that are named by their contents, and only those are large.

use std::io::Read;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use object_store::multipart::{MultipartStore as _, PartId};
use object_store::path::Path;
use object_store::{ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};

use super::S3Origin;
use crate::ids::{to_u64, to_usize};
use crate::origin::{Created, OriginError};

/// Bytes of a part: what is in memory of an object that is written. S3 wants at least 5 MiB.
const PART_BYTES: u64 = 8 << 20;
/// Most parts that S3 joins.
const PARTS_MAX: usize = 10_000;

/// How to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Leave an object of that name alone.
    Create,
    /// Take its place.
    Replace,
}

/// Reads up to a part's bytes; fewer only at the end.
fn read_part(content: &mut dyn Read) -> std::io::Result<Bytes> {
    let mut part = Vec::new();
    content.take(PART_BYTES).read_to_end(&mut part)?;
    Ok(part.into())
}

impl S3Origin {
    /// Writes what `content` gives.
    pub(super) fn write(
        &self,
        object: &str,
        content: &mut dyn Read,
        mode: Mode,
    ) -> Result<Created, OriginError> {
        let unreadable = |e: std::io::Error| self.unavailable(object, format!("its content: {e}"));
        let path = self.path(object)?;
        let first = read_part(content).map_err(unreadable)?;
        let second = if to_u64(first.len()) < PART_BYTES {
            Bytes::new()
        } else {
            read_part(content).map_err(unreadable)?
        };
        if second.is_empty() {
            return self.put(object, &path, first, mode);
        }
        if mode == Mode::Create && self.is_there(object, &path)? {
            return Ok(Created::Existed);
        }
        let id = self.patiently(object, || {
            self.run(object, async |s3| s3.create_multipart(&path).await)
        })?;
        let upload = Upload {
            origin: self,
            object,
            path: &path,
            id: &id,
        };
        let done = upload.parts([first, second], content);
        if done.is_err() {
            // Parts that are not joined cost money and are shown to nobody.
            let aborted = self.run(object, async |s3| s3.abort_multipart(&path, &id).await);
            if let Err(error) = aborted {
                tracing::warn!(object, %error, "an unfinished upload could not be given up");
            }
        }
        done.map(|()| Created::New)
    }

    fn is_there(&self, object: &str, path: &Path) -> Result<bool, OriginError> {
        let head = || self.run(object, async |s3| s3.head(path).await);
        match self.patiently(object, head) {
            Ok(_) => Ok(true),
            Err(OriginError::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn put(
        &self,
        object: &str,
        path: &Path,
        content: Bytes,
        mode: Mode,
    ) -> Result<Created, OriginError> {
        let put = |mode: PutMode| {
            self.patiently(object, || {
                let content = PutPayload::from(content.clone());
                self.run(object, async |s3| {
                    let options = PutOptions::from(mode.clone());
                    match s3.put_opts(path, content.clone(), options).await {
                        Ok(_) => Ok(Some(Created::New)),
                        Err(object_store::Error::AlreadyExists { .. }) => {
                            Ok(Some(Created::Existed))
                        }
                        Err(e) if mode == PutMode::Create && super::is_not_implemented(&e) => {
                            Ok(None)
                        }
                        Err(e) => Err(e),
                    }
                })
            })
        };
        if mode == Mode::Create {
            if self.conditional.load(Ordering::Relaxed) {
                if let Some(created) = put(PutMode::Create)? {
                    return Ok(created);
                }
                tracing::warn!(
                    origin = %self.address,
                    "the server cannot create objects on condition that they are not there; \
                     they are looked for first, and the later of two writers at the same moment wins"
                );
                self.conditional.store(false, Ordering::Relaxed);
            }
            if self.is_there(object, path)? {
                return Ok(Created::Existed);
            }
        }
        put(PutMode::Overwrite).map(|_| Created::New)
    }
}

struct Upload<'a> {
    origin: &'a S3Origin,
    object: &'a str,
    path: &'a Path,
    id: &'a String,
}

impl Upload<'_> {
    fn parts(&self, begun: [Bytes; 2], content: &mut dyn Read) -> Result<(), OriginError> {
        let (origin, object) = (self.origin, self.object);
        let mut done: Vec<PartId> = Vec::new();
        let mut begun = begun.into_iter();
        loop {
            let part = match begun.next() {
                Some(part) => part,
                None => read_part(content)
                    .map_err(|e| origin.unavailable(object, format!("its content: {e}")))?,
            };
            if part.is_empty() {
                break;
            }
            if done.len() == PARTS_MAX {
                let bytes = PART_BYTES * to_u64(PARTS_MAX);
                return Err(origin.unavailable(object, format!("it has more than {bytes} bytes")));
            }
            let index = done.len();
            let last = part.len() < to_usize(PART_BYTES);
            let id = origin.patiently(object, || {
                let payload = PutPayload::from(part.clone());
                origin.run(object, async |s3| {
                    s3.put_part(self.path, self.id, index, payload.clone())
                        .await
                })
            })?;
            done.push(id);
            if last {
                break;
            }
        }
        origin.patiently(object, || {
            origin.run(object, async |s3| {
                s3.complete_multipart(self.path, self.id, done.clone())
                    .await
            })
        })?;
        Ok(())
    }
}
