//! GET by a general client: encryption, redirects, proxies, credentials in the address.
//!
//! The client lives on a runtime of its own with one thread, which drives the connections; a caller waits on its own thread.
//! A redirect is followed a few times, never from encrypted to plain; credentials stay with the host they were given for.

use std::sync::OnceLock;
use std::time::Duration;

use reqwest::redirect::{Attempt, Policy};
use reqwest::{Client, header};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::Failure;
use super::limits::HttpLimits;
use super::reply::{Ask, Reply, receive};

/// Connections kept open for reuse.
const IDLE_CONNECTIONS_MAX: usize = 32;
/// Redirects followed for one request.
const REDIRECTS_MAX: usize = 5;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct GeneralHttp {
    /// The address with its credentials; never shown.
    base: String,
    limits: HttpLimits,
    client: Client,
    /// `None` only while it is being dropped.
    runtime: Option<Runtime>,
}

impl Drop for GeneralHttp {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for its threads is not allowed everywhere, and there is nothing to wait for.
            runtime.shutdown_background();
        }
    }
}

/// TLS needs one crypto provider per process.
pub(crate) fn install_crypto() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // An error means that another part of the process installed one before: that one serves.
        drop(rustls::crypto::ring::default_provider().install_default());
    });
}

fn follow(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let from_encrypted = attempt.previous().iter().any(|url| url.scheme() == "https");
    if attempt.previous().len() > REDIRECTS_MAX {
        return attempt.error(format!("more than {REDIRECTS_MAX} redirects"));
    }
    if from_encrypted && attempt.url().scheme() != "https" {
        return attempt.error("a redirect from an encrypted to a plain connection is not followed");
    }
    attempt.follow()
}

impl GeneralHttp {
    /// # Errors
    /// When the client or its thread cannot be made (no TLS roots, for example).
    pub(super) fn new(base: &str, limits: HttpLimits) -> Result<Self, Failure> {
        install_crypto();
        let client = Client::builder()
            .connect_timeout(limits.connect)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .pool_idle_timeout(limits.idle_max)
            .redirect(Policy::custom(follow))
            .referer(false)
            // Whatever features other crates switch on: what is stored is what is wanted.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .user_agent(concat!("dsec/", env!("CARGO_PKG_VERSION")))
            .build()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("http")
            .enable_all()
            .build()?;
        Ok(Self {
            base: base.to_owned(),
            limits,
            client,
            runtime: Some(runtime),
        })
    }

    /// # Errors
    /// What went wrong below HTTP, or with a redirect.
    pub(super) fn send(&self, ask: &Ask<'_>) -> Result<Reply, Failure> {
        let runtime = self.runtime.as_ref().ok_or("the client is being closed")?;
        runtime.block_on(async {
            let reply = match self.head(ask).await {
                // A kept connection that the server has closed meanwhile: at once on a new one.
                Err(HeadError::Broken(error)) => {
                    tracing::debug!(object = ask.object, %error, "sending a request once more");
                    self.head(ask).await
                }
                reply => reply,
            }?;
            receive(reply.into(), ask, &self.limits).await
        })
    }

    /// The reply's headers.
    async fn head(&self, ask: &Ask<'_>) -> Result<reqwest::Response, HeadError> {
        let mut request = self
            .client
            .request(ask.method.clone(), format!("{}/{}", self.base, ask.object))
            .header(header::ACCEPT_ENCODING, "identity");
        if let Some(range) = ask.range {
            request = request.header(header::RANGE, range);
        }
        // The connection has its own limit inside the client.
        let longest = self.limits.connect.saturating_add(self.limits.first_byte);
        let limit = ask.until.cut(longest).map_err(HeadError::Final)?;
        match timeout(limit, request.send()).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) if error.is_connect() || error.is_redirect() || error.is_timeout() => {
                Err(HeadError::Final(error.into()))
            }
            Ok(Err(error)) => Err(HeadError::Broken(error)),
            Err(_elapsed) => Err(HeadError::Final(no_answer(limit))),
        }
    }
}

/// Why there are no headers.
enum HeadError {
    /// The connection broke; it may have been an old one.
    Broken(reqwest::Error),
    Final(Failure),
}

impl From<HeadError> for Failure {
    fn from(error: HeadError) -> Self {
        match error {
            HeadError::Broken(error) => error.into(),
            HeadError::Final(error) => error,
        }
    }
}

/// Nothing came in time.
pub(super) fn no_answer(limit: Duration) -> Failure {
    format!("no answer within {:.1} s", limit.as_secs_f64()).into()
}
