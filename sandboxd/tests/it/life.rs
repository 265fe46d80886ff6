//! Making and ending: what is left, and what survives.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sandboxd::backend::Backend as _;
use sandboxd::backend::Plan;
use sandboxd::container::protocol::{Answer, Request};

use crate::host::{Host, LIMITS, SOON, shell, until};

/// What the kernel keeps for us.
fn census(host: &Host) -> BTreeMap<&'static str, usize> {
    // Other tests mount too.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours = host.dir.path().to_str().unwrap();
    let mounts = mounts.lines().filter(|line| line.contains(ours)).count();
    let entries = |path: &Path| std::fs::read_dir(path).map_or(0, Iterator::count);
    let name = format!(
        "dsec-test-{}",
        host.dir
            .path()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .trim_start_matches('.')
    );
    let groups = ["unified", "memory", "cpu", "pids"].map(|kind| {
        let parent = Path::new("/sys/fs/cgroup").join(kind).join(&name);
        std::fs::read_dir(parent).map_or(0, |entries| {
            entries
                .filter(|e| e.as_ref().unwrap().file_type().unwrap().is_dir())
                .count()
        })
    });
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    BTreeMap::from([
        ("mounts", mounts),
        ("groups", groups.iter().sum()),
        ("descriptors", descriptors()),
        ("children", children.split_whitespace().count()),
        ("sockets", entries(&host.dir.path().join("run"))),
    ])
}

/// Open descriptors; those of user namespaces but once each, since one is kept for every slot that was ever used.
fn descriptors() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let all: Vec<PathBuf> = all.filter_map(|fd| fd.path().read_link().ok()).collect();
    let namespaces = all
        .iter()
        .filter(|path| path.to_string_lossy().starts_with("user:"));
    let distinct: BTreeSet<&PathBuf> = namespaces.collect();
    all.len() - distinct.len()
}

/// Mutation: without the removal of the control group in `end`, the next sandbox of the slot cannot make its execs' groups.
#[test]
fn hundreds_of_sandboxes_with_faults_leave_nothing() {
    let host = Host::new();
    let missing = [PathBuf::from("/"), PathBuf::from("/nowhere")];
    let bad = host.dir.path().join("bad");
    std::fs::create_dir_all(&bad).unwrap();
    std::os::unix::fs::symlink("/etc", bad.join("sys")).unwrap();
    let redirected = [PathBuf::from("/"), bad];
    let file = [PathBuf::from("/etc/passwd")];
    let good = [PathBuf::from("/")];
    let round = |n: usize| {
        let layers: &[PathBuf] = match n % 8 {
            0 => &missing,
            1 => &redirected,
            2 => &file,
            _ => &good,
        };
        let name = format!("r{n}");
        let plan = Plan {
            layers,
            rw: &host.rw(&name),
            hostname: &name,
            limits: &LIMITS,
            patience: SOON,
        };
        let made = host.containers.create(&plan);
        assert_eq!(made.is_ok(), n % 8 > 2, "{made:?}");
        if let Ok(place) = made {
            if n % 8 == 3 {
                let mut spec = shell("setsid sleep 1000 & exec sleep 1000");
                spec.exec_id = "s".to_owned();
                host.ask(
                    &place,
                    &Request::Exec {
                        spec: Box::new(spec),
                        stream: false,
                        resumed: false,
                    },
                )
                .unwrap();
            }
            if n % 8 == 4 {
                // Its agent is gone already when it is killed.
                let pid = rustix_pid(place.pid);
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
            if n % 8 == 5 {
                host.containers.pause(&place).unwrap();
            }
            host.containers.kill(&place).unwrap();
            host.containers.kill(&place).unwrap();
        }
        std::fs::remove_dir_all(host.rw(&name)).unwrap_or_default();
    };
    (0..16).for_each(round);
    let before = settled(&host);
    (16..216).for_each(round);
    assert_eq!(settled(&host), before);
}

/// The census when the pool, which fills up in the background, is full: longer than the pause after a shell that failed.
fn settled(host: &Host) -> BTreeMap<&'static str, usize> {
    let mut last = census(host);
    until("the pool is full", || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let now = census(host);
        std::mem::replace(&mut last, now.clone()) == now
    });
    last
}

/// Mutation: if `create` does not discard its shell, groups and sockets stay.
#[test]
fn a_fault_at_each_step_of_a_create_leaves_nothing() {
    let cycles = std::env::var("DSEC_CYCLES").map_or(120, |n| n.parse().unwrap());
    let host = Host::new();
    let good = [PathBuf::from("/")];
    host.sandbox("first");
    let before = settled(&host);
    // Seven steps of a shell and of a create can fail: a number that meets each in turn.
    sandboxd::faults::fail_every(5);
    let failed = (0..cycles).filter(|n| {
        let name = format!("f{n}");
        let plan = Plan {
            layers: &good,
            rw: &host.rw(&name),
            hostname: &name,
            limits: &LIMITS,
            patience: SOON,
        };
        let made = host.containers.create(&plan);
        if let Ok(place) = &made {
            host.containers.kill(place).unwrap();
        }
        std::fs::remove_dir_all(host.rw(&name)).unwrap_or_default();
        made.is_err()
    });
    let failed = failed.count();
    sandboxd::faults::fail_every(0);
    assert!(
        (cycles / 4..cycles).contains(&failed),
        "{failed} of {cycles}"
    );
    assert_eq!(settled(&host), before);
}

fn rustix_pid(pid: i32) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(pid).unwrap()
}

/// Mutation: with processes that only wait to be collected counted as living, the stray is found.
#[test]
fn sandboxes_outlive_the_daemon_and_strays_do_not() {
    let mut host = Host::new();
    let (kept, stray) = (host.sandbox("kept"), host.sandbox("stray"));
    host.ok(&kept, "echo here > /root/note");
    let mut spec = shell("sleep 0.3; echo late");
    spec.exec_id = "running".to_owned();
    let request = Request::Exec {
        spec: Box::new(spec),
        stream: false,
        resumed: false,
    };
    host.ask(&kept, &request).unwrap();
    host.restart(std::slice::from_ref(&kept));
    assert!(host.containers.find(&kept).is_ok());
    assert_eq!(host.ok(&kept, "cat /root/note"), "here\n");
    assert!(matches!(
        host.ask(&kept, &request).unwrap(),
        Answer::Started { again: true, .. }
    ));
    assert!(host.containers.find(&stray).is_err());
    let fresh = host.sandbox("fresh");
    assert_ne!(fresh.slot, kept.slot);
}

/// A place whose process number now belongs to another process is not found, and not killed.
#[test]
fn another_process_with_the_same_number_is_left_alone() {
    let host = Host::new();
    let mut place = host.sandbox("number");
    place.started += 1;
    assert!(host.containers.find(&place).is_err());
    let mut sleeper = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let foreign = sandboxd::backend::Place {
        backend: sandboxd::backend::Kind::Container,
        slot: 9000,
        pid: i32::try_from(sleeper.id()).unwrap(),
        started: 1,
    };
    host.containers.kill(&foreign).unwrap();
    assert!(sleeper.try_wait().unwrap().is_none());
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}
