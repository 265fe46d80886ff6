//! Disks in folders: random work with snapshots, merges and reopening equals a model; snapshots are taken while others write;
//! whatever a killed process left of a snapshot or a merge opens.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use imgstore::disk::device::BlockDevice;
use imgstore::disk::folder::{DiskFolder, Lower, open_lower, read_state, write_merged};
use imgstore::disk::stack::Stack;
use proptest::prelude::*;

const SECTORS: u64 = 128;

fn content(number: u64, lba: u64) -> Vec<u8> {
    [number.to_le_bytes(), lba.to_le_bytes()]
        .concat()
        .repeat(32)
}

fn written(number: u64, lba: u64, sectors: u64) -> Vec<u8> {
    (lba..lba + sectors)
        .flat_map(|lba| content(number, lba))
        .collect()
}

fn all(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xEE; usize::try_from(device.size()).unwrap()];
    device.read(&mut bytes, 0).unwrap();
    bytes
}

fn set(model: &mut [u8], lba: u64, bytes: &[u8]) {
    let from = usize::try_from(lba * 512).unwrap();
    model[from..from + bytes.len()].copy_from_slice(bytes);
}

/// The disk as it would be read from its files alone, without the pair on top.
fn sealed(folder: &Path) -> Vec<u8> {
    let state = read_state(folder).unwrap();
    let layers = state
        .layers
        .iter()
        .map(|lower| open_lower(folder, lower).unwrap());
    all(&Stack::new(&layers.collect::<Vec<_>>()).unwrap())
}

/// Without the side files that a pair has while the disk is open.
fn files(folder: &Path) -> Vec<String> {
    let mut names = all_files(folder);
    names.retain(|name| !name.contains(".recent"));
    names
}

fn all_files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64),
    Discard(u64, u64),
    Snapshot,
    Merge(usize, usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..SECTORS, 1..20_u64).prop_map(|(lba, n)| (lba, n.min(SECTORS - lba)));
    prop_oneof![
        6 => range.clone().prop_map(|(lba, n)| Step::Write(lba, n)),
        2 => range.prop_map(|(lba, n)| Step::Discard(lba, n)),
        2 => Just(Step::Snapshot),
        1 => (0..6_usize, 2..5_usize).prop_map(|(at, n)| Step::Merge(at, n)),
        1 => Just(Step::Reopen),
    ]
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("DSEC_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    ProptestConfig::with_cases(cases.unwrap_or(12))
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn random_work_equals_the_model(
        base in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("disk");
        let mut model = vec![0; usize::try_from(SECTORS * 512).unwrap()];
        let mut layers = Vec::new();
        if base {
            // An odd size: the disk is larger than what it lies on.
            let raw = written(999, 0, 40);
            std::fs::write(scratch.path().join("raw"), &raw[..20_000]).unwrap();
            set(&mut model, 0, &raw[..20_000]);
            layers.push(Lower::Raw(scratch.path().join("raw")));
        }
        DiskFolder::create(&folder, layers, Some(SECTORS * 512)).unwrap();
        let mut open = DiskFolder::open(&folder).unwrap();
        for (number, step) in (1..).zip(steps) {
            match step {
                Step::Write(lba, n) => {
                    let bytes = written(number, lba, n);
                    open.disk().write(&bytes, lba * 512).unwrap();
                    set(&mut model, lba, &bytes);
                }
                Step::Discard(lba, n) => {
                    open.disk().discard(lba * 512, n * 512).unwrap();
                    set(&mut model, lba, &vec![0; usize::try_from(n * 512).unwrap()]);
                }
                Step::Snapshot => {
                    open.snapshot().unwrap();
                    let mut below = sealed(&folder);
                    below.resize(model.len(), 0);
                    prop_assert!(below == model, "the sealed layers are the disk");
                }
                Step::Merge(at, n) => {
                    let count = open.state().layers.len();
                    let merged = open.merge(at..at + n);
                    prop_assert_eq!(merged.is_ok(), at + n <= count);
                    if merged.is_ok() {
                        prop_assert_eq!(open.state().layers.len(), count + 1 - n);
                    }
                }
                Step::Reopen => {
                    open.disk().flush().unwrap();
                    drop(open);
                    open = DiskFolder::open(&folder).unwrap();
                }
            }
            prop_assert!(all(&*open.disk()) == model, "after step {}", number);
        }
        let state = open.state();
        drop(open);
        // Nothing lies around: disk.json, lock, the pair on top, and one file a layer of its own.
        let own = state.layers.iter().filter(|lower| matches!(lower, Lower::Lsmt(_))).count();
        prop_assert_eq!(all_files(&folder).len(), 4 + own);
    }
}

#[test]
fn a_disk_is_open_once() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("disk");
    DiskFolder::create(&folder, Vec::new(), Some(1 << 20)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    let error = DiskFolder::open(&folder).unwrap_err().to_string();
    assert!(error.contains("open in another process"), "{error}");
    drop(open);
    DiskFolder::open(&folder).unwrap();
    let error = DiskFolder::create(&folder, Vec::new(), Some(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("is a disk already"), "{error}");
}

/// Eight threads write numbered sectors while snapshots and merges go on; every sector that was answered is there at the end, and in no
/// snapshot is there one that was answered after it. Red when a write does not hold the gate: it then lands in a pair that is being sealed.
#[test]
fn snapshots_while_others_write_lose_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("disk");
    DiskFolder::create(&folder, Vec::new(), Some(64 << 20)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    let disk = open.disk();
    let done: Arc<Vec<AtomicU64>> = Arc::new((0..8).map(|_| AtomicU64::new(0)).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..8_u64)
        .map(|thread| {
            let (disk, done, stop) = (Arc::clone(&disk), Arc::clone(&done), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut number = 0;
                while !stop.load(Ordering::SeqCst) {
                    number += 1;
                    let lba = thread * 1000 + number % 1000;
                    disk.write(&content(number, lba), lba * 512).unwrap();
                    done[usize::try_from(thread).unwrap()].store(number, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for round in 0..20 {
        let before: Vec<u64> = done.iter().map(|n| n.load(Ordering::SeqCst)).collect();
        open.snapshot().unwrap();
        let below = sealed(&folder);
        for (thread, answered) in (0..8_u64).zip(before) {
            for number in answered.saturating_sub(900).max(1)..=answered {
                let lba = thread * 1000 + number % 1000;
                let from = usize::try_from(lba * 512).unwrap();
                let found = u64::from_le_bytes(below[from..from + 8].try_into().unwrap());
                assert!(
                    found >= number && found % 1000 == number % 1000,
                    "{number} {found}"
                );
                assert!(below[from..from + 512] == content(found, lba), "torn");
            }
        }
        if round % 5 == 4 {
            open.merge(0..open.state().layers.len()).unwrap();
        }
    }
    stop.store(true, Ordering::SeqCst);
    for thread in threads {
        thread.join().unwrap();
    }
    for (thread, last) in (0..8_u64).zip(done.iter()) {
        let lba = thread * 1000 + last.load(Ordering::SeqCst) % 1000;
        let mut found = vec![0; 512];
        disk.read(&mut found, lba * 512).unwrap();
        assert!(found == content(last.load(Ordering::SeqCst), lba));
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in all_files(from) {
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// A folder as a killed process leaves it: what was answered is there, flushed or not, in the pair on top and in one that was about to
/// be sealed. Where the data of a write is not what was written, that write and what came after it do not count.
///
/// Red without the side files, when the pair that is sealed next does not have them replayed, and without the check of the data.
#[test]
fn what_was_answered_survives_the_process() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let folder = at("disk");
    DiskFolder::create(&folder, Vec::new(), Some(SECTORS * 512)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    open.disk().write(&written(1, 0, 9), 0).unwrap();
    open.disk().flush().unwrap();
    open.disk().write(&written(2, 5, 9), 5 * 512).unwrap();
    let first = all(&*open.disk());
    open.disk().write(&written(3, 5, 2), 5 * 512).unwrap();
    open.disk().discard(512, 1024).unwrap();
    let answered = all(&*open.disk());
    copy(&folder, &at("killed"));
    copy(&folder, &at("data lost"));
    let path = at("data lost").join("w0.data");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
    // Killed in a snapshot: the state names the pair as what lies below, and it is not flushed.
    copy(&at("killed"), &at("in snapshot"));
    open.snapshot().unwrap();
    for name in ["w1.data", "w1.index"] {
        std::fs::copy(folder.join(name), at("in snapshot").join(name)).unwrap();
    }
    let state = std::fs::read_to_string(folder.join("disk.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&state).unwrap();
    json["layers"] = serde_json::json!([{ "pair": "w0" }]);
    std::fs::write(at("in snapshot").join("disk.json"), json.to_string()).unwrap();
    for (name, expected) in [
        ("killed", &answered),
        ("in snapshot", &answered),
        ("data lost", &first),
    ] {
        let open = DiskFolder::open(&at(name)).unwrap();
        assert!(all(&*open.disk()) == *expected, "{name}");
        drop(open);
        assert_eq!(all_files(&at(name)), files(&at(name)), "{name}");
        let open = DiskFolder::open(&at(name)).unwrap();
        assert!(all(&*open.disk()) == *expected, "{name}, again");
    }
}

/// What is on disk between any two steps of a snapshot, put together by hand.
#[test]
fn a_snapshot_that_was_cut_off_is_finished_when_the_disk_is_opened() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let before = at("before");
    DiskFolder::create(&before, Vec::new(), Some(1 << 20)).unwrap();
    let open = DiskFolder::open(&before).unwrap();
    open.disk().write(&written(1, 5, 7), 5 * 512).unwrap();
    open.disk().flush().unwrap();
    let expected = all(&*open.disk());
    copy(&before, &at("kept"));
    open.snapshot().unwrap();
    drop(open);
    let (state, names) = (read_state(&before).unwrap(), files(&before));
    assert_eq!(state.layers, [Lower::Lsmt(PathBuf::from("w0.data"))]);
    assert_eq!(
        names,
        ["disk.json", "lock", "w0.data", "w1.data", "w1.index"]
    );

    // The new pair was made, nothing else: it is a leftover.
    let cut = at("new pair only");
    copy(&at("kept"), &cut);
    std::fs::copy(before.join("w1.data"), cut.join("w1.data")).unwrap();
    std::fs::copy(before.join("w1.index"), cut.join("w1.index")).unwrap();
    std::fs::write(cut.join("mine.data"), b"foreign").unwrap();
    let open = DiskFolder::open(&cut).unwrap();
    assert!(all(&*open.disk()) == expected);
    assert_eq!(
        files(&cut),
        ["disk.json", "lock", "mine.data", "w0.data", "w0.index"]
    );
    drop(open);

    // The state names the old pair as what lies below; it is not sealed. And: sealed, but the state does not say so.
    for (name, sealed_already) in [("not sealed", false), ("sealed, unsaid", true)] {
        let cut = at(name);
        copy(&at("kept"), &cut);
        for file in ["w1.data", "w1.index"] {
            std::fs::copy(before.join(file), cut.join(file)).unwrap();
        }
        if sealed_already {
            std::fs::copy(before.join("w0.data"), cut.join("w0.data")).unwrap();
        }
        let mut json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(before.join("disk.json")).unwrap()).unwrap();
        json["layers"] = serde_json::json!([{ "pair": "w0" }]);
        std::fs::write(cut.join("disk.json"), json.to_string()).unwrap();
        let open = DiskFolder::open(&cut).unwrap();
        assert!(all(&*open.disk()) == expected, "{name}");
        assert_eq!(open.state(), state, "{name}");
        assert_eq!(files(&cut), names, "{name}");
    }

    // All is done but the old index is still there.
    let cut = at("index left");
    copy(&before, &cut);
    std::fs::copy(at("kept").join("w0.index"), cut.join("w0.index")).unwrap();
    let open = DiskFolder::open(&cut).unwrap();
    assert!(all(&*open.disk()) == expected);
    assert_eq!(files(&cut), names);
}

#[test]
fn children_share_what_lies_below_and_differ_above() {
    let scratch = tempfile::tempdir().unwrap();
    let parent = scratch.path().join("parent");
    DiskFolder::create(&parent, Vec::new(), Some(1 << 20)).unwrap();
    let open = DiskFolder::open(&parent).unwrap();
    open.disk().write(&written(1, 0, 100), 0).unwrap();
    let snapshot = open.snapshot().unwrap().layer;
    open.disk().write(&written(2, 50, 10), 50 * 512).unwrap();
    let mut children = Vec::new();
    for number in 3..6 {
        let folder = scratch.path().join(number.to_string());
        DiskFolder::create(&folder, vec![Lower::Lsmt(snapshot.clone())], None).unwrap();
        let child = DiskFolder::open(&folder).unwrap();
        child
            .disk()
            .write(&written(number, 50, 5), 50 * 512)
            .unwrap();
        children.push((number, child));
    }
    for (number, child) in &children {
        let mut model = vec![0; 1 << 20];
        set(&mut model, 0, &written(1, 0, 100));
        set(&mut model, 50, &written(*number, 50, 5));
        assert!(all(&*child.disk()) == model);
    }
    // A layer of another lineage is refused by name.
    children[0].1.snapshot().unwrap();
    let own = scratch.path().join("3").join("w0.data");
    let layers = vec![Lower::Lsmt(own), Lower::Lsmt(snapshot)];
    let error = DiskFolder::create(&scratch.path().join("odd"), layers, None);
    assert!(error.is_ok(), "the lowest layer names no parent");
}

#[test]
fn fifty_layers_read_merge_and_stay_small() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("disk");
    DiskFolder::create(&folder, Vec::new(), Some(1 << 20)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    let mut model = vec![0; 1 << 20];
    for number in 0..50 {
        let bytes = written(number + 1, number * 7, 11);
        open.disk().write(&bytes, number * 7 * 512).unwrap();
        set(&mut model, number * 7, &bytes);
        open.snapshot().unwrap();
    }
    open.disk().write(&written(99, 3, 1), 3 * 512).unwrap();
    set(&mut model, 3, &written(99, 3, 1));
    assert_eq!(open.state().layers.len(), 50);
    assert!(all(&*open.disk()) == model);
    let base = open.disk().view().base.clone().unwrap();
    assert_eq!(base.map().records().len(), 50);
    let merged = open.merge(0..50).unwrap();
    assert!(all(&*open.disk()) == model);
    // Live sectors only: header, 50 x 7 + 4 sectors, index, trailer.
    let bytes = std::fs::metadata(&merged).unwrap().len();
    assert_eq!(
        bytes,
        (4096 + (50 * 7 + 4) * 512_u64 + 4096).next_multiple_of(4096) + 4096
    );
    drop(open);
    let open = DiskFolder::open(&folder).unwrap();
    assert!(all(&*open.disk()) == model);
    let state = open.state();
    let layers: Vec<_> = state
        .layers
        .iter()
        .map(|l| open_lower(&folder, l).unwrap())
        .collect();
    write_merged(&layers, &scratch.path().join("out")).unwrap();
}

/// Red when only layers with more than a limit of extents are sealed in place and the rest is an error: here the pair would have to
/// be, for it has more than a sealed layer may, and its data joins when it is written in order.
#[test]
fn a_layer_of_too_many_extents_is_written_in_order() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("disk");
    const SECTORS: u64 = 1_000_100;
    DiskFolder::create(&folder, Vec::new(), Some(SECTORS * 512)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    let disk = open.disk();
    assert!(open.snapshot_beyond(0).unwrap().is_none());
    // From the end to the start: no two neighbours continue each other in the data file.
    for lba in (0..SECTORS).rev() {
        disk.write(&lba.to_le_bytes().repeat(64), lba * 512)
            .unwrap();
    }
    assert_eq!(disk.view().top.extents(), 1_000_100);
    assert!(open.snapshot_beyond(1_000_100).unwrap().is_none());
    open.snapshot_beyond(1_000_099).unwrap().unwrap();
    let state = open.state();
    assert_eq!(state.layers, [Lower::Lsmt(PathBuf::from("w0.lsmt"))]);
    assert_eq!(
        files(&folder),
        ["disk.json", "lock", "w0.lsmt", "w1.data", "w1.index"]
    );
    assert!(disk.view().frozen.is_empty());
    for lba in [0, 1, 777_777, SECTORS - 1] {
        let mut found = vec![0; 512];
        disk.read(&mut found, lba * 512).unwrap();
        assert!(found == lba.to_le_bytes().repeat(64), "sector {lba}");
    }
    drop(open);
    // Alternate sectors do not join: the pair stays one, also when the disk is opened again, and is read and written over.
    let folder = scratch.path().join("apart");
    DiskFolder::create(&folder, Vec::new(), Some(SECTORS * 2 * 512)).unwrap();
    let open = DiskFolder::open(&folder).unwrap();
    let disk = open.disk();
    for lba in 0..SECTORS {
        disk.discard(lba * 2 * 512, 512).unwrap();
    }
    disk.write(&[7; 512], 0).unwrap();
    open.snapshot().unwrap();
    assert_eq!(open.state().layers, [Lower::Pair("w0".to_owned())]);
    disk.write(&[8; 512], 1024).unwrap();
    disk.flush().unwrap();
    drop(open);
    drop(disk);
    let open = DiskFolder::open(&folder).unwrap();
    assert_eq!(open.disk().view().frozen.len(), 1);
    let mut found = vec![0; 2048];
    open.disk().read(&mut found, 0).unwrap();
    assert!(found == [[7; 512], [0; 512], [8; 512], [0; 512]].concat());
}

/// A layer file that was exchanged for another is found by its name. Red without the check of the writable pair's parent.
#[test]
fn a_disk_does_not_open_on_other_layers_than_it_was_made_on() {
    let scratch = tempfile::tempdir().unwrap();
    let layer = |name: &str| {
        let folder = scratch.path().join(name);
        DiskFolder::create(&folder, Vec::new(), Some(1 << 20)).unwrap();
        let open = DiskFolder::open(&folder).unwrap();
        open.disk().write(&written(1, 0, 8), 0).unwrap();
        open.snapshot().unwrap().layer
    };
    let (right, wrong) = (layer("right"), layer("wrong"));
    let child = scratch.path().join("child");
    DiskFolder::create(&child, vec![Lower::Lsmt(right.clone())], None).unwrap();
    drop(DiskFolder::open(&child).unwrap());
    std::fs::rename(wrong, &right).unwrap();
    let error = DiskFolder::open(&child).unwrap_err();
    assert!(
        matches!(error, imgstore::disk::DiskError::WrongParent { .. }),
        "{error}"
    );
}
