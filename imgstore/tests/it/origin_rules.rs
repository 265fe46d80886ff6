//! What every origin that can be written promises, held against each of them by one function.

use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use imgstore::origin::dir::DirOrigin;
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::{ByteRange, Created, Origin, OriginError};

use crate::random_tree::Rng;

/// Larger than a part of any upload, and not a multiple of one.
const LARGE_BYTES: usize = (17 << 20) + 12_345;

fn range(start: u64, len: u64) -> ByteRange {
    ByteRange { start, len }
}

/// Reads of one object of ten bytes.
fn reads(origin: &dyn Origin, object: &str) {
    assert_eq!(origin.fetch(object, range(0, 10)).unwrap(), b"0123456789");
    assert_eq!(origin.fetch(object, range(9, 1)).unwrap(), b"9");
    for past in [range(9, 2), range(10, 1), range(1 << 40, 5)] {
        let error = origin.fetch(object, past).unwrap_err();
        assert!(
            matches!(error, OriginError::WrongAnswer { .. }),
            "{past:?}: {error}"
        );
    }
    assert_eq!(origin.fetch_all(object, 10).unwrap(), b"0123456789");
    let error = origin.fetch_all(object, 9).unwrap_err();
    assert!(matches!(error, OriginError::WrongAnswer { .. }), "{error}");
    assert_eq!(origin.size(object).unwrap(), 10);
    for error in [
        origin.fetch("packs/ab/none", range(0, 1)).err(),
        origin.fetch_all("packs/ab/none", 5).err(),
        origin.size("packs/ab/none").err(),
    ] {
        assert!(
            matches!(error, Some(OriginError::NotFound { .. })),
            "{error:?}"
        );
    }
}

fn lists(origin: &dyn Origin, long: &str) {
    let tags = ["tags/base/a+b_c.d/1.json", "tags/base/a/1.json", long];
    for tag in tags {
        origin.replace(tag, b"first").unwrap();
        origin.replace(tag, b"second!").unwrap();
        assert_eq!(origin.fetch_all(tag, 100).unwrap(), b"second!", "{tag}");
    }
    let mut wanted: Vec<String> = tags.map(str::to_owned).to_vec();
    wanted.sort();
    assert_eq!(origin.list("tags/").unwrap(), wanted);
    assert_eq!(origin.list("tags/base/a/").unwrap(), [tags[1]]);
    assert_eq!(origin.list("leases/").unwrap(), Vec::<String>::new());
    let infos = origin.list_info("tags/").unwrap();
    let names: Vec<&String> = infos.iter().map(|info| &info.name).collect();
    assert_eq!(names, wanted.iter().collect::<Vec<_>>());
    for info in &infos {
        let name = &info.name;
        assert_eq!(info.size, 7, "{name}");
        let age = SystemTime::now().duration_since(info.modified);
        // Origins keep whole seconds; some round up.
        assert!(
            age.unwrap_or_else(|e| e.duration()) < Duration::from_secs(60),
            "{name}"
        );
    }
    origin.remove(tags[1]).unwrap();
    origin.remove(tags[1]).unwrap();
    let error = origin.fetch_all(tags[1], 100).unwrap_err();
    assert!(matches!(error, OriginError::NotFound { .. }), "{error}");
    wanted.retain(|name| name != tags[1]);
    assert_eq!(origin.list("tags/").unwrap(), wanted);
    origin.replace(tags[1], b"again").unwrap();
    assert_eq!(origin.fetch_all(tags[1], 100).unwrap(), b"again");
}

/// The promises, on an origin with nothing in it. `part_max` is the longest part of a name that is tried.
pub(crate) fn keeps_the_rules(origin: &dyn Origin, part_max: usize) {
    let ten = "packs/ab/ten";
    assert_eq!(
        origin.create(ten, &mut &b"0123456789"[..]).unwrap(),
        Created::New
    );
    assert_eq!(
        origin.create(ten, &mut &b"0123456789"[..]).unwrap(),
        Created::Existed
    );
    reads(origin, ten);
    assert_eq!(
        origin.create("packs/ab/empty", &mut &b""[..]).unwrap(),
        Created::New
    );
    assert_eq!(origin.fetch_all("packs/ab/empty", 0).unwrap(), b"");

    let version = "9".repeat(part_max);
    lists(
        origin,
        &format!("tags/base/{}/{version}.json", "n".repeat(part_max)),
    );

    let large = Rng::new(7).bytes(LARGE_BYTES);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &large).unwrap();
    let object = "packs/cd/large";
    assert_eq!(
        origin.create_from_file(object, file.path()).unwrap(),
        Created::New
    );
    assert_eq!(
        origin.create_from_file(object, file.path()).unwrap(),
        Created::Existed
    );
    assert_eq!(
        origin.size(object).unwrap(),
        u64::try_from(LARGE_BYTES).unwrap()
    );
    let at = (8 << 20) - 3;
    let got = origin.fetch(object, range(at, 9)).unwrap();
    let at = usize::try_from(at).unwrap();
    assert_eq!(got, large[at..at + 9]);
    assert!(origin.fetch_all(object, 32 << 20).unwrap() == large);
    std::fs::write(file.path(), b"mended").unwrap();
    origin.replace_from_file(object, file.path()).unwrap();
    assert_eq!(origin.fetch_all(object, 100).unwrap(), b"mended");
    assert_eq!(
        origin.list("packs/").unwrap(),
        ["packs/ab/empty", ten, object]
    );
}

/// Of many writers of one name exactly one makes it, and the others leave it alone.
pub(crate) fn one_of_many_writers_wins(origin: &dyn Origin) {
    for round in 0..4 {
        let object = format!("leases/{round}");
        let start = Barrier::new(8);
        let wins: Vec<Option<u8>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0_u8..8)
                .map(|n| {
                    let (start, object) = (&start, &object);
                    scope.spawn(move || {
                        start.wait();
                        let made = origin.create(object, &mut &[n; 100][..]).unwrap();
                        (made == Created::New).then_some(n)
                    })
                })
                .collect();
            writers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        let winners: Vec<u8> = wins.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        assert_eq!(origin.fetch_all(&object, 100).unwrap(), [winners[0]; 100]);
    }
}

#[test]
fn memory_and_directories_keep_the_rules() {
    keeps_the_rules(&MemOrigin::default(), 128);
    let dir = tempfile::tempdir().unwrap();
    let origin = DirOrigin::create_root(dir.path()).unwrap();
    keeps_the_rules(&origin, 128);
    one_of_many_writers_wins(&origin);
}
