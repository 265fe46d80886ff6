//! Addresses of a name, within a time, and the last known ones when the name service fails.
//!
//! The system's resolver cannot be told to hurry, so it is asked on a thread that is left behind when it does not answer. It
//! ends by itself; at most a few such threads wait at a time.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// Most lookups that may hang.
const LOOKUPS_MAX: usize = 16;
/// A lookup needs what libc needs.
const STACK_BYTES: usize = 512 << 10;

/// Asks the system, or a test.
pub(super) type Lookup = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// See the head of this file.
pub(super) struct Resolver {
    lookup: Arc<Lookup>,
    hanging: Arc<AtomicUsize>,
    /// The last answer, the address that worked first.
    known: Mutex<Vec<SocketAddr>>,
}

impl std::fmt::Debug for Resolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver")
            .field("known", &self.known)
            .finish_non_exhaustive()
    }
}

/// Counts down when the lookup has ended, however it ended.
struct Hanging(Arc<AtomicUsize>);

impl Drop for Hanging {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn system(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

impl Resolver {
    pub(super) fn system() -> Self {
        Self::new(Arc::new(system))
    }

    pub(super) fn new(lookup: Arc<Lookup>) -> Self {
        Self {
            lookup,
            hanging: Arc::new(AtomicUsize::new(0)),
            known: Mutex::new(Vec::new()),
        }
    }

    /// The addresses of `host`, those that are known to work first.
    ///
    /// # Errors
    /// When the name service fails and never answered before.
    pub(super) fn resolve(
        &self,
        host: &str,
        port: u16,
        limit: Duration,
    ) -> io::Result<Vec<SocketAddr>> {
        if let Ok(ip) = host.parse() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let failed = match self.ask(host, port, limit) {
            Ok(mut found) if !found.is_empty() => {
                let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(best) = known.first() {
                    found.sort_by_key(|address| address != best);
                }
                known.clone_from(&found);
                return Ok(found);
            }
            Ok(_) => io::Error::new(io::ErrorKind::NotFound, "the name has no address"),
            Err(error) => error,
        };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_empty() {
            return Err(failed);
        }
        tracing::warn!(host, error = %failed, "using the addresses that the name had before");
        Ok(known.clone())
    }

    /// A connection to this address worked: it comes first next time.
    pub(super) fn worked(&self, address: SocketAddr) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.sort_by_key(|other| *other != address);
    }

    fn ask(&self, host: &str, port: u16, limit: Duration) -> io::Result<Vec<SocketAddr>> {
        let hanging = Hanging(Arc::clone(&self.hanging));
        if self.hanging.fetch_add(1, Ordering::AcqRel) >= LOOKUPS_MAX {
            return Err(io::Error::other(format!(
                "{LOOKUPS_MAX} lookups of the name are waiting already"
            )));
        }
        let (send, receive) = mpsc::sync_channel(1);
        let (lookup, host) = (Arc::clone(&self.lookup), host.to_owned());
        let run = move || {
            let found = lookup(&host, port);
            drop(hanging);
            // Nobody may wait any more.
            drop(send.send(found));
        };
        std::thread::Builder::new()
            .name("resolve".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(run)?;
        receive.recv_timeout(limit).unwrap_or_else(|_| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no address within {:.1} s", limit.as_secs_f64()),
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, last], 80))
    }

    #[test]
    fn a_name_service_that_fails_is_made_up_for_by_what_it_said_before() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let resolver = Resolver::new(Arc::new(move |_: &str, _| {
            match count.fetch_add(1, Ordering::SeqCst) {
                0 | 3 => Err(io::Error::other("SERVFAIL")),
                4 => Ok(Vec::new()),
                _ => Ok(vec![address(1), address(2)]),
            }
        }));
        let resolve = || resolver.resolve("name", 80, Duration::from_secs(20));
        resolve().unwrap_err();
        assert_eq!(resolve().unwrap(), [address(1), address(2)]);
        resolver.worked(address(2));
        for _ in 2..6 {
            assert_eq!(resolve().unwrap(), [address(2), address(1)]);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 6);
    }

    #[test]
    fn a_name_service_that_hangs_costs_its_time_and_a_bounded_number_of_threads() {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let resolver = Resolver::new(Arc::new(move |_: &str, _| {
            count.fetch_add(1, Ordering::SeqCst);
            // Until the sender is dropped.
            held.lock().unwrap().recv().unwrap_err();
            Err(io::Error::other("too late"))
        }));
        for _ in 0..LOOKUPS_MAX + 10 {
            resolver
                .resolve("name", 80, Duration::from_millis(1))
                .unwrap_err();
        }
        assert!(asked.load(Ordering::SeqCst) <= LOOKUPS_MAX);
        // An address needs no name service.
        let found = resolver.resolve("::1", 80, Duration::from_millis(1));
        assert_eq!(found.unwrap(), ["[::1]:80".parse().unwrap()]);
        drop(release);
    }
}
