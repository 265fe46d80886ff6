//! Where layers live: the seam between the store and a directory, a web server or memory.
//!
//! An origin holds named, immutable objects (and tags, the one mutable kind). Readers ask for byte ranges;
//! writers create an object under a name that did not exist. Names are relative slash-separated paths, as listed in
//! `docs/format.md`. Nothing here knows what the objects mean, and nothing here verifies them: that is the reader's part.

pub mod counting;
pub mod dir;
pub mod http;
pub mod lag;
pub mod late;
pub mod mem;
pub mod oci;
pub mod s3;
pub mod three_fs;
pub mod url;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// A half-open range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// Number of bytes, at least 1.
    pub len: u64,
}

/// Why an origin could not answer. The caller's choice hangs on the variant, the text names object and place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OriginError {
    /// No object of that name. Do not retry unless the origin is known to lag.
    #[error("`{object}` does not exist on origin `{origin}`")]
    NotFound {
        /// The origin's address.
        origin: String,
        /// The object's name.
        object: String,
    },
    /// The origin could not be reached or failed; a retry may help.
    #[error("origin `{origin}` could not {}: {reason}", task(object))]
    Unavailable {
        /// The origin's address.
        origin: String,
        /// The object's name; empty when the origin itself could not be opened.
        object: String,
        /// What failed.
        reason: String,
    },
    /// The origin asks to be left alone for a while (429, 503 with Retry-After, SlowDown); a retry after that may help.
    #[error("origin `{origin}` is busy and could not {}: {reason}", task(object))]
    Busy {
        /// The origin's address.
        origin: String,
        /// The object's name.
        object: String,
        /// What it said.
        reason: String,
        /// How long it wants to be left alone, where it said so.
        retry_after: Option<Duration>,
    },
    /// The origin refuses who asks: no credentials, wrong ones, or expired ones. Asking again with the same ones does not help.
    #[error("origin `{origin}` refused `{object}`: {reason}")]
    Denied {
        /// The origin's address.
        origin: String,
        /// The object's name; empty when the origin itself could not be opened.
        object: String,
        /// What it said, and where credentials are looked for.
        reason: String,
    },
    /// The origin answered with something that is not the object: wrong range, length or encoding.
    #[error(
        "origin `{origin}` gave a wrong answer for `{object}`: expected {expected}, found {found}"
    )]
    WrongAnswer {
        /// The origin's address.
        origin: String,
        /// The object's name.
        object: String,
        /// What a right answer looks like.
        expected: String,
        /// What came.
        found: String,
    },
    /// The origin cannot do this at all (an HTTP origin cannot be written or listed).
    #[error("origin `{origin}` cannot {what}; use a `dir:` origin for that")]
    Unsupported {
        /// The origin's address.
        origin: String,
        /// The refused operation.
        what: &'static str,
    },
}

fn task(object: &str) -> String {
    if object.is_empty() {
        "be opened".to_owned()
    } else {
        format!("give `{object}`")
    }
}

impl OriginError {
    /// Whether asking again can help.
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::Busy { .. } | Self::WrongAnswer { .. }
        )
    }
}

/// What `create` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The object is new.
    New,
    /// An object of that name was there already and was left alone.
    Existed,
}

/// What an origin knows of an object without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// The object's name.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// When it was created or replaced, by the origin's own clock.
    pub modified: SystemTime,
}

/// Named immutable objects. Implementations are used from many threads at once.
pub trait Origin: Send + Sync + std::fmt::Debug {
    /// The address as the user gave it (`dir:/path`, `http://…`).
    fn address(&self) -> String;

    /// Exactly `range.len` bytes of an object: never fewer, never other bytes than the origin holds there.
    ///
    /// # Errors
    /// As [`OriginError`] says. A range past the end is [`OriginError::WrongAnswer`].
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError>;

    /// Refuses an object that can be seen, cheaply, to have another size than `size` bytes: one that is still written, say.
    ///
    /// # Errors
    /// [`OriginError::WrongAnswer`] then; else as [`OriginError`] says.
    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        let _: (&str, u64) = (object, size);
        Ok(())
    }

    /// As [`Origin::fetch`], of an object whose size is known; that is checked first.
    ///
    /// # Errors
    /// As for [`Origin::check_size`] and [`Origin::fetch`].
    fn fetch_of(&self, object: &str, size: u64, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.check_size(object, size)?;
        self.fetch(object, range)
    }

    /// A whole object of at most `max_len` bytes.
    ///
    /// # Errors
    /// As [`OriginError`] says; a longer object is [`OriginError::WrongAnswer`].
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError>;

    /// As [`Origin::fetch`], given up at `deadline` where the origin can: one that can hang must.
    ///
    /// # Errors
    /// As for [`Origin::fetch`]; [`OriginError::Unavailable`] when the time is over.
    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let _: Instant = deadline;
        self.fetch(object, range)
    }

    /// As [`Origin::fetch_all`], given up if nothing has come by `deadline`. An answer that comes may take longer, as long as it
    /// makes progress: whole objects can be large.
    ///
    /// # Errors
    /// As for [`Origin::fetch_all`]; [`OriginError::Unavailable`] when the time is over.
    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let _: Instant = deadline;
        self.fetch_all(object, max_len)
    }

    /// How long an object that exists may still seem not to: a missing one is asked for again that long.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }

    /// Creates an object from a reader; durable and visible whole, or not at all. Never overwrites.
    ///
    /// # Errors
    /// [`OriginError::Unsupported`] on read-only origins, else [`OriginError::Unavailable`].
    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError>;

    /// Creates an object from a finished file. Origins on a file system may link it in place of copying, if it lies in
    /// [`Origin::staging`]; the caller removes its own name afterwards.
    ///
    /// # Errors
    /// As for [`Origin::create`].
    fn create_from_file(&self, object: &str, path: &Path) -> Result<Created, OriginError> {
        let mut file = std::fs::File::open(path).map_err(|e| OriginError::Unavailable {
            origin: self.address(),
            object: object.to_owned(),
            reason: format!("cannot read `{}`: {e}", path.display()),
        })?;
        self.create(object, &mut file)
    }

    /// Creates or atomically replaces an object: a mutable one (tag, placement, index), or one whose bytes on the origin are
    /// not those that its name stands for.
    ///
    /// # Errors
    /// As for [`Origin::create`].
    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError>;

    /// As [`Origin::replace`], from a finished file, which is left where it is.
    ///
    /// # Errors
    /// As for [`Origin::create`].
    fn replace_from_file(&self, object: &str, path: &Path) -> Result<(), OriginError> {
        let content = std::fs::read(path).map_err(|e| OriginError::Unavailable {
            origin: self.address(),
            object: object.to_owned(),
            reason: format!("cannot read `{}`: {e}", path.display()),
        })?;
        self.replace(object, &content)
    }

    /// Names of all objects whose name starts with `prefix` (a folder, ending in `/`), sorted.
    ///
    /// # Errors
    /// [`OriginError::Unsupported`] where the origin cannot list.
    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError>;

    /// The size of an object in bytes.
    ///
    /// # Errors
    /// As [`OriginError`] says.
    fn size(&self, object: &str) -> Result<u64, OriginError>;

    /// As [`Origin::list`], with sizes and ages: what collecting garbage needs.
    ///
    /// # Errors
    /// [`OriginError::Unsupported`] where the origin cannot tell.
    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let _: &str = prefix;
        Err(OriginError::Unsupported {
            origin: self.address(),
            what: "tell the age of its objects",
        })
    }

    /// Removes an object; one that is gone already is no error.
    ///
    /// # Errors
    /// [`OriginError::Unsupported`] on read-only origins, else [`OriginError::Unavailable`].
    fn remove(&self, object: &str) -> Result<(), OriginError> {
        let _: &str = object;
        Err(OriginError::Unsupported {
            origin: self.address(),
            what: "remove objects",
        })
    }

    /// Gives back what would outlive the process; reads that come later fail. For a process that ends while threads of it
    /// still hold the origin.
    fn close(&self) {}

    /// Reads that cross multiples of this cost the origin an operation more: packs are laid out so that a segment does not.
    fn chunk_bytes(&self) -> Option<u64> {
        None
    }

    /// A folder on the origin's own file system for large temporary files, if it has one.
    fn staging(&self) -> Option<PathBuf> {
        None
    }
}
