//! Trajectories end to end: killed clients and daemons, and replays.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::sandboxd::Sandboxd;
use crate::world::World;

/// Random enough for moments; the same for the same seed.
struct Moments(u64);

impl Moments {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

fn trainer(daemon: &Sandboxd<'_>, id: &str, steps: usize) -> Command {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("python3");
    command
        .arg("-B")
        .arg(tools.join("tests/it/trainer.py"))
        .arg(id)
        .arg(steps.to_string())
        .env("PYTHONPATH", tools.with_file_name("libdsec").join("src"))
        .env("DSEC_URL", daemon.url())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    command
}

/// What each step told: `ok …` or `unknown`.
fn to_its_end(daemon: &Sandboxd<'_>, id: &str, steps: usize) -> BTreeMap<u32, String> {
    let ran = trainer(daemon, id, steps).output().unwrap();
    assert!(ran.status.success(), "{}", daemon.log());
    let said = String::from_utf8(ran.stdout).unwrap();
    let told = said.lines().map(|line| line.split_once(' ').unwrap());
    let told: BTreeMap<u32, String> = told
        .map(|(n, told)| (n.parse().unwrap(), told.to_owned()))
        .collect();
    assert_eq!(told.len(), steps, "{said}");
    told
}

/// A dozen kills, or `DSEC_KILLS`, of a trainer or the daemon in turn. Mutation: if `begin` takes every request for a new one, a
/// step that was done fails (its file has been renamed).
#[test]
fn killed_trainers_and_daemons_neither_lose_nor_repeat_a_request() {
    let kills = std::env::var("DSEC_KILLS").map_or(12, |n| n.parse::<usize>().unwrap());
    let steps = 5 * kills;
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let mut moments = Moments(std::process::id().into());
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    let mut child = trainer(&daemon, &id, steps)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    for n in 0..kills {
        std::thread::sleep(Duration::from_millis(60 + moments.below(300)));
        if n % 2 == 0 {
            daemon.crash_and_restart();
        } else {
            child.kill().unwrap();
        }
        if n % 2 == 1 || child.try_wait().unwrap().is_some() {
            child.wait().unwrap();
            child = trainer(&daemon, &id, steps)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let told = to_its_end(&daemon, &id, steps);
    daemon.crash_and_restart();
    assert_eq!(
        to_its_end(&daemon, &id, steps),
        told,
        "answers do not change"
    );
    let log = daemon.ok(&["sandbox", "exec", &id, "--", "cat", "/w/log"]);
    let files = daemon.ok(&["sandbox", "exec", &id, "--", "ls", "/w"]);
    let mut unknown = 0;
    let told_by = &told;
    for (n, told) in &told {
        let times = log.lines().filter(|line| **line == n.to_string()).count();
        let appends = ![1, 2].contains(&(n % 5)) && n % 20 != 4;
        let before = n.checked_sub(1).and_then(|n| told_by.get(&n));
        let before = before.map(String::as_str);
        match &**told {
            "unknown" => {
                unknown += 1;
                assert!(times <= 1, "step {n} ran {times} times");
            }
            // Its file may never have come.
            _ if n % 5 == 2 && before == Some("unknown") => {}
            told => assert!(told.starts_with("ok "), "step {n}: {told}"),
        }
        if told.starts_with("ok") && appends {
            assert_eq!(times, 1, "step {n} ran {times} times: {told}");
        }
        if told == "ok renamed" {
            assert!(
                files.contains(&format!("old{}", n - 1)),
                "step {n}: {files}"
            );
        }
    }
    println!("{kills} kills, {unknown} of {steps} outcomes unknown");
    assert!(unknown <= kills, "a kill leaves one request open at most");
    let shown = daemon.ok(&["trajectory", "show", &id, "--json"]);
    for (n, line) in shown.lines().enumerate() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(event["seq"], n + 1);
    }
}

/// Mutation: with the times of files in the digest, the first replay differs.
#[test]
fn a_replay_of_deterministic_commands_gives_an_equal_tree() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1", "--env", "A=b"]);
    let run = |line: &str| daemon.dsec(&["sandbox", "exec", &id, "--", "sh", "-c", line]);
    run("mkdir -p /w/a/b; echo $A > /w/a/b/f; rm /etc/passwd; printf 1234 > /usr/new");
    run("cat /w/none; exit 3");
    std::fs::write(world.path("in"), [0, 255, 10, 13].repeat(1000)).unwrap();
    daemon.ok(&["sandbox", "cp", "in", &format!("{id}:/w/file")]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_dsec"))
        .args([
            "sandbox",
            "exec",
            "-i",
            &id,
            "--",
            "sh",
            "-c",
            "cat > /w/input",
        ])
        .env("DSEC_URL", daemon.url())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"typed").unwrap();
    assert!(child.wait().unwrap().success());
    let replay = || daemon.dsec(&["trajectory", "replay", &id, "--on", "base/mini:1"]);
    let same = replay();
    let said = String::from_utf8(same.stderr).unwrap();
    assert_eq!((said.trim(), same.status.code()), ("equal", Some(0)));
    let shown = daemon.ok(&["trajectory", "show", &id]);
    assert!(shown.contains("create base/mini:1"), "{shown}");
    assert!(shown.contains("user_exit 3"), "{shown}");
    assert_eq!(daemon.ok(&["sandbox", "ls"]).lines().count(), 1);
    run("head -c 8 /dev/urandom > /w/random");
    let other = replay();
    let said = String::from_utf8(other.stderr).unwrap();
    assert!(said.ends_with("different\n"), "{said}");
    assert_eq!(other.status.code(), Some(1));
}

/// Mutations: a replay that goes on in the parent's replay has its process write on; without the cut it has what the parent did later; uploads
/// that are not kept cannot be sent again.
#[test]
fn a_replay_of_a_forks_fork_begins_with_its_ancestors() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let run = |id: &str, line: &str| daemon.ok(&["sandbox", "exec", id, "--", "sh", "-c", line]);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    // Larger than what the database keeps, twice the same.
    std::fs::write(world.path("large"), crate::world::noise(1, 3 << 20)).unwrap();
    for name in ["one", "two"] {
        daemon.ok(&["sandbox", "cp", "large", &format!("{id}:/w/{name}")]);
    }
    let kept = std::fs::read_dir(world.path("state/uploads").join(&id)).unwrap();
    assert_eq!(kept.count(), 1, "equal uploads are kept once");
    run(&id, "mkdir /w/d; echo parent > /w/d/f; rm /etc/passwd");
    let child = daemon.ok(&["sandbox", "fork", &id]);
    run(&id, "echo later > /w/later");
    run(
        &child,
        "rm /w/two; rm -r /w/d; mkdir /w/d; echo child > /w/d/g",
    );
    let grandchild = daemon.ok(&["sandbox", "fork", &child]);
    run(&grandchild, "echo grandchild >> /w/d/g");
    let replay = |id: &str| {
        let ran = daemon.dsec(&["trajectory", "replay", id, "--on", "base/mini:1"]);
        String::from_utf8(ran.stderr).unwrap()
    };
    assert_eq!(replay(&grandchild), "equal\n");
    assert_eq!(replay(&child), "equal\n");
    // A step's moment is not told by requests.
    daemon.ok(&["sandbox", "snapshot", &id, "now"]);
    let other = daemon.ok(&["sandbox", "fork", &id, "--from", "now"]);
    assert_eq!(
        replay(&other),
        format!(
            "dsec: sandbox `{other}` was forked from step `now`, has the files of an earlier moment than its fork: no replay\n"
        )
    );
    daemon.ok(&["sandbox", "kill", &child, &grandchild, &other]);
}
