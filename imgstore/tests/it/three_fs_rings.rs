//! `3fs:` through a library with the ABI of 3FS's user-space I/O and all its ways of answering: a stand-in over a folder, not
//! 3FS.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use imgstore::origin::three_fs::origin::{ThreeFsOptions, ThreeFsOrigin};
use imgstore::origin::url::OriginUrl;
use imgstore::origin::{ByteRange, Origin, OriginError};
use three_fs_stand_in::control::Control;
use three_fs_stand_in::mount::CHUNK_BYTES;

use crate::random_tree::{Rng, cases};

const LEN: u64 = 7 * CHUNK_BYTES + 4321;
/// Most rings, and most files kept registered.
const RINGS_MAX: usize = 8;
const FILES_MAX: usize = 64;

/// A folder that the library takes for a mount of 3FS, with one object.
struct World {
    dir: tempfile::TempDir,
    bytes: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("3fs-virt/iovs")).unwrap();
        fs::create_dir_all(dir.path().join("origin/packs")).unwrap();
        let bytes = Rng::new(5).bytes(usize::try_from(LEN).unwrap());
        fs::write(dir.path().join("origin/packs/a"), &bytes).unwrap();
        Self { dir, bytes }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("origin")
    }

    fn open(&self, patience: Duration) -> ThreeFsOrigin {
        let library = three_fs_stand_in::library().into();
        let options = ThreeFsOptions { library, patience };
        ThreeFsOrigin::open_with(&self.root(), &options).unwrap()
    }

    fn control(&self, lines: &[&str]) {
        Control::write(self.dir.path(), lines);
    }

    fn right(&self, origin: &ThreeFsOrigin, start: u64, len: u64) {
        let mut found = origin.fetch_of("packs/a", LEN, ByteRange { start, len });
        // Where a test has little patience, the machine may be slower than that.
        for _ in 0..20 {
            let slow = |e: &OriginError| e.to_string().contains("no answer from the 3FS client");
            if found.as_ref().is_err_and(slow) {
                found = origin.fetch_of("packs/a", LEN, ByteRange { start, len });
            }
        }
        let (from, count) = (
            usize::try_from(start).unwrap(),
            usize::try_from(len).unwrap(),
        );
        assert!(
            found.unwrap() == self.bytes[from..from + count],
            "{start} {len}"
        );
    }

    /// Ranges around borders, and one that takes several batches.
    fn all_right(&self, origin: &ThreeFsOrigin) {
        let mib = CHUNK_BYTES;
        for (start, len) in [
            (0, 1),
            (0, LEN),
            (5000, 10),
            (mib - 1, 2),
            (mib - 1, 5 * mib),
            (2 * mib, mib),
            (LEN - 1, 1),
        ] {
            self.right(origin, start, len);
        }
    }

    fn error(&self, origin: &ThreeFsOrigin) -> OriginError {
        let range = ByteRange {
            start: 10,
            len: 2 * CHUNK_BYTES,
        };
        origin.fetch("packs/a", range).unwrap_err()
    }
}

/// Descriptors, shared memory of this process, and links below the mount.
fn held(world: &World) -> (usize, usize, usize) {
    let count = |folder: &Path| fs::read_dir(folder).unwrap().count();
    let mine = format!("hf3fs-iov-{:08x}", std::process::id());
    let shared = fs::read_dir("/dev/shm").unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_str().unwrap().starts_with(&mine)
    });
    (
        count(Path::new("/proc/self/fd")),
        shared.count(),
        count(&world.dir.path().join("3fs-virt/iovs")),
    )
}

fn soon() -> Duration {
    Duration::from_secs(20)
}

/// Broken on purpose: completions taken in the order of preparing (reverse); the ring's being full taken for a failure (capacity).
#[test]
fn reads_are_right_in_whatever_order_and_number_they_finish() {
    let world = World::new();
    let origin = world.open(soon());
    for lines in [
        &[][..],
        &["reverse"],
        &["early"],
        &["capacity 1"],
        &["capacity 3", "reverse"],
        &["early", "capacity 2"],
    ] {
        world.control(lines);
        world.all_right(&origin);
    }
}

/// Every way of failing is an error of the kind that helps the caller, and the next read is right again. Broken on purpose:
/// the sign of `reg_fd` taken like the others (every good one fails); short and empty
/// reads accepted; a second completion ignored.
#[test]
fn every_failure_is_an_error_and_no_later_read_suffers() {
    let world = World::new();
    let transient = |e: &OriginError| matches!(e, OriginError::Unavailable { .. });
    let wrong = |e: &OriginError| matches!(e, OriginError::WrongAnswer { .. });
    type Kind<'a> = &'a dyn Fn(&OriginError) -> bool;
    let table: [(&str, &str, Kind<'_>); 16] = [
        ("result -5", "failed: Input/output error", &transient),
        ("result -4", "failed: Interrupted system call", &transient),
        ("result -61", "met a hole", &wrong),
        ("result 0", "a read of 0 bytes", &wrong),
        ("cut 1", "a read of", &wrong),
        ("cut -1", "more bytes than asked for", &transient),
        (
            "result 9223372036854775807",
            "more bytes than asked for",
            &transient,
        ),
        ("result -9223372036854775808", "in place of", &wrong),
        ("twice", "the same read twice", &transient),
        ("foreign", "an unknown read", &transient),
        (
            "fail prep_io 11",
            "`hf3fs_prep_io` of the 3FS library failed: Resource temporarily",
            &transient,
        ),
        (
            "fail prep_io 13",
            "`hf3fs_prep_io` of the 3FS library failed: Permission denied",
            &transient,
        ),
        (
            "fail submit_ios 5",
            "`hf3fs_submit_ios` of the 3FS library failed",
            &transient,
        ),
        (
            "fail wait_for_ios 5",
            "`hf3fs_wait_for_ios` of the 3FS library failed",
            &transient,
        ),
        (
            "fail iorcreate 22",
            "cannot make a ring: Invalid argument",
            &transient,
        ),
        (
            "fail iovcreate 5",
            "cannot make a ring: Input/output error",
            &transient,
        ),
    ];
    let before = held(&world);
    for (line, text, kind) in table {
        let origin = world.open(soon());
        world.control(&[line]);
        let error = world.error(&origin);
        assert!(error.to_string().contains(text), "{line}: {error}");
        assert!(kind(&error) && error.is_transient(), "{line}: {error:?}");
        world.control(&[]);
        world.all_right(&origin);
    }
    for (errno, text) in [(9, "Bad file descriptor"), (22, "Invalid argument")] {
        let origin = world.open(soon());
        world.control(&[&format!("fail reg_fd {errno}")]);
        let error = world.error(&origin);
        assert!(
            transient(&error) && error.to_string().contains(text),
            "{error}"
        );
        world.control(&[]);
        world.all_right(&origin);
    }
    assert_eq!(held(&world), before, "something leaked");
}

/// A read that gets no answer in time fails; when its answer comes, while another one is done, it spoils nothing.
/// Broken on purpose: a ring is given back although a read is under way on it (the second read gets other bytes).
#[test]
fn a_late_answer_reaches_no_other_reader() {
    let world = World::new();
    let origin = world.open(Duration::from_secs(1));
    for held_reads in [1, 3] {
        world.control(&[&format!("hold {held_reads}")]);
        let error = world.error(&origin).to_string();
        assert!(error.contains("no answer from the 3FS client"), "{error}");
        // The next read is on another ring, and in its course the late ones are done.
        world.control(&[]);
        world.right(&origin, 3 * CHUNK_BYTES, CHUNK_BYTES);
        world.all_right(&origin);
    }
    // One ring stayed aside, was found quiet, and was used again: there never was a third.
    assert_eq!(held(&world).1, 2 * 2);
}

/// No answer at all, again and again: the rings run out, and what is held is bounded; when the answers come, all is well.
/// Broken on purpose: rings that are aside not counted; never looked at again (the last reads fail).
#[test]
fn rings_without_answers_are_bounded_and_come_back() {
    let world = World::new();
    let before = held(&world);
    let origin = world.open(Duration::from_millis(400));
    world.control(&["hold 1000"]);
    for _ in 0..RINGS_MAX {
        let error = world.error(&origin).to_string();
        assert!(error.contains("no answer from the 3FS client"), "{error}");
    }
    for _ in 0..3 {
        let error = world.error(&origin).to_string();
        assert!(error.contains("all 8 rings wait for answers"), "{error}");
    }
    assert_eq!(held(&world).1, 2 * RINGS_MAX);
    world.control(&[]);
    world.all_right(&origin);
    // Dropped with reads under way: they end in the client's own memory.
    world.control(&["hold 1000"]);
    for _ in 0..3 {
        world.error(&origin);
    }
    drop(origin);
    world.control(&[]);
    let origin = world.open(soon());
    world.all_right(&origin);
    drop(origin);
    assert_eq!(held(&world), before, "something leaked");
}

/// Any chunk lost or short, any range: the right bytes or an error, whatever the library does about holes. Broken on purpose:
/// short reads accepted (other bytes).
#[test]
fn a_lost_chunk_is_an_error_and_never_zeros_through_rings() {
    let world = World::new();
    let origin = world.open(soon());
    let mut rng = Rng::new(13);
    let (mut right, mut refused) = (0, 0);
    for _ in 0..cases(40).cases {
        let lines: Vec<String> = (0..=rng.below(2))
            .map(|_| {
                let keep = rng.pick(&[0, 1, 4096, 500_000, CHUNK_BYTES - 1]);
                format!("lost a {} {keep}", rng.below(8))
            })
            .collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        world.control(&lines);
        for _ in 0..4 {
            let start = rng.below(LEN);
            let len = 1 + rng.below((LEN - start).min(6 * CHUNK_BYTES));
            match origin.fetch_of("packs/a", LEN, ByteRange { start, len }) {
                Ok(found) => {
                    let from = usize::try_from(start).unwrap();
                    let count = usize::try_from(len).unwrap();
                    assert!(found == world.bytes[from..from + count], "{start} {len}");
                    right += 1;
                }
                Err(OriginError::WrongAnswer { .. }) => refused += 1,
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert!(right > 20 && refused > 20, "{right} {refused}");
    world.control(&[]);
    world.all_right(&origin);
}

/// Many threads, more than there are rings; then everything is given back. Broken on purpose: no link removed by us (the
/// links of 8 rings stay); files not taken back before they are closed (descriptors stay, and registering fails with EINVAL).
#[test]
fn threads_share_rings_and_nothing_is_left_behind() {
    let world = World::new();
    let before = held(&world);
    let origin = world.open(soon());
    world.control(&["reverse"]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for seed in 0..16 {
            let (world, origin, next) = (&world, &origin, &next);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                while next.fetch_add(1, Ordering::Relaxed) < 200 {
                    let start = rng.below(LEN);
                    let len = 1 + rng.below((LEN - start).min(CHUNK_BYTES));
                    world.right(origin, start, len);
                }
            });
        }
    });
    let (_, shared, links) = held(&world);
    assert!(
        shared <= 2 * RINGS_MAX && links <= 2 * RINGS_MAX,
        "{shared} {links}"
    );
    drop(origin);
    assert_eq!(held(&world), before, "something leaked");
}

/// Broken on purpose: files never let go (two descriptors more for each).
#[test]
fn files_are_registered_once_and_not_without_end() {
    let world = World::new();
    let origin = world.open(soon());
    world.right(&origin, 0, 10);
    let one = held(&world).0;
    for _ in 0..20 {
        world.right(&origin, 0, 10);
    }
    assert_eq!(held(&world).0, one);
    let range = ByteRange { start: 0, len: 3 };
    for n in 0..3 * FILES_MAX {
        let object = format!("packs/{n}");
        fs::write(world.root().join(&object), n.to_string().repeat(3)).unwrap();
        let found = origin.fetch(&object, range).unwrap();
        assert_eq!(found, n.to_string().repeat(3).as_bytes()[..3]);
    }
    assert_eq!(held(&world).0, one + 2 * (FILES_MAX - 1));
    // Replaced through us: read anew.
    origin.replace("packs/0", b"other").unwrap();
    assert_eq!(origin.fetch("packs/0", range).unwrap(), b"oth");
    origin.remove("packs/0").unwrap();
    let error = origin.fetch("packs/0", range).unwrap_err();
    assert!(matches!(error, OriginError::NotFound { .. }), "{error}");
}

/// A damaged object that somebody else replaced is read anew after a read of it failed. Broken on purpose: not
/// forgetting the file after a failure (the error stays).
#[test]
fn a_file_that_failed_is_opened_again() {
    let world = World::new();
    let origin = world.open(soon());
    let path = world.root().join("packs/b");
    fs::write(&path, &world.bytes[..1000]).unwrap();
    let range = ByteRange {
        start: 0,
        len: 1500,
    };
    let error = origin.fetch_of("packs/b", 1500, range).unwrap_err();
    let expected = "expected an object of 1500 bytes, found one of 1000";
    assert!(error.to_string().ends_with(expected), "{error}");
    let new = path.with_extension("new");
    fs::write(&new, &world.bytes[..1500]).unwrap();
    fs::rename(new, &path).unwrap();
    let found = origin.fetch_of("packs/b", 1500, range).unwrap();
    assert!(found == world.bytes[..1500]);
}

#[test]
fn without_library_or_mount_the_error_says_what_to_do() {
    let world = World::new();
    let url: OriginUrl = format!("3fs:{}", world.root().display()).parse().unwrap();
    assert_eq!(url.to_string(), format!("3fs:{}", world.root().display()));
    for open in [OriginUrl::open, OriginUrl::open_or_create] {
        let text = open(&url).unwrap_err().to_string();
        for part in [
            "cannot load 3FS's library `libhf3fs_api_shared.so`",
            "set DSEC_HF3FS_LIB to its path",
            &format!("or use `dir:{}`", world.root().display()),
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
    let options = |library: PathBuf| ThreeFsOptions {
        library: library.into(),
        patience: soon(),
    };
    // A library, but another one.
    let libc = ThreeFsOrigin::open_with(&world.root(), &options("libc.so.6".into()));
    let text = libc.unwrap_err().to_string();
    assert!(
        text.contains("it has no `hf3fs_extract_mount_point`"),
        "{text}"
    );
    let elsewhere = tempfile::tempdir().unwrap();
    let library = options(three_fs_stand_in::library());
    let text = ThreeFsOrigin::open_with(elsewhere.path(), &library);
    let text = text.unwrap_err().to_string();
    assert!(text.contains("is not on a 3FS mount; use `dir:"), "{text}");
    for wrong in ["3fs:", "3fs:relative", "3fs"] {
        let error = wrong.parse::<OriginUrl>().unwrap_err().to_string();
        assert!(error.contains("`3fs:/absolute/path`"), "{error}");
    }
}
