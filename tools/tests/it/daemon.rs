//! A layerd of one test; what it mounted and started goes away with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::world::{World, dsec, json, ok};

/// Longest wait for layerd to answer.
const START_MAX: Duration = Duration::from_secs(20);

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Layerd<'a> {
    world: &'a World,
    child: Child,
}

fn program() -> PathBuf {
    let layerd = Path::new(env!("CARGO_BIN_EXE_dsec")).with_file_name("layerd");
    let there = layerd.try_exists().unwrap();
    assert!(
        there,
        "`{}` is missing; run `cargo build -p layerd` first",
        layerd.display()
    );
    layerd
}

impl<'a> Layerd<'a> {
    /// Starts layerd with cache, socket and log in `world`.
    pub(crate) fn start(world: &'a World, origin: &str) -> Self {
        Self::start_with(world, origin, &[])
    }

    /// The same, with more environment variables.
    pub(crate) fn start_with(world: &'a World, origin: &str, env: &[(&str, &str)]) -> Self {
        let child = Self::spawn(world, origin, env);
        let daemon = Self { world, child };
        daemon.wait();
        daemon
    }

    /// Ends the control process only, as a crash does, and starts another one with these environment variables.
    pub(crate) fn replace(&mut self, origin: &str, env: &[(&str, &str)]) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(self.world, origin, env);
        self.wait();
    }

    fn spawn(world: &World, origin: &str, env: &[(&str, &str)]) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(world.path("layerd.log"))
            .unwrap();
        Command::new(program())
            .args(["--origin", origin, "--read-deadline", "5s", "--cache"])
            .arg(world.path("cache"))
            .arg("--socket")
            .arg(world.path("socket"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .envs(env.iter().copied())
            .spawn()
            .unwrap()
    }

    fn wait(&self) {
        let deadline = Instant::now() + START_MAX;
        while !self.run(&["stats"]).status.success() {
            assert!(
                Instant::now() < deadline,
                "layerd does not answer: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// `dsec` with this layerd's socket.
    pub(crate) fn run(&self, args: &[&str]) -> std::process::Output {
        let socket = self.world.path("socket").display().to_string();
        dsec(self.world, &[args, &["--socket", &socket]].concat())
    }

    /// `dsec stats --json`.
    pub(crate) fn stats(&self) -> Value {
        json(&ok(self.run(&["stats", "--json"])))
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.world.path("layerd.log")).unwrap()
    }
}

impl Drop for Layerd<'_> {
    fn drop(&mut self) {
        // It unmounts everything and takes its data plane along.
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        self.child.wait().unwrap();
    }
}
