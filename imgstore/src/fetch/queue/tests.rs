//! Which range goes when, and what an origin that hangs cannot hold up.

use std::io::Read;
use std::sync::mpsc;

use super::*;
use crate::format::manifest::{Blob, FORMAT, Manifest, Totals};
use crate::format::placement::{Pack, Placement, Spot};
use crate::origin::counting::{CountingOrigin, Traffic};
use crate::origin::mem::MemOrigin;
use crate::origin::{ByteRange, Created, Origin};

/// A layer of `n` segments of 10 stored bytes in one pack, and the origin that has the pack.
pub(super) fn fixture(n: u64) -> (Arc<Layer>, Arc<dyn Origin>) {
    let pack_bytes: Vec<u8> = (0..=255)
        .cycle()
        .take(usize::try_from(n * 10).unwrap())
        .collect();
    let pack = Digest::of(&pack_bytes);
    let blob = Blob {
        digest: pack,
        size: 4096,
    };
    let manifest = Manifest {
        chunks: blob,
        features_compat: Vec::new(),
        features_incompat: Vec::new(),
        format: FORMAT,
        meta: blob,
        segments: (0..n)
            .map(|i| Segment(Digest::of(&i.to_le_bytes()), 4096))
            .collect(),
        totals: Totals::default(),
    };
    let digest = manifest.layer();
    let placement = Placement {
        format: FORMAT,
        layer: digest,
        packs: vec![Pack {
            digest: pack,
            size: n * 10,
        }],
        segments: (0..n).map(|i| Spot(0, i * 10, 10)).collect(),
    };
    let origin = MemOrigin::default();
    origin.replace(&names::pack(&pack), &pack_bytes).unwrap();
    let layer = Layer {
        digest,
        manifest,
        placement,
    };
    (Arc::new(layer), Arc::new(origin))
}

pub(super) fn queue(origin: Arc<dyn Origin>) -> (FetchQueue, mpsc::Receiver<Delivery>) {
    queue_with(origin, Duration::from_secs(5))
}

fn queue_with(
    origin: Arc<dyn Origin>,
    patience: Duration,
) -> (FetchQueue, mpsc::Receiver<Delivery>) {
    let (send, receive) = mpsc::channel();
    let send = Mutex::new(send);
    let sink: Sink = Arc::new(move |delivery| {
        drop(send.lock().unwrap().send(delivery));
    });
    (
        FetchQueue::new(OriginSet::new(vec![origin]), patience, sink),
        receive,
    )
}

#[test]
fn neighbours_come_in_one_request_each_once() {
    let (layer, origin) = fixture(50);
    let traffic = Arc::new(Traffic::default());
    let origin = Arc::new(CountingOrigin::new(origin, Arc::clone(&traffic)));
    let (queue, deliveries) = queue(origin);
    let all: Vec<usize> = (0..50).collect();
    queue.push(&layer, &all, Priority::Demand);
    let delivery = deliveries.recv_timeout(Duration::from_secs(10)).unwrap();
    let bytes = delivery.outcome.unwrap().bytes;
    let frames: Vec<_> = delivery
        .plan
        .split(&bytes)
        .map(|(p, f)| (p.index, f.unwrap()[0]))
        .collect();
    let expected: Vec<_> = (0..50)
        .map(|i| (i, u8::try_from(i * 10 % 256).unwrap()))
        .collect();
    assert_eq!(frames, expected);
    assert_eq!((traffic.requests(), traffic.bytes()), (1, 500));
}

#[test]
fn a_missing_pack_is_delivered_as_a_failure() {
    let (layer, _) = fixture(3);
    let (queue, deliveries) = queue(Arc::new(MemOrigin::default()));
    queue.push(&layer, &[1], Priority::Again);
    let delivery = deliveries.recv_timeout(Duration::from_secs(10)).unwrap();
    let error = delivery.outcome.unwrap_err();
    assert!(
        matches!(error, FetchError::Origin(OriginError::NotFound { .. })),
        "{error}"
    );
    assert_eq!(delivery.spent.requests, 1);
}

#[test]
fn a_reader_moves_a_waiting_prefetch_forward() {
    let (layer, _) = fixture(4);
    let job = |index| Job {
        layer: Arc::clone(&layer),
        plan: plan(&layer.placement, [index], 1000).remove(0),
        priority: Priority::Prefetch,
        asked: Instant::now(),
    };
    let mut state = State::default();
    for index in 0..3 {
        let digest = layer.manifest.segments[index].digest();
        assert!(state.want(&digest, Priority::Prefetch, &Pace::default()));
        state.prefetch.push_back(job(index));
    }
    let wanted = layer.manifest.segments[1].digest();
    assert!(!state.want(&wanted, Priority::Demand, &Pace::default()));
    assert_eq!(state.demand[0].plan.parts[0].index, 1);
    assert_eq!(state.prefetch.len(), 2);
    state.promote(&wanted, &Pace::default());
    assert_eq!(state.demand.len(), 1);
}

/// Answers when it is told to, whatever the deadline.
#[derive(Debug, Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    waiting: Mutex<usize>,
}

impl Gate {
    fn pass(&self) {
        *self.waiting.lock().unwrap() += 1;
        let open = self.open.lock().unwrap();
        drop(self.changed.wait_while(open, |open| !*open).unwrap());
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait_for(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while *self.waiting.lock().unwrap() < count {
            assert!(
                Instant::now() < deadline,
                "{:?} of {count}",
                self.waiting.lock()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Holds the ranges whose start `held` accepts.
#[derive(Debug)]
struct Gated {
    inner: Arc<dyn Origin>,
    gate: Arc<Gate>,
    held: fn(u64) -> bool,
}

impl Origin for Gated {
    fn address(&self) -> String {
        "gated:".to_owned()
    }
    fn fetch(&self, object: &str, range: ByteRange) -> Result<Vec<u8>, OriginError> {
        if (self.held)(range.start) {
            self.gate.pass();
        }
        self.inner.fetch(object, range)
    }
    fn fetch_all(&self, object: &str, max_len: u64) -> Result<Vec<u8>, OriginError> {
        self.inner.fetch_all(object, max_len)
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
    fn size(&self, object: &str) -> Result<u64, OriginError> {
        self.inner.size(object)
    }
}

/// S76: read-ahead that hangs, and a queue full of more of it, are in nobody's way. Mutation that was seen red: all threads
/// may prefetch.
#[test]
fn s76_hanging_read_ahead_and_its_full_queue_delay_no_demand() {
    let (layer, inner) = fixture(400);
    let gate = Arc::new(Gate::default());
    let origin = Gated {
        inner,
        gate: Arc::clone(&gate),
        held: |start| start % 20 == 0,
    };
    let (queue, deliveries) = queue(Arc::new(origin));
    // Every other segment, so that each is a range.
    for index in (0..380).step_by(2) {
        queue.push(&layer, &[index], Priority::Prefetch);
    }
    gate.wait_for(PREFETCH_THREADS_MAX);
    let refused = 190 - PREFETCH_THREADS_MAX - PREFETCH_MAX;
    // One or two more fit while the threads took theirs.
    for _ in 0..refused.saturating_sub(PREFETCH_THREADS_MAX) {
        let delivery = deliveries.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(matches!(delivery.outcome, Err(FetchError::Busy)));
    }
    while deliveries.try_recv().is_ok() {}
    for index in (1..100).step_by(2) {
        queue.push(&layer, &[index], Priority::Demand);
        let delivery = deliveries.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(delivery.plan.parts[0].index, index);
        delivery.outcome.unwrap();
    }
    gate.open();
}

/// Mutation that was seen red: threads that are lost are not replaced.
#[test]
fn threads_that_an_origin_never_gives_back_are_replaced() {
    let (layer, inner) = fixture(100);
    let gate = Arc::new(Gate::default());
    let origin = Gated {
        inner,
        gate: Arc::clone(&gate),
        held: |start| start < 320,
    };
    let (queue, deliveries) = queue_with(Arc::new(origin), Duration::from_millis(1));
    for index in (0..32).step_by(2) {
        queue.push(&layer, &[index], Priority::Demand);
    }
    gate.wait_for(THREADS_MAX);
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut index = 40;
    while deliveries.recv_timeout(Duration::from_millis(100)).is_err() {
        assert!(Instant::now() < deadline, "no thread is left");
        queue.push(&layer, &[index], Priority::Demand);
        index += 2;
    }
    gate.open();
}

/// Mutation: no `arrived` in `State::want`: the segment is fetched twice.
#[test]
fn what_has_come_is_not_fetched_again_until_it_is_settled() {
    let (layer, origin) = fixture(4);
    let traffic = Arc::new(Traffic::default());
    let origin = Arc::new(CountingOrigin::new(origin, Arc::clone(&traffic)));
    let (deliver, deliveries) = mpsc::channel();
    let (go_on, wait) = mpsc::channel::<()>();
    let (deliver, wait) = (Mutex::new(deliver), Mutex::new(wait));
    let sink: Sink = Arc::new(move |delivery| {
        drop(deliver.lock().unwrap().send(delivery));
        wait.lock().unwrap().recv().unwrap();
    });
    let queue = FetchQueue::new(OriginSet::new(vec![origin]), Duration::from_secs(5), sink);
    let digest = |index: usize| layer.manifest.segments[index].digest();
    let deadline = Duration::from_secs(10);
    queue.push(&layer, &[0, 1], Priority::Demand);
    let first = deliveries.recv_timeout(deadline).unwrap();
    assert!(queue.has_arrived(&digest(0)) && !queue.has_arrived(&digest(2)));
    queue.push(&layer, &[0], Priority::Trace);
    queue.push(&layer, &[1], Priority::Demand);
    // Another fetch's number settles nothing.
    assert!(!queue.settle(&digest(1), first.run + 1));
    assert!(!queue.settle(&digest(0), first.run) && queue.settle(&digest(1), first.run));
    assert_eq!(traffic.requests(), 1);
    // Settled: asking means fetching; so does asking for a damaged one.
    queue.push(&layer, &[1], Priority::Demand);
    go_on.send(()).unwrap();
    let second = deliveries.recv_timeout(deadline).unwrap();
    assert_eq!(
        (second.plan.parts.len(), second.plan.parts[0].index),
        (1, 1)
    );
    queue.push(&layer, &[1], Priority::Again);
    go_on.send(()).unwrap();
    let third = deliveries.recv_timeout(deadline).unwrap();
    assert_eq!(third.priority, Priority::Again);
    // What the sink leaves out although it was asked for comes again.
    queue.push(&layer, &[1], Priority::Demand);
    go_on.send(()).unwrap();
    let fourth = deliveries.recv_timeout(deadline).unwrap();
    assert_eq!(fourth.priority, Priority::Demand);
    go_on.send(()).unwrap();
    assert_eq!(traffic.requests(), 4);
}
