//! E2B's own client from PyPI against `sandboxd` on real layers: the one conformance test that nobody here wrote.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sandboxd::Sandboxd;
use crate::world::{World, dsec, ok, sh};

/// A Python with the package `e2b`, as `tools/setup check` installs it.
fn python() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target");
    let python = target.join("test-tools/e2b/bin/python");
    let there = python.try_exists().unwrap();
    assert!(
        there,
        "`{}` is missing; run `tools/setup check` first",
        python.display()
    );
    python
}

/// A workspace with a folder, a toolkit with Perl, some more programs and a user.
fn publish(world: &World) {
    let script = "set -e; mkdir -p app/srv/app more/usr/bin more/etc more/home/ann
        echo root:x:0:0:root:/root:/bin/sh > more/etc/passwd; echo ann:x:1000:1000:Ann:/home/ann:/bin/bash >> more/etc/passwd
        printf 'root:x:0:\\nann:x:1000:\\n' > more/etc/group; chown 1000:1000 more/home/ann
        for b in perl stty mv ln chmod touch; do
            cp -L $(command -v $b) more/usr/bin/$b
            for l in $(ldd more/usr/bin/$b | grep -o '/[^ ]*'); do mkdir -p more/usr$(dirname ${l#/usr}); cp -L $l more/usr${l#/usr}; done
        done
        for d in $(perl -e 'print join qq(\\n), @INC'); do
            case $d in */perl-base) mkdir -p more$d; cp -r $d/. more$d ;; esac
        done";
    sh(world.root(), script);
    let origin = world.origin("origin");
    for (tree, axis, name) in [("./app", "workspace", "app"), ("./more", "toolkit", "perl")] {
        let args = [
            "build",
            tree,
            "--axis",
            axis,
            "--name",
            name,
            "--version",
            "1",
        ];
        ok(dsec(world, &[&args[..], &["--origin", &origin]].concat()));
    }
}

fn run_suite(with_keys: bool) {
    let world = World::new();
    let key = if with_keys {
        let made = ok(dsec(
            &world,
            &["sandbox", "new-key", "team", "--file", "keys"],
        ));
        made.trim().to_owned()
    } else {
        format!("e2b_{}", "0".repeat(40))
    };
    let keys = world.path("keys").display().to_string();
    let args: &[&str] = if with_keys {
        &["--api-keys", &keys]
    } else {
        &[]
    };
    let daemon = Sandboxd::start_with(
        &world,
        "127.0.0.1:0",
        args,
        if with_keys { &key } else { "" },
    );
    publish(&world);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2b_conformance.py");
    let mut command = Command::new(python());
    command
        .arg("-B")
        .arg(suite)
        .arg("-v")
        .env("E2B_API_URL", daemon.url())
        .env("E2B_SANDBOX_URL", daemon.url())
        .env("E2B_API_KEY", &key);
    if with_keys {
        command.env("DSEC_E2B_KEYS", "1");
    }
    let ran = command.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{}", daemon.log());
    let all = if with_keys {
        "\nOK\n"
    } else {
        "\nOK (skipped=1)\n"
    };
    assert!(
        said.contains("Ran 29 tests") && said.ends_with(all),
        "{said}"
    );
    assert!(!daemon.log().contains(&key[4..]), "{}", daemon.log());
}

/// What a client changes in a sandbox of its own, whose id it prints.
const CHANGES: &str = "
from e2b import Sandbox
sb = Sandbox.create('base/mini:1+workspace/app:1+toolkit/perl:1', timeout=120)
sb.files.write('/srv/a b', 'one')
sb.files.write('notes', b'\\0' * 2000000, user='ann')
sb.files.make_dir('/srv/d')
sb.files.rename('/srv/a b', '/srv/d/c')
try:
    sb.files.write('/srv/d', 'a folder')
except Exception as refused:
    pass
sb.commands.run('echo x > /srv/d/x')
sb.files.write('/srv/gone', 'z')
cat = sb.commands.run('cat > /srv/typed', background=True, stdin=True)
sb.commands.send_stdin(cat.pid, 'typed ')
sb.commands.send_stdin(cat.pid, 'again')
sb.commands.close_stdin(cat.pid)
cat.wait()
sb.set_timeout(100)
sb.files.remove('/srv/gone')
sb.pause()
sb.connect()
print(sb.sandbox_id)
";

/// Mutations: `put` does not look at the pieces (`see`): the replay has an empty file; native requests ignore their `user`;
/// `noted_with` does not see the bytes; a refused write counts as done (its bytes are not kept: no replay).
#[test]
fn what_the_client_of_e2b_changes_is_in_the_trajectory_and_can_be_replayed() {
    let world = World::new();
    let daemon = Sandboxd::start_with(&world, "127.0.0.1:0", &[], "");
    publish(&world);
    let ran = Command::new(python())
        .args(["-B", "-c", CHANGES])
        .env("E2B_API_URL", daemon.url())
        .env("E2B_SANDBOX_URL", daemon.url())
        .env("E2B_API_KEY", format!("e2b_{}", "0".repeat(40)))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{}", daemon.log());
    let id = String::from_utf8(ran.stdout).unwrap().trim().to_owned();
    let shown = daemon.ok(&["trajectory", "show", &id, "--json"]);
    let events = shown
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let asked: Vec<String> = events
        .filter(|event| event["what"] == "request")
        .skip(1)
        .map(|event| {
            let text = |name: &str| event[name].as_str().unwrap().to_owned();
            // A process has a name of its own.
            let path = match text("path").split('/').collect::<Vec<_>>()[..] {
                ["", "execs", _, what] => format!("/execs/…/{what}"),
                _ => text("path"),
            };
            format!("{} {path}", text("method"))
        })
        .collect();
    assert_eq!(
        asked,
        [
            "PUT /files?path=/srv/a%20b&user=",
            "PUT /files?path=notes&user=ann",
            "POST /files/mkdir?path=/srv/d&user=",
            "POST /files/rename",
            "PUT /files?path=/srv/d&user=",
            "POST /execs",
            "PUT /files?path=/srv/gone&user=",
            "POST /execs",
            "POST /execs/…/stdin",
            "POST /execs/…/stdin",
            "POST /execs/…/stdin?eof=true",
            "POST /timeout",
            "DELETE /files?path=/srv/gone&user=",
            "POST /pause",
            "POST /resume",
            "POST /timeout",
        ]
    );
    let replay = [
        "trajectory",
        "replay",
        &id,
        "--on",
        "base/mini:1",
        "--workspace",
        "workspace/app:1",
        "--toolkit",
        "toolkit/perl:1",
    ];
    let ran = daemon.dsec(&replay);
    assert_eq!(String::from_utf8(ran.stderr).unwrap(), "equal\n");
}

/// Mutation: offsets that begin at 0 for `connect` fail a test of the suite.
#[test]
fn the_client_of_e2b_works() {
    run_suite(false);
}

/// Mutations: an `admit` that lets everybody in, and ports without their token, fail one each.
#[test]
fn the_client_of_e2b_works_with_keys() {
    run_suite(true);
}
