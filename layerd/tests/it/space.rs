//! A cache disk that is full, or that may only be used a little.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::daemon::{Daemon, detach, read_whole, until};
use crate::fixture::World;

fn bytes_below(folder: &Path) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // A file may be evicted while we look.
        let Ok(meta) = fs::symlink_metadata(&path) else {
            continue;
        };
        sum += if meta.is_dir() {
            bytes_below(&path)
        } else {
            meta.len()
        };
    }
    sum
}

/// A small file system of its own.
struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    fn new(path: &Path, size: &str) -> Self {
        fs::create_dir_all(path).unwrap();
        let size = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(path)
            .status();
        assert!(mounted.unwrap().success());
        Self(path.to_owned())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        detach(&self.0);
    }
}

#[test]
fn a_full_disk_is_served_around_with_one_warning() {
    const OTHERS: usize = (4 << 20) - (200 << 10);
    let world = World::new();
    let (_, data) = world.publish_data(12);
    let disk = Tmpfs::new(&world.path("cache"), "4M");
    let daemon = Daemon::start(
        world.dir.path(),
        &[world.origin_url()],
        &["--memory", "1MiB"],
    );
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    fs::write(world.path("cache/other"), vec![1; OTHERS]).unwrap();
    for _ in 0..2 {
        assert!(read_whole(&mnt.join("data")).unwrap() == data);
    }
    let total = daemon.total();
    assert!(total.cache_write_failures > 0, "{total:?}");
    assert_eq!(total.failed_reads, 0);
    assert_eq!(fs::read(world.path("cache/other")).unwrap().len(), OTHERS);
    assert_eq!(daemon.log().matches("without being cached").count(), 1);
    drop(daemon);
    drop(disk);
}

#[test]
fn the_cache_stays_within_its_limit_and_reads_stay_right() {
    let world = World::new();
    let (_, data) = world.publish_data(12);
    let args = ["--cache-size", "3MiB", "--memory", "1MiB"];
    let mut daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    let segments = daemon.cache().join("segments");
    for _ in 0..3 {
        assert!(read_whole(&mnt.join("data")).unwrap() == data);
        let used = bytes_below(&segments);
        assert!(used <= 3 << 20, "{used}");
    }
    let stats = daemon.stats();
    assert!(stats.cache.evicted > 30, "{stats:?}");
    assert_eq!(stats.total.failed_reads, 0);
    daemon.kill_control();
    daemon.restart();
    until("the cache is counted", || {
        daemon.stats().cache.bytes_used == bytes_below(&segments)
    });
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(bytes_below(&segments) <= 3 << 20);
}
