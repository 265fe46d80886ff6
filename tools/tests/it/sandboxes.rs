//! `sandboxd` on a real layerd, through `dsec run`, `dsec sandbox` and the Python package.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::sandboxd::Sandboxd;
use crate::world::World;

fn metrics(daemon: &Sandboxd<'_>) -> String {
    let socket = daemon.url().replacen("unix:", "", 1);
    let page = Command::new("curl")
        .args(["-sf", "--unix-socket", &socket, "http://sandboxd/metrics"])
        .output()
        .unwrap();
    String::from_utf8(page.stdout).unwrap()
}

#[test]
fn run_makes_a_sandbox_for_one_command_and_takes_it_away() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let run =
        |args: &[&str]| daemon.dsec(&[&["run", "--base", "base/mini:1", "--"], args].concat());
    let ran = run(&["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((&*ran.stdout, &*ran.stderr), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(ran.status.code(), Some(7));
    let missing = run(&["nothing-here"]);
    assert_eq!(missing.status.code(), Some(127));
    let said = String::from_utf8(missing.stderr).unwrap();
    assert!(said.contains("cannot find `nothing-here`"), "{said}");
    assert_eq!(daemon.ok(&["sandbox", "ls"]), "");
    let wrong = daemon.dsec(&["run", "--base", "base/none:1", "--", "true"]);
    assert_eq!(wrong.status.code(), Some(1));
    let page = metrics(&daemon);
    for line in [
        "dsec_sandboxd_creates_total{result=\"ok\"} 2",
        "dsec_sandboxd_creates_total{result=\"not_found\"} 1",
        "dsec_sandboxd_create_seconds_count 2",
        "dsec_sandboxd_creating 0",
        "dsec_sandboxd_exec_start_seconds_count 2",
        "dsec_sandboxd_sandboxes{state=\"running\"} 0",
        "dsec_sandboxd_execs_total{outcome=\"user_exit\"} 1",
        "dsec_sandboxd_execs_total{outcome=\"not_started\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} in {page}");
    }
}

/// `dsec run` ends its sandbox as soon as it has seen the command's end. Mutations: without the wait for `written_down` some ends count as
/// `sandbox_gone`; without `ending` some count as `infra_failed`.
#[test]
fn every_exec_counts_once_and_as_what_it_was() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    for _ in 0..40 {
        daemon.ok(&["run", "--base", "base/mini:1", "--", "echo", "x"]);
    }
    // Killed under way: the client is told so, too.
    let kills = 20;
    for _ in 0..kills {
        let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
        let exec = ["sandbox", "exec", &id, "--", "sleep", "1000"];
        let child = Command::new(env!("CARGO_BIN_EXE_dsec"))
            .args(exec)
            .env("DSEC_URL", daemon.url())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let shown = || daemon.ok(&["trajectory", "show", &id]);
        crate::sandboxd::until("it runs", || {
            daemon.ok(&["sandbox", "logs", &id]).contains("running")
        });
        daemon.ok(&["sandbox", "kill", &id]);
        let told = child.wait_with_output().unwrap();
        assert_eq!(
            String::from_utf8(told.stderr).unwrap(),
            "dsec: sandbox_gone: it was killed\n"
        );
        assert!(shown().contains("sandbox_gone -1"), "{}", shown());
    }
    let page = metrics(&daemon);
    let counts = page
        .lines()
        .filter(|l| l.starts_with("dsec_sandboxd_execs_total"));
    assert_eq!(
        counts.collect::<Vec<_>>(),
        [
            format!("dsec_sandboxd_execs_total{{outcome=\"sandbox_gone\"}} {kills}"),
            "dsec_sandboxd_execs_total{outcome=\"user_exit\"} 40".to_owned(),
        ]
    );
}

#[test]
fn sandbox_commands_work_and_a_crash_of_the_daemon_loses_nothing() {
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1", "--env", "A=b"]);
    fs::write(world.path("in"), [0, 255, 10, 13].repeat(100_000)).unwrap();
    daemon.ok(&["sandbox", "cp", "in", &format!("{id}:/w/file")]);
    daemon.crash_and_restart();
    daemon.ok(&["sandbox", "cp", &format!("{id}:/w/file"), "out"]);
    assert!(fs::read(world.path("in")).unwrap() == fs::read(world.path("out")).unwrap());
    assert_eq!(
        daemon.ok(&["sandbox", "exec", &id, "--", "sh", "-c", "echo $A"]),
        "b"
    );
    let late = daemon.dsec(&[
        "sandbox",
        "exec",
        "--timeout",
        "0.2",
        &id,
        "--",
        "sleep",
        "100",
    ]);
    assert_eq!(late.status.code(), Some(124));
    daemon.ok(&["sandbox", "pause", &id]);
    assert!(daemon.ok(&["sandbox", "ls"]).contains("paused"));
    daemon.crash_and_restart();
    assert_eq!(
        daemon.ok(&["sandbox", "exec", &id, "--", "echo", "awake"]),
        "awake"
    );
    let digest = daemon.ok(&["sandbox", "pack-diff", &id, "workspace/w:1"]);
    assert_eq!(digest.len(), 64);
    let children = daemon.ok(&["sandbox", "fork", &id, "2"]);
    let child = children.lines().next().unwrap();
    assert_eq!(
        daemon.ok(&["sandbox", "exec", child, "--", "wc", "-c", "/w/file"]),
        "400000 /w/file"
    );
    daemon.ok(&["sandbox", "kill", &id]);
    daemon.crash_and_restart();
    // What the child stands on outlives its parent.
    assert_eq!(
        daemon.ok(&["sandbox", "exec", child, "--", "wc", "-c", "/w/file"]),
        "400000 /w/file"
    );
    let gone = daemon.dsec(&["sandbox", "exec", &id, "--", "true"]);
    assert_eq!(
        String::from_utf8(gone.stderr).unwrap(),
        format!("dsec: sandbox `{id}` is gone: it was killed (sandbox_gone)\n")
    );
    assert!(daemon.ok(&["sandbox", "ls", "--all"]).contains("gone"));
}

#[test]
fn the_python_package_works() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("libdsec");
    let ran = Command::new("python3")
        .args(["-B", "-m", "unittest", "-v", "test_libdsec"])
        .env(
            "PYTHONPATH",
            format!(
                "{}:{}",
                package.join("src").display(),
                package.join("tests").display()
            ),
        )
        .env("DSEC_URL", daemon.url())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{}", daemon.log());
    assert!(said.contains("Ran 14 tests"), "{said}");
}

/// Mutations: without the raw terminal the first interrupt ends the client; without the signal's handler no size arrives.
#[test]
fn a_shell_at_a_terminal_takes_every_key_and_its_size() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sandbox_shell.py");
    let ran = Command::new("python3")
        .arg(script)
        .args([env!("CARGO_BIN_EXE_dsec"), &id])
        .env("DSEC_URL", daemon.url())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{}", daemon.log());
    let no_terminal = daemon.dsec(&["sandbox", "shell", &id]);
    let said = String::from_utf8(no_terminal.stderr).unwrap();
    assert!(
        said.starts_with("dsec: standard input is no terminal"),
        "{said}"
    );
}

/// `mypy --strict` on the package, its tests, and the examples of the documentation. Mutations: a parameter without a type, and an
/// example that names one that is not there.
#[test]
fn the_python_package_and_the_examples_have_right_types() {
    let world = World::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mypy = root.join("target/test-tools/mypy/bin/mypy");
    assert!(mypy.try_exists().unwrap(), "run `tools/setup check` first");
    let mut examples = 0;
    for page in ["docs/sandbox.md", "libdsec/README.md"] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        for block in text.split("```python\n").skip(1) {
            let code = block.split("```").next().unwrap();
            examples += 1;
            fs::write(world.path(&format!("example{examples}.py")), code).unwrap();
        }
    }
    assert!(examples >= 2, "{examples}");
    let ran = Command::new(mypy)
        .args(["--strict", "--no-incremental", "--cache-dir=/dev/null", "."])
        .arg(root.join("libdsec/src"))
        .arg(root.join("libdsec/tests"))
        .current_dir(world.root())
        .env("MYPYPATH", root.join("libdsec/src"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{ran:?}");
}

/// In an environment of its own, from a copy: installing leaves files beside the sources.
#[test]
fn the_python_package_can_be_installed() {
    let world = World::new();
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("libdsec");
    let pip = Path::new(env!("CARGO_MANIFEST_DIR"))
        .with_file_name("target")
        .join("test-tools/setuptools/bin/pip");
    assert!(pip.try_exists().unwrap(), "run `tools/setup check` first");
    let script = format!(
        "set -e; cp -r {} copy; {} wheel -q --disable-pip-version-check --no-build-isolation --no-deps ./copy
        python3 -m venv env; env/bin/pip install -q --disable-pip-version-check --no-index libdsec-*.whl
        cd /; $OLDPWD/env/bin/python -c 'import libdsec, pathlib; folder = pathlib.Path(libdsec.__file__).parent
assert (folder / \"py.typed\").exists() and \"site-packages\" in str(folder), folder; print(len(libdsec.__all__))'",
        package.display(),
        pip.display()
    );
    let ran = Command::new("bash")
        .args(["-c", &script])
        .current_dir(world.root())
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    assert_eq!(String::from_utf8(ran.stdout).unwrap(), "30\n");
}
