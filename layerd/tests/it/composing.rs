//! Several layers as one root file system.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::daemon::{Daemon, mounts_below};
use crate::fixture::World;

/// Three layers that overlap, lowest first.
fn publish_three(world: &World) {
    for (tag, files) in [
        ("base/b:1", &[("etc/name", "base"), ("usr/lib/a", "a")][..]),
        (
            "workspace/w:1",
            &[("etc/name", "work"), ("src/main.py", "print()")],
        ),
        (
            "toolkit/t:1",
            &[("opt/tool/run.py", "tool"), ("usr/lib/b", "b")],
        ),
    ] {
        let tree = world.folder(&tag.replace(['/', ':'], "-"));
        for (path, content) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        world.publish(&tree, tag);
    }
}

const STACK: [&str; 3] = ["base/b:1", "workspace/w:1", "toolkit/t:1"];

#[test]
fn upper_layers_hide_lower_ones_and_folders_merge() {
    let world = World::new();
    publish_three(&world);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&STACK, &mnt, false);
    let read = |path: &str| fs::read_to_string(mnt.join(path)).unwrap();
    assert_eq!(read("etc/name"), "work");
    assert_eq!(
        (read("usr/lib/a"), read("usr/lib/b")),
        ("a".into(), "b".into())
    );
    let error = fs::write(mnt.join("new"), b"x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn writes_land_in_the_upper_directory_and_outlive_the_mount() {
    let world = World::new();
    publish_three(&world);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    let mount = daemon.mount(&STACK, &mnt, true);
    let upper = mount.upper.clone().unwrap();
    let cache = mnt.join("opt/tool/__pycache__");
    fs::create_dir(&cache).unwrap();
    fs::write(cache.join("run.pyc"), b"code").unwrap();
    fs::remove_file(mnt.join("etc/name")).unwrap();
    fs::write(mnt.join("usr/lib/a"), b"changed").unwrap();
    assert_eq!(
        fs::read(upper.join("opt/tool/__pycache__/run.pyc")).unwrap(),
        b"code"
    );
    assert_eq!(daemon.client().mounts().unwrap().mounts, [mount]);
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(fs::read(upper.join("usr/lib/a")).unwrap(), b"changed");
    let whiteout = fs::symlink_metadata(upper.join("etc/name")).unwrap();
    assert_eq!(
        (whiteout.rdev(), whiteout.mode() & 0o170_000),
        (0, 0o020_000)
    );
    daemon.mount(&STACK, &mnt, true);
    assert_eq!(
        fs::read(mnt.join("usr/lib/a")).unwrap(),
        b"a",
        "a new composition is fresh"
    );
}

#[test]
fn compositions_share_one_kernel_mount_a_layer() {
    let world = World::new();
    publish_three(&world);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    for n in 0..10 {
        daemon.mount(&STACK, &world.folder(&format!("m{n}")), n % 2 == 0);
    }
    assert_eq!(mounts_below(&daemon.cache().join("run/layers")).len(), 3);
    assert_eq!(daemon.stats().mounts.len(), 10);
}

/// Mutation: lowers in the order of the overlay (topmost first) fail here.
#[test]
fn a_composition_says_where_its_layers_are() {
    let world = World::new();
    publish_three(&world);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mount = daemon.mount(&STACK, &world.folder("mnt"), false);
    let names = mount
        .lowers
        .iter()
        .map(|lower| fs::read_dir(lower).unwrap().count());
    assert_eq!(names.collect::<Vec<_>>(), [2, 2, 2]);
    assert!(mount.lowers[0].join("usr/lib/a").is_file());
    assert!(mount.lowers[1].join("src/main.py").is_file());
    assert!(mount.lowers[2].join("opt/tool/run.py").is_file());
}

#[test]
fn a_layer_may_come_twice_and_the_upper_one_decides() {
    let world = World::new();
    publish_three(&world);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mnt = world.folder("mnt");
    daemon.mount(&["base/b:1", "workspace/w:1", "base/b:1"], &mnt, false);
    assert_eq!(fs::read_to_string(mnt.join("etc/name")).unwrap(), "base");
    daemon.client().umount(&mnt).unwrap();
    assert_eq!(mounts_below(&daemon.cache().join("run/layers")).len(), 0);
}

#[test]
fn the_root_has_the_attributes_of_the_top_layers_root() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("f"), b"x").unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o751)).unwrap();
    std::os::unix::fs::chown(&tree, Some(1234), Some(5678)).unwrap();
    world.publish(&tree, "base/t:1");
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    for rw in [false, true] {
        let mnt = world.folder(&format!("mnt-{rw}"));
        daemon.mount(&["base/t:1"], &mnt, rw);
        let meta = fs::metadata(&mnt).unwrap();
        assert_eq!(
            (meta.mode() & 0o7777, meta.uid(), meta.gid()),
            (0o751, 1234, 5678)
        );
    }
}
