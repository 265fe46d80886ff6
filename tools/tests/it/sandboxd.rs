//! A sandboxd of one test, on a layerd of its own; sandboxes go away with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
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

/// A sandboxd with a layer `base/mini:1` that has a shell and coreutils.
#[derive(Debug)]
pub(crate) struct Sandboxd<'a> {
    world: &'a World,
    _layerd: Layerd<'a>,
    child: Child,
    listen: String,
    args: Vec<String>,
    key: String,
}

pub(crate) fn beside(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_dsec")).with_file_name(name);
    let there = program.try_exists().unwrap();
    assert!(there, "`{name}` is missing; run `cargo build` first");
    program
}

/// Publishes `base/NAME:1` with a shell and these programs of this machine.
pub(crate) fn base(world: &World, name: &str, programs: &str) {
    let script = format!(
        "set -e; mkdir -p {name}/usr/bin {name}/proc {name}/sys {name}/dev {name}/tmp {name}/root {name}/etc {name}/w
        ln -s usr/bin {name}/bin; ln -s usr/lib {name}/lib; ln -s usr/lib64 {name}/lib64
        echo root:x:0:0:root:/root:/bin/sh > {name}/etc/passwd
        for b in bash dash {programs}; do
            cp $(readlink -f $(command -v $b || which $b)) {name}/usr/bin/$b 2>/dev/null || cp /usr/bin/$b {name}/usr/bin/$b
            for l in $(ldd /usr/bin/$b | grep -o '/[^ ]*'); do mkdir -p {name}/usr$(dirname ${{l#/usr}}); cp -L $l {name}/usr${{l#/usr}}; done
        done
        ln -s dash {name}/usr/bin/sh"
    );
    sh(world.root(), &script);
    let (origin, tree) = (world.origin("origin"), format!("./{name}"));
    let args = [
        "build",
        &tree,
        "--axis",
        "base",
        "--name",
        name,
        "--version",
        "1",
    ];
    ok(dsec(world, &[&args[..], &["--origin", &origin]].concat()));
}

impl<'a> Sandboxd<'a> {
    /// On a unix socket, without keys.
    pub(crate) fn start(world: &'a World) -> Self {
        let listen = format!("unix:{}", world.path("sandboxd.sock").display());
        Self::start_with(world, &listen, &[], "")
    }

    /// Listening somewhere, with more arguments; `key` is used to ask it.
    pub(crate) fn start_with(world: &'a World, listen: &str, args: &[&str], key: &str) -> Self {
        base(
            world,
            "mini",
            "cat ls sleep rm mkdir wc head stat printf echo id sha256sum",
        );
        let origin = world.origin("origin");
        let layerd = Layerd::start(world, &origin);
        let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
        let mut daemon = Self {
            world,
            _layerd: layerd,
            child: Self::spawn(world, listen, &args),
            listen: listen.to_owned(),
            args,
            key: key.to_owned(),
        };
        daemon.wait();
        daemon
    }

    pub(crate) fn spawn(world: &World, listen: &str, args: &[String]) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(world.path("sandboxd.log"))
            .unwrap();
        Command::new(beside("sandboxd"))
            .arg("--layerd")
            .arg(world.path("socket"))
            .args(["--listen", listen, "--state"])
            .arg(world.path("state"))
            .args(["--origin", &world.origin("origin"), "--pool", "2", "--dsec"])
            .arg(beside("dsec"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    pub(crate) fn wait(&mut self) {
        let deadline = Instant::now() + SOON;
        while self.url().is_empty() || !self.dsec(&["sandbox", "ls"]).status.success() {
            let late = Instant::now() > deadline;
            let ended = self.child.try_wait().unwrap();
            assert!(
                !late && ended.is_none(),
                "sandboxd does not answer ({ended:?}): {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.world.path("sandboxd.log")).unwrap()
    }

    /// Where it listens; for a TCP port that the kernel chose, as the log has it (empty: not yet).
    pub(crate) fn url(&self) -> String {
        if self.listen.starts_with("unix:") {
            return self.listen.clone();
        }
        let log = self.log();
        let told = log.lines().rfind(|line| line.contains("listening at="));
        let at = told.and_then(|line| line.split("at=").nth(1));
        at.map_or(String::new(), |at| format!("http://{}", at.trim()))
    }

    pub(crate) fn dsec(&self, args: &[&str]) -> Output {
        self.dsec_as(&self.key, args)
    }

    /// `dsec` with this key (none if it is empty).
    pub(crate) fn dsec_as(&self, key: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dsec"));
        command.args(args).env("DSEC_URL", self.url());
        if !key.is_empty() {
            command.env("DSEC_API_KEY", key);
        }
        command
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
        self.crash();
        self.restart();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn crash(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.child = Self::spawn(self.world, &self.listen, &self.args);
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
