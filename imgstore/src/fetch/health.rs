//! What is remembered of one origin: counters for the metrics, and whether it is worth asking first.
//!
//! One memory an origin and process: every [`super::origins::OriginSet`] that is made from another one shares it, so that a mount learns from
//! what readers met. `Watched` is the origin as those see it who ask: each request is counted, timed and judged.

use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::circuit::{Circuit, Failed};
use super::failure::{Failure, FailureKind};
use super::latency::{Latency, LatencySnapshot};
use crate::ids::to_u64;
use crate::origin::{ByteRange, Created, ObjectInfo, Origin, OriginError};

pub use super::circuit::Standing;

/// See the head of this file.
#[derive(Debug)]
pub struct OriginHealth {
    address: String,
    requests: AtomicU64,
    retries: AtomicU64,
    bytes: AtomicU64,
    in_flight: AtomicU64,
    failures: [AtomicU64; FailureKind::ALL.len()],
    latency: Latency,
    circuit: Mutex<Circuit>,
}

/// The counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthSnapshot {
    /// The origin's address.
    pub address: String,
    /// Requests sent, failed ones included.
    pub requests: u64,
    /// Of those, requests for something that this or another origin had just failed to give.
    pub retries: u64,
    /// Body bytes of answers.
    pub bytes: u64,
    /// Requests that are not answered yet.
    pub in_flight: u64,
    /// Failures of every kind.
    pub failures: [(FailureKind, u64); FailureKind::ALL.len()],
    /// How long answers took; failures are not in here.
    pub latency: LatencySnapshot,
    /// Whether it fails at the moment: other origins are asked before it.
    pub failing: bool,
}

impl OriginHealth {
    /// Nothing is known yet of the origin at `address`.
    pub fn new(address: String) -> Self {
        Self {
            address,
            requests: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            failures: Default::default(),
            latency: Latency::default(),
            circuit: Mutex::new(Circuit::default()),
        }
    }

    fn circuit(&self) -> MutexGuard<'_, Circuit> {
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How to treat it now.
    pub fn standing(&self) -> Standing {
        self.circuit().standing(Instant::now())
    }

    /// All counters.
    pub fn snapshot(&self) -> HealthSnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HealthSnapshot {
            address: self.address.clone(),
            requests: load(&self.requests),
            retries: load(&self.retries),
            bytes: load(&self.bytes),
            in_flight: load(&self.in_flight),
            failures: FailureKind::ALL.map(|kind| (kind, self.failures(kind))),
            latency: self.latency.snapshot(),
            failing: !matches!(self.standing(), Standing::Good),
        }
    }

    /// Failures of one kind.
    pub fn failures(&self, kind: FailureKind) -> u64 {
        let at = FailureKind::ALL.iter().position(|k| *k == kind);
        let counter = at.and_then(|at| self.failures.get(at));
        counter.map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    pub(super) fn count_failure(&self, kind: FailureKind) {
        let at = FailureKind::ALL.iter().position(|k| *k == kind);
        if let Some(counter) = at.and_then(|at| self.failures.get(at)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// The caller is the one who finds out whether it is back.
    pub(super) fn probe(&self) {
        self.circuit().probe(Instant::now());
    }

    /// Sends a request, counts it and draws conclusions. `range`: it must end by `deadline`, so one that does not is a sign.
    fn observe<T>(
        &self,
        deadline: Instant,
        range: bool,
        request: impl FnOnce() -> Result<T, OriginError>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T, OriginError> {
        let start = Instant::now();
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let number = range.then(|| self.circuit().begin(start));
        let reply = request();
        let took = start.elapsed();
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        let mut circuit = self.circuit();
        if let Some(number) = number {
            circuit.end(number);
        }
        match &reply {
            Ok(found) => {
                self.bytes.fetch_add(bytes(found), Ordering::Relaxed);
                self.latency.record(took);
                circuit.answered();
            }
            Err(error) => {
                let kind = error.kind();
                self.count_failure(kind);
                if kind.is_the_origins() {
                    let allowed = deadline.saturating_duration_since(start);
                    circuit.failed(
                        Failed {
                            kind,
                            took,
                            allowed,
                            retry_after: retry_after(error),
                        },
                        start + took,
                    );
                } else if kind == FailureKind::NotFound {
                    circuit.answered();
                }
            }
        }
        drop(circuit);
        reply
    }
}

const fn retry_after(error: &OriginError) -> Option<Duration> {
    match error {
        OriginError::Busy { retry_after, .. } => *retry_after,
        _ => None,
    }
}

/// An origin that is asked now, with the time it has. See the head of this file.
#[derive(Debug)]
pub(super) struct Watched<'a> {
    pub(super) origin: &'a dyn Origin,
    pub(super) health: &'a OriginHealth,
    pub(super) deadline: Instant,
}

impl Origin for Watched<'_> {
    fn address(&self) -> String {
        self.origin.address()
    }

    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        let deadline = self.deadline;
        let fetch = || {
            let bytes = self.origin.fetch_within(object, range, deadline)?;
            if to_u64(bytes.len()) == range.len {
                return Ok(bytes);
            }
            // No origin should do this; whoever counts on the length must not pay for one that does.
            Err(OriginError::WrongAnswer {
                origin: self.origin.address(),
                object: object.to_owned(),
                expected: format!("{} bytes at offset {}", range.len, range.start),
                found: format!("{} bytes", bytes.len()),
            })
        };
        self.health
            .observe(deadline, true, fetch, |bytes| to_u64(bytes.len()))
    }

    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        let deadline = self.deadline;
        let fetch = || {
            let bytes = self.origin.fetch_all_within(object, max_len, deadline)?;
            if to_u64(bytes.len()) <= max_len {
                return Ok(bytes);
            }
            Err(OriginError::WrongAnswer {
                origin: self.origin.address(),
                object: object.to_owned(),
                expected: format!("at most {max_len} bytes"),
                found: format!("{} bytes", bytes.len()),
            })
        };
        self.health
            .observe(deadline, false, fetch, |bytes| to_u64(bytes.len()))
    }

    fn size(&self, object: &str) -> Result<u64, OriginError> {
        let size = || self.origin.size(object);
        self.health.observe(self.deadline, false, size, |_| 0)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>, OriginError> {
        let list = || self.origin.list(prefix);
        self.health.observe(self.deadline, false, list, |_| 0)
    }

    fn list_info(&self, prefix: &str) -> Result<Vec<ObjectInfo>, OriginError> {
        let list = || self.origin.list_info(prefix);
        self.health.observe(self.deadline, false, list, |_| 0)
    }

    /// Nothing: it is the set that asks again, after it has asked the others.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }

    fn check_size(&self, object: &str, size: u64) -> Result<(), OriginError> {
        self.origin.check_size(object, size)
    }

    fn chunk_bytes(&self) -> Option<u64> {
        self.origin.chunk_bytes()
    }

    fn create(&self, object: &str, content: &mut dyn Read) -> Result<Created, OriginError> {
        self.origin.create(object, content)
    }

    fn replace(&self, object: &str, content: &[u8]) -> Result<(), OriginError> {
        self.origin.replace(object, content)
    }

    fn remove(&self, object: &str) -> Result<(), OriginError> {
        self.origin.remove(object)
    }

    fn staging(&self) -> Option<PathBuf> {
        self.origin.staging()
    }
}
