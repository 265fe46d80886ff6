//! Either process killed at every step of starting, mounting, reading, unmounting, upgrading and ending.
//!
//! A step is a change outside the process (`layerd/src/kill.rs`): a mount, a file, a message. In one run of the scenario the
//! process dies at step n; runs with n = 1, 1 + stride … go on until the scenario ends before step n. Whatever died, readers
//! get right bytes or an error, a new control process finds its way, and nothing is left. `DSEC_CASES` makes the stride 1.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerd_client::api::MountState;
use rustix::process::Signal;

use crate::daemon::{
    Daemon, SOON, detach, mounts_below, processes_of, read_cold, read_whole, until,
};
use crate::fixture::{World, cached, noise};
use crate::web::Web;

/// What all runs share: two layers on a server.
struct Stage {
    world: World,
    web: Web,
    /// Contents of the file `base` in the one and `tool` in the other layer.
    base: Arc<Vec<u8>>,
    tool: Arc<Vec<u8>>,
    segments: Vec<imgstore::ids::Digest>,
}

impl Stage {
    fn new() -> Self {
        let world = World::new();
        let bytes = noise(900 << 10);
        let (base, tool) = bytes.split_at(512 << 10);
        let mut segments = Vec::new();
        for (name, content) in [("base", base), ("tool", tool)] {
            let tree = world.folder(&format!("tree-{name}"));
            fs::write(tree.join(name), content).unwrap();
            let tag = if name == "base" {
                "base/b:1"
            } else {
                "toolkit/t:1"
            };
            let layer = world.publish(&tree, tag);
            segments.extend(layer.manifest.segments.iter().map(|s| s.digest()));
        }
        let web = Web::serve(&world.origin(), Duration::ZERO);
        Self {
            web,
            base: Arc::new(base.to_vec()),
            tool: Arc::new(tool.to_vec()),
            segments,
            world,
        }
    }
}

/// One run.
struct Run<'a> {
    stage: &'a Stage,
    dir: tempfile::TempDir,
    daemon: Daemon,
    /// What the control process gets told that follows the upgrade.
    later: Option<(&'static str, String)>,
}

/// Who dies.
#[derive(Debug, Clone, Copy)]
enum Victim {
    /// The control process before the upgrade.
    First,
    /// The one after it.
    Second,
    DataPlane,
}

const ONE: (&str, &[&str], bool) = ("one", &["base/b:1"], false);
const TWO: (&str, &[&str], bool) = ("two", &["base/b:1", "toolkit/t:1"], true);

impl Run<'_> {
    fn point(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes sure that a control process answers and has a data plane, however often one dies meanwhile.
    fn up(&mut self) {
        let deadline = Instant::now() + SOON;
        loop {
            assert!(Instant::now() < deadline, "layerd does not come back");
            if !self.daemon.lives() {
                self.daemon.spawn();
            }
            // Without a socket the client would wait for a while.
            if UnixStream::connect(self.daemon.socket()).is_ok()
                && let Ok(stats) = self.daemon.client().stats()
                && stats.data_plane_pid.is_some()
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn mount(&mut self, (name, refs, rw): (&str, &[&str], bool)) -> bool {
        self.up();
        let point = self.point(name);
        self.daemon.try_mount(refs, &point, rw).is_ok()
    }

    fn umount(&mut self, name: &str) -> bool {
        self.up();
        let point = self.point(name);
        self.daemon.client().umount(&point).is_ok()
    }

    /// Reads a file; right bytes or an error. Whatever dies meanwhile, it ends.
    fn read(&mut self, path: PathBuf, expected: &Arc<Vec<u8>>) -> bool {
        self.up();
        let expected = Arc::clone(expected);
        let reader = std::thread::spawn(move || {
            // A cold piece first, so that there is a demand besides read-ahead.
            let piece = read_cold(&path, 300 << 10, 8192);
            if let Ok(bytes) = &piece {
                assert!(*bytes == expected[300 << 10..][..8192], "wrong bytes");
            }
            let whole = read_whole(&path);
            if let Ok(bytes) = &whole {
                assert!(*bytes == *expected, "wrong bytes");
            }
            piece.is_ok() && whole.is_ok()
        });
        while !reader.is_finished() {
            self.up();
        }
        reader.join().unwrap()
    }

    fn read_all(&mut self, name: &str) -> bool {
        let (base, tool) = (Arc::clone(&self.stage.base), Arc::clone(&self.stage.tool));
        let point = self.point(name);
        let right = self.read(point.join("base"), &base);
        right && (name == ONE.0 || self.read(point.join("tool"), &tool))
    }

    fn scenario(&mut self) {
        self.mount(ONE);
        self.read_all(ONE.0);
        self.mount(("none", &["base/none:1"], true));
        self.mount(TWO);
        self.read_all(TWO.0);
        self.umount(ONE.0);
        self.mount(ONE);
        self.up();
        self.daemon.end(Signal::USR1);
        self.daemon.env.extend(self.later.take());
        self.up();
        self.read_all(TWO.0);
        self.umount(TWO.0);
        self.read_all(ONE.0);
        self.up();
        self.daemon.end(Signal::TERM);
    }

    /// What is found is as it is said to be, and can be taken away.
    fn check_what_is_left(&mut self) {
        self.up();
        for mount in self.daemon.client().mounts().unwrap().mounts {
            let name = mount
                .mountpoint
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            assert_eq!(
                self.read_all(&name),
                mount.state == MountState::Alive,
                "{mount:?}"
            );
            assert!(self.umount(&name));
        }
        // Before anything is mounted that could tidy up by the way.
        self.check_folders();
    }

    fn check_folders(&self) {
        let cache = self.daemon.cache();
        assert_eq!(
            mounts_below(self.dir.path()),
            [cache.join("run/fuse").to_str().unwrap()]
        );
        for folder in ["run/layers", "run/mounts", "run/fuse", "rw", "tmp"] {
            let left = || {
                let entries = fs::read_dir(cache.join(folder)).unwrap();
                entries.map(|e| e.unwrap().path()).collect::<Vec<_>>()
            };
            let deadline = Instant::now() + SOON;
            // What is being written to the cache goes by itself.
            while folder == "tmp" && !left().is_empty() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(left(), [""; 0].map(PathBuf::from));
        }
    }

    /// Everything works as if nothing had happened, and what is cached is not fetched again.
    fn check_that_it_works(&mut self) {
        for round in 0..2 {
            let before = self.stage.web.pack_requests();
            for what in [ONE, TWO] {
                assert!(self.mount(what));
                assert!(self.read_all(what.0));
                assert!(self.umount(what.0));
            }
            let cache = self.daemon.cache();
            let there = |digest| cached(&cache, digest).exists();
            until("everything is cached", || {
                self.stage.segments.iter().all(there)
            });
            let again = self.stage.web.pack_requests() - before;
            assert!(
                round == 0 || again == 0,
                "{again} requests for what is cached"
            );
        }
    }

    fn check_that_nothing_is_left(&mut self) {
        self.check_folders();
        let cache = self.daemon.cache();
        assert_eq!(fs::read_dir(cache.join("layers")).unwrap().count(), 2);
        assert!(self.daemon.end(Signal::TERM));
        assert_eq!(mounts_below(self.dir.path()), [""; 0]);
        until("no process is left", || {
            processes_of(self.dir.path()).is_empty()
        });
        assert!(!self.daemon.socket().exists());
    }
}

/// Runs the scenario with a death at this step; whether it came to that.
fn die_at(stage: &Stage, victim: Victim, step: u64) -> bool {
    let dir = tempfile::tempdir_in(stage.world.dir.path()).unwrap();
    let token = dir.path().join("token");
    fs::write(&token, b"").unwrap();
    let mut daemon = Daemon::idle(dir.path(), &[stage.web.url()], &["--memory", "0"]);
    let plan = format!("{step}:{}", token.display());
    let mut later = None;
    match victim {
        Victim::First => daemon.env.push(("DSEC_KILL_CONTROL", plan)),
        Victim::Second => later = Some(("DSEC_KILL_CONTROL", plan)),
        Victim::DataPlane => daemon.env.push(("DSEC_KILL_DATA_PLANE", plan)),
    }
    let mut run = Run {
        stage,
        dir,
        daemon,
        later,
    };
    run.scenario();
    // What comes now is not to die.
    let died = fs::remove_file(&token).is_err();
    println!(
        "{victim:?} {step}: {}",
        run.daemon
            .log()
            .lines()
            .find(|l| l.contains("as planned"))
            .unwrap_or("no death")
    );
    run.check_what_is_left();
    run.check_that_it_works();
    run.check_that_nothing_is_left();
    died
}

/// Lets a process die at every step, or at some; at how many it did.
fn die_at_steps(victim: Victim, stride: usize) -> usize {
    let stage = Stage::new();
    let stride = if std::env::var_os("DSEC_CASES").is_some() {
        1
    } else {
        stride
    };
    let steps = (1..).step_by(stride);
    let deaths = steps
        .take_while(|step| die_at(&stage, victim, *step))
        .count();
    println!("{deaths} deaths");
    deaths
}

/// Mutations: each of these turned it red: records removed before the folder for writes is cleared (`rw` is left); no
/// `clear_mount_points` (`run/layers` is left); half-written records not removed (`run/mounts` is left).
#[test]
fn the_control_process_may_die_at_any_step() {
    let deaths = die_at_steps(Victim::First, 7);
    assert!(deaths >= 8, "only {deaths}");
}

#[test]
fn the_control_process_after_an_upgrade_may_die_at_any_step() {
    let deaths = die_at_steps(Victim::Second, 6);
    assert!(deaths >= 5, "only {deaths}");
}

#[test]
fn the_data_plane_may_die_at_any_step() {
    let deaths = die_at_steps(Victim::DataPlane, 9);
    assert!(deaths >= 10, "only {deaths}");
}

/// A second control process over the same cache, started while the first one is killed: the first one's mounts are found.
#[test]
fn a_mount_that_somebody_else_took_away_meanwhile_is_forgotten() {
    let stage = Stage::new();
    let dir = tempfile::tempdir_in(stage.world.dir.path()).unwrap();
    let mut daemon = Daemon::start(dir.path(), &[stage.web.url()], &[]);
    let point = dir.path().join("two");
    daemon.mount(TWO.1, &point, true);
    daemon.kill_control();
    detach(Path::new(&point));
    daemon.restart();
    assert_eq!(daemon.client().mounts().unwrap().mounts, []);
    for folder in ["run/layers", "run/mounts", "run/fuse", "rw"] {
        assert_eq!(
            fs::read_dir(daemon.cache().join(folder)).unwrap().count(),
            0,
            "{folder}"
        );
    }
}
