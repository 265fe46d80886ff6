//! Several origins as one: asked in order, and again after a pause, until a deadline.
//!
//! The first origin that has an object gives it. Those that fail again and again come last until they are back
//! ([`super::health`]); those that ask to be left alone are. The time that is left is split evenly between the origins of a
//! round, so that one which hangs leaves some for the next. When all have failed and at least one of them might do better
//! later, the round is repeated after a random pause between nothing and a bound that doubles ("full jitter"), so that
//! many hosts do not come back at the same moment. A missing object is final, except on an origin known to
//! lag behind ([`Origin::lag`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::failure::{Failure, FailureKind};
use super::health::{OriginHealth, Standing, Watched};
use super::pause;
use crate::origin::{ByteRange, Origin, OriginError};
use crate::store::layer::LayerError;

/// Longest time a probe may take from a request that another origin can answer.
const PROBE_TIME: Duration = Duration::from_secs(2);
/// Rounds for a tag or another description when origins fail: who asks for one is told soon.
const DESCRIPTION_ROUNDS_MAX: u32 = 4;
/// How long the first bytes of a description may take, all tries together.
const DESCRIPTION_PATIENCE: Duration = Duration::from_secs(30);
/// Spread added to what an origin asks for, so that not everybody comes back at that very moment.
const RETRY_AFTER_SPREAD: Duration = Duration::from_millis(250);
/// Bound of the pause between two looks for an object on an origin that lags.
const LAG_PAUSE: Duration = Duration::from_millis(500);

/// What an answer cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Requests sent, failed ones included.
    pub requests: u64,
    /// Of those, requests that came after a failed one.
    pub retries: u64,
    /// Answers that there is no such object.
    pub missing: u64,
    /// Body bytes of the answers that were accepted.
    pub bytes: u64,
}

/// Origins in the order in which they are asked, and what is remembered of them.
#[derive(Debug, Clone)]
pub struct OriginSet {
    members: Vec<Member>,
}

#[derive(Debug, Clone)]
struct Member {
    origin: Arc<dyn Origin>,
    health: Arc<OriginHealth>,
}

/// The bytes, and who gave them.
#[derive(Debug)]
pub struct Fetched {
    /// Exactly the range.
    pub bytes: Vec<u8>,
    /// The origin's address.
    pub origin: String,
}

/// How something is asked for.
#[derive(Debug, Clone, Copy)]
struct Ask<'a> {
    /// For messages; may be empty.
    object: &'a str,
    /// Which origin of the order begins.
    first: usize,
    start: Instant,
    deadline: Instant,
    /// Most rounds that end in failures of origins.
    rounds_max: u32,
}

/// When a failed round can be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    Never,
    /// After a pause.
    Soon,
    /// An origin lags behind: the object may appear.
    Lagging,
    /// When an origin wants to be asked again.
    At(Instant),
}

impl Again {
    /// The better of two prospects.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Soon, _) | (_, Self::Soon) => Self::Soon,
            (Self::Lagging, _) | (_, Self::Lagging) => Self::Lagging,
            (Self::At(a), Self::At(b)) => Self::At(a.min(b)),
            (Self::At(at), Self::Never) | (Self::Never, Self::At(at)) => Self::At(at),
            (Self::Never, Self::Never) => Self::Never,
        }
    }
}

/// A round without an answer: which error to report, and what the prospects are.
struct Failures<E> {
    /// The best one so far: its origin's place in the user's order, and whether it is more than "not there".
    report: Option<(bool, usize, E)>,
    again: Again,
}

impl<E: Failure> Failures<E> {
    const fn none() -> Self {
        Self {
            report: None,
            again: Again::Never,
        }
    }

    /// An origin that fails says more than one that does not have the object: it might have had it. Among equals, the one
    /// that the user put first.
    fn add(&mut self, member: usize, error: E, again: Again) {
        self.again = self.again.or(again);
        let says_more = error.kind() != FailureKind::NotFound;
        let better = self.report.as_ref().is_none_or(|(old_says_more, old, _)| {
            (says_more, std::cmp::Reverse(member)) > (*old_says_more, std::cmp::Reverse(*old))
        });
        if better {
            self.report = Some((says_more, member, error));
        }
    }
}

impl OriginSet {
    /// Origins in order. At least one.
    pub fn new(origins: Vec<Arc<dyn Origin>>) -> Self {
        assert!(!origins.is_empty(), "at least one origin");
        let member = |origin: Arc<dyn Origin>| Member {
            health: Arc::new(OriginHealth::new(origin.address())),
            origin,
        };
        Self {
            members: origins.into_iter().map(member).collect(),
        }
    }

    /// The same origins behind a decorator each; what is remembered of them is shared.
    #[must_use]
    pub fn decorated(&self, decorate: impl Fn(Arc<dyn Origin>) -> Arc<dyn Origin>) -> Self {
        let member = |member: &Member| Member {
            origin: decorate(Arc::clone(&member.origin)),
            health: Arc::clone(&member.health),
        };
        Self {
            members: self.members.iter().map(member).collect(),
        }
    }

    /// Fetches a range of an object of `size` bytes. `first` says which origin to begin with (modulo their number): a second fetch of something that was
    /// damaged begins with another one, where there is another one.
    ///
    /// # Errors
    /// The most telling failure, when no origin has the object or the deadline has passed.
    pub fn fetch(
        &self,
        object: &str,
        size: u64,
        range: ByteRange,
        first: usize,
        deadline: Instant,
    ) -> (Result<Fetched, OriginError>, Spent) {
        let ask = Ask {
            object,
            first,
            start: Instant::now(),
            deadline,
            rounds_max: u32::MAX,
        };
        let mut spent = Spent::default();
        let found = self.ask(ask, &mut spent, |origin| {
            let bytes = origin.fetch_of(object, size, range)?;
            let origin = origin.address();
            Ok(Fetched { bytes, origin })
        });
        if found.is_ok() {
            spent.bytes += range.len;
        }
        (found, spent)
    }

    /// Runs `load` on each origin until one answers: for tags, manifests and other small objects.
    ///
    /// # Errors
    /// The most telling failure; among equals that of the origin the user put first.
    pub fn first<T>(
        &self,
        load: impl FnMut(&dyn Origin) -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        self.first_from(0, load)
    }

    /// As [`OriginSet::first`], beginning with another origin, as in [`OriginSet::fetch`]: for what may be wrong and has no digest.
    ///
    /// # Errors
    /// As for [`OriginSet::first`].
    pub fn first_from<T>(
        &self,
        first: usize,
        load: impl FnMut(&dyn Origin) -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        let start = Instant::now();
        let ask = Ask {
            object: "",
            first,
            start,
            deadline: start + DESCRIPTION_PATIENCE,
            rounds_max: DESCRIPTION_ROUNDS_MAX,
        };
        self.ask(ask, &mut Spent::default(), load)
    }

    fn ask<T, E: Failure>(
        &self,
        ask: Ask<'_>,
        spent: &mut Spent,
        mut load: impl FnMut(&dyn Origin) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut rounds = 0;
        let mut report = None;
        loop {
            let failures = match self.round(ask, spent, &mut load) {
                Ok(found) => return Ok(found),
                Err(failures) => failures,
            };
            // A later round may end before it asked anybody; then the earlier one's failure is the reason.
            report = failures.report.map(|(_, _, error)| error).or(report);
            let now = Instant::now();
            let wait = match failures.again {
                Again::Never => Duration::MAX,
                Again::Soon => {
                    rounds += 1;
                    if rounds < ask.rounds_max {
                        pause::between_rounds(rounds - 1)
                    } else {
                        Duration::MAX
                    }
                }
                Again::Lagging => pause::below(LAG_PAUSE),
                Again::At(at) => {
                    at.saturating_duration_since(now) + pause::below(RETRY_AFTER_SPREAD)
                }
            };
            let in_time = now
                .checked_add(wait)
                .is_some_and(|then| then < ask.deadline);
            if !in_time {
                return Err(report.expect("a round without an answer has a failure"));
            }
            std::thread::sleep(wait);
        }
    }

    /// Asks every origin once.
    fn round<T, E: Failure>(
        &self,
        ask: Ask<'_>,
        spent: &mut Spent,
        load: &mut impl FnMut(&dyn Origin) -> Result<T, E>,
    ) -> Result<T, Failures<E>> {
        let mut failures = Failures::none();
        let order = self.order(ask, &mut failures);
        for (n, (index, member, standing)) in order.iter().enumerate() {
            let now = Instant::now();
            let others = order.len() - n - 1;
            if now >= ask.deadline && failures.report.is_some() {
                break;
            }
            let mut share = share(ask.deadline.saturating_duration_since(now), others);
            if *standing == Standing::Probe {
                member.health.probe();
                if others > 0 {
                    share = share.min(PROBE_TIME);
                }
            }
            spent.requests += 1;
            if spent.requests > 1 {
                spent.retries += 1;
                member.health.count_retry();
            }
            let watched = Watched {
                origin: &*member.origin,
                health: &member.health,
                deadline: now + share,
            };
            let error = match load(&watched) {
                Ok(found) => return Ok(found),
                Err(error) => error,
            };
            let kind = error.kind();
            tracing::debug!(
                object = ask.object,
                origin = member.origin.address(),
                kind = kind.name(),
                "origin passed over"
            );
            if kind == FailureKind::Damaged {
                member.health.count_failure(kind);
            }
            spent.missing += u64::from(kind == FailureKind::NotFound);
            failures.add(*index, error, prospects(kind, member, ask));
        }
        Err(failures)
    }

    /// Who is asked now and in which order; those who are not, because they want to be left alone, become failures.
    fn order<E: Failure>(
        &self,
        ask: Ask<'_>,
        failures: &mut Failures<E>,
    ) -> Vec<(usize, &Member, Standing)> {
        let mut order = Vec::with_capacity(self.members.len());
        for (index, member) in self.members.iter().enumerate() {
            match member.health.standing() {
                Standing::Resting(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    let busy = OriginError::Busy {
                        origin: member.origin.address(),
                        object: ask.object.to_owned(),
                        reason: format!(
                            "it asked to be left alone for another {:.1} s",
                            left.as_secs_f64()
                        ),
                        retry_after: Some(left),
                    };
                    failures.add(index, busy.into(), Again::At(until));
                }
                standing => order.push((index, member, standing)),
            }
        }
        order.sort_by_key(|(index, _, standing)| (*standing == Standing::Failing, *index));
        let len = order.len().max(1);
        order.rotate_left(ask.first % len);
        order
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Their addresses, in order.
    pub fn addresses(&self) -> Vec<String> {
        self.members.iter().map(|m| m.origin.address()).collect()
    }

    /// What is remembered of each, in order.
    pub fn health(&self) -> Vec<Arc<OriginHealth>> {
        self.members.iter().map(|m| Arc::clone(&m.health)).collect()
    }
}

/// The part of `left` for one origin with `others` behind it.
fn share(left: Duration, others: usize) -> Duration {
    left / u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1)
}

fn prospects(kind: FailureKind, member: &Member, ask: Ask<'_>) -> Again {
    if kind == FailureKind::NotFound && ask.start.elapsed() < member.origin.lag() {
        return Again::Lagging;
    }
    if !kind.is_transient() {
        return Again::Never;
    }
    match member.health.standing() {
        Standing::Resting(until) => Again::At(until),
        _ => Again::Soon,
    }
}

#[cfg(test)]
mod tests;
