//! `dsec trace`, `dsec optimize` and `dsec export-set` from the first start to one without the origin.

use std::fs;

use crate::daemon::Layerd;
use crate::world::{World, dsec, failed, json, noise, ok};

const LEN: usize = 600_000;
const READ: usize = LEN.next_multiple_of(4096);

/// A world with three files of one layer, and the traces of two workloads that read one of them each.
fn recorded() -> World {
    let world = World::new();
    let tree = world.folder("tree");
    for (n, name) in (1..).zip(["one", "two", "three"]) {
        fs::write(tree.join(name), noise(n, LEN)).unwrap();
    }
    world.build("tree", "origin", &[]);
    let daemon = Layerd::start(&world, &world.origin("origin"));
    world.folder("mnt");
    for name in ["one", "two"] {
        ok(daemon.run(&["mount", "base/t:1", "mnt"]));
        let (out, read) = (
            format!("{name}.trace"),
            format!("cat mnt/{name} >/dev/null"),
        );
        let socket = world.path("socket").display().to_string();
        let args = [
            "trace", "record", "mnt", "--out", &out, "--json", "--socket", &socket,
        ];
        let said = json(&ok(dsec(
            &world,
            &[&args[..], &["--", "sh", "-c", &read]].concat(),
        )));
        assert_eq!(
            (said.get("bytes"), said.get("truncated")),
            (Some(&READ.into()), Some(&false.into()))
        );
        ok(daemon.run(&["umount", "mnt"]));
    }
    drop(daemon);
    world
}

#[test]
fn a_trace_is_recorded_shown_applied_and_optimised() {
    let world = recorded();
    let origin = world.origin("origin");
    let shown = ok(dsec(
        &world,
        &["trace", "show", "one.trace", "--origin", &origin, "--json"],
    ));
    let shown = json(&shown);
    let files = &shown["layers"][0]["files"];
    let expected = serde_json::json!([{"path": "one", "bytes": LEN, "bytes_read": READ}]);
    assert_eq!(files, &expected, "{shown}");
    let text = ok(dsec(
        &world,
        &["trace", "show", "two.trace", "--origin", &origin],
    ));
    assert!(
        text.lines().count() == 2 && text.trim_end().ends_with("  two"),
        "{text}"
    );
    let apply = [
        "trace",
        "apply",
        "base/t:1",
        "--trace",
        "one.trace",
        "--origin",
        &origin,
    ];
    let applied = ok(dsec(&world, &apply));
    let tag = ok(dsec(&world, &["inspect", "base/t:1", "--origin", &origin]));
    let digest = shown["digest"].as_str().unwrap();
    assert!(
        applied.contains(digest) && tag.contains(&format!("dsec.trace: {digest}")),
        "{tag}"
    );
    let both = [
        "--trace",
        "two.trace",
        "--trace",
        "one.trace",
        "--version",
        "hot",
    ];
    let args = [
        &["optimize", "base/t:1", "--origin", &origin, "--json"][..],
        &both,
    ]
    .concat();
    let report = json(&ok(dsec(&world, &args)));
    assert_eq!(report[0]["tag"], "base/t:hot");
    assert_eq!(report[0]["report"]["bytes_traced"], 2 * READ);
    ok(dsec(&world, &["verify", "base/t:hot", "--origin", &origin]));
    let daemon = Layerd::start(&world, &origin);
    ok(daemon.run(&["mount", "base/t:hot", "mnt"]));
    for name in ["two", "one", "three"] {
        let read = fs::read(world.path("mnt").join(name)).unwrap();
        assert!(read == fs::read(world.path("tree").join(name)).unwrap());
    }
    ok(daemon.run(&["umount", "mnt"]));
    // Optimising the tag in place, and again with a trace of the layer it came from.
    for _ in 0..2 {
        let args = [
            "optimize",
            "base/t:1",
            "--trace",
            "one.trace",
            "--origin",
            &origin,
        ];
        ok(dsec(&world, &args));
    }
    // The trace is of the old layer; with this one it is a note, and the mount works.
    let noted = daemon.run(&["mount", "base/t:1", "mnt", "--trace", "one.trace"]);
    let said = String::from_utf8_lossy(&noted.stderr).into_owned();
    assert!(
        noted.status.success() && said.contains("which is not mounted here"),
        "{said}"
    );
}

#[test]
fn wrong_traces_are_refused_by_name() {
    let world = recorded();
    let origin = world.origin("origin");
    fs::write(world.path("bad.trace"), "{\"format\":1}").unwrap();
    for args in [
        &["trace", "show", "bad.trace"][..],
        &[
            "trace",
            "apply",
            "base/t:1",
            "--trace",
            "bad.trace",
            "--origin",
            &origin,
        ],
        &[
            "optimize",
            "base/t:1",
            "--trace",
            "bad.trace",
            "--origin",
            &origin,
        ],
        &[
            "export-set",
            "--traces",
            "bad.trace",
            "--bytes",
            "1MiB",
            "--origin",
            &origin,
        ],
    ] {
        let error = failed(&dsec(&world, args), 1);
        assert!(error.contains("cannot use trace `bad.trace`"), "{error}");
    }
    fs::write(world.path("tree/one"), b"changed").unwrap();
    world.build("tree", "origin", &["--version", "2"]);
    for command in [&["trace", "apply"][..], &["optimize"]] {
        let rest = ["base/t:2", "--trace", "one.trace", "--origin", &origin];
        let error = failed(&dsec(&world, &[command, &rest].concat()), 1);
        assert!(
            error.contains("the trace has nothing of") && error.contains("base/t:2"),
            "{error}"
        );
    }
}

/// Mutations that turn it red: a placement that has every segment in the part (what is not covered would be an error of another
/// kind); the metadata left out.
#[test]
fn a_part_serves_what_it_covers_and_nothing_else() {
    let world = recorded();
    let origin = world.origin("origin");
    let plan = |bytes: &str, more: &[&str]| {
        let args = [
            "export-set",
            "--traces",
            "one.trace",
            "two.trace",
            "--origin",
            &origin,
        ];
        dsec(&world, &[&args[..], &["--bytes", bytes], more].concat())
    };
    let curve = json(&ok(plan("1GiB", &["--json"])));
    assert_eq!(
        (&curve["covered"], &curve["exact"]),
        (&2.into(), &true.into()),
        "{curve}"
    );
    let least = curve["curve"][0]["bytes"].as_u64().unwrap();
    let all = curve["curve"][1]["bytes"].as_u64().unwrap();
    assert!(
        least > READ as u64 && all > least + READ as u64 && all < 3 * READ as u64,
        "{curve}"
    );
    let error = failed(&plan(&(least - 1).to_string(), &[]), 1);
    assert!(error.contains("no workload fits into"), "{error}");
    let limit = (all - 1).to_string();
    let part = world.origin("part");
    let drawn = ok(plan(&limit, &["--to", &part, "--svg", "curve.svg"]));
    assert!(
        drawn.contains("1 of 2 workloads") && drawn.contains("<- chosen"),
        "{drawn}"
    );
    assert!(
        fs::read_to_string(world.path("curve.svg"))
            .unwrap()
            .contains("<path")
    );
    let covered = curve["curve"][0]["names"][0].as_str().unwrap();
    fs::rename(world.path("origin"), world.path("gone")).unwrap();
    // Recording has filled it.
    fs::remove_dir_all(world.path("cache")).unwrap();
    let daemon = Layerd::start(&world, &part);
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    for name in ["one", "two", "three"] {
        let read = fs::read(world.path("mnt").join(name));
        if name == covered {
            assert!(read.unwrap() == fs::read(world.path("tree").join(name)).unwrap());
        } else {
            let error = read.err().and_then(|e| e.raw_os_error());
            assert_eq!(error, Some(5), "{name}");
        }
        let len = fs::metadata(world.path("mnt").join(name)).unwrap().len();
        assert_eq!(len, LEN as u64);
    }
    assert_eq!(daemon.stats()["total"]["verify_failures"], 0);
    ok(daemon.run(&["umount", "mnt"]));
}
