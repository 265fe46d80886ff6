//! Disk limits of sandboxes: full is full, and nothing of it is left.

use std::fs;
use std::path::Path;

use crate::sandboxd::{Sandboxd, until};
use crate::world::World;

/// Loop devices that show a file below `folder`.
fn loops(folder: &Path) -> usize {
    let devices = fs::read_dir("/sys/block").unwrap();
    let shown = devices.filter_map(|device| {
        let path = device.unwrap().path().join("loop/backing_file");
        fs::read_to_string(path).ok()
    });
    shown
        .filter(|file| file.starts_with(folder.to_str().unwrap()))
        .count()
}

/// Mutation: without autoclear the devices stay.
#[test]
fn a_full_disk_is_the_sandboxs_own_and_leaves_nothing() {
    let world = World::new();
    let mut daemon = Sandboxd::start(&world);
    let create = ["sandbox", "create", "--base", "base/mini:1", "--disk-mb"];
    let id = daemon.ok(&[&create[..], &["32"]].concat());
    let listed = daemon.ok(&["sandbox", "ls", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let disk = serde_json::json!({"mib": 32, "inodes": 4096, "by": "loop"});
    assert_eq!(listed[0]["disk"], disk);
    let sh = |id: &str, line: &str| {
        let ran = daemon.dsec(&["sandbox", "exec", id, "--", "sh", "-c", line]);
        let said = [ran.stdout, ran.stderr].concat();
        (ran.status.code(), String::from_utf8(said).unwrap())
    };
    let (code, said) = sh(&id, "head -c 40000000 /dev/zero > /w/big");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("No space left on device"), "{said}");
    let (_, size) = sh(&id, "stat -c %s /w/big");
    let size: u64 = size.trim().parse().unwrap();
    assert!((28 << 20..32 << 20).contains(&size), "{size}");
    // With nothing left: the agent answers, and what is removed can be written again.
    fs::write(world.path("in"), vec![1; 2 << 20]).unwrap();
    let full = daemon.dsec(&["sandbox", "cp", "in", &format!("{id}:/w/more")]);
    let said = String::from_utf8(full.stderr).unwrap();
    assert!(said.contains("No space left on device"), "{said}");
    assert_eq!(
        sh(&id, "rm /w/big; echo gone"),
        (Some(0), "gone\n".to_owned())
    );
    daemon.ok(&["sandbox", "cp", "in", &format!("{id}:/w/more")]);
    let many = "i=0; while [ $i -lt 5000 ] && printf '' > /w/f$i; do i=$((i+1)); done 2>/dev/null; echo $i";
    let (_, made) = sh(&id, many);
    let made: u64 = made.trim().parse().unwrap();
    assert!((3900..4096).contains(&made), "{made} files of 4096");
    sh(&id, "rm -f /w/f*");
    let child = daemon.ok(&["sandbox", "fork", &id, "1"]);
    assert_eq!(loops(world.root()), 2);
    daemon.crash_and_restart();
    let wc = ["sandbox", "exec", &child, "--", "wc", "-c", "/w/more"];
    assert_eq!(daemon.ok(&wc), "2097152 /w/more");
    let name = format!("workspace/disk:{id}");
    assert_eq!(daemon.ok(&["sandbox", "pack-diff", &id, &name]).len(), 64);
    daemon.ok(&["sandbox", "kill", &id, &child]);
    until("the devices are free", || loops(world.root()) == 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let state = world.path("state/sandboxes");
    assert!(!mounts.contains(state.to_str().unwrap()), "{mounts}");
    for wrong in ["15", "2000000"] {
        let refused = daemon.dsec(&[&create[..], &[wrong]].concat());
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(said.contains("16 to 1048576 are expected"), "{said}");
    }
}
