//! Groups of version 2 with their controllers, which this machine's kernel has not: in the test VM.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const LIMITS: Limits = Limits {
    memory_bytes: 64 << 20,
    cpus: 0.5,
    pids: 20,
};

#[test]
fn groups_of_version_2_in_the_vm() {
    test_vm::suite(
        "container::cgroup::vm_tests::groups_of_version_2_in_the_vm",
        &[],
        &[
            ("limits", limits_are_written),
            ("pids", processes_are_limited),
            ("freeze", what_is_frozen_stands_still),
            ("oom", what_takes_too_much_is_killed_and_counted),
            ("give_back", unused_memory_is_given_back),
            ("remove", what_is_removed_is_killed),
        ],
    );
}

fn group(name: &str) -> Cgroup {
    let found = Hierarchies::open("dsec-vm").unwrap();
    assert_eq!(found.v1_controllers(), Vec::<&str>::new());
    let group = found.group(name);
    group.make(1000).unwrap();
    group.limit(&LIMITS).unwrap();
    fs::create_dir(group.run().join("x-1")).unwrap();
    group
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap().trim().to_owned()
}

/// A shell that runs `line` in the group of an exec.
fn start(group: &Cgroup, line: &str) -> Child {
    let procs = group.run().join("x-1/cgroup.procs");
    let script = format!("echo 0 > {} && {line}", procs.display());
    Command::new("sh").arg("-c").arg(script).spawn().unwrap()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

/// Mutation: the files of version 1 are written (there are none).
fn limits_are_written() {
    let group = group("limits");
    let file = |name: &str| text(&group.v2.join(name));
    assert_eq!(file("memory.max"), (64 << 20).to_string());
    assert_eq!(file("memory.swap.max"), "0");
    assert_eq!(file("cpu.max"), "50000 100000");
    assert_eq!(file("pids.max"), "22");
    group.remove(PATIENCE).unwrap();
}

/// Mutation: `pids.max` of 100,000 more (no process is refused).
fn processes_are_limited() {
    let group = group("pids");
    let line = "i=0; while [ $i -lt 40 ]; do sleep 1000 & i=$((i+1)); done; wait";
    let mut shell = start(&group, line);
    let refused = || text(&group.v2.join("pids.events")) != "max 0";
    until("a process is refused", refused);
    assert!(group.usage().unwrap().pids <= 22);
    group.remove(PATIENCE).unwrap();
    shell.wait().unwrap();
}

/// Mutation: `freeze` writes `0` (the first wait ends with an error).
fn what_is_frozen_stands_still() {
    let group = group("freeze");
    let mut shell = start(&group, "while :; do :; done");
    until("it runs", || group.usage().unwrap().cpu_us > 20_000);
    group.freeze(true, PATIENCE).unwrap();
    let before = group.usage().unwrap().cpu_us;
    let mut again = start(&group, "while :; do :; done");
    // What joins a frozen group is stopped as well; until it is, the group is not.
    until("the second joined", || group.usage().unwrap().pids >= 2);
    until("the second stands still", || {
        text(&group.run().join("cgroup.events")).contains("frozen 1")
    });
    group.freeze(false, PATIENCE).unwrap();
    until("it goes on", || {
        group.usage().unwrap().cpu_us > before + 20_000
    });
    group.remove(PATIENCE).unwrap();
    again.wait().unwrap();
    shell.wait().unwrap();
}

/// Mutation: `oom_kills` looks for `oom_kill_disable`.
fn what_takes_too_much_is_killed_and_counted() {
    let group = group("oom");
    assert_eq!(group.usage().unwrap().oom_kills, 0);
    let mut shell = start(
        &group,
        "head -c 200000000 /dev/zero | tail -c 199999999 | wc -c",
    );
    shell.wait().unwrap();
    assert_eq!(group.usage().unwrap().oom_kills, 1);
    group.remove(PATIENCE).unwrap();
}

/// Mutation: `give_back` does nothing.
fn unused_memory_is_given_back() {
    let group = group("back");
    let at = std::env::temp_dir().join("back");
    let line = "truncate -s 64M $0.img && mkfs.ext4 -q $0.img && mkdir $0 && mount -o loop $0.img $0 \
        && head -c 30000000 /dev/urandom > $0/file && sync && echo 3 > /proc/sys/vm/drop_caches";
    let made = Command::new("sh").arg("-c").arg(line).arg(&at).status();
    assert!(made.unwrap().success());
    let line = format!("cat {}/file > /dev/null", at.display());
    assert!(start(&group, &line).wait().unwrap().success());
    let before = group.usage().unwrap().memory_bytes;
    assert!(before > 10_000_000, "{before}");
    group.freeze(true, PATIENCE).unwrap();
    group.give_back().unwrap();
    let after = group.usage().unwrap().memory_bytes;
    assert!(after < before / 2, "{before} and then {after}");
    group.remove(PATIENCE).unwrap();
}

/// Mutation: `cgroup.kill` is not written (the removal does not end in time).
fn what_is_removed_is_killed() {
    let group = group("remove");
    let mut shell = start(&group, "trap '' TERM; setsid sleep 1000 & wait");
    until("both run", || group.usage().unwrap().pids >= 2);
    group.freeze(true, PATIENCE).unwrap();
    group.remove(PATIENCE).unwrap();
    shell.wait().unwrap();
    assert!(!group.v2.try_exists().unwrap());
    // Again: nothing is there, and that is no error.
    group.remove(PATIENCE).unwrap();
}
