//! Order, retries, pauses and deadlines, against origins that fail as they are told.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use super::*;
use crate::origin::Created;

type Reply = Result<Vec<u8>, OriginError>;
type Script = Box<dyn Fn(usize, &str, Instant) -> Reply + Send + Sync>;

/// Answers the n-th request as the script says.
struct Scripted {
    name: &'static str,
    asked: AtomicUsize,
    script: Script,
    lag: Duration,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Scripted {
    fn new(
        name: &'static str,
        script: impl Fn(usize, &str, Instant) -> Reply + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            asked: AtomicUsize::new(0),
            script: Box::new(script),
            lag: Duration::ZERO,
        })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Origin for Scripted {
    fn address(&self) -> String {
        self.name.to_owned()
    }
    fn fetch(&self, _: &str, _: ByteRange) -> Reply {
        panic!("a request without a deadline");
    }
    fn fetch_within(&self, object: &str, _: ByteRange, deadline: Instant) -> Reply {
        let n = self.asked.fetch_add(1, Ordering::SeqCst);
        (self.script)(n, object, deadline)
    }
    fn fetch_all(&self, _: &str, _: u64) -> Reply {
        panic!("a request without a deadline");
    }
    fn fetch_all_within(&self, object: &str, _: u64, deadline: Instant) -> Reply {
        let n = self.asked.fetch_add(1, Ordering::SeqCst);
        (self.script)(n, object, deadline)
    }
    fn lag(&self) -> Duration {
        self.lag
    }
    fn create(&self, _: &str, _: &mut dyn Read) -> Result<Created, OriginError> {
        unreachable!()
    }
    fn replace(&self, _: &str, _: &[u8]) -> Result<(), OriginError> {
        unreachable!()
    }
    fn list(&self, _: &str) -> Result<Vec<String>, OriginError> {
        unreachable!()
    }
    fn size(&self, _: &str) -> Result<u64, OriginError> {
        unreachable!()
    }
}

fn right() -> Reply {
    Ok(b"234".to_vec())
}

fn unavailable() -> Reply {
    Err(OriginError::Unavailable {
        origin: "o".to_owned(),
        object: "a".to_owned(),
        reason: "told to".to_owned(),
    })
}

fn not_found() -> Reply {
    Err(OriginError::NotFound {
        origin: "o".to_owned(),
        object: "a".to_owned(),
    })
}

fn denied() -> Reply {
    Err(OriginError::Denied {
        origin: "o".to_owned(),
        object: "a".to_owned(),
        reason: "expired".to_owned(),
    })
}

fn busy(retry_after: Option<Duration>) -> Reply {
    Err(OriginError::Busy {
        origin: "o".to_owned(),
        object: "a".to_owned(),
        reason: "too much".to_owned(),
        retry_after,
    })
}

fn good() -> Arc<Scripted> {
    Scripted::new("good", |_, _, _| right())
}

fn failing(times: usize) -> Arc<Scripted> {
    Scripted::new(
        "failing",
        move |n, _, _| {
            if n < times { unavailable() } else { right() }
        },
    )
}

fn set(origins: &[&Arc<Scripted>]) -> OriginSet {
    let origin = |origin: &&Arc<Scripted>| Arc::clone(*origin) as Arc<dyn Origin>;
    OriginSet::new(origins.iter().map(origin).collect())
}

const RANGE: ByteRange = ByteRange { start: 2, len: 3 };

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn kind(fetched: Result<Fetched, OriginError>) -> FailureKind {
    fetched.unwrap_err().kind()
}

#[test]
fn a_transient_failure_is_retried_and_counted() {
    let set = set(&[&failing(2)]);
    let (fetched, spent) = set.fetch("a", 10, RANGE, 0, soon());
    assert_eq!(fetched.unwrap().bytes, b"234");
    let expected = Spent {
        requests: 3,
        retries: 2,
        missing: 0,
        bytes: 3,
    };
    assert_eq!(spent, expected);
    let seen = set.health()[0].snapshot();
    assert_eq!((seen.requests, seen.retries, seen.bytes), (3, 2, 3));
    assert_eq!((seen.in_flight, seen.latency.count()), (0, 1));
    for (kind, count) in seen.failures {
        let expected = u64::from(kind == FailureKind::Unavailable) * 2;
        assert_eq!(count, expected, "{}", kind.name());
    }
}

#[test]
fn a_missing_object_is_not_retried_and_a_deadline_ends_retries() {
    let missing = Scripted::new("missing", |_, _, _| not_found());
    let both = set(&[&missing, &missing]);
    let (fetched, spent) = both.fetch("b", 10, RANGE, 0, soon());
    assert_eq!(kind(fetched), FailureKind::NotFound);
    assert_eq!((spent.requests, spent.missing), (2, 2));
    let down = set(&[&failing(usize::MAX)]);
    let (fetched, spent) = down.fetch("a", 10, RANGE, 0, Instant::now());
    assert_eq!(kind(fetched), FailureKind::Unavailable);
    assert_eq!(spent.requests, 1);
}

#[test]
fn the_next_origin_serves_when_the_first_cannot() {
    let set = set(&[&failing(usize::MAX), &good()]);
    let (fetched, spent) = set.fetch("a", 10, RANGE, 0, soon());
    assert_eq!(fetched.unwrap().origin, "good");
    assert_eq!(spent.requests, 2);
    let (fetched, spent) = set.fetch("a", 10, RANGE, 1, soon());
    assert_eq!(fetched.unwrap().origin, "good");
    assert_eq!(spent.requests, 1);
}

/// Without the circuit the failing origin is asked by every request: 20 and not 3.
#[test]
fn a_failing_first_origin_is_passed_over_until_it_is_back() {
    let first = failing(3);
    let second = good();
    let set = set(&[&first, &second]);
    for _ in 0..20 {
        set.fetch("a", 10, RANGE, 0, soon()).0.unwrap();
    }
    assert_eq!((first.asked(), second.asked()), (3, 20));
    assert!(set.health()[0].snapshot().failing);
    // The pause is at most a second; then one request finds out, and the first origin is the first again.
    let deadline = soon();
    while first.asked() == 3 {
        assert!(Instant::now() < deadline, "never probed");
        set.fetch("a", 10, RANGE, 0, soon()).0.unwrap();
    }
    let before = second.asked();
    for _ in 0..5 {
        assert_eq!(
            set.fetch("a", 10, RANGE, 0, soon()).0.unwrap().origin,
            "failing"
        );
    }
    assert_eq!(second.asked(), before);
    assert!(!set.health()[0].snapshot().failing);
}

/// What was damaged must come from somewhere else, also while the usual order does not hold.
#[test]
fn a_second_fetch_begins_with_another_origin_also_while_one_fails() {
    let first = failing(3);
    let second = good();
    let set = set(&[&first, &second]);
    for _ in 0..3 {
        assert_eq!(
            set.fetch("a", 10, RANGE, 0, soon()).0.unwrap().origin,
            "good"
        );
    }
    let (fetched, _) = set.fetch("a", 10, RANGE, 1, soon());
    assert_eq!(fetched.unwrap().origin, "failing");
}

#[test]
fn an_open_circuit_forbids_nothing_when_nobody_else_answers() {
    let first = failing(3);
    let second = Scripted::new("empty", |_, _, _| not_found());
    let set = set(&[&first, &second]);
    let (fetched, spent) = set.fetch("a", 10, RANGE, 0, soon());
    assert_eq!(fetched.unwrap().origin, "failing");
    assert_eq!((spent.requests, spent.missing), (8, 4));
}

/// Each origin of a round gets an even part of what is left; without that a first one that hangs takes everything.
#[test]
fn a_hanging_origin_leaves_time_for_the_others_and_costs_it_once() {
    let hangs = Scripted::new("hangs", |_, _, deadline| {
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        unavailable()
    });
    let second = good();
    let set = set(&[&hangs, &second]);
    let start = Instant::now();
    let patience = Duration::from_millis(2200);
    for _ in 0..10 {
        let (fetched, _) = set.fetch("a", 10, RANGE, 0, Instant::now() + patience);
        assert_eq!(fetched.unwrap().origin, "good");
    }
    // Once its half of the time; a probe may have fallen into the loop only if the machine is very slow.
    let took = start.elapsed();
    assert!(took >= patience / 2, "{took:?}");
    assert_eq!(hangs.asked(), 1, "after {took:?}");
}

#[test]
fn a_request_that_hangs_warns_those_that_come_later() {
    let held = Arc::new((Mutex::new(true), Condvar::new()));
    let gate = Arc::clone(&held);
    let hangs = Scripted::new("hangs", move |_, _, _| {
        let (held, freed) = &*gate;
        drop(freed.wait_while(held.lock().unwrap(), |h| *h).unwrap());
        right()
    });
    let set = set(&[&hangs, &good()]);
    let far = Instant::now() + Duration::from_mins(1);
    std::thread::scope(|scope| {
        let stuck = scope.spawn(|| set.fetch("a", 10, RANGE, 0, far).0.unwrap().origin);
        while !set.health()[0].snapshot().failing {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(set.health()[0].snapshot().in_flight, 1);
        assert_eq!(set.fetch("a", 10, RANGE, 0, far).0.unwrap().origin, "good");
        *held.0.lock().unwrap() = false;
        held.1.notify_all();
        assert_eq!(stuck.join().unwrap(), "hangs");
    });
    assert!(!set.health()[0].snapshot().failing);
}

#[test]
fn what_a_busy_origin_asks_for_is_waited_for() {
    let wait = Duration::from_millis(400);
    let asked = Arc::new(Mutex::new(VecDeque::new()));
    let times = Arc::clone(&asked);
    let origin = Scripted::new("busy", move |n, _, _| {
        times.lock().unwrap().push_back(Instant::now());
        if n == 0 { busy(Some(wait)) } else { right() }
    });
    let set = set(&[&origin]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| set.fetch("a", 10, RANGE, 0, soon()));
        let refused = || {
            set.health()[0]
                .snapshot()
                .failures
                .iter()
                .any(|(_, n)| *n > 0)
        };
        while !refused() {
            std::thread::yield_now();
        }
        // Another reader keeps to it too.
        set.fetch("a", 10, RANGE, 0, soon()).0.unwrap();
        first.join().unwrap().0.unwrap();
    });
    let asked = asked.lock().unwrap();
    assert_eq!(asked.len(), 3);
    assert!(asked[1] - asked[0] >= wait, "{:?}", asked[1] - asked[0]);
}

#[test]
fn a_busy_origin_is_not_waited_for_past_the_deadline_nor_asked_before_its_time() {
    let origin = Scripted::new("busy", |_, _, _| busy(Some(Duration::from_secs(40))));
    let set = set(&[&origin]);
    let start = Instant::now();
    for _ in 0..3 {
        let (fetched, _) = set.fetch("a", 10, RANGE, 0, soon());
        let error = fetched.unwrap_err();
        assert_eq!(error.kind(), FailureKind::Busy);
        assert!(error.to_string().contains("busy"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(origin.asked(), 1);
}

#[test]
fn a_busy_origin_does_not_keep_another_one_from_answering() {
    let first = Scripted::new("busy", |_, _, _| busy(Some(Duration::from_secs(40))));
    let set = set(&[&first, &good()]);
    for _ in 0..3 {
        assert_eq!(
            set.fetch("a", 10, RANGE, 0, soon()).0.unwrap().origin,
            "good"
        );
    }
    assert_eq!(first.asked(), 1);
}

#[test]
fn refused_credentials_are_not_tried_again_by_themselves_and_work_once_they_are_right() {
    let origin = Scripted::new("denied", |n, _, _| if n < 2 { denied() } else { right() });
    let set = set(&[&origin]);
    for asked in 1..=2 {
        let (fetched, spent) = set.fetch("a", 10, RANGE, 0, soon());
        assert_eq!(kind(fetched), FailureKind::Denied);
        assert_eq!((spent.requests, origin.asked()), (1, asked));
    }
    set.fetch("a", 10, RANGE, 0, soon()).0.unwrap();
}

#[test]
fn an_object_that_an_origin_does_not_show_yet_is_waited_for() {
    let lagging = |shows_after: usize, lag| {
        let script: Script = Box::new(move |n, _, _| {
            if n < shows_after {
                not_found()
            } else {
                right()
            }
        });
        Arc::new(Scripted {
            name: "lagging",
            asked: AtomicUsize::new(0),
            script,
            lag,
        })
    };
    let origin = lagging(3, Duration::from_secs(20));
    let (fetched, spent) = set(&[&origin]).fetch("a", 10, RANGE, 0, soon());
    fetched.unwrap();
    assert_eq!(spent.missing, 3);
    // And no longer than the lag: then it is missing.
    let origin = lagging(usize::MAX, Duration::from_millis(300));
    let start = Instant::now();
    let (fetched, _) = set(&[&origin]).fetch("a", 10, RANGE, 0, soon());
    assert_eq!(kind(fetched), FailureKind::NotFound);
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(origin.asked() > 1);
    // A description is waited for as well.
    let origin = lagging(6, Duration::from_secs(20));
    let loaded = set(&[&origin]).first(|o| Ok(o.fetch_all("a", 10)?));
    assert_eq!(loaded.unwrap(), b"234");
}

#[test]
fn a_description_is_retried_a_few_times_and_the_telling_failure_is_reported() {
    let load = |set: &OriginSet| set.first(|o| Ok(o.fetch_all("a", 10)?));
    assert_eq!(load(&set(&[&failing(3)])).unwrap(), b"234");
    let down = failing(usize::MAX);
    let empty = Scripted::new("empty", |_, _, _| not_found());
    let error = load(&set(&[&empty, &down])).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Unavailable, "{error}");
    assert_eq!(down.asked(), 4);
    let error = load(&set(&[&empty])).unwrap_err();
    assert_eq!(error.kind(), FailureKind::NotFound, "{error}");
}

/// S7, at the seam: an origin that gives fewer or more bytes than asked for is an origin that gives a wrong answer.
#[test]
fn answers_of_every_wrong_length_are_refused() {
    for len in (0..10).filter(|len| *len != 3) {
        let origin = Scripted::new(
            "short",
            move |n, _, _| {
                if n == 0 { Ok(vec![7; len]) } else { right() }
            },
        );
        let set = set(&[&origin]);
        let (fetched, spent) = set.fetch("a", 10, RANGE, 0, soon());
        assert_eq!(fetched.unwrap().bytes, b"234", "{len}");
        assert_eq!(spent.requests, 2);
        assert_eq!(set.health()[0].failures(FailureKind::WrongAnswer), 1);
    }
}

#[test]
fn decorated_sets_share_what_they_remember() {
    let first = failing(usize::MAX);
    let readers = set(&[&first, &good()]);
    let names = readers.decorated(|origin| origin);
    for _ in 0..3 {
        readers.fetch("a", 10, RANGE, 0, soon()).0.unwrap();
    }
    names.first(|o| Ok(o.fetch_all("a", 10)?)).unwrap();
    assert_eq!(first.asked(), 3);
}
