//! Copying between origins, mending and checking them, as typed.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::world::{World, dsec, failed, json, noise, ok, sh};

/// Two versions on `a` that share a file.
fn two_versions(world: &World) {
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 700_000)).unwrap();
    world.build("tree", "a", &[]);
    fs::write(tree.join("b"), noise(2, 300_000)).unwrap();
    world.build("tree", "a", &["--version", "2"]);
}

fn run_json(world: &World, args: &[&str]) -> Value {
    json(&ok(dsec(world, &[args, &["--json"]].concat())))
}

fn packs(world: &World, origin: &str) -> Vec<PathBuf> {
    let found = sh(world.root(), &format!("find {origin}/packs -type f | sort"));
    found.lines().map(|name| world.path(name)).collect()
}

#[test]
fn push_and_pull_bring_what_is_missing() {
    let world = World::new();
    two_versions(&world);
    let (a, b, c) = (world.origin("a"), world.origin("b"), world.origin("c"));
    let first = run_json(&world, &["push", "base/t:1", "--origin", &a, "--to", &b]);
    let segments = first["segments_copied"].as_u64().unwrap();
    assert!(segments >= 2, "{first}");
    assert_eq!(first["segments_present"], 0);
    assert!(first["bytes_copied"].as_u64().unwrap() > 700_000, "{first}");
    let second = run_json(
        &world,
        &["push", "base/t:1", "base/t:2", "--origin", &a, "--to", &b],
    );
    assert!(
        second["segments_present"].as_u64().unwrap() >= segments,
        "{second}"
    );
    let bytes = second["bytes_copied"].as_u64().unwrap();
    assert!((300_000..400_000).contains(&bytes), "{second}");
    assert!(second["requests"].as_u64().unwrap() > 0);
    let again = run_json(
        &world,
        &["pull", "base/t:1", "base/t:2", "--from", &a, "--origin", &b],
    );
    assert_eq!(
        (&again["segments_copied"], &again["bytes_copied"]),
        (&Value::from(0), &Value::from(0))
    );
    for version in ["base/t:1", "base/t:2"] {
        ok(dsec(&world, &["verify", version, "--origin", &b]));
    }
    sh(
        world.root(),
        "rm b/index.json; touch b/index.json; diff -r a/tags b/tags; diff -r a/packs b/packs",
    );
    let text = ok(dsec(
        &world,
        &["pull", "base/t:2", "--from", &b, "--origin", &c],
    ));
    assert!(text.starts_with("base/t:2 = "), "{text}");
    let layers = ok(dsec(&world, &["layers", "--origin", &c]));
    assert_eq!(layers.lines().count(), 1);

    let error = failed(
        &dsec(&world, &["push", "base/t:1", "--origin", &a, "--to", &a]),
        1,
    );
    assert!(error.contains("two different origins"), "{error}");
    let error = failed(
        &dsec(&world, &["push", "base/t:9", "--origin", &a, "--to", &b]),
        1,
    );
    assert!(
        error.contains("base/t:9") && error.contains("dsec layers"),
        "{error}"
    );
}

#[test]
fn repair_mends_from_another_origin_until_verify_is_clean() {
    let world = World::new();
    two_versions(&world);
    let (a, b) = (world.origin("a"), world.origin("b"));
    ok(dsec(
        &world,
        &["push", "base/t:1", "base/t:2", "--origin", &a, "--to", &b],
    ));
    for pack in packs(&world, "a") {
        let mut bytes = fs::read(&pack).unwrap();
        let middle = bytes.len() / 3;
        bytes[middle] ^= 1;
        fs::write(&pack, bytes).unwrap();
    }
    sh(world.root(), "rm -r a/placements a/meta");
    let verify = ["verify", "base/t:2", "--origin", &a];
    let output = dsec(&world, &verify);
    failed(&output, 1);
    let said = String::from_utf8(output.stdout).unwrap();
    for part in [
        "dsec repair base/t:2 --from",
        "placements/",
        "meta/",
        "expected",
        "found",
        &a,
    ] {
        assert!(said.contains(part), "`{part}` is missing in: {said}");
    }
    let repair = ["repair", "base/t:2", "--from", &b, "--origin", &a];
    let report = run_json(&world, &repair);
    assert!(report["segments_mended"].as_u64().unwrap() >= 1, "{report}");
    assert_eq!(report["left"], serde_json::json!([]));
    ok(dsec(&world, &verify));
    // Layer 1's metadata and placement are its own: not asked for.
    failed(&dsec(&world, &["verify", "base/t:1", "--origin", &a]), 1);
    ok(dsec(
        &world,
        &["repair", "base/t:1", "--from", &b, "--origin", &a],
    ));
    ok(dsec(&world, &["verify", "base/t:1", "--origin", &a]));
    let before = sh(world.root(), "find a -type f -printf '%p %T@ %i\n' | sort");
    let said = ok(dsec(&world, &repair));
    assert!(said.contains("nothing to mend"), "{said}");
    assert_eq!(
        sh(world.root(), "find a -type f -printf '%p %T@ %i\n' | sort"),
        before
    );
    ok(dsec(&world, &["fsck", "--origin", &a, "--deep"]));
}

#[test]
fn fsck_tells_damage_by_its_status_and_mends_the_index() {
    let world = World::new();
    two_versions(&world);
    let a = world.origin("a");
    let fsck = ["fsck", "--origin", &a];
    let report = run_json(&world, &fsck);
    assert_eq!(
        (&report["tags"], &report["layers"]),
        (&Value::from(2), &Value::from(2))
    );
    let said = ok(dsec(&world, &fsck));
    assert!(said.contains("all right"), "{said}");
    fs::write(world.path("a/index.json"), "{}").unwrap();
    let output = dsec(&world, &fsck);
    failed(&output, 1);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("damaged: index.json") && said.contains("--repair"),
        "{said}"
    );
    let report = run_json(&world, &[&fsck[..], &["--repair"]].concat());
    assert_eq!(report["mended"], serde_json::json!(["index.json"]));
    ok(dsec(&world, &fsck));
    let mut bytes = fs::read(&packs(&world, "a")[0]).unwrap();
    bytes[5000] ^= 1;
    fs::write(&packs(&world, "a")[0], bytes).unwrap();
    ok(dsec(&world, &fsck));
    let output = dsec(&world, &[&fsck[..], &["--deep", "--repair"]].concat());
    failed(&output, 1);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("segment ") && said.contains("dsec repair"),
        "{said}"
    );
    let error = failed(&dsec(&world, &["fsck"]), 2);
    assert!(error.contains("--origin"), "{error}");
}
