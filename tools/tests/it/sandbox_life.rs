//! The life of many sandboxes: faults, bursts, crashes; nothing lost, nothing left.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::sandboxd::{Sandboxd, until};
use crate::world::World;

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |n| n.parse().unwrap())
}

fn script(daemon: &Sandboxd<'_>, what: &str, count: usize) -> Command {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("python3");
    command
        .arg("-B")
        .arg(tools.join("tests/it/cycles.py"))
        .args([what, &count.to_string()])
        .env("PYTHONPATH", tools.with_file_name("libdsec").join("src"))
        .env("DSEC_URL", daemon.url())
        .stdin(Stdio::null());
    command
}

/// Runs it; how many did well, and how many did not.
fn counted(daemon: &Sandboxd<'_>, what: &str, count: usize) -> (usize, usize) {
    let ran = script(daemon, what, count)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let said = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success(), "{said}\n{}", daemon.log());
    let (well, ill) = said.trim().split_once(' ').unwrap();
    (well.parse().unwrap(), ill.parse().unwrap())
}

/// Folders of control groups of this state folder.
fn groups(world: &World) -> Vec<PathBuf> {
    let state = fs::canonicalize(world.path("state")).unwrap();
    let hash = state
        .to_str()
        .unwrap()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    let name = format!("dsec-{hash:016x}");
    let kinds = ["unified", "memory", "cpu", "pids", "."];
    let parents = kinds.map(|kind| Path::new("/sys/fs/cgroup").join(kind).join(&name));
    let folders = parents
        .iter()
        .filter_map(|parent| fs::read_dir(parent).ok())
        .flatten();
    let folders = folders.filter(|e| e.as_ref().unwrap().file_type().unwrap().is_dir());
    folders.map(|e| e.unwrap().path()).collect()
}

/// Processes in them.
fn processes(world: &World) -> usize {
    let lists = groups(world).into_iter().flat_map(|group| {
        let below = fs::read_dir(&group).into_iter().flatten().flatten();
        below
            .map(|entry| entry.path().join("cgroup.procs"))
            .chain([group.join("cgroup.procs")])
            .collect::<Vec<_>>()
    });
    lists
        .filter_map(|list| fs::read_to_string(list).ok())
        .map(|list| list.lines().count())
        .sum()
}

/// What the kernel and the disk keep for the daemon; the database opens and closes files as it likes.
fn census(world: &World, daemon: &Sandboxd<'_>) -> BTreeMap<&'static str, usize> {
    let root = world.root().to_str().unwrap();
    let count = |path: &str| fs::read_dir(world.path(path)).map_or(0, Iterator::count);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let folder = PathBuf::from(format!("/proc/{}/fd", daemon.pid()));
    let fds = fs::read_dir(folder).unwrap().filter(|fd| {
        let target = fs::read_link(fd.as_ref().unwrap().path());
        target.is_ok_and(|t| !t.to_string_lossy().contains("/trajectory/"))
    });
    let loops = fs::read_dir("/sys/block").unwrap().filter(|device| {
        let file = device.as_ref().unwrap().path().join("loop/backing_file");
        fs::read_to_string(file).is_ok_and(|file| file.starts_with(root))
    });
    let sandboxes = fs::read_dir(world.path("state/sandboxes")).unwrap();
    let written = sandboxes
        .flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap())
        .filter(|file| file.as_ref().unwrap().file_name() != "record.json");
    BTreeMap::from([
        (
            "mounts",
            mounts.lines().filter(|l| l.contains(root)).count(),
        ),
        ("groups", groups(world).len()),
        ("processes", processes(world)),
        ("descriptors", fds.count()),
        ("loop devices", loops.count()),
        ("sockets", count("state/run")),
        ("files of sandboxes", written.count()),
        ("copies", count("state/frozen") + count("state/packing")),
    ])
}

fn settled(world: &World, daemon: &Sandboxd<'_>) -> BTreeMap<&'static str, usize> {
    let mut last = census(world, daemon);
    let mut since = Instant::now();
    until("nothing changes any more", || {
        let now = census(world, daemon);
        if now != last {
            since = Instant::now();
            last = now;
        }
        since.elapsed() > Duration::from_millis(600)
    });
    last
}

/// `DSEC_CYCLES` says how many (`tools/soak`). Mutation: if `make_now` leaves a failed create's folder, its files are found.
#[test]
fn creates_with_faults_at_every_step_leave_nothing() {
    let cycles = number("DSEC_CYCLES", 100);
    let world = World::new();
    let listen = format!("unix:{}", world.path("sandboxd.sock").display());
    let daemon = Sandboxd::start_with(&world, &listen, &["--fail-every", "17"], "");
    counted(&daemon, "cycles", 30);
    let before = settled(&world, &daemon);
    let (well, ill) = counted(&daemon, "cycles", cycles);
    println!("{cycles} cycles, {ill} of them with a fault: {before:?}");
    assert!(well > cycles / 4 && ill > cycles / 20, "{well} {ill}");
    assert_eq!(settled(&world, &daemon), before);
}

/// `DSEC_BURST` says how many. Mutation: with room for 100 in the queue, 800 and more are refused.
#[test]
fn a_burst_of_a_thousand_creates_is_queued() {
    let burst = number("DSEC_BURST", 1000);
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    assert_eq!(counted(&daemon, "burst", burst), (burst, 0));
    assert_eq!(daemon.ok(&["sandbox", "ls"]), "");
}

/// The time is printed, not asserted. Mutation: if records were not written before the answer, the last ones are lost.
#[test]
fn a_hundred_sandboxes_outlive_a_crash() {
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let create = [
        "sandbox",
        "create",
        "--base",
        "base/mini:1",
        "--memory-mb",
        "64",
    ];
    let ids: Vec<String> = (0..100).map(|_| daemon.ok(&create)).collect();
    let began = Instant::now();
    daemon.crash_and_restart();
    let first = daemon.ok(&["sandbox", "exec", &ids[0], "--", "echo", "here"]);
    println!("100 sandboxes: usable {:?} after SIGKILL", began.elapsed());
    assert_eq!(first, "here");
    for id in &ids {
        assert_eq!(daemon.ok(&["sandbox", "exec", id, "--", "echo", id]), *id);
    }
    let all: Vec<&str> = ids.iter().map(String::as_str).collect();
    daemon.ok(&[&["sandbox", "kill"][..], &all].concat());
    assert_eq!(daemon.ok(&["sandbox", "ls"]), "");
}

/// Mutations that were seen to fail: sockets of shells that ended with their daemon, a folder
/// whose removal was cut off, or compositions of sandboxes that had ended, stay; a sandbox that was being copied stands still for ever.
#[test]
fn a_daemon_killed_at_twenty_moments_of_a_storm_leaves_nothing() {
    let kills = number("DSEC_KILLS", 20);
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    daemon.ok(&["run", "--base", "base/mini:1", "--", "echo"]);
    let before = settled(&world, &daemon);
    let mut storm = script(&daemon, "storm", kills / 2)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut moment = u64::from(std::process::id());
    for _ in 0..kills {
        moment = moment
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(99);
        std::thread::sleep(Duration::from_millis(150 + (moment >> 33) % 500));
        daemon.crash_and_restart();
    }
    storm.wait().unwrap();
    let listed = daemon.ok(&["sandbox", "ls"]);
    println!(
        "{kills} kills, {} sandboxes alive after them",
        listed.lines().count()
    );
    for line in listed.lines() {
        let id = line.split(' ').next().unwrap();
        // Whatever lives is usable.
        assert_eq!(
            daemon.ok(&["sandbox", "exec", id, "--", "echo", "on"]),
            "on"
        );
        daemon.ok(&["sandbox", "kill", id]);
    }
    // What layerd held for earlier daemons is given back within seconds.
    until("all is given back", || {
        let mut now = census(&world, &daemon);
        // Also what was held ready before; and the first daemon may have had a descriptor open that later ones had no use for.
        let at_most = ["mounts", "descriptors"].map(|kind| {
            let found = now.insert(kind, before[kind]).unwrap();
            (found, before[kind])
        });
        let all = now == before && at_most.iter().all(|(now, before)| now <= before);
        if !all {
            println!("{now:?}, {at_most:?} at most, and {before:?} before");
        }
        all
    });
}

/// Mutation: without the parent-death signal, the shells that waited stay.
#[test]
fn when_the_daemon_dies_for_good_what_has_no_purpose_ends() {
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    settled(&world, &daemon);
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    let spawner = fs::read_to_string(children).unwrap();
    let spawner: u32 = spawner.split_whitespace().next().unwrap().parse().unwrap();
    daemon.crash();
    until("the spawner has gone", || {
        !Path::new("/proc").join(spawner.to_string()).exists()
    });
    // The agent and its launcher, in a group of v2 and one of each v1.
    let alone = |world: &World| {
        let used = groups(world).into_iter().filter(|group| {
            let below = |name: &str| fs::read_to_string(group.join(name)).unwrap_or_default();
            !below("cgroup.procs").is_empty()
        });
        used.map(|group| group.file_name().unwrap().to_owned())
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    until("only the sandbox that is used is left", || {
        alone(&world) == 1
    });
    daemon.restart();
    assert_eq!(
        daemon.ok(&["sandbox", "exec", &id, "--", "echo", "on"]),
        "on"
    );
}

/// `idle_timeout` counts from the last request's end (from ready, if there was none), whatever the sandbox does: one that is paused has
/// it too. Nothing here depends on how fast this machine is: only that nobody is ended while a request runs. Mutations: idle from the
/// request's beginning (`in_use` left out) ends the sandbox under its command; one that is never looked at while paused stays.
#[test]
fn an_idle_sandbox_ends_after_its_last_request_and_never_under_one() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let client = |code: &str| {
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("libdsec");
        let ran = Command::new("python3")
            .args([
                "-B",
                "-c",
                &format!("import time\nfrom libdsec import Sandbox\nBASE = 'base/mini:1'\n{code}"),
            ])
            .env("PYTHONPATH", package.join("src"))
            .env("DSEC_URL", daemon.url())
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}\n{}", daemon.log());
        String::from_utf8(ran.stdout).unwrap().trim_end().to_owned()
    };
    let ended = |id: &str| {
        until("it has ended", || {
            !daemon.ok(&["sandbox", "ls"]).contains(id)
        });
        let all = daemon.ok(&["sandbox", "ls", "--all"]);
        let line = all.lines().find(|line| line.starts_with(id)).unwrap();
        assert!(line.ends_with("(nobody used it)"), "{line}");
    };
    // A command much longer than the time, and no other request.
    let id = client(
        "sb = Sandbox.create(base=BASE, idle_timeout=0.5)\nprint(sb.id)\nassert sb.commands.run('sleep 2; echo on').stdout == 'on\\n'",
    );
    ended(&id);
    // Nobody ever asked it anything.
    ended(&client(
        "print(Sandbox.create(base=BASE, idle_timeout=0.2).id)",
    ));
    // It stands still.
    ended(&client(
        "sb = Sandbox.create(base=BASE, idle_timeout=1)\nsb.pause()\nprint(sb.id)",
    ));
    // Looking at it is no use of it.
    let id = client(
        "sb = Sandbox.create(base=BASE, idle_timeout=1)\nprint(sb.id)\nwhile sb.get_info().state != 'gone': time.sleep(0.01)",
    );
    ended(&id);
}

/// Mutation: if each request of a paused sandbox resumes it by itself, without `change`'s look at the state under the lock, it is resumed many times.
#[test]
fn many_requests_to_a_paused_sandbox_resume_it_once() {
    let world = World::new();
    let daemon = Sandboxd::start(&world);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    for _ in 0..5 {
        daemon.ok(&["sandbox", "pause", &id]);
        let children: Vec<_> = (0..12)
            .map(|n| {
                Command::new(env!("CARGO_BIN_EXE_dsec"))
                    .args(["sandbox", "exec", &id, "--", "echo", &n.to_string()])
                    .env("DSEC_URL", daemon.url())
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for (n, child) in children.into_iter().enumerate() {
            let told = child.wait_with_output().unwrap();
            assert_eq!(String::from_utf8(told.stdout).unwrap(), format!("{n}\n"));
        }
        assert!(daemon.ok(&["sandbox", "ls"]).contains("running"));
    }
    let log = daemon.log();
    let resumed = log.lines().filter(|line| line.contains("resumed"));
    assert_eq!(resumed.count(), 5, "{log}");
}
