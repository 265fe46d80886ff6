//! `dir:` on a mount with the semantics of 3FS: a stand-in (FUSE), not 3FS.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use imgstore::build::BuildOptions;
use imgstore::fetch::origins::OriginSet;
use imgstore::format::names;
use imgstore::origin::dir::DirOrigin;
use imgstore::origin::{ByteRange, Created, Origin, OriginError};
use imgstore::store::layer::{self, Layer};
use imgstore::store::verify;
use imgstore::tree::{Content, Inode, Kind, Meta, ROOT, Tree};
use three_fs_stand_in::mount::{CHUNK_BYTES, Event, StandIn};

use crate::build::build_as;
use crate::random_tree::{Rng, Spool, cases};

const IMMUTABLE: u32 = 0x10;

/// A folder, and the mount over it.
struct World {
    _dir: tempfile::TempDir,
    folder: PathBuf,
    mount: StandIn,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (folder, point) = (dir.path().join("folder"), dir.path().join("mount"));
        fs::create_dir(&folder).unwrap();
        fs::create_dir(&point).unwrap();
        let mount = StandIn::mount(&folder, &point);
        Self {
            _dir: dir,
            folder,
            mount,
        }
    }

    fn origin(&self) -> DirOrigin {
        DirOrigin::create_root(&self.mount.point().join("origin")).unwrap()
    }

    /// The same object, past the mount: as another host would change it.
    fn behind(&self, object: &str) -> PathBuf {
        self.folder.join("origin").join(object)
    }

    fn name(object: &str) -> String {
        format!("origin/{object}")
    }

    /// An object of random bytes.
    fn object(&self, object: &str, len: usize) -> Vec<u8> {
        let bytes = Rng::new(7).bytes(len);
        let created = self.origin().create(object, &mut bytes.as_slice());
        assert_eq!(created.unwrap(), Created::New);
        bytes
    }
}

/// Some MiB that do not compress, and some that do.
fn tree(spool: &mut Spool) -> Tree {
    let mut tree = Tree::new(Meta::default());
    let mut rng = Rng::new(3);
    let mut add = |name: String, content: Content| {
        let kind = Kind::File(content);
        let meta = Meta::default();
        let id = tree.add(Inode { meta, kind });
        let root = tree.dir_mut(ROOT).unwrap();
        root.insert(name.into_bytes(), id);
    };
    for n in 0..7_usize {
        let noise = rng.bytes(700_000 + n * 1000);
        let len = u64::try_from(noise.len()).unwrap();
        add(format!("noise-{n}"), spool.content(len, &[(0, noise)]));
        let text = format!("line {n}\n").repeat(50_000).into_bytes();
        let len = u64::try_from(text.len()).unwrap();
        add(format!("text-{n}"), spool.content(len, &[(0, text)]));
    }
    tree
}

fn publish(origin: &dyn Origin) -> Layer {
    let mut spool = Spool::new();
    let report = build_as(&tree(&mut spool), "1", origin, &BuildOptions::default());
    layer::open(origin, &report.layer).unwrap()
}

fn range(start: u64, len: u64) -> ByteRange {
    ByteRange { start, len }
}

/// Whether these events come in this order, with others between them.
fn in_order(events: &[Event], wanted: &[&dyn Fn(&Event) -> bool]) -> bool {
    let mut events = events.iter();
    wanted.iter().all(|wanted| events.any(wanted))
}

/// Broken on purpose: renaming in place of linking, with NOREPLACE (the kernel makes EINVAL of `ENOSYS`, nothing is published); a `try_exists` before
/// linking (looked up twice); syncing the folder and taking its error for one (nothing is published); linking before
/// the writer is closed; sealing before the temporary name is gone (it stays). Each made this test fail.
#[test]
fn publishing_uses_what_three_fs_has_in_the_order_that_it_wants() {
    let world = World::new();
    let origin = world.origin();
    let layer = publish(&origin);
    let events = world.mount.take_events();
    let missing: Vec<_> = events
        .iter()
        .filter(|event| matches!(event, Event::Missing(_)))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    let immutable = [
        names::pack(&layer.placement.packs[0].digest),
        names::meta(&layer.manifest.meta.digest),
        names::chunks(&layer.manifest.chunks.digest),
        names::manifest(&layer.digest),
    ];
    for object in &immutable {
        let ino = world.mount.inode(&World::name(object));
        let name = object.rsplit('/').next().unwrap().to_owned();
        let order: [&dyn Fn(&Event) -> bool; 5] = [
            &|e| *e == Event::Fsync(ino),
            &|e| *e == Event::Release(ino, true),
            &|e| *e == Event::Link(ino, name.clone()),
            &|e| matches!(e, Event::Unlink(_)),
            &|e| *e == Event::SetFlags(ino, IMMUTABLE),
        ];
        assert!(in_order(&events, &order), "{object}: {events:?}");
        // The one that `link` itself makes; the placement has the manifest's name, in another folder.
        let probe = Event::Lookup(name, false);
        let probes = events.iter().filter(|e| **e == probe).count();
        let named_so = if object.starts_with("manifests/") {
            2
        } else {
            1
        };
        assert_eq!(probes, named_so, "{object}");
        assert!(world.mount.has_flag(&World::name(object), IMMUTABLE));
    }
    // What may not change is never renamed.
    for event in &events {
        if let Event::Rename(_, to) = event {
            assert!(!immutable.iter().any(|object| object.ends_with(to)), "{to}");
        }
    }
    assert_eq!(fs::read_dir(world.behind("tmp")).unwrap().count(), 0);
    let report = verify::verify(&origin, &layer.digest, &|_, _| ()).unwrap();
    assert_eq!(report.damage, Vec::new());
    // Published again, everything is there and stays.
    let again = publish(&origin);
    assert_eq!(again.placement, layer.placement);
}

/// Broken on purpose: no padding (frames cross); a padding that is no zstd frame (`zstd -dc` fails).
#[test]
fn segments_do_not_cross_chunks_and_packs_stay_plain_zstd() {
    let world = World::new();
    let layer = publish(&world.origin());
    let elsewhere = tempfile::tempdir().unwrap();
    let plain = publish(&DirOrigin::open(elsewhere.path()).unwrap());
    assert_eq!(plain.digest, layer.digest);
    let pack = layer.placement.packs[0];
    let crossing = |layer: &Layer| {
        let spots = (0..layer.manifest.segments.len()).map(|n| layer.placement.find(n).unwrap().1);
        spots
            .filter(|r| r.start / CHUNK_BYTES != (r.start + r.len - 1) / CHUNK_BYTES)
            .count()
    };
    assert!(pack.size > 4 * CHUNK_BYTES, "{}", pack.size);
    assert_eq!(crossing(&layer), 0);
    assert!(crossing(&plain) > 2);
    let path = world.behind(&names::pack(&pack.digest));
    let out = Command::new("zstd").arg("-dc").arg(path).output().unwrap();
    assert!(out.status.success());
    let origin = world.origin();
    let mut wanted = Vec::new();
    for index in 0..layer.manifest.segments.len() {
        wanted.extend(layer::read_segment(&origin, &layer, index).unwrap());
    }
    assert!(out.stdout == wanted);
}

/// Broken on purpose: pieces of 2 MiB (they cross); without `O_DIRECT` (the kernel asks for pages as it likes).
#[test]
fn a_read_is_one_request_inside_of_one_chunk() {
    let world = World::new();
    let origin = world.origin();
    let bytes = world.object("packs/a", 5 << 20);
    let ino = world.mount.inode("origin/packs/a");
    let reads = |start: u64, len: u64| {
        world.mount.take_events();
        let found = origin.fetch("packs/a", range(start, len)).unwrap();
        let from = usize::try_from(start).unwrap();
        assert!(found == bytes[from..from + usize::try_from(len).unwrap()]);
        let events = world.mount.take_events().into_iter();
        let reads = events.filter_map(|event| match event {
            Event::Read(i, offset, size) if i == ino => Some((offset, size)),
            _ => None,
        });
        reads.collect::<Vec<_>>()
    };
    const MIB: u32 = 1 << 20;
    let mib = u64::from(MIB);
    assert_eq!(reads(0, mib), [(0, MIB)]);
    assert_eq!(reads(5000, 10), [(4096, 914)]);
    assert_eq!(
        reads(mib - 10, 2 * mib),
        [(mib - 4096, 4096), (mib, MIB), (2 * mib, MIB - 10)]
    );
    // What is asked for again comes from the server again.
    assert_eq!(reads(0, mib), [(0, MIB)]);
    let whole: u64 = reads(0, 5 * mib).iter().map(|r| u64::from(r.1)).sum();
    assert_eq!(whole, 5 * mib);
}

/// Any chunk lost or short, any range: the right bytes or an error. Broken on purpose: reads across chunks (zeros); a short read
/// taken for a whole one (other bytes); reads through the page cache (other bytes).
#[test]
fn a_lost_chunk_is_an_error_and_never_zeros() {
    let world = World::new();
    let origin = world.origin();
    let len = 6 * CHUNK_BYTES + 12_345;
    let bytes = world.object("packs/a", usize::try_from(len).unwrap());
    let mut rng = Rng::new(11);
    let (mut right, mut refused) = (0, 0);
    for _ in 0..cases(60).cases {
        world.mount.heal();
        for _ in 0..=rng.below(2) {
            let keep = rng.pick(&[0, 1, 4096, 500_000, CHUNK_BYTES - 1]);
            world.mount.lose("origin/packs/a", rng.below(7), keep);
        }
        for _ in 0..4 {
            let start = rng.below(len);
            let most = len - start;
            let wanted = range(start, 1 + rng.below(most.min(3 * CHUNK_BYTES)));
            match origin.fetch_of("packs/a", len, wanted) {
                Ok(found) => {
                    let from = usize::try_from(start).unwrap();
                    assert!(found == bytes[from..from + found.len()], "{wanted:?}");
                    assert_eq!(u64::try_from(found.len()).unwrap(), wanted.len);
                    right += 1;
                }
                Err(OriginError::WrongAnswer { found, .. }) => {
                    assert!(found.contains("a chunk of it is lost"), "{found}");
                    refused += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
        if origin
            .fetch_all("packs/a", len)
            .is_ok_and(|all| all != bytes)
        {
            panic!("other bytes of the whole object");
        }
    }
    assert!(right > 20 && refused > 20, "{right} {refused}");
    world.mount.heal();
    assert!(origin.fetch_all("packs/a", len).unwrap() == bytes);
}

/// A name that this host remembers as missing was published by another: asked for again until 3FS has forgotten. Broken
/// on purpose: a lag of 0 (both fail at once).
#[test]
fn a_name_remembered_as_missing_is_asked_for_again() {
    let world = World::new();
    let origin = world.origin();
    let layer = publish(&origin);
    let (pack, spot) = layer.placement.find(0).unwrap();
    let object = names::pack(&pack.digest);
    let away = world.folder.join("away");
    fs::rename(world.behind(&object), &away).unwrap();
    // Another mount: this one knows the name still.
    let point = world.folder.with_file_name("other");
    fs::create_dir(&point).unwrap();
    let host = StandIn::mount(&world.folder, &point);
    let origin = DirOrigin::open(&host.point().join("origin")).unwrap();
    let missing = |found: Result<Vec<u8>, OriginError>| {
        assert!(
            matches!(found, Err(OriginError::NotFound { .. })),
            "{found:?}"
        );
    };
    missing(origin.fetch(&object, spot));
    fs::rename(&away, world.behind(&object)).unwrap();
    missing(origin.fetch(&object, spot));
    let set = OriginSet::new(vec![std::sync::Arc::new(
        DirOrigin::open(&host.point().join("origin")).unwrap(),
    )]);
    std::thread::scope(|scope| {
        let set = scope.spawn(|| {
            let deadline = Instant::now() + Duration::from_secs(60);
            set.fetch(&object, pack.size, spot, 0, deadline).0.unwrap()
        });
        layer::read_segment(&origin, &layer, 0).unwrap();
        assert_eq!(
            set.join().unwrap().bytes.len(),
            usize::try_from(spot.len).unwrap()
        );
        // What is missing for good is said to be, after that time.
        let gone = scope.spawn(|| {
            let deadline = Instant::now() + Duration::from_secs(60);
            missing(layer_fetch(&origin, "packs/none", deadline));
        });
        gone.join().unwrap();
    });
}

fn layer_fetch(
    origin: &DirOrigin,
    object: &str,
    deadline: Instant,
) -> Result<Vec<u8>, OriginError> {
    let asked = Instant::now();
    let found = imgstore::origin::lag::named(origin, || origin.fetch(object, range(0, 1)));
    assert!(Instant::now() < deadline);
    assert!(
        asked.elapsed() > Duration::from_secs(5),
        "asked too shortly"
    );
    found
}

/// Broken on purpose: no check of the size (the range is read); the remembered size believed (a whole object is refused for
/// 30 s).
#[test]
fn sizes_are_checked_before_use_and_not_believed_when_stale() {
    let world = World::new();
    let origin = world.origin();
    let bytes = world.object("packs/a", 100_000);
    let wanted = range(10, 20);
    assert!(origin.fetch_of("packs/a", 100_000, wanted).is_ok());
    for size in [99_999, 100_001, 0] {
        let error = origin.fetch_of("packs/a", size, wanted).unwrap_err();
        let expected = format!("expected an object of {size} bytes, found one of 100000");
        assert!(error.to_string().ends_with(&expected), "{error}");
    }
    // Another host goes on writing; this one remembers the old size.
    fs::File::options()
        .append(true)
        .open(world.behind("packs/a"))
        .unwrap()
        .write_all(&bytes)
        .unwrap();
    let remembered = fs::metadata(world.mount.point().join("origin/packs/a")).unwrap();
    assert_eq!(remembered.len(), 100_000);
    let found = origin.fetch_of("packs/a", 200_000, range(100_000, 100_000));
    assert!(found.unwrap() == bytes);
    assert_eq!(origin.size("packs/a").unwrap(), 200_000);
}

#[test]
fn data_that_went_with_its_last_name_is_an_error() {
    let world = World::new();
    let origin = world.origin();
    world.object("packs/a", 100_000);
    let held = fs::File::open(world.mount.point().join("origin/packs/a")).unwrap();
    // Keeps the chunks' fate apart from the name's: the name is still there for this host.
    world.mount.lose("origin/packs/a", 0, 0);
    let error = origin.fetch("packs/a", range(0, 4096)).unwrap_err();
    assert!(error.to_string().contains("a read of 0 bytes"), "{error}");
    drop(held);
    origin.remove("packs/a").unwrap();
    let error = origin.fetch("packs/a", range(0, 4096)).unwrap_err();
    assert!(matches!(error, OriginError::NotFound { .. }), "{error}");
    origin.remove("packs/a").unwrap();
}

/// The server dies while a read waits for it: an error at once, and at every later try.
#[test]
fn the_death_of_the_server_is_an_error() {
    let world = World::new();
    let origin = world.origin();
    world.object("packs/a", 100_000);
    world.mount.hang(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| origin.fetch("packs/a", range(0, 4096)));
        world.mount.wait_for_reads(1);
        world.mount.kill();
        let error = reader.join().unwrap().unwrap_err();
        assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
    });
    let error = origin.fetch("packs/a", range(0, 4096)).unwrap_err();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
    let error = DirOrigin::open(&world.mount.point().join("origin")).unwrap_err();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
}

/// Broken on purpose: no unsealing (mending is refused with EPERM).
#[test]
fn sealed_objects_can_be_mended_and_removed_by_us_alone() {
    let world = World::new();
    let origin = world.origin();
    world.object("packs/a", 1000);
    let path = world.mount.point().join("origin/packs/a");
    for refused in [
        fs::File::options().write(true).open(&path).map(drop),
        fs::hard_link(&path, path.with_extension("b")),
        fs::remove_file(&path),
    ] {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(1));
    }
    let created = origin.create("packs/a", &mut &b"other"[..]).unwrap();
    assert_eq!(created, Created::Existed);
    origin.replace("packs/a", b"mended").unwrap();
    assert_eq!(origin.fetch_all("packs/a", 10).unwrap(), b"mended");
    assert!(world.mount.has_flag("origin/packs/a", IMMUTABLE));
    origin.remove("packs/a").unwrap();
    assert!(!world.behind("packs/a").try_exists().unwrap());
}

/// The stand-in is as odd as it should be, and other file systems are not taken for 3FS.
#[test]
fn three_fs_is_recognised_and_nothing_else() {
    let world = World::new();
    assert_eq!(world.origin().chunk_bytes(), Some(CHUNK_BYTES));
    assert_eq!(world.origin().lag(), Duration::from_secs(6));
    for other in ["/proc", "/dev/shm", "/", "/sys"] {
        let origin = DirOrigin::open(Path::new(other)).unwrap();
        assert_eq!((origin.chunk_bytes(), origin.lag()), (None, Duration::ZERO));
    }
    world.mount.set_latency(Duration::from_millis(1));
    let point = world.mount.point();
    fs::write(point.join("a"), b"x").unwrap();
    let shell = |line: &str| {
        let status = Command::new("sh")
            .args(["-c", line])
            .current_dir(point)
            .stderr(Stdio::null())
            .status();
        status.unwrap().success()
    };
    assert!(!shell("mkfifo fifo"));
    assert!(!shell("setfattr -n user.a -v b a"));
    assert!(!shell("fallocate -l 4096 a"));
    assert!(!shell("sync ."), "a folder cannot be synced");
    assert!(shell("ln a b && mv b c && cat c"));
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = text.lines().find(|l| l.contains(point.to_str().unwrap()));
    let line = line.unwrap();
    assert!(line.contains("hf3fs.stand-in"), "{line}");
    assert!(line.contains("max_read=1048576"), "{line}");
}
