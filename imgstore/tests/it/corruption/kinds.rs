//! Kinds of origins and how each is damaged: what is stored on it, and what it answers.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use imgstore::origin::dir::DirOrigin;
use imgstore::origin::http::HttpOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{ByteRange, Created, Origin, OriginError};

use super::layers::World;
use super::{fill, mem, servers};
use crate::bad_web::{Act, BadWeb, PAGE, gzip};

/// A wrong answer about an object.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lie {
    /// Shorter, longer, cut off, moved: chosen by the number.
    WrongLength(u64),
    /// The whole object in place of a range.
    Whole,
    /// Compressed on the way; whether it says so.
    Gzip(bool),
    /// A page; whether it is cut or padded to the right length.
    Html(bool),
}

/// One origin that can be damaged.
pub(super) trait Site {
    fn origin(&self) -> Arc<dyn Origin>;

    /// Puts exactly these bytes (or nothing) under a name, past the origin's own rules.
    fn put(&self, object: &str, bytes: Option<&[u8]>);

    /// The origin with wrong answers about an object. An origin that cannot lie by itself does so behind a decorator.
    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        Arc::new(Lying::new(origin, object, *lie))
    }

    /// No more wrong answers.
    fn honest(&self) {}
}

/// A row of the campaign.
pub(super) struct Kind {
    pub(super) name: &'static str,
    /// How often every combination of damage and object comes.
    pub(super) rounds: usize,
    pub(super) make: fn(&World) -> Box<dyn Site>,
}

fn row(name: &'static str, rounds: usize, make: fn(&World) -> Box<dyn Site>) -> Kind {
    Kind { name, rounds, make }
}

/// All kinds. A new one is a line here, with a test in the parent that runs it.
pub(super) static KINDS: std::sync::LazyLock<Vec<Kind>> = std::sync::LazyLock::new(|| {
    vec![
        row("mem", 60, Mem::site),
        row("dir", 38, Dir::site),
        row("http", 22, Http::site),
        row("s3", 7, servers::s3),
        row("oci", 6, servers::oci),
        row("3fs-mount", 7, servers::three_fs_mount),
        row("3fs-rings", 7, servers::three_fs_rings),
    ]
});

struct Mem(Arc<MemOrigin>);

impl Mem {
    fn site(world: &World) -> Box<dyn Site> {
        Box::new(Self(Arc::new(mem(&world.objects))))
    }
}

impl Site for Mem {
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.0) as Arc<dyn Origin>
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        self.0.tamper(|objects| {
            match bytes {
                Some(bytes) => objects.insert(object.to_owned(), bytes.to_vec()),
                None => objects.remove(object),
            };
        });
    }
}

struct Dir {
    folder: tempfile::TempDir,
    origin: Arc<DirOrigin>,
}

impl Dir {
    fn site(world: &World) -> Box<dyn Site> {
        let folder = tempfile::tempdir().unwrap();
        let origin = Arc::new(DirOrigin::create_root(folder.path()).unwrap());
        let site = Self { folder, origin };
        fill(world, &site);
        Box::new(site)
    }
}

impl Site for Dir {
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin) as Arc<dyn Origin>
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        let path = self.folder.path().join(object);
        match bytes {
            Some(bytes) => {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
            None => fs::remove_file(path).unwrap(),
        }
    }
}

type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A real server; it lies by itself.
struct Http {
    objects: Objects,
    web: BadWeb,
    origin: Arc<HttpOrigin>,
}

impl Http {
    fn site(world: &World) -> Box<dyn Site> {
        let objects = Arc::new(Mutex::new(world.objects.clone()));
        let served = Arc::clone(&objects);
        let web = BadWeb::serve(move |path| served.lock().unwrap().get(path).cloned());
        let origin = Arc::new(HttpOrigin::open(&web.url()).unwrap());
        Box::new(Self {
            objects,
            web,
            origin,
        })
    }
}

fn act(lie: Lie) -> Act {
    match lie {
        Lie::WrongLength(n) => {
            let by = usize::try_from(n >> 8 & 0x3FF).unwrap() + 1;
            match n % 9 {
                0 => Act::Shorter(by),
                1 => Act::Longer(by),
                2 => Act::CutOff(by),
                3 => Act::NoLength(by),
                4 => Act::ChunkedCut(by),
                5 => Act::OtherOffset(by),
                6 => Act::LyingOffset(by),
                7 => Act::ResetAfter(by),
                _ => Act::Chunked,
            }
        }
        Lie::Whole => Act::Whole,
        Lie::Gzip(true) => Act::Gzip,
        Lie::Gzip(false) => Act::SecretGzip,
        Lie::Html(true) => Act::HtmlInPlace,
        Lie::Html(false) => Act::Html,
    }
}

impl Site for Http {
    fn origin(&self) -> Arc<dyn Origin> {
        Arc::clone(&self.origin) as Arc<dyn Origin>
    }

    fn put(&self, object: &str, bytes: Option<&[u8]>) {
        let mut objects = self.objects.lock().unwrap();
        match bytes {
            Some(bytes) => objects.insert(object.to_owned(), bytes.to_vec()),
            None => objects.remove(object),
        };
    }

    fn lie(&self, origin: Arc<dyn Origin>, object: &str, lie: &Lie) -> Arc<dyn Origin> {
        let (object, act) = (object.to_owned(), act(*lie));
        self.web.tell(move |request| {
            if request.path == object {
                act.clone()
            } else {
                Act::Right
            }
        });
        origin
    }

    fn honest(&self) {
        self.web.always(Act::Right);
        self.web.forget();
    }
}

/// Gives wrong answers about one object, whatever the contract says.
#[derive(Debug)]
pub(super) struct Lying {
    inner: Arc<dyn Origin>,
    object: String,
    lie: Lie,
}

impl Lying {
    pub(super) fn new(inner: Arc<dyn Origin>, object: &str, lie: Lie) -> Self {
        let object = object.to_owned();
        Self { inner, object, lie }
    }

    fn change(&self, right: Vec<u8>, range: Option<ByteRange>) -> Result<Vec<u8>, OriginError> {
        let len = right.len();
        Ok(match self.lie {
            Lie::WrongLength(n) => {
                let by = usize::try_from(n >> 8 & 0x3FF).unwrap() + 1;
                let mut bytes = right;
                match (n % 3, range) {
                    (0, _) => bytes.truncate(len.saturating_sub(by)),
                    (1, _) => bytes.resize(len + by, 0),
                    (_, Some(range)) => {
                        let start = u64::try_from(by).unwrap().min(range.start);
                        let start = range.start - start;
                        bytes = self
                            .inner
                            .fetch(&self.object, ByteRange { start, ..range })?;
                    }
                    (_, None) => bytes.clear(),
                }
                bytes
            }
            Lie::Whole => self.inner.fetch_all(&self.object, 1 << 30)?,
            Lie::Gzip(_) => gzip(&right),
            Lie::Html(true) => PAGE.iter().copied().cycle().take(len).collect(),
            Lie::Html(false) => PAGE.to_vec(),
        })
    }
}

impl Origin for Lying {
    fn address(&self) -> String {
        self.inner.address()
    }
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        let right = self.inner.fetch(object, range)?;
        if object == self.object {
            return self.change(right, Some(range));
        }
        Ok(right)
    }
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        let right = self.inner.fetch_all(object, max_len)?;
        if object == self.object {
            return self.change(right, None);
        }
        Ok(right)
    }
    fn create(&self, _: &str, _: &mut dyn Read) -> Result<Created, OriginError> {
        unreachable!()
    }
    fn replace(&self, _: &str, _: &[u8]) -> Result<(), OriginError> {
        unreachable!()
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        self.inner.list(prefix)
    }
    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.inner.size(object)
    }
}

/// An origin whose failures are final, so that nothing is retried (that is another test's subject), and that may not be able to
/// list, so that its index is read.
#[derive(Debug)]
pub(super) struct Final {
    pub(super) inner: Arc<dyn Origin>,
    pub(super) lists: bool,
}

impl Final {
    fn last<T>(&self, object: &str, reply: Result<T, OriginError>) -> Result<T, OriginError> {
        reply.map_err(|error| match error {
            OriginError::NotFound { .. } | OriginError::Unsupported { .. } => error,
            other => OriginError::Denied {
                origin: self.inner.address(),
                object: object.to_owned(),
                reason: other.to_string(),
            },
        })
    }
}

impl Origin for Final {
    fn address(&self) -> String {
        self.inner.address()
    }
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.last(object, self.inner.fetch(object, range))
    }
    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        let reply = self.inner.fetch_within(object, range, deadline);
        let right = |bytes: &Vec<u8>| u64::try_from(bytes.len()).unwrap() == range.len;
        if reply.as_ref().is_ok_and(|bytes| !right(bytes)) {
            // Whoever asks looks at it too (`fetch::origins` has a test), and would ask again.
            return self.last(
                object,
                Err(OriginError::WrongAnswer {
                    origin: self.inner.address(),
                    object: object.to_owned(),
                    expected: range.len.to_string(),
                    found: "another length".to_owned(),
                }),
            );
        }
        self.last(object, reply)
    }
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.last(object, self.inner.fetch_all(object, max_len))
    }
    fn create(&self, _: &str, _: &mut dyn Read) -> Result<Created, OriginError> {
        unreachable!()
    }
    fn replace(&self, _: &str, _: &[u8]) -> Result<(), OriginError> {
        unreachable!()
    }
    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        if self.lists {
            return self.last(prefix, self.inner.list(prefix));
        }
        Err(OriginError::Unsupported {
            origin: self.inner.address(),
            what: "be listed",
        })
    }
    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.last(object, self.inner.size(object))
    }
}
