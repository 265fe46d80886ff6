//! From wishes of the data plane to frames: fetch, hand over, then keep.
//!
//! A frame goes to the data plane before it is written to the cache: the reader waits for the first, not for the second.
//! Neither is verified here. When a pack is gone, the placement is read again once, for it may have moved.
//!
//! What a trace foresaw goes to the cache first and then over, frame by frame: nobody waits for most of it, and the data plane
//! keeps only what somebody does wait for. Whoever asks for it in between is answered by the frame that is about to go: the
//! queue knows what has come until it is settled here.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use imgstore::fetch::health::OriginHealth;
use imgstore::fetch::origins::{Fetched, OriginSet};
use imgstore::fetch::plan::{Part, with_partner};
use imgstore::fetch::queue::{Delivery, FetchError, FetchQueue, Priority, QueueDepth};
use imgstore::format::frame::{frame_len_max, verified};
use imgstore::format::manifest::SEGMENTS_MAX;
use imgstore::ids::{Digest, to_u64};
use imgstore::store::cache::{Kept, SegmentCache};
use imgstore::store::layer::Layer;
use layerd_client::api::Counters;

use super::ControlConfig;
use super::layers::LayerStore;
use super::link::PlaneLink;
use super::pages::PageDropper;
use super::selftest::SelfTest;

use crate::protocol::{Cost, FORESEEN, Provenance, ToControl, ToData, Traced};

/// A cache that cannot be written is reported this often.
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Pause between two looks whether everything is delivered.
const DRAIN_PAUSE: Duration = Duration::from_millis(2);

/// Most descriptions that are loaded (again) at a time, each on a thread of its own.
const LOADING_MAX: usize = 64;

/// What deliveries are done with.
#[derive(Debug)]
struct Target {
    layers: Arc<LayerStore>,
    cache: Arc<SegmentCache>,
    plane: Mutex<Option<Arc<PlaneLink>>>,
    /// While the built-in image is mounted: it has its segments.
    self_test: Mutex<Option<Arc<SelfTest>>>,
    warned: Mutex<Option<Instant>>,
    unwarned: AtomicU64,
    loading: AtomicUsize,
}

/// See the head of this file.
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    target: Arc<Target>,
    queue: FetchQueue,
    pub(crate) pages: PageDropper,
    /// Nothing new is fetched: the next control process is asked for it.
    draining: Arc<AtomicBool>,
}

impl Feed {
    /// Fetches from `origins`, as patiently and with as much for traces as `config` says.
    pub(crate) fn new(
        origins: OriginSet,
        config: &ControlConfig,
        layers: Arc<LayerStore>,
        cache: Arc<SegmentCache>,
        pages: PageDropper,
    ) -> Self {
        let target = Arc::new(Target {
            layers,
            cache,
            plane: Mutex::new(None),
            self_test: Mutex::new(None),
            warned: Mutex::new(None),
            unwarned: AtomicU64::new(0),
            loading: AtomicUsize::new(0),
        });
        let sink = Arc::clone(&target);
        // The queue holds the sink, and the sink needs the queue: it is put in when there is one.
        let back: Arc<OnceLock<FetchQueue>> = Arc::default();
        let later = Arc::clone(&back);
        let queue = FetchQueue::with_budget(
            origins,
            config.patience,
            config.traced_bytes_max,
            Arc::new(move |delivery| {
                if let Some(queue) = later.get() {
                    sink.deliver(&delivery, queue);
                }
            }),
        );
        back.get_or_init(|| queue.clone());
        Self {
            target,
            queue,
            pages,
            draining: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Fetches segments of a layer because a trace says that they will be read: those that the cache lacks, as long as it has
    /// room without letting anything go. `pace`: how fast the layer's description came, in bytes a millisecond.
    pub(crate) fn prefetch(
        &self,
        layer: &Arc<Layer>,
        segments: impl IntoIterator<Item = usize>,
        pace: Option<u64>,
    ) {
        if let Some(pace) = pace {
            self.queue.hint_pace(pace);
        }
        let mut left = self.target.cache.bytes_left();
        let mut wanted = Vec::new();
        for index in segments {
            let segment = layer.manifest.segments.get(index);
            let (Some(segment), Some((_, range))) = (segment, layer.placement.find(index)) else {
                continue;
            };
            if self.has(&segment.digest()) {
                continue;
            }
            let Some(rest) = left.checked_sub(range.len) else {
                tracing::info!(layer = %layer.digest, segments = wanted.len(), "the cache has room for the beginning of the trace only");
                break;
            };
            left = rest;
            wanted.push(index);
        }
        tracing::debug!(layer = %layer.digest, segments = wanted.len(), "fetching what a trace foresees");
        self.queue.push(layer, &wanted, Priority::Trace);
    }

    /// Fetches no more of what was foreseen of the layers that `layer` says yes to.
    pub(crate) fn stop_prefetch(&self, layer: impl Fn(&Digest) -> bool) {
        let cancelled = self.queue.cancel_traced(layer);
        self.target.say_cancelled(cancelled);
    }

    /// Frames go to this data plane from now on.
    pub(crate) fn set_plane(&self, plane: Option<Arc<PlaneLink>>) {
        let blind = plane.as_ref().is_some_and(|plane| !plane.can(FORESEEN));
        self.queue.set_blind(blind);
        *self.target.plane() = plane;
    }

    /// Segments of the self-test's image come from there from now on.
    pub(crate) fn set_self_test(&self, test: Option<Arc<SelfTest>>) {
        *self.target.self_test() = test;
    }

    /// The data plane that lives now.
    pub(crate) fn plane(&self) -> Option<Arc<PlaneLink>> {
        self.target.plane().clone()
    }

    /// What is remembered of each origin, in order: the counters for the metrics.
    pub(crate) fn health(&self) -> Vec<Arc<OriginHealth>> {
        self.queue.origins().health()
    }

    /// What there is to fetch now.
    pub(crate) fn depth(&self) -> QueueDepth {
        self.queue.depth()
    }

    /// Fetches nothing new, and waits until what is on its way is delivered and in the cache, so that nobody fetches it a
    /// second time; whether it is. The data plane says its other wishes again to the next control process.
    pub(crate) fn drain(&self, timeout: Duration) -> bool {
        self.draining.store(true, Ordering::Release);
        // What nobody has read is left to whoever will: the next mount goes on there.
        self.stop_prefetch(|_| true);
        let until = Instant::now() + timeout;
        while self.depth() != QueueDepth::default() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(DRAIN_PAUSE);
        }
        true
    }

    /// Counts what no layer did.
    pub(crate) fn count(&self, counters: Counters) {
        self.target.count(None, counters);
    }

    /// Does what the data plane wishes.
    pub(crate) fn wish(&self, message: ToControl) {
        tracing::trace!(?message, "wish");
        match message {
            ToControl::Need {
                layer,
                first,
                count,
                prefetch,
            } => {
                // No layer has more.
                let count = count.min(SEGMENTS_MAX);
                let indexes: Vec<usize> = (first..first.saturating_add(count)).collect();
                let priority = if prefetch {
                    Priority::Prefetch
                } else {
                    Priority::Demand
                };
                self.need(layer, indexes, priority);
            }
            ToControl::Again { layer, index } => self.need(layer, vec![index], Priority::Again),
            ToControl::Foreseen { layer, bytes } => self.queue.traced_read(&layer, bytes),
            ToControl::Promote { digest } => self.queue.promote(&[digest]),
            ToControl::Drop { layer, start, end } => self.pages.drop_pages(layer, start, end),
            ToControl::Used { digests } => self.target.cache.touch(&digests),
            ToControl::Welcome { .. } | ToControl::Done { .. } => {
                tracing::warn!("the data plane said something out of turn");
            }
            ToControl::Unknown => {
                tracing::debug!("the data plane said something that only later builds know");
            }
        }
    }

    /// Whether a segment is in the cache or on its way there. A disk that cannot tell is treated as empty: the segment
    /// comes once more than needed.
    fn has(&self, digest: &Digest) -> bool {
        self.queue.has_arrived(digest)
            || self.target.cache.files().contains(digest).unwrap_or(false)
    }

    fn need(&self, digest: Digest, indexes: Vec<usize>, priority: Priority) {
        if self.draining.load(Ordering::Acquire) {
            tracing::debug!(layer = %digest, ?indexes, "left to the next control process");
            return;
        }
        if let Some(test) = self.target.self_test().clone()
            && test.layer() == digest
            && let Some(plane) = self.plane()
        {
            test.give(&plane, &indexes);
            return;
        }
        let again = priority == Priority::Again;
        if let Some(layer) = self.target.layers.get(&digest).filter(|_| !again) {
            let indexes = match *indexes {
                [index] if priority == Priority::Demand && !self.queue.follows(&digest, index) => {
                    with_partner(&layer, index, |partner, bytes| {
                        self.queue.worth(bytes) && !self.has(partner)
                    })
                }
                _ => indexes,
            };
            let indexes = self.target.not_cached(&layer, indexes);
            self.queue.push(&layer, &indexes, priority);
            return;
        }
        // Not on this thread, which listens: after a restart the layer is on disk or at an origin, and after damage the
        // segment may have moved.
        if self.target.loading.fetch_add(1, Ordering::AcqRel) >= LOADING_MAX {
            self.target.loading.fetch_sub(1, Ordering::AcqRel);
            // Who waits gets EIO at its deadline.
            tracing::warn!(layer = %digest, "{LOADING_MAX} descriptions are being loaded already");
            return;
        }
        let feed = self.clone();
        let load = move || {
            let layers = &feed.target.layers;
            let loaded = layers.load(&digest).map(|layer| {
                let moved = again.then(|| layers.refresh(&layer).ok()).flatten();
                moved.unwrap_or(layer)
            });
            match loaded {
                Ok(layer) => feed.queue.push(&layer, &indexes, priority),
                Err(error) => {
                    tracing::error!(layer = %digest, %error, "segments of an unknown layer are needed");
                }
            }
            feed.target.loading.fetch_sub(1, Ordering::AcqRel);
        };
        let spawned = std::thread::Builder::new()
            .name("load-layer".to_owned())
            .spawn(load);
        if let Err(error) = spawned {
            self.target.loading.fetch_sub(1, Ordering::AcqRel);
            tracing::error!(%error, "cannot start a thread to load a layer");
        }
    }
}

/// Plain bytes of the segments in a range.
fn plain_bytes(delivery: &Delivery) -> u64 {
    let segments = &delivery.layer.manifest.segments;
    let parts = delivery.plan.parts.iter();
    parts
        .filter_map(|part| segments.get(part.index))
        .map(imgstore::format::manifest::Segment::len)
        .sum()
}

/// The frames of a range with their segments.
fn frames<'a>(delivery: &'a Delivery, bytes: &'a [u8]) -> Vec<(Part, Digest, &'a [u8])> {
    let segments = &delivery.layer.manifest.segments;
    let split = delivery.plan.split(bytes);
    let of = |(part, frame): (Part, Option<&'a [u8]>)| {
        Some((part, segments.get(part.index)?.digest(), frame?))
    };
    split.filter_map(of).collect()
}

fn provenance(delivery: &Delivery, part: &Part, origin: &str) -> Provenance {
    Provenance {
        origin: origin.to_owned(),
        pack: delivery.plan.pack,
        offset: part.offset,
    }
}

impl Target {
    fn plane(&self) -> MutexGuard<'_, Option<Arc<PlaneLink>>> {
        self.plane.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn self_test(&self) -> MutexGuard<'_, Option<Arc<SelfTest>>> {
        let guard = self.self_test.lock();
        guard.unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: &ToData, bytes: &[u8]) {
        let plane = self.plane().clone();
        if let Some(plane) = plane {
            plane.send(message, bytes);
        }
    }

    fn count(&self, layer: Option<Digest>, counters: Counters) {
        let counters = Box::new(counters);
        self.send(&ToData::Count { layer, counters }, &[]);
    }

    /// Those of these segments that are not in the cache. A reader looks there before it asks, but its question may be older than
    /// what a trace brought meanwhile: it is given that.
    fn not_cached(&self, layer: &Layer, mut indexes: Vec<usize>) -> Vec<usize> {
        indexes.retain(|index| !self.give_cached(layer, *index));
        indexes
    }

    /// Hands over a segment from the cache; whether it is there, and right.
    fn give_cached(&self, layer: &Layer, index: usize) -> bool {
        let Some(segment) = layer.manifest.segments.get(index) else {
            return false;
        };
        let (digest, len) = (segment.digest(), segment.len());
        let Ok(Some(frame)) = self.cache.files().read(&digest, frame_len_max(len)) else {
            return false;
        };
        let place = layer.placement.find(index);
        let (Ok(_), Some((pack, range))) = (verified(&frame, &digest, len), place) else {
            return false;
        };
        let from = Provenance {
            origin: "the cache".to_owned(),
            pack: pack.digest,
            offset: range.start,
        };
        let message = ToData::Frame {
            digest,
            from,
            cost: None,
            traced: None,
        };
        self.send(&message, &frame);
        true
    }

    fn deliver(&self, delivery: &Delivery, queue: &FetchQueue) {
        tracing::trace!(segments = delivery.plan.parts.len(), "fetched");
        let cost = Cost {
            layer: delivery.layer.digest,
            requests: delivery.spent.requests,
            retries: delivery.spent.retries,
            bytes: delivery.spent.bytes,
            plain_bytes: match delivery.outcome {
                Ok(_) => plain_bytes(delivery),
                Err(_) => 0,
            },
        };
        match &delivery.outcome {
            Ok(fetched) if delivery.priority == Priority::Trace => {
                let kept = self.keep_first(delivery, queue, fetched, cost);
                if !kept {
                    let cancelled = queue.cancel_traced(|layer| *layer == delivery.layer.digest);
                    self.say_cancelled(cancelled);
                }
            }
            Ok(fetched) => self.hand_over(delivery, queue, fetched, cost),
            Err(error) => {
                self.count(Some(cost.layer), cost.counters());
                if delivery.priority == Priority::Trace {
                    self.give_up(delivery, error, queue);
                } else {
                    self.refuse(delivery, error, queue);
                }
            }
        }
    }

    fn hand_over(&self, delivery: &Delivery, queue: &FetchQueue, fetched: &Fetched, cost: Cost) {
        let mut cost = Some(Box::new(cost));
        let layer = &delivery.layer;
        let frames = frames(delivery, &fetched.bytes);
        let frame_of = |part: &Part, digest: &Digest, cost: Option<Box<Cost>>| ToData::Frame {
            digest: *digest,
            from: provenance(delivery, part, &fetched.origin),
            cost,
            traced: None,
        };
        for (part, digest, frame) in &frames {
            self.send(&frame_of(part, digest, cost.take()), frame);
        }
        tracing::trace!("handed over");
        // Writing to the cache takes a while, and the data plane may have been woken on this very processor: it goes first
        // (measured: the median frame arrives after 65 us instead of 200).
        std::thread::yield_now();
        let mut written = Counters::default();
        for (part, digest, frame) in &frames {
            self.put(digest, frame, &mut written);
            if queue.settle(digest, delivery.run) {
                self.send(&frame_of(part, digest, None), frame);
            }
        }
        self.count(Some(layer.digest), written);
    }

    /// Writes a frame to the cache; whether it is there.
    fn put(&self, digest: &Digest, frame: &[u8], written: &mut Counters) -> bool {
        match self.cache.put(digest, frame) {
            Ok(Kept::Yes) => {
                written.cache_write_bytes += to_u64(frame.len());
                true
            }
            // The limit is smaller than what is pinned, mounted and on its way; stats say so.
            Ok(_) => false,
            Err(error) => {
                written.cache_write_failures += 1;
                self.warn(&error);
                false
            }
        }
    }

    /// Writes what a trace foresaw to the cache and hands it over after that; what readers wait for goes first. Whether
    /// the cache took all of it.
    fn keep_first(
        &self,
        delivery: &Delivery,
        queue: &FetchQueue,
        fetched: &Fetched,
        cost: Cost,
    ) -> bool {
        let mut cost = Some(Box::new(cost));
        let layer = delivery.layer.digest;
        let mut frames = frames(delivery, &fetched.bytes);
        // Stable: the others stay in the trace's order.
        frames.sort_by_key(|(part, ..)| !delivery.joined.contains(&part.index));
        let mut written = Counters::default();
        let mut kept = true;
        for (part, digest, frame) in &frames {
            let awaited = delivery.joined.contains(&part.index);
            if !awaited {
                kept &= self.put(digest, frame, &mut written);
                // Before it goes: who asks from now on does so because it went by, and then the cache has it.
                queue.settle(digest, delivery.run);
            }
            let message = |cost| ToData::Frame {
                digest: *digest,
                from: provenance(delivery, part, &fetched.origin),
                cost,
                traced: Some(Traced {
                    layer,
                    index: part.index,
                }),
            };
            self.send(&message(cost.take()), frame);
            if awaited {
                kept &= self.put(digest, frame, &mut written);
                if queue.settle(digest, delivery.run) {
                    self.send(&message(None), frame);
                }
            }
        }
        self.count(Some(layer), written);
        kept
    }

    /// The data plane may have counted on these; who reads one of them asks for it anew.
    fn say_cancelled(&self, digests: Vec<Digest>) {
        if !digests.is_empty() {
            let reason = "no more is fetched because of a trace".to_owned();
            let message = ToData::NoFrame {
                digests,
                reason,
                foreseen: true,
            };
            self.send(&message, &[]);
        }
    }

    /// A range of a trace cannot be had: an origin that fails is left alone with what nobody waits for. For those who came
    /// meanwhile it is asked once more, now in their name.
    fn give_up(&self, delivery: &Delivery, error: &FetchError, queue: &FetchQueue) {
        let layer = &delivery.layer;
        tracing::info!(layer = %layer.digest, %error, "no more is fetched because of a trace");
        self.say_cancelled(queue.cancel_traced(|l| *l == layer.digest));
        let waiting = &delivery.joined;
        queue.push(layer, waiting, Priority::Demand);
        let parts = delivery
            .plan
            .parts
            .iter()
            .filter(|p| !waiting.contains(&p.index));
        let segments = &layer.manifest.segments;
        let digests = parts.filter_map(|p| segments.get(p.index).map(|s| s.digest()));
        let message = ToData::NoFrame {
            digests: digests.collect(),
            reason: error.to_string(),
            foreseen: true,
        };
        self.send(&message, &[]);
    }

    /// Says once a minute that segments are not kept.
    fn warn(&self, error: &imgstore::store::cache::CacheError) {
        self.unwarned.fetch_add(1, Ordering::Relaxed);
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            *warned = Some(Instant::now());
            let segments = self.unwarned.swap(0, Ordering::Relaxed);
            tracing::warn!(%error, segments, "segments are served without being cached");
        }
    }

    fn refuse(&self, delivery: &Delivery, error: &FetchError, queue: &FetchQueue) {
        let layer = &delivery.layer;
        let indexes = delivery.plan.parts.iter().map(|part| part.index);
        let digests = |layer: &Layer| -> Vec<Digest> {
            let segment = |index: usize| layer.manifest.segments.get(index).map(|s| s.digest());
            indexes.clone().filter_map(segment).collect()
        };
        if delivery.spent.missing > 0 {
            // The packs may have been rewritten, or the bundle was behind: then they are where the placement says now.
            match self.layers.refresh(layer) {
                Ok(new) if new.placement != layer.placement => {
                    tracing::info!(layer = %layer.digest, "the layer's packs have moved");
                    let indexes: Vec<usize> = indexes.clone().collect();
                    queue.push(&new, &indexes, delivery.priority);
                    return;
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "cannot read a placement again"),
            }
        }
        if delivery.priority == Priority::Prefetch && matches!(error, FetchError::Busy) {
            tracing::debug!(layer = %layer.digest, %error, "read-ahead is left out");
        } else {
            tracing::error!(layer = %layer.digest, pack = %delivery.plan.pack, offset = delivery.plan.range.start,
                len = delivery.plan.range.len, %error, "segments cannot be fetched");
        }
        self.send(
            &ToData::NoFrame {
                digests: digests(layer),
                reason: error.to_string(),
                foreseen: false,
            },
            &[],
        );
    }
}
