//! `dsec fsck --cache` and `dsec cache` as users and scripts meet them.

use std::fs;
use std::path::PathBuf;

use crate::daemon::Layerd;
use crate::world::{World, dsec, failed, json, noise, ok, sh};

/// A world with a layer that was mounted, read and left in the cache.
fn cached_world() -> (World, Vec<PathBuf>) {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("data"), noise(1, 1 << 20)).unwrap();
    world.build("tree", "origin", &[]);
    let daemon = Layerd::start(&world, &world.origin("origin"));
    let mnt = world.folder("mnt");
    let at = mnt.to_str().unwrap();
    ok(daemon.run(&["mount", "base/t:1", at]));
    assert!(fs::read(mnt.join("data")).unwrap() == noise(1, 1 << 20));
    while segments(&world).len() < 4 {
        std::thread::yield_now();
    }
    ok(daemon.run(&["umount", at]));
    drop(daemon);
    let files = segments(&world);
    (world, files)
}

fn segments(world: &World) -> Vec<PathBuf> {
    let shards = fs::read_dir(world.path("cache/segments")).unwrap();
    let files = shards.flat_map(|shard| fs::read_dir(shard.unwrap().path()).unwrap());
    let mut files: Vec<PathBuf> = files.map(|f| f.unwrap().path()).collect();
    files.sort();
    files
}

/// Meant to turn red (not tried): `check_frame` that does not compare the digest.
#[test]
fn fsck_finds_each_kind_of_damage_and_mends_only_when_told() {
    let (world, files) = cached_world();
    let cache = world.path("cache");
    let fsck = |more: &[&str]| dsec(&world, &[&["fsck", "--cache", "cache"], more].concat());
    let report = json(&ok(fsck(&["--json"])));
    assert_eq!(report["segments_right"], files.len());
    assert_eq!(report["descriptions_right"], 3);
    assert!(ok(fsck(&[])).contains("all right"));
    fs::copy(&files[1], &files[0]).unwrap();
    let whole = fs::read(&files[2]).unwrap();
    fs::write(&files[2], &whole[..whole.len() / 2]).unwrap();
    let layers: Vec<_> = fs::read_dir(cache.join("layers")).unwrap().collect();
    let layer = layers[0].as_ref().unwrap().path();
    let mut placement = fs::read(layer.join("placement.json")).unwrap();
    placement[100] ^= 1;
    fs::write(layer.join("placement.json"), placement).unwrap();
    let mut meta = fs::read(layer.join("meta.erofs")).unwrap();
    meta[5000] ^= 1;
    fs::write(layer.join("meta.erofs"), meta).unwrap();
    let left_over = cache.join("tmp/dsec-0000000000000001-7");
    fs::write(&left_over, b"half").unwrap();
    let foreign = [files[3].with_extension("bak"), cache.join("tmp/mine")];
    for path in &foreign {
        fs::write(path, b"mine").unwrap();
    }
    let expected = [
        files[0].clone(),
        files[2].clone(),
        layer.join("meta.erofs"),
        layer.join("placement.json"),
    ];
    for (arguments, mended) in [(&["--json"][..], false), (&["--json", "--repair"], true)] {
        let output = fsck(arguments);
        assert_eq!(output.status.code(), Some(i32::from(!mended)));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let report = json(&String::from_utf8(output.stdout).unwrap());
        let damage = report["damage"].as_array().unwrap();
        let mut found: Vec<PathBuf> = damage
            .iter()
            .map(|d| world.root().join(d["path"].as_str().unwrap()))
            .collect();
        found.sort();
        let mut expected = expected.to_vec();
        expected.sort();
        assert_eq!(found, expected);
        assert!(damage.iter().all(|d| d["mended"] == mended));
        assert_eq!(
            (&report["leftovers"], &report["foreign"]),
            (&1.into(), &2.into())
        );
        assert_eq!(expected.iter().any(|path| path.exists()), !mended);
        assert_eq!(left_over.exists(), !mended);
    }
    assert!(
        foreign
            .iter()
            .all(|path| fs::read(path).unwrap() == b"mine")
    );
    assert!(ok(fsck(&["--repair"])).contains("all right"));
}

/// A mount over a file: it cannot be removed.
struct Stuck(PathBuf);

impl Stuck {
    fn over(file: &std::path::Path) -> Self {
        sh(
            file.parent().unwrap(),
            &format!("mount --bind {0} {0}", file.display()),
        );
        Self(file.to_owned())
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        sh(
            self.0.parent().unwrap(),
            &format!("umount {}", self.0.display()),
        );
    }
}

/// What cannot be mended stops nothing else, and says so by the status. Turned red by: a status that looks at damage alone.
#[test]
fn fsck_fails_while_damage_is_left() {
    let (world, files) = cached_world();
    for file in &files[..3] {
        fs::write(file, b"damaged").unwrap();
    }
    let fsck = |more: &[&str]| dsec(&world, &[&["fsck", "--cache", "cache"], more].concat());
    let stuck = Stuck::over(&files[0]);
    let output = fsck(&["--repair"]);
    assert_eq!(failed(&output, 1), "");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("2 damaged files were removed, 1 could not be")
            && said.contains("cannot remove"),
        "{said}"
    );
    let left: Vec<bool> = files.iter().map(|file| file.exists()).collect();
    assert_eq!(left[..4], [true, false, false, true]);
    drop(stuck);
    assert!(ok(fsck(&["--repair"])).contains("1 damaged files were removed"));
    assert!(!files[0].exists());
    assert!(ok(fsck(&[])).contains("all right"));
}

#[test]
fn fsck_refuses_a_cache_in_use_and_a_folder_that_is_none() {
    let (world, _) = cached_world();
    let daemon = Layerd::start(&world, &world.origin("origin"));
    let pid = daemon.stats()["control_pid"].to_string();
    let error = failed(&dsec(&world, &["fsck", "--cache", "cache"]), 1);
    assert!(
        error.contains(&format!("in use by layerd, process {pid}")),
        "{error}"
    );
    drop(daemon);
    ok(dsec(&world, &["fsck", "--cache", "cache"]));
    let error = failed(&dsec(&world, &["fsck", "--cache", "tree"]), 1);
    assert!(error.contains("is no cache"), "{error}");
    failed(&dsec(&world, &["fsck"]), 2);
}

#[test]
fn what_is_cached_can_be_seen_and_pinned() {
    let (world, files) = cached_world();
    let daemon = Layerd::start(&world, &world.origin("origin"));
    while daemon.stats()["cache"]["counted"] != true {
        std::thread::yield_now();
    }
    let list = || json(&ok(daemon.run(&["cache", "ls", "--json"])));
    let layer = &list()["layers"][0];
    assert_eq!(
        (&layer["segments_cached"], &layer["pinned"]),
        (&files.len().into(), &false.into())
    );
    let pinned = json(&ok(daemon.run(&["cache", "pin", "base/t:1", "--json"])));
    assert_eq!(
        (&pinned["pinned"], &pinned["layer"]),
        (&true.into(), &layer["layer"])
    );
    assert_eq!(list()["layers"][0]["refs"][0], "base/t:1");
    let text = ok(daemon.run(&["cache", "ls"]));
    assert!(
        text.contains("base/t:1") && text.contains("pinned"),
        "{text}"
    );
    assert_eq!(ok(daemon.run(&["cache", "unpin", "base/t:1"])), "");
    let error = failed(&daemon.run(&["cache", "unpin", "base/t:1"]), 1);
    assert!(error.contains("`base/t:1` is not pinned"), "{error}");
    let error = failed(&daemon.run(&["cache", "pin", "base/none:1"]), 1);
    assert!(error.contains("base/none:1"), "{error}");
}
