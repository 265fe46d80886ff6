//! Ranges of traces: behind every reader, within a budget, and taken apart for a reader.

use super::tests::{fixture, queue};
use super::traced::{TRACED_RANGE_BYTES_FIRST, traced_job};
use super::*;
use crate::format::placement::Spot;

fn waiting(layer: &Arc<Layer>, indexes: std::ops::Range<usize>) -> Job {
    traced_job(layer, plan(&layer.placement, indexes, 1 << 20).remove(0))
}

/// Mutations that turn it red: no `demanding > 0` in `next_traced`; no bound of bytes there.
#[test]
fn a_trace_waits_for_every_reader_and_keeps_to_its_budget() {
    let (layer, _) = fixture(20);
    let mut state = State::default();
    for start in [0, 5, 10] {
        state.traced.push_back(waiting(&layer, start..start + 5));
    }
    state.demanding = 1;
    assert!(state.next_traced(1000).is_none());
    state.demanding = 0;
    let first = state.next_traced(90).unwrap();
    // 50 bytes are on their way, and 50 more do not fit into 90.
    assert!(state.next_traced(90).is_none());
    assert!(state.next_traced(100).is_some());
    assert!(state.next_traced(120).is_none());
    state.finish(&first);
    assert_eq!((state.tracing, state.tracing_bytes), (1, 50));
    assert!(state.next_traced(100).is_some() && state.traced.is_empty());
}

/// Mutation: no `shorten_front`.
#[test]
fn ranges_of_a_trace_are_as_long_as_the_link_bears() {
    let (mut layer, _) = fixture(40);
    // 100 kB each.
    let layer_mut = Arc::get_mut(&mut layer).unwrap();
    for (n, spot) in layer_mut.placement.segments.iter_mut().enumerate() {
        *spot = Spot(0, crate::ids::to_u64(n) * 100_000, 100_000);
    }
    layer_mut.placement.packs[0].size = 4_000_000;
    let whole = || Job {
        layer: Arc::clone(&layer),
        plan: plan(&layer.placement, 0..40, u64::MAX).remove(0),
        priority: Priority::Trace,
        asked: Instant::now(),
    };
    let first = |pace: Option<u64>, budget: u64| {
        let mut state = State::default();
        state.traced.push_back(whole());
        pace.into_iter().for_each(|pace| state.set_pace(pace));
        let job = state.next_traced(budget).unwrap();
        let left: usize = state.traced.iter().map(|job| job.plan.parts.len()).sum();
        assert_eq!(job.plan.parts.len() + left, 40);
        job.plan.parts.len()
    };
    let budget = TRACED_BYTES_MAX;
    assert_eq!(first(None, budget), 5);
    // 25 MB/s, 1 GB/s, 1 MB/s, and a small budget.
    assert_eq!(
        [25_000, 1_000_000, 1000].map(|p| first(Some(p), budget)),
        [5, 20, 1]
    );
    assert_eq!(first(Some(1_000_000), 1 << 20), 5);
}

#[test]
fn one_range_may_begin_whatever_the_budget() {
    let (layer, _) = fixture(5);
    let mut state = State::default();
    state.traced.push_back(waiting(&layer, 0..5));
    assert!(state.next_traced(1).is_some());
}

/// A link of 25 MB/s without delay: no spare byte is worth it.
fn narrow() -> Pace {
    let pace = Pace::default();
    for kb in 20..60 {
        pace.record(kb * 1000, Duration::from_micros(40 * kb));
    }
    pace
}

/// Mutations: the whole range moves to the demand queue; read-ahead takes segments out before anybody jumped.
#[test]
fn a_reader_takes_its_segment_out_of_a_trace_and_one_on_its_way_is_joined() {
    let (layer, _) = fixture(20);
    let mut state = State::default();
    let pace = narrow();
    for index in 0..20 {
        state.wanted.insert(layer.manifest.segments[index].digest());
    }
    state.traced.push_back(waiting(&layer, 0..10));
    state.traced.push_back(waiting(&layer, 10..20));
    let on_its_way = state.next_traced(1000).unwrap();
    let want = |state: &mut State, index: usize, priority| {
        state.want_all(&layer, &[index], priority, &pace)
    };
    assert_eq!(want(&mut state, 12, Priority::Prefetch), [0; 0]);
    assert_eq!((state.traced.len(), state.demand.len()), (1, 0));
    assert_eq!(want(&mut state, 12, Priority::Demand), [12]);
    let starts = |jobs: &VecDeque<Job>| -> Vec<usize> {
        jobs.iter().map(|job| job.plan.parts[0].index).collect()
    };
    assert_eq!(
        (starts(&state.traced), starts(&state.demand)),
        // A jump: nothing behind it comes along.
        (vec![10, 13], vec![])
    );
    assert_eq!(want(&mut state, 3, Priority::Demand), [0; 0]);
    assert_eq!(state.finish(&on_its_way), [3]);
    assert!(state.joined.is_empty() && state.wanted.len() == 10);
}

/// Mutations: `take_out` takes what is behind it along (`take(index, u64::MAX)`), or lets it pay (`begin` and `read`); `next_traced`
/// without `seen`; `want_all` without `has_jumped`.
#[test]
fn a_reader_who_jumps_about_reads_as_without_a_trace_and_pays_for_nothing_ahead() {
    let (layer, _) = fixture(60);
    let mut state = State::default();
    for index in 0..60 {
        state.wanted.insert(layer.manifest.segments[index].digest());
    }
    state.traced.push_back(waiting(&layer, 0..60));
    state.ahead.start(layer.digest);
    let pace = Pace::default();
    for pair in [[40, 41], [20, 21], [50, 51], [30, 31]] {
        assert!(!state.ahead.is_in_order(&layer.digest, pair[0]));
        let fresh = state.want_all(&layer, &pair, Priority::Demand, &pace);
        assert_eq!(fresh, pair);
    }
    let plans = |jobs: &VecDeque<Job>| -> Vec<(usize, usize)> {
        let plan = |job: &Job| (job.plan.parts[0].index, job.plan.parts.len());
        jobs.iter().map(plan).collect()
    };
    let pieces = [(0, 20), (22, 8), (32, 8), (42, 8), (52, 8)];
    assert_eq!(plans(&state.traced), pieces);
    // All four are read, and still the guess is all that may be begun.
    assert_eq!(state.ahead.left(&layer.digest, 1000), 1000);
    // It is spent, but for less than the next piece: those behind that one, however short, wait as well.
    state
        .ahead
        .begin(&layer.digest, TRACED_RANGE_BYTES_FIRST - 100);
    assert!(state.next_traced(TRACED_BYTES_MAX).is_none());
    assert_eq!(plans(&state.traced), pieces);
    // Read-ahead of the one who jumped comes as without a trace too.
    let window = [52, 53, 54];
    let fresh = state.want_all(&layer, &window, Priority::Prefetch, &pace);
    assert_eq!(fresh, window);
    assert!(state.demand.is_empty() && state.wanted.len() == 60);
    // One who goes on in order takes the trace along again.
    let fresh = state.want_all(&layer, &[55], Priority::Demand, &pace);
    assert_eq!((fresh.len(), plans(&state.demand)), (1, vec![]));
    let fresh = state.want_all(&layer, &[56], Priority::Demand, &pace);
    assert_eq!((fresh.len(), plans(&state.demand)), (0, vec![(56, 4)]));
    assert!(!state.ahead.has_jumped(&layer.digest));
}

#[test]
fn a_cancelled_trace_is_forgotten_and_can_be_asked_for_again() {
    let (layer, origin) = fixture(20);
    let (queue, deliveries) = queue(origin);
    let mut state = queue.shared.lock();
    for index in 0..20 {
        state.wanted.insert(layer.manifest.segments[index].digest());
    }
    state.traced.push_back(waiting(&layer, 0..20));
    drop(state);
    assert!(
        queue
            .cancel_traced(|digest| *digest != layer.digest)
            .is_empty()
    );
    assert_eq!(queue.shared.lock().traced.len(), 1);
    assert_eq!(
        queue.cancel_traced(|digest| *digest == layer.digest).len(),
        20
    );
    queue.push(&layer, &[7], Priority::Trace);
    let delivery = deliveries.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(delivery.plan.parts.len(), 1);
    assert_eq!(delivery.priority, Priority::Trace);
}
