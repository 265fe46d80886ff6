//! A bucket of S3, or of any server that speaks its protocol.
//!
//! `object_store` signs requests and reads replies; everything that decides about right and wrong is ours: `wire` lets no
//! redirection, encoding or ignored range through, `failure` says what a refusal means, `credentials` keeps us known,
//! `upload` writes. Reads are not repeated here: that is the part of whoever knows the deadline. Writes, of which many
//! make one published layer, are repeated a few times when the server is busy or away.
//!
//! The trait is for plain threads; a small runtime of this origin's own drives the connections.

mod address;
mod credentials;
mod failure;
mod place;
mod profile;
mod upload;
mod wire;

use std::io::Read;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredentialProvider};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore as _, ObjectStoreExt as _};
use object_store::{GetResult, RetryConfig};
use tokio::runtime::Runtime;
use tokio::time::timeout;

pub use address::S3Address;
use credentials::{Credentials, Held};
use failure::Failure;
use place::Place;
pub(crate) use place::is_loopback;
use upload::Mode;

use super::{ByteRange, Created, ObjectInfo, Origin, OriginError};
use crate::credentials::environment::Environment;
use crate::ids::to_u64;

/// A body must bring so many bytes in every window of this length; there is no limit for all of it.
const PROGRESS_WINDOW: Duration = Duration::from_secs(10);
const PROGRESS_BYTES: u64 = 32 << 10;
/// How often a write is tried in all.
const WRITE_ATTEMPTS_MAX: u32 = 5;
/// First pause between tries; it doubles.
const WRITE_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause that a busy server can ask for.
const WRITE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Threads that drive connections: signing and copying are done by the caller's thread.
const RUNTIME_THREADS: usize = 1;

/// See the head of this file.
#[derive(Debug)]
pub struct S3Origin {
    address: S3Address,
    credentials: Arc<Credentials>,
    signed: AmazonS3,
    anonymous: AmazonS3,
    /// Whether the server is not known to lack conditional writes.
    conditional: AtomicBool,
    /// Taken when the origin goes away.
    runtime: Option<Runtime>,
}

/// Whether the server does not know what it was asked for.
fn is_not_implemented(error: &object_store::Error) -> bool {
    failure::cause::<Failure>(error).is_some_and(|f| {
        f.is_code("NotImplemented") || f.status() == Some(reqwest::StatusCode::NOT_IMPLEMENTED)
    })
}

impl S3Origin {
    /// Prepares a client with what `env` says; nothing is sent yet.
    ///
    /// # Errors
    /// [`OriginError::Unavailable`] when the settings cannot be understood.
    pub fn open(address: &S3Address, env: &Environment) -> Result<Self, OriginError> {
        let fail = |reason: String| OriginError::Unavailable {
            origin: address.to_string(),
            object: String::new(),
            reason,
        };
        let place = Place::new(env).map_err(fail)?;
        let credentials = Arc::new(Credentials::new(env));
        let provider: AwsCredentialProvider = credentials.clone();
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&address.bucket)
            .with_region(&place.region)
            .with_allow_http(place.allow_http)
            .with_virtual_hosted_style_request(place.virtual_hosted)
            .with_http_connector(wire::Connector)
            .with_credentials(provider)
            .with_retry(RetryConfig {
                max_retries: 0,
                ..RetryConfig::default()
            });
        if let Some(endpoint) = &place.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        let build = |builder: AmazonS3Builder| builder.build().map_err(|e| fail(e.to_string()));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(RUNTIME_THREADS)
            .thread_name("s3")
            .enable_all()
            .build()
            .map_err(|e| fail(e.to_string()))?;
        Ok(Self {
            address: address.clone(),
            credentials,
            anonymous: build(builder.clone().with_skip_signature(true))?,
            signed: build(builder)?,
            conditional: AtomicBool::new(true),
            runtime: Some(runtime),
        })
    }

    fn unavailable(&self, object: &str, reason: String) -> OriginError {
        OriginError::Unavailable {
            origin: self.address(),
            object: object.to_owned(),
            reason,
        }
    }

    fn wrong(&self, object: &str, expected: String, found: String) -> OriginError {
        OriginError::WrongAnswer {
            origin: self.address(),
            object: object.to_owned(),
            expected,
            found,
        }
    }

    fn path(&self, object: &str) -> Result<Path, OriginError> {
        let key = self.address.key(object);
        Path::parse(key.trim_end_matches('/')).map_err(|e| self.unavailable(object, e.to_string()))
    }

    /// Sends one request (or what belongs to one). If the server refuses us and there are other credentials by now, it is
    /// sent once more with those.
    fn run<T>(
        &self,
        object: &str,
        request: impl AsyncFn(&AmazonS3) -> object_store::Result<T>,
    ) -> Result<T, OriginError> {
        self.block_on(self.attempt(object, request))
    }

    /// As `run`, given up at `deadline`.
    fn run_until<T>(
        &self,
        object: &str,
        deadline: Option<Instant>,
        request: impl AsyncFn(&AmazonS3) -> object_store::Result<T>,
    ) -> Result<T, OriginError> {
        let Some(deadline) = deadline else {
            return self.run(object, request);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.block_on(async {
            match timeout(left, self.attempt(object, request)).await {
                Ok(done) => done,
                Err(_elapsed) => {
                    let seconds = left.as_secs_f64();
                    Err(self.unavailable(object, format!("no answer within {seconds:.1} s")))
                }
            }
        })
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        let runtime = self.runtime.as_ref().expect("taken by `drop` only");
        runtime.block_on(work)
    }

    async fn attempt<T>(
        &self,
        object: &str,
        request: impl AsyncFn(&AmazonS3) -> object_store::Result<T>,
    ) -> Result<T, OriginError> {
        let mut again = true;
        loop {
            let used: Held = self.credentials.now().await.map_err(|e| {
                let (origin, object) = (self.address(), object.to_owned());
                let reason = e.to_string();
                OriginError::Denied {
                    origin,
                    object,
                    reason,
                }
            })?;
            let s3 = if used.is_some() {
                &self.signed
            } else {
                &self.anonymous
            };
            let error = match request(s3).await {
                Ok(done) => return Ok(done),
                Err(e) => failure::explain(&e, &self.address(), object),
            };
            let denied = matches!(error, OriginError::Denied { .. });
            if !(denied && again && self.credentials.changed_since(&used).await) {
                return Err(error);
            }
            again = false;
        }
    }

    fn range(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Option<Instant>,
    ) -> Result<Vec<u8>, OriginError> {
        let path = self.path(object)?;
        let end = range.start.saturating_add(range.len);
        let bytes = self.run_until(object, deadline, async |s3| {
            let asked = GetOptions {
                range: Some(GetRange::Bounded(range.start..end)),
                ..GetOptions::default()
            };
            collect(s3.get_opts(&path, asked).await?, range.len).await
        })?;
        if to_u64(bytes.len()) == range.len {
            return Ok(bytes);
        }
        Err(self.wrong(
            object,
            format!("{} bytes at offset {}", range.len, range.start),
            format!("{} bytes", bytes.len()),
        ))
    }

    /// A whole object; `deadline` is for the beginning of the reply.
    fn all(
        &self,
        object: &str,
        max_len: u64,
        deadline: Option<Instant>,
    ) -> Result<Vec<u8>, OriginError> {
        let path = self.path(object)?;
        let got = self.run_until(object, deadline, async |s3| {
            s3.get_opts(&path, GetOptions::default()).await
        })?;
        let announced = got.meta.size;
        if announced > max_len {
            let found = format!("{announced} bytes announced");
            return Err(self.wrong(object, format!("at most {max_len} bytes"), found));
        }
        let bytes = self.block_on(collect(got, max_len));
        let bytes = bytes.map_err(|e| failure::explain(&e, &self.address(), object))?;
        if to_u64(bytes.len()) != announced {
            let found = format!("{} bytes", bytes.len());
            return Err(self.wrong(object, format!("{announced} bytes"), found));
        }
        Ok(bytes)
    }

    /// Repeats what failed in a way that may pass.
    fn patiently<T>(
        &self,
        object: &str,
        mut attempt: impl FnMut() -> Result<T, OriginError>,
    ) -> Result<T, OriginError> {
        let mut pause = WRITE_PAUSE;
        for _ in 1..WRITE_ATTEMPTS_MAX {
            let error = match attempt() {
                Err(e) if e.is_transient() => e,
                done => return done,
            };
            let asked = match &error {
                OriginError::Busy { retry_after, .. } => retry_after.unwrap_or_default(),
                _ => Duration::ZERO,
            };
            tracing::debug!(object, %error, "tried again");
            std::thread::sleep(pause.max(asked.min(WRITE_PAUSE_MAX)));
            pause *= 2;
        }
        attempt()
    }

    fn list_meta(&self, prefix: &str) -> Result<Vec<(String, ObjectMeta)>, OriginError> {
        let folder = self.path(prefix)?;
        let list = || {
            self.run(prefix, async |s3| {
                let all = (!folder.as_ref().is_empty()).then_some(&folder);
                s3.list(all).try_collect::<Vec<ObjectMeta>>().await
            })
        };
        let mut out: Vec<(String, ObjectMeta)> = self
            .patiently(prefix, list)?
            .into_iter()
            .filter_map(|meta| Some((self.address.object(meta.location.as_ref())?, meta)))
            .filter(|(name, _)| name.starts_with(prefix))
            .collect();
        out.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(out)
    }
}

/// Collects a body of at most `max` bytes, and the beginning of what is more, as long as it makes progress.
async fn collect(got: GetResult, max: u64) -> object_store::Result<Vec<u8>> {
    let slow = || object_store::Error::Generic {
        store: "S3",
        source: Box::new(Failure::Slow(PROGRESS_WINDOW)),
    };
    let mut out = Vec::new();
    let mut stream = got.into_stream();
    let (mut window, mut in_window) = (Instant::now(), 0);
    loop {
        let Ok(next) = timeout(PROGRESS_WINDOW, stream.next()).await else {
            return Err(slow());
        };
        let Some(bytes) = next else {
            return Ok(out);
        };
        let bytes = bytes?;
        in_window += to_u64(bytes.len());
        out.extend_from_slice(&bytes);
        if to_u64(out.len()) > max {
            return Ok(out);
        }
        if window.elapsed() > PROGRESS_WINDOW {
            if in_window < PROGRESS_BYTES {
                return Err(slow());
            }
            (window, in_window) = (Instant::now(), 0);
        }
    }
}

impl Origin for S3Origin {
    fn address(&self) -> String {
        self.address.to_string()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        self.range(object, range, None)
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.all(object, max_len, None)
    }

    fn fetch_within(
        &self,
        object: &str,
        range: ByteRange,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.range(object, range, Some(deadline))
    }

    fn fetch_all_within(
        &self,
        object: &str,
        max_len: u64,
        deadline: Instant,
    ) -> Result<Vec<u8>, OriginError> {
        self.all(object, max_len, Some(deadline))
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.write(object, content, Mode::Create)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.write(object, &mut &*content, Mode::Replace).map(drop)
    }

    fn replace_from_file(&self, object: &str, path: &FilePath) -> Result<(), OriginError> {
        let mut file = std::fs::File::open(path)
            .map_err(|e| self.unavailable(object, format!("`{}`: {e}", path.display())))?;
        self.write(object, &mut file, Mode::Replace).map(drop)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        let listed = self.list_meta(prefix)?;
        Ok(listed.into_iter().map(|(name, _)| name).collect())
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        let path = self.path(object)?;
        Ok(self.run(object, async |s3| s3.head(&path).await)?.size)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let info = |(name, meta): (String, ObjectMeta)| ObjectInfo {
            name,
            size: meta.size,
            modified: meta.last_modified.into(),
        };
        Ok(self.list_meta(prefix)?.into_iter().map(info).collect())
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        let path = self.path(object)?;
        let delete = || self.run(object, async |s3| s3.delete(&path).await);
        match self.patiently(object, delete) {
            Err(OriginError::NotFound { .. }) => Ok(()),
            done => done,
        }
    }
}

impl Drop for S3Origin {
    fn drop(&mut self) {
        // Connections in use do not hold up whoever drops the origin.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
