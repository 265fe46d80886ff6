//! What a first start reads is written down, and fetched ahead for the second: few requests, few bytes, and never in a reader's
//! way.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use imgstore::build::optimize::{OptimizeOptions, OptimizeReport, Target, optimize};
use imgstore::format::trace::{Blocks, Trace};
use imgstore::ids::{Digest, TagName, to_u64};
use imgstore::origin::dir::DirOrigin;
use imgstore::store::layer::{self, Layer};
use imgstore::store::trace;
use layerd_client::api::Counters;

use crate::daemon::{Daemon, read_cold, until};
use crate::fixture::World;
use crate::web::Web;

/// A world with a layer of 16 MiB and 64 segments, and its bytes.
fn world() -> (World, Layer, Vec<u8>) {
    let world = World::new();
    let (layer, data) = world.publish_data(16);
    (world, layer, data)
}

/// 16 KiB in each of 48 places all over the file, in an order of its own: what the workload reads.
fn places() -> Vec<u64> {
    (0..48)
        .map(|n| (n * 29 % 64) * (256 << 10) + (n % 5) * (48 << 10))
        .collect()
}

const READ: usize = 16 << 10;

/// Runs the workload; everything it reads is right.
fn workload(mnt: &Path, data: &[u8]) {
    for offset in places() {
        let at = usize::try_from(offset).unwrap();
        let found = read_cold(&mnt.join("data"), offset, READ).unwrap();
        assert!(found == data[at..at + READ], "other bytes at {offset}");
    }
}

/// A daemon with an empty cache in a folder of its own.
fn fresh(world: &World, name: &str, web: &Web, extra: &[&str]) -> (Daemon, PathBuf) {
    let folder = world.folder(name);
    let mnt = world.folder(&format!("{name}-mnt"));
    (Daemon::start(&folder, &[web.url()], extra), mnt)
}

/// Runs the workload on a fresh daemon and records it.
fn record(world: &World, web: &Web, data: &[u8]) -> (Trace, Counters) {
    let (daemon, mnt) = fresh(world, "recording", web, &[]);
    daemon.mount(&["base/t:1"], &mnt, false);
    workload(&mnt, data);
    let recorded = daemon.client().trace(&mnt).unwrap();
    assert!(!recorded.truncated);
    let trace = Trace::parse(recorded.trace.as_bytes()).unwrap();
    (trace, daemon.total())
}

fn optimized(world: &World, trace: &Trace) -> (OptimizeReport, Layer) {
    let origin = DirOrigin::open(&world.origin()).unwrap();
    let tag: TagName = "base/t:1".parse().unwrap();
    let old = layer::read_tag(&origin, &tag).unwrap();
    let options = OptimizeOptions {
        level: 1,
        threads: 1,
        progress: None,
    };
    let target = Target {
        tag: "base/t:hot".parse().unwrap(),
        old: old.clone(),
    };
    let report = optimize(&origin, &old.layer, trace, target, &options).unwrap();
    let layer = layer::open(&origin, &report.layer).unwrap();
    (report, layer)
}

/// The object name of the pack that holds the first segment, and of the one that holds the last.
fn packs(layer: &Layer) -> (String, String) {
    let last = layer.manifest.segments.len() - 1;
    let name = |index| layer.placement.find(index).unwrap().0.digest.to_hex();
    (name(0), name(last))
}

/// Blocks of the workload's reads, in order, as the layer numbers them: `data` is the first file of the layer.
fn expected(layer: &Digest) -> Trace {
    let block = |bytes: u64| u32::try_from(bytes / 4096).unwrap();
    Trace::new(places().into_iter().map(|offset| {
        let blocks = Blocks {
            first: block(offset),
            count: block(to_u64(READ)),
        };
        (*layer, blocks)
    }))
}

/// That a block which is read twice counts once is seen by the data plane's own test: here the kernel keeps what it has read.
#[test]
fn a_trace_holds_exactly_the_first_reads_in_their_order() {
    let (world, layer, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (daemon, mnt) = fresh(&world, "recording", &web, &[]);
    daemon.mount(&["base/t:1"], &mnt, false);
    workload(&mnt, &data);
    workload(&mnt, &data);
    let recorded = daemon.client().trace(&mnt).unwrap();
    assert_eq!(
        recorded.trace.as_bytes(),
        expected(&layer.digest).to_bytes()
    );
    // The control process is another one, the data plane has the record.
    let mut daemon = daemon;
    daemon.kill_control();
    daemon.restart();
    assert_eq!(daemon.client().trace(&mnt).unwrap(), recorded);
    let nothing = daemon.client().trace(&world.path("nothing")).unwrap_err();
    assert!(
        nothing
            .to_string()
            .contains("nothing of this layerd is mounted"),
        "{nothing}"
    );
}

/// The aims of a second start, in counters. Mutations that turn it red: hot segments in the order of the old layer's segments
/// (`hot::plan` without ranks) leaves the sum but not the first range; no `feed.prefetch`: one request a segment.
#[test]
fn a_second_start_fetches_what_the_first_one_read_in_a_fifth_of_the_requests() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::from_millis(1));
    let (trace, first) = record(&world, &web, &data);
    let (report, hot) = optimized(&world, &trace);
    assert_eq!(report.bytes_traced, trace.bytes());
    let before = (web.requests(), web.pack_requests());
    let (daemon, mnt) = fresh(&world, "second", &web, &[]);
    daemon.mount(&["base/t:hot"], &mnt, false);
    workload(&mnt, &data);
    until("all is there", || {
        daemon.total().fetched_plain_bytes >= report.bytes_hot
    });
    let requests = web.requests() - before.0;
    let second = daemon.total();
    assert_eq!(second.remote_requests, requests);
    assert!(
        requests * 5 <= first.remote_requests,
        "{requests} of {}",
        first.remote_requests
    );
    assert_eq!(second.needed_bytes, first.needed_bytes);
    assert_eq!(second.fetched_plain_bytes, report.bytes_hot);
    assert!(
        second.fetched_plain_bytes * 5 <= second.needed_bytes * 6,
        "{second:?}"
    );
    assert_eq!((second.failed_reads, second.verify_failures), (0, 0));
    assert!(second.traced_bytes > 0);
    assert_eq!(second.traced_unused_segments, 0);
    assert_eq!(daemon.log().matches("WARN").count(), 0, "{}", daemon.log());
    // Each range once, from the front on.
    let (pack, _) = packs(&hot);
    let mut asked = web.asked(&pack);
    asked.sort_unstable();
    assert!(
        asked[0] == 0 && asked.is_sorted_by(|a, b| a < b),
        "{asked:?}"
    );
}

/// Mutation: `Foresight::of` does not look at `no_trace`.
#[test]
fn without_a_trace_or_a_budget_nothing_is_fetched_before_it_is_read() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (_, hot) = optimized(&world, &trace);
    let (pack, _) = packs(&hot);
    let (off, mnt) = fresh(&world, "off", &web, &[]);
    off.mount_traced(&["base/t:hot"], &mnt, None);
    let (zero, other) = fresh(&world, "zero", &web, &["--trace-budget", "0"]);
    zero.mount(&["base/t:hot"], &other, false);
    for (daemon, mnt) in [(&off, &mnt), (&zero, &other)] {
        let before = web.asked(&pack).len();
        let offset = places()[0];
        let at = usize::try_from(offset).unwrap();
        assert!(read_cold(&mnt.join("data"), offset, READ).unwrap() == data[at..at + READ]);
        assert_eq!(web.asked(&pack).len(), before + 1);
        let counters = daemon.total();
        assert_eq!(
            (counters.traced_segments, counters.prefetched_segments),
            (0, 0)
        );
    }
}

/// A published trace is followed by mounts of the tag, one that the user gives by that mount; neither changes the layer.
/// Mutation: `Foresight::begin` takes `0..hot` in place of the trace's segments.
#[test]
fn a_published_trace_and_a_given_one_bring_exactly_the_traced_segments() {
    let (world, layer, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let origin = DirOrigin::open(&world.origin()).unwrap();
    let tag: TagName = "base/t:1".parse().unwrap();
    // Every third segment of the first 30.
    let touches = (0..10).map(|n| {
        let first = n * 3 * 64;
        (layer.digest, Blocks { first, count: 2 })
    });
    let some = Trace::new(touches);
    let text = String::from_utf8(some.to_bytes()).unwrap();
    let (given, mnt) = fresh(&world, "given", &web, &[]);
    given.mount_traced(&["base/t:1"], &mnt, Some(&text));
    let read = |mnt: &Path, n: u64| {
        let offset = n * 3 * (256 << 10);
        let at = usize::try_from(offset).unwrap();
        assert!(read_cold(&mnt.join("data"), offset, 4096).unwrap() == data[at..at + 4096]);
    };
    // The trace keeps ahead of a reader who follows it.
    let follow = |daemon: &Daemon, mnt: &Path| {
        for n in 0..10 {
            until("the trace is ahead", || daemon.total().traced_segments > n);
            read(mnt, n);
        }
        assert_eq!(daemon.total().traced_segments, 10);
    };
    follow(&given, &mnt);
    let requests = given.total().remote_requests;
    trace::publish(&origin, &tag, &some).unwrap();
    assert_eq!(layer::read_tag(&origin, &tag).unwrap().layer, layer.digest);
    let (published, other) = fresh(&world, "published", &web, &[]);
    published.mount(&["base/t:1"], &other, false);
    follow(&published, &other);
    // One more: the trace itself.
    assert_eq!(published.total().remote_requests, requests + 1);
    let before = web.pack_requests();
    for mnt in [&mnt, &other] {
        (0..10).for_each(|n| read(mnt, n));
    }
    assert_eq!(web.pack_requests(), before);
}

/// Damaged, missing, of another layer, or no trace at all: a message, and the mount is as without.
/// Mutation: a published trace of other layers is followed.
#[test]
fn a_trace_that_cannot_be_used_is_a_message_and_no_failure() {
    let (world, layer, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let origin = DirOrigin::open(&world.origin()).unwrap();
    let tag: TagName = "base/t:1".parse().unwrap();
    let blocks = |first| Blocks { first, count: 1 };
    let other = Trace::new([(Digest::of(b"deleted"), blocks(0))]);
    let far = Trace::new([(layer.digest, blocks(1 << 25))]);
    let (daemon, mnt) = fresh(&world, "daemon", &web, &[]);
    let mounted = |what: &str, trace: Option<&Trace>| {
        let text = trace.map(|t| String::from_utf8(t.to_bytes()).unwrap());
        match &text {
            Some(text) => daemon.mount_traced(&["base/t:1"], &mnt, Some(text)),
            None => drop(daemon.mount(&["base/t:1"], &mnt, false)),
        }
        until("the log says so", || daemon.log().contains(what));
        assert!(read_cold(&mnt.join("data"), 0, 4096).unwrap() == data[..4096]);
        daemon.client().umount(&mnt).unwrap();
    };
    mounted("the trace has nothing of this layer", Some(&other));
    mounted("blocks of a trace: expected inside the layer's", Some(&far));
    let digest = trace::publish(&origin, &tag, &other).unwrap();
    mounted("the tag's trace is of other layers and is ignored", None);
    let object = world.origin().join(imgstore::format::names::trace(&digest));
    fs::write(&object, b"{}").unwrap();
    mounted("digest of a trace: expected", None);
    fs::remove_file(&object).unwrap();
    mounted("does not exist on origin", None);
    assert_eq!(daemon.total().traced_segments, 0);
    let bad = layerd_client::api::MountRequest {
        refs: vec!["base/t:1".to_owned()],
        mountpoint: mnt.clone(),
        rw: false,
        trace: Some("{}".to_owned()),
        no_trace: false,
    };
    let error = daemon.client().mount(&bad).unwrap_err().to_string();
    assert!(error.contains("the trace cannot be used"), "{error}");
}

/// By order, not by time. While a reader's request is on its way, no range of the trace begins; the ones that were on their way
/// keep to the budget. Mutation: demand behind the trace in `FetchQueue::next` (the reader's request never comes). That no range
/// of a trace begins while a reader waits: `fetch::queue::traced_tests`.
#[test]
fn readers_come_first_and_the_budget_holds() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (_, hot) = optimized(&world, &trace);
    let (front, rest) = packs(&hot);
    web.hold(&front);
    web.hold(&rest);
    let (daemon, mnt) = fresh(&world, "second", &web, &["--trace-budget", "256KiB"]);
    let rest_before = web.asked(&rest).len();
    daemon.mount(&["base/t:hot"], &mnt, false);
    // Two ranges of 128 KiB at most are on their way, and the mount did not wait for them. A range has at least one frame.
    until("the trace is being fetched", || {
        !web.asked(&front).is_empty()
    });
    std::thread::scope(|scope| {
        // A place that no trace knows.
        let cold = (15 << 20) + (100 << 10);
        let path = mnt.join("data");
        let reader = scope.spawn(move || read_cold(&path, cold, 4096));
        until("the reader's request is there", || {
            web.asked(&rest).len() > rest_before
        });
        let on_their_way = web.asked(&front).len();
        assert!(on_their_way <= 2, "{on_their_way}");
        web.release(&front);
        let stored = |index: usize| u64::from(hot.placement.segments[index].2);
        until("what was on its way is there", || {
            daemon.total().traced_bytes >= stored(0)
        });
        // A second reader's request that is answered comes after anything that the end of the first range could have begun.
        drop(daemon.client().stats().unwrap());
        assert_eq!(
            web.asked(&front).len(),
            on_their_way,
            "the trace did not wait for the reader"
        );
        assert!(!reader.is_finished());
        web.release(&rest);
        let at = usize::try_from(cold).unwrap();
        assert!(reader.join().unwrap().unwrap() == data[at..at + 4096]);
    });
    workload(&mnt, &data);
    assert_eq!(daemon.total().failed_reads, 0);
}

/// A trace of somebody else costs the first guess, however long its layer is mounted; one that readers follow is fetched to
/// its end. Mutation: the queue is blind (`set_blind(true)`).
#[test]
fn a_trace_that_nobody_follows_costs_little() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (report, hot) = optimized(&world, &trace);
    let (front, _) = packs(&hot);
    let (daemon, mnt) = fresh(&world, "second", &web, &["--trace-budget", "256KiB"]);
    daemon.mount(&["base/t:hot"], &mnt, false);
    until("the guess is fetched", || daemon.total().traced_bytes > 0);
    // After each of these the next range could begin.
    for n in 0..6_u64 {
        let cold = (12 << 20) + (n << 18) + (220 << 10);
        let at = usize::try_from(cold).unwrap();
        let read = read_cold(&mnt.join("data"), cold, 4096).unwrap();
        assert!(read == data[at..at + 4096]);
    }
    // Ranges of 128 KiB until more than that is on its way.
    let guessed = web.asked(&front).len();
    assert!((1..=2).contains(&guessed), "{guessed}");
    assert!(daemon.total().traced_segments < report.segments_hot);
    workload(&mnt, &data);
    assert!(web.asked(&front).len() > guessed);
    assert_eq!(daemon.total().failed_reads, 0);
}

/// A reader of what the trace has on its way waits for that, and asks for nothing again; one of what still waits there takes
/// it out. Mutation: `State::want` lets the segment through, wanted or arrived (it is fetched twice).
#[test]
fn a_reader_joins_what_the_trace_is_fetching() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (report, hot) = optimized(&world, &trace);
    let (front, _) = packs(&hot);
    web.hold(&front);
    let (daemon, mnt) = fresh(&world, "second", &web, &[]);
    daemon.mount(&["base/t:hot"], &mnt, false);
    until("the trace is being fetched", || {
        !web.asked(&front).is_empty()
    });
    std::thread::scope(|scope| {
        let readers: Vec<_> = places()
            .into_iter()
            .take(8)
            .map(|offset| {
                let path = mnt.join("data");
                scope.spawn(move || (offset, read_cold(&path, offset, READ)))
            })
            .collect();
        until("all wait", || daemon.total().fuse_reads >= 8);
        web.release(&front);
        for reader in readers {
            let (offset, found) = reader.join().unwrap();
            let at = usize::try_from(offset).unwrap();
            assert!(found.unwrap() == data[at..at + READ]);
        }
    });
    workload(&mnt, &data);
    until("all is there", || {
        daemon.total().fetched_plain_bytes >= report.bytes_hot
    });
    let counters = daemon.total();
    assert_eq!(
        counters.fetched_plain_bytes, report.bytes_hot,
        "something came twice"
    );
    let mut asked = web.asked(&front);
    asked.sort_unstable();
    assert!(
        asked.is_sorted_by(|a, b| a < b),
        "a range was asked for twice: {asked:?}"
    );
}

/// Mutation: `Feed::stop_prefetch` stops nothing.
#[test]
fn unmounting_ends_what_a_trace_began() {
    let (world, _, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (report, hot) = optimized(&world, &trace);
    let (front, _) = packs(&hot);
    web.hold(&front);
    let (daemon, mnt) = fresh(&world, "second", &web, &["--trace-budget", "128KiB"]);
    daemon.mount(&["base/t:hot"], &mnt, false);
    until("the trace is being fetched", || {
        !web.asked(&front).is_empty()
    });
    let waiting = || daemon.metric("dsec_layerd_fetch_ranges{state=\"traced\"} ");
    assert!(waiting() > 0);
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(waiting(), 0);
    let asked = web.asked(&front).len();
    web.release(&front);
    until("the range on its way is kept", || {
        daemon.stats().cache.bytes_used > 0
    });
    assert_eq!(web.asked(&front).len(), asked);
    assert!(daemon.total().traced_segments < report.segments_hot);
    // The next mount goes on where it ended.
    daemon.mount(&["base/t:hot"], &mnt, false);
    workload(&mnt, &data);
    until("all is there", || {
        daemon.total().fetched_plain_bytes >= report.bytes_hot
    });
    assert_eq!(daemon.total().fetched_plain_bytes, report.bytes_hot);
}

/// Neither has anything evicted, nor is an origin that fails asked for what nobody wants.
/// Mutations: no `bytes_left` in `Feed::prefetch`; no `give_up`.
#[test]
fn a_full_cache_and_a_failing_origin_end_a_trace_and_no_reader() {
    let (world, layer, data) = world();
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let (trace, _) = record(&world, &web, &data);
    let (report, _) = optimized(&world, &trace);
    let (small, mnt) = fresh(&world, "small", &web, &["--cache-size", "400KiB"]);
    small.mount(&["base/t:hot"], &mnt, false);
    until("the log says so", || {
        small
            .log()
            .contains("room for the beginning of the trace only")
    });
    until("the beginning is there", || {
        small.stats().cache.bytes_used > 200 << 10
    });
    assert_eq!(small.stats().cache.evicted, 0);
    assert!(small.total().traced_segments < report.segments_hot);
    workload(&mnt, &data);
    let text = String::from_utf8(trace.to_bytes()).unwrap();
    // Long enough for a reader to outlast the pause that an origin has after failures.
    let args = ["--read-deadline", "1s"];
    let (failing, other) = fresh(&world, "failing", &web, &args);
    // Description only: the packs are refused.
    failing.mount_traced(&["base/t:1"], &other, None);
    failing.client().umount(&other).unwrap();
    web.faults()
        .refuse
        .store(1 << 40, std::sync::atomic::Ordering::SeqCst);
    let digest = layer.digest.to_hex();
    failing.mount_traced(&[&digest], &other, Some(&text));
    until("it gives up", || {
        failing
            .log()
            .contains("no more is fetched because of a trace")
    });
    web.faults()
        .refuse
        .store(0, std::sync::atomic::Ordering::SeqCst);
    workload(&other, &data);
    let counters = failing.total();
    // What was on its way may have come through when the origin was well again; what waited was not asked for.
    assert_eq!(counters.failed_reads, 0);
    assert!(counters.traced_segments < 16, "{counters:?}");
}
