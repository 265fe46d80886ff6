//! `dsec push`, `dsec repair` and `dsec fsck --origin --repair` under SIGKILL: whenever it comes, what can be seen is whole or as damaged
//! as before, doing it again finishes, and a collection takes the temporaries away.
//!
//! A process is killed when so many files of the target have changed, not after a time.
#![expect(
    clippy::indexing_slicing,
    reason = "what is missing in a report fails the test"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::world::{World, dsec, json, noise, ok};

/// Points at which each command is killed; more for `tools/soak`.
fn points() -> usize {
    let cases = std::env::var("DSEC_CASES").ok();
    cases.and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// Every file below a folder, with what tells it from another one under its name.
fn files(root: &Path) -> BTreeSet<(PathBuf, u64, u64)> {
    let mut out = BTreeSet::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        // It may go while we look.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                folders.push(entry.path());
            } else {
                out.insert((entry.path(), meta.ino(), meta.len()));
            }
        }
    }
    out
}

fn names(root: &Path) -> BTreeSet<PathBuf> {
    files(root).into_iter().map(|(path, ..)| path).collect()
}

fn spawn(world: &World, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_dsec"))
        .args(args)
        .current_dir(world.root())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Runs a command and kills it after `changes` changes below `folder`; whether it was still at work.
fn kill_after(world: &World, args: &[&str], folder: &Path, changes: usize) -> bool {
    let before = files(folder);
    let mut seen = BTreeSet::new();
    let mut child = spawn(world, args);
    while seen.len() < changes {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        seen.extend(files(folder).difference(&before).cloned());
    }
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

/// The damaged objects of a tag; none where the origin has no such tag.
fn damaged(world: &World, origin: &str, tag: &str) -> Option<BTreeSet<String>> {
    let output = dsec(world, &["verify", tag, "--origin", origin, "--json"]);
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("no layer") {
        return None;
    }
    let report = json(&String::from_utf8(output.stdout).unwrap());
    let damage = report["damage"].as_array().unwrap().iter();
    Some(
        damage
            .map(|d| d["object"].as_str().unwrap().to_owned())
            .collect(),
    )
}

const TAGS: [&str; 3] = ["base/t:1", "base/t:2", "base/t:3"];

/// Three layers that share a file, on the origin `a`.
fn three(world: &World) {
    for n in 1_u8..4 {
        let tree = world.folder(&format!("tree-{n}"));
        fs::write(tree.join("shared"), noise(1, 300_000)).unwrap();
        fs::write(tree.join("own"), noise(10 + u64::from(n), 200_000)).unwrap();
        let version = n.to_string();
        world.build(&format!("tree-{n}"), "a", &["--version", &version]);
    }
}

fn collect(world: &World, origin: &str) {
    ok(dsec(
        world,
        &["gc", "--grace", "0", "--json", "--origin", origin],
    ));
}

fn copy_folder(from: &Path, to: &Path) {
    fs::remove_dir_all(to).ok();
    let status = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(status.unwrap().success());
}

/// Turned red by: a tag that is written before placement and bundle.
#[test]
fn a_killed_push_leaves_whole_layers_and_nothing_else() {
    let world = World::new();
    three(&world);
    let (a, b) = (world.origin("a"), world.origin("b"));
    let target = world.path("b");
    let push = [&["push"][..], &TAGS, &["--origin", &a, "--to", &b]].concat();
    ok(dsec(&world, &push));
    collect(&world, &b);
    let finished = names(&target);
    let mut at_work = 0;
    for point in 0..points() {
        fs::remove_dir_all(&target).unwrap();
        fs::create_dir(&target).unwrap();
        at_work += usize::from(kill_after(&world, &push, &target, 1 + point * 2));
        for tag in TAGS {
            let found = damaged(&world, &b, tag).unwrap_or_default();
            assert_eq!(found, BTreeSet::new(), "{tag} at point {point}");
        }
        if point % 2 == 0 {
            // What the dead left goes, and what is whole stays.
            collect(&world, &b);
            let left = names(&target);
            assert!(left.is_subset(&finished), "{left:?}");
            assert!(
                names(&target.join("tmp")).is_empty() && names(&target.join("leases")).is_empty()
            );
        }
        ok(dsec(&world, &push));
        collect(&world, &b);
        assert_eq!(names(&target), finished, "point {point}");
    }
    assert!(at_work * 2 >= points(), "{at_work} were killed at work");
}

/// A pack, a metadata image, a placement and a tag of the second layer, and the bundle of the third. Gives the damaged objects.
fn damage(world: &World) -> BTreeSet<String> {
    let target = world.path("b");
    let tag =
        |n: u8| json(&fs::read_to_string(target.join(format!("tags/base/t/{n}.json"))).unwrap());
    let object = |folder: &str, digest: &str, ending: &str| {
        format!("{folder}/{}/{digest}{ending}", &digest[..2])
    };
    let read = |name: &str| json(&fs::read_to_string(target.join(name)).unwrap());
    let (second, third) = (tag(2), tag(3));
    let (second, third) = (
        second["layer"].as_str().unwrap(),
        third["layer"].as_str().unwrap(),
    );
    let manifest = read(&object("manifests", second, ".json"));
    let placement = read(&object("placements", second, ".json"));
    let packs = placement["packs"].as_array().unwrap();
    let mut hit: BTreeSet<String> = packs
        .iter()
        .map(|pack| object("packs", pack["digest"].as_str().unwrap(), ".zst"))
        .collect();
    hit.insert(object(
        "meta",
        manifest["meta"]["digest"].as_str().unwrap(),
        ".erofs.zst",
    ));
    hit.insert(object("bundles", third, ".bundle"));
    for name in &hit {
        let path = target.join(name);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        // A new file, as the name may be a link to another one.
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
    }
    hit
}

#[test]
fn a_killed_repair_leaves_what_is_right_or_as_damaged_as_it_was() {
    let world = World::new();
    three(&world);
    let (a, b) = (world.origin("a"), world.origin("b"));
    let target = world.path("b");
    ok(dsec(
        &world,
        &[&["push"][..], &TAGS, &["--origin", &a, "--to", &b]].concat(),
    ));
    collect(&world, &b);
    let finished = names(&target);
    let hit = damage(&world);
    let broken = world.path("broken");
    copy_folder(&target, &broken);
    let repair = ["repair", "base/t:2", "--from", &a, "--origin", &b];
    let bundle = ["repair", "base/t:3", "--from", &a, "--origin", &b];
    let mut at_work = 0;
    for point in 0..points() {
        copy_folder(&broken, &target);
        at_work += usize::from(kill_after(&world, &repair, &target, 1 + point / 2));
        for tag in TAGS {
            let found = damaged(&world, &b, tag).unwrap();
            assert!(found.is_subset(&hit), "{tag} at point {point}: {found:?}");
        }
        ok(dsec(&world, &repair));
        ok(dsec(&world, &bundle));
        for tag in TAGS {
            assert_eq!(
                damaged(&world, &b, tag).unwrap(),
                BTreeSet::new(),
                "{tag} at point {point}"
            );
        }
        collect(&world, &b);
        assert_eq!(names(&target), finished, "point {point}");
    }
    assert!(at_work * 4 >= points(), "{at_work} were killed at work");
}

/// The index, and bundles that are damaged or missing: what an origin mends by itself.
#[test]
fn a_killed_fsck_leaves_what_is_right_or_as_damaged_as_it_was() {
    let world = World::new();
    three(&world);
    let b = world.origin("a");
    let target = world.path("a");
    collect(&world, &b);
    let finished = names(&target);
    let mut bundles = names(&target.join("bundles")).into_iter();
    fs::remove_file(bundles.next().unwrap()).unwrap();
    for path in bundles {
        fs::write(path, b"damaged").unwrap();
    }
    fs::write(target.join("index.json"), b"{}").unwrap();
    let broken = world.path("broken");
    copy_folder(&target, &broken);
    let fsck = ["fsck", "--origin", &b, "--repair"];
    let mut at_work = 0;
    for point in 0..points() {
        copy_folder(&broken, &target);
        at_work += usize::from(kill_after(&world, &fsck, &target, 1 + point / 2));
        for tag in TAGS {
            let found = damaged(&world, &b, tag).unwrap();
            let bundles = found.iter().all(|object| object.starts_with("bundles/"));
            assert!(
                bundles && found.len() <= 1,
                "{tag} at point {point}: {found:?}"
            );
        }
        ok(dsec(&world, &fsck));
        ok(dsec(&world, &["fsck", "--origin", &b, "--deep"]));
        collect(&world, &b);
        assert_eq!(names(&target), finished, "point {point}");
    }
    assert!(at_work * 4 >= points(), "{at_work} were killed at work");
}
