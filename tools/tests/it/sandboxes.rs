//! `sandboxd` on a real layerd, through `dsec run`, `dsec sandbox` and the Python package.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::daemon::Layerd;
use crate::world::{World, dsec, ok, sh};

const SOON: Duration = Duration::from_secs(20);

/// Waits until `check` says yes.
pub(crate) fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !check() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A sandboxd on a unix socket, with a layer `base/mini:1` that has a shell and coreutils.
#[derive(Debug)]
pub(crate) struct Sandboxd<'a> {
    world: &'a World,
    _layerd: Layerd<'a>,
    child: Child,
}

fn beside(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_dsec")).with_file_name(name);
    let there = program.try_exists().unwrap();
    assert!(there, "`{name}` is missing; run `cargo build` first");
    program
}

fn mini(world: &World) {
    let script = "set -e; mkdir -p tree/usr/bin tree/proc tree/sys tree/dev tree/tmp tree/root tree/etc tree/w
        ln -s usr/bin tree/bin; ln -s usr/lib tree/lib; ln -s usr/lib64 tree/lib64
        echo root:x:0:0:root:/root:/bin/sh > tree/etc/passwd
        for b in bash dash cat ls sleep rm mkdir wc head stat printf echo id sha256sum; do
            cp $(readlink -f $(command -v $b || which $b)) tree/usr/bin/$b 2>/dev/null || cp /usr/bin/$b tree/usr/bin/$b
            for l in $(ldd /usr/bin/$b | grep -o '/[^ ]*'); do mkdir -p tree/usr$(dirname ${l#/usr}); cp -L $l tree/usr${l#/usr}; done
        done
        ln -s dash tree/usr/bin/sh";
    sh(world.root(), script);
    let origin = world.origin("origin");
    let args = [
        "build",
        "./tree",
        "--axis",
        "base",
        "--name",
        "mini",
        "--version",
        "1",
    ];
    ok(dsec(world, &[&args[..], &["--origin", &origin]].concat()));
}

impl<'a> Sandboxd<'a> {
    pub(crate) fn start(world: &'a World) -> Self {
        mini(world);
        let origin = world.origin("origin");
        let layerd = Layerd::start(world, &origin);
        let mut daemon = Self {
            world,
            _layerd: layerd,
            child: Self::spawn(world),
        };
        daemon.wait();
        daemon
    }

    fn spawn(world: &World) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(world.path("sandboxd.log"))
            .unwrap();
        Command::new(beside("sandboxd"))
            .arg("--layerd")
            .arg(world.path("socket"))
            .arg("--listen")
            .arg(format!("unix:{}", world.path("sandboxd.sock").display()))
            .arg("--state")
            .arg(world.path("state"))
            .args(["--origin", &world.origin("origin"), "--pool", "2", "--dsec"])
            .arg(beside("dsec"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    pub(crate) fn wait(&mut self) {
        let deadline = Instant::now() + SOON;
        while !self.dsec(&["sandbox", "ls"]).status.success() {
            let late = Instant::now() > deadline;
            assert!(!late, "sandboxd does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.world.path("sandboxd.log")).unwrap()
    }

    pub(crate) fn url(&self) -> String {
        format!("unix:{}", self.world.path("sandboxd.sock").display())
    }

    pub(crate) fn dsec(&self, args: &[&str]) -> std::process::Output {
        Command::new(env!("CARGO_BIN_EXE_dsec"))
            .args(args)
            .env("DSEC_URL", self.url())
            .current_dir(self.world.root())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Its standard output, if it did well.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let ran = self.dsec(args);
        let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{args:?}: {errors}\n{}", self.log());
        String::from_utf8(ran.stdout).unwrap().trim_end().to_owned()
    }

    /// As a crash: sandboxes stay.
    pub(crate) fn crash_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(self.world);
        self.wait();
    }
}

impl Drop for Sandboxd<'_> {
    fn drop(&mut self) {
        for line in self.ok(&["sandbox", "ls"]).lines() {
            let id = line.split(' ').next().unwrap_or_default();
            self.dsec(&["sandbox", "kill", id]);
        }
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }
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
        format!("dsec: sandbox `{id}` is gone: it was killed\n")
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
    assert!(said.contains("Ran 11 tests"), "{said}");
}
