//! A loader between a reader and the control process, without a kernel.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};

use imgstore::build::{BuildOptions, build};
use imgstore::ids::TagName;
use imgstore::origin::dir::DirOrigin;
use imgstore::source::{self, SourceOptions, SourceSpec};
use imgstore::store::layer;

use super::*;
use crate::paths::{MANIFEST, META};
use crate::protocol::read_message;

/// Longest wait for anything that must happen.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// A layer with several segments in a data plane without a kernel, and the control process's end of the connection.
pub(super) struct World {
    pub(super) loader: Loader,
    pub(super) layer: Arc<LayerState>,
    control: UnixStream,
    pub(super) origin: DirOrigin,
    _dir: tempfile::TempDir,
}

impl World {
    fn new(patience: Duration) -> Self {
        Self::on(patience, SegmentFiles::new(Path::new("/nowhere")))
    }

    pub(super) fn on(patience: Duration, files: SegmentFiles) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("tree")).unwrap();
        fs::create_dir(path("origin")).unwrap();
        let mut noise = vec![0; 2 << 20];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        fs::write(path("tree").join("data"), noise).unwrap();
        let origin = DirOrigin::open(&path("origin")).unwrap();
        let spec = SourceSpec::Directory(path("tree"));
        let loaded = source::load(&spec, &SourceOptions::new(dir.path())).unwrap();
        let tag: TagName = "base/t:1".parse().unwrap();
        let options = BuildOptions::default();
        let digest = build((&loaded.tree).into(), tag.into(), &origin, &options)
            .unwrap()
            .layer;
        let (bytes, manifest) = layer::read_manifest_bytes(&origin, &digest).unwrap();
        fs::write(path(MANIFEST), bytes).unwrap();
        fs::write(path(META), layer::read_meta(&origin, &manifest).unwrap()).unwrap();
        let (ours, control) = UnixStream::pair().unwrap();
        control.set_read_timeout(Some(SOON)).unwrap();
        let link = Arc::new(Link::default());
        link.open(&ours).unwrap();
        let settings = LoaderSettings {
            memory_bytes_max: 0,
            patience,
        };
        Self {
            loader: Loader::start(files, link, &settings).unwrap(),
            layer: Arc::new(LayerState::open(dir.path(), digest, true).unwrap()),
            control,
            origin,
            _dir: dir,
        }
    }

    pub(super) fn read(&self, index: usize) -> Receiver<Result<usize, String>> {
        let (send, receive) = mpsc::channel();
        let done: OnSegment = Box::new(move |segment| {
            let result = segment.map(|plain| plain.len()).map_err(str::to_owned);
            send.send(result).unwrap();
        });
        self.loader.read(&self.layer, vec![(index, done)]);
        receive
    }

    pub(super) fn wish(&mut self) -> ToControl {
        read_message(&mut self.control).unwrap().unwrap().0
    }

    pub(super) fn digest(&self, index: usize) -> Digest {
        self.layer.segments.get(index).unwrap().digest()
    }
}

#[test]
fn a_reader_who_joins_read_ahead_has_a_deadline_too() {
    let mut world = World::new(Duration::from_millis(50));
    assert!(world.layer.segments.len() >= 5);
    for index in 0..5 {
        // The last round's reader is gone, so nothing but this one can wake the timer.
        world.loader.prefetch(&world.layer, index, index + 1);
        assert!(matches!(
            world.wish(),
            ToControl::Need { prefetch: true, .. }
        ));
        let answer = world.read(index).recv_timeout(SOON).unwrap();
        assert_eq!(answer, Err("no answer in time".to_owned()));
        assert!(matches!(world.wish(), ToControl::Promote { .. }));
    }
}

#[test]
fn failed_read_ahead_is_asked_for_again_once_when_a_reader_has_joined_it() {
    let mut world = World::new(SOON);
    world.loader.prefetch(&world.layer, 1, 2);
    assert!(matches!(
        world.wish(),
        ToControl::Need { prefetch: true, .. }
    ));
    let answer = world.read(1);
    assert!(matches!(world.wish(), ToControl::Promote { .. }));
    world.loader.no_frame(&[world.digest(1)], "busy", false);
    let again = world.wish();
    assert!(
        matches!(
            again,
            ToControl::Need {
                first: 1,
                count: 1,
                prefetch: false,
                ..
            }
        ),
        "{again:?}"
    );
    assert!(answer.try_recv().is_err(), "the reader still waits");
    world.loader.no_frame(&[world.digest(1)], "broken", false);
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Err("broken".to_owned()));
}

/// What a trace asked for came to nothing when a reader had asked already: that is not the reader's answer.
/// Mutation: `no_frame` does not look at `foreseen`.
#[test]
fn a_trace_that_fails_is_no_answer_to_a_reader() {
    let mut world = World::new(SOON);
    let answer = world.read(1);
    world.wish();
    world
        .loader
        .no_frame(&[world.digest(1)], "no more of a trace", true);
    world.wish();
    assert!(answer.try_recv().is_err(), "the reader still waits");
    world.loader.no_frame(&[world.digest(1)], "broken", false);
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Err("broken".to_owned()));
}

#[test]
fn read_ahead_that_failed_and_was_asked_for_again_is_answered() {
    let mut world = World::new(SOON);
    world.loader.prefetch(&world.layer, 1, 2);
    world.wish();
    let answer = world.read(1);
    world.wish();
    world.loader.no_frame(&[world.digest(1)], "busy", false);
    world.wish();
    let layer = layer::open(&world.origin, &world.layer.digest).unwrap();
    let plain = layer::read_segment(&world.origin, &layer, 1).unwrap();
    let from = Provenance {
        origin: "here".to_owned(),
        pack: Digest::of(b""),
        offset: 0,
    };
    let stored = frame::encode(&plain, 1);
    world.loader.frame(world.digest(1), stored, from, false);
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Ok(plain.len()));
}

/// A segment that two layers share may lie in two packs: one that is lost must not fail a reader of the other.
///
/// Mutation: without `turn_to_another_layer` both readers get an error at the first refusal.
#[test]
fn a_segment_is_asked_for_through_every_layer_that_has_a_reader() {
    let mut world = World::new(SOON);
    let mut other = LayerState::open(world._dir.path(), world.layer.digest, true).unwrap();
    other.digest = Digest::of(b"another layer with the same segments");
    let other = Arc::new(other);
    let first = world.read(1);
    world.wish();
    let (send, second) = mpsc::channel();
    let done: OnSegment = Box::new(move |segment| {
        send.send(segment.map(|plain| plain.len()).map_err(str::to_owned))
            .unwrap();
    });
    world.loader.read(&other, vec![(1, done)]);
    world
        .loader
        .no_frame(&[world.digest(1)], "the pack is lost", false);
    let asked = world.wish();
    assert!(
        matches!(asked, ToControl::Need { layer, first: 1, count: 1, .. } if layer == other.digest),
        "{asked:?}"
    );
    assert!(
        first.try_recv().is_err() && second.try_recv().is_err(),
        "both wait"
    );
    world.loader.no_frame(&[world.digest(1)], "lost too", false);
    for answer in [first, second] {
        assert_eq!(
            answer.recv_timeout(SOON).unwrap(),
            Err("lost too".to_owned())
        );
    }
}

/// A frame may come between the look on disk and its verdict. Mutation: `Shared::look` does not look at `Stage::Decoding`: the
/// first question is for segment 1.
#[test]
fn what_came_during_the_look_is_not_asked_for() {
    let mut world = World::new(SOON);
    let place = Place {
        layer: Arc::clone(&world.layer),
        index: 1,
    };
    let mut entry = Entry::looking(place, None);
    entry.stage = Stage::Decoding;
    let shared = &world.loader.shared;
    shared.lock().pending.entries.insert(world.digest(1), entry);
    shared.look(&world.layer, vec![1]);
    let _answer = world.read(3);
    let wish = world.wish();
    assert!(matches!(wish, ToControl::Need { first: 3, .. }), "{wish:?}");
}
