//! The native API against its own description: `schemathesis` (PyPI) makes requests from `/openapi.json`, good and bad ones, and wants every
//! answer to be as described and none to be a failure of ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sandboxd::Sandboxd;
use crate::world::World;

/// Requests of each operation; the soak makes more.
const EXAMPLES: &str = "15";

fn schemathesis() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target");
    let program = target.join("test-tools/schemathesis/bin/schemathesis");
    let there = program.try_exists().unwrap();
    assert!(
        there,
        "`{}` is missing; run `tools/setup check` first",
        program.display()
    );
    program
}

fn run(world: &World, daemon: &Sandboxd<'_>, config: &str, more: &[&str]) {
    fs::write(world.path("schemathesis.toml"), config).unwrap();
    let examples = std::env::var("DSEC_API_EXAMPLES").unwrap_or_else(|_unset| EXAMPLES.to_owned());
    let ran = Command::new(schemathesis())
        .args([
            "--config-file",
            "schemathesis.toml",
            "run",
            "--phases",
            "examples,coverage,fuzzing",
        ])
        .args([
            "--max-examples",
            &examples,
            "--seed",
            "1",
            "--request-timeout",
            "30",
            "--generation-deterministic",
        ])
        // What is right by its shape can be wrong all the same: `cmd` and `args` at once, a layer that is no layer's name.
        .args(["--exclude-checks", "positive_data_acceptance"])
        .args(more)
        .arg(format!("{}/openapi.json", daemon.url()))
        .current_dir(world.root())
        .env("NO_COLOR", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    let log = daemon.log();
    assert!(
        ran.status.success(),
        "{said}\n{}\n{}",
        String::from_utf8_lossy(&ran.stderr),
        &log[log.len().saturating_sub(5000)..]
    );
    assert!(said.contains(" generated, "), "{said}");
}

/// It found, among others: a reply in the background without its end, a signal of 65 that was taken. Mutation: 200 in place of 204 for
/// a step's removal. A create, a fork and a packed difference that succeed are not among the requests: 202 in place of 201 for a create
/// is not seen here.
#[test]
fn the_api_is_as_it_describes_itself() {
    let world = World::new();
    let daemon = Sandboxd::start_with(&world, "127.0.0.1:0", &[], "");
    let named = "import json, sys, urllib.request; paths = json.load(urllib.request.urlopen(sys.argv[1]))['paths']
print(sum('request_id' in [p['name'] for p in o.get('parameters', [])] for i in paths.values() for o in i.values()))";
    let document = format!("{}/openapi.json", daemon.url());
    let ran = Command::new("python3")
        .args(["-c", named, &document])
        .output()
        .unwrap();
    // All that changes a sandbox, but create and execs (whose bodies have it) and a terminal's size.
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), "15\n");
    // Sandboxes that are not there.
    run(&world, &daemon, "", &[]);
    // One that is; what makes others or ends it is left to the run before.
    let id = daemon.ok(&[
        "sandbox",
        "create",
        "--base",
        "base/mini:1",
        "--memory-mb",
        "256",
    ]);
    // A command that has ended: waiting for it ends.
    let begin = "import urllib.request, sys; urllib.request.urlopen(urllib.request.Request(sys.argv[1], data=sys.argv[2].encode(), method='POST'))";
    let url = format!("{}/v1/sandboxes/{id}/execs", daemon.url());
    let exec = r#"{"args": ["echo", "x"], "request_id": "known", "pty": {"cols": 80, "rows": 24}}"#;
    let ran = Command::new("python3")
        .args(["-c", begin, &url, exec])
        .output()
        .unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let config = format!("[parameters]\n\"path.id\" = \"{id}\"\n\"path.exec\" = \"known\"\n");
    // And what never ends: watching.
    let others = "^/v1/sandboxes(/\\{id\\}(/fork|/pack_diff|/timeout|/files/watch)?)?$";
    run(&world, &daemon, &config, &["--exclude-path-regex", others]);
    assert_eq!(daemon.ok(&["sandbox", "ls"]).lines().count(), 1);
}
