//! A cache disk that is full, or that may only be used a little.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::daemon::{Daemon, detach, read_whole, until};
use crate::fixture::World;

/// What `du` says of a file or folder. Files may come and go meanwhile.
fn du(path: &Path) -> u64 {
    let Ok(meta) = fs::symlink_metadata(path) else {
        return 0;
    };
    let below = fs::read_dir(path).into_iter().flatten().flatten();
    meta.blocks() * 512 + below.map(|entry| du(&entry.path())).sum::<u64>()
}

/// What `du` says of all that is the cache's in its folder.
pub(crate) fn cache_bytes(cache: &Path) -> u64 {
    let ours = ["segments", "layers", "tmp", "pins", "cache.json", "lock"];
    ours.iter().map(|name| du(&cache.join(name))).sum()
}

/// A small file system of its own.
pub(crate) struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    pub(crate) fn new(path: &Path, size: &str) -> Self {
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
    let cache = daemon.cache();
    for _ in 0..3 {
        assert!(read_whole(&mnt.join("data")).unwrap() == data);
        let used = cache_bytes(&cache);
        assert!(used <= 3 << 20, "{used}");
    }
    let stats = daemon.stats();
    assert!(stats.cache.evicted > 30, "{stats:?}");
    assert_eq!(stats.total.failed_reads, 0);
    daemon.kill_control();
    daemon.restart();
    until("the cache is counted", || {
        let stats = daemon.stats().cache;
        stats.counted && stats.bytes_used == cache_bytes(&cache)
    });
    assert!(read_whole(&mnt.join("data")).unwrap() == data);
    assert!(cache_bytes(&cache) <= 3 << 20);
}
