//! One tree, one name: whatever the source's form, its order, the threads and what the origin has already.

use std::fs::File;
use std::process::Stdio;

use crate::world::{World, dsec_reading, json, noise, ok, rich_tree, sh};

#[test]
fn a_directory_and_every_tar_of_it_are_one_layer() {
    let world = World::new();
    rich_tree(&world, "tree");
    let wanted = world.build("tree", "origin", &["--threads", "1"])["layer"].clone();
    let tar = "tar --format=pax --xattrs --xattrs-include='*' -C tree";
    sh(
        world.root(),
        &format!(
            "{tar} --sort=name -cf sorted.tar .
            {tar} --sort=none -cf unsorted.tar .
            {tar} --sparse --acls --sort=inode -cf sparse.tar .
            (cd tree; find . ! -type d | sort -r; find . -type d | sort -r) > backwards
            {tar} --no-recursion -T backwards -cf backwards.tar
            gzip -c sorted.tar > sorted.tar.gz
            zstd -q -c unsorted.tar > unsorted.tar.zst
            cmp -s sorted.tar backwards.tar && exit 1
            cp -a --sparse=always tree copy"
        ),
    );
    let sources = [
        "copy",
        "sorted.tar",
        "unsorted.tar",
        "sparse.tar",
        "backwards.tar",
        "sorted.tar.gz",
        "unsorted.tar.zst",
    ];
    for source in sources {
        for threads in ["1", "4"] {
            let empty = format!("empty-{source}-{threads}");
            let built = world.build(source, &empty, &["--threads", threads]);
            assert_eq!(built["layer"], wanted, "{source} on {threads} threads");
            assert!(built["segments_new"].as_u64().unwrap() > 3, "{built}");
        }
    }
    for file in ["sorted.tar", "sorted.tar.gz", "unsorted.tar.zst"] {
        let origin = world.origin("origin-stdin");
        let args = [
            "build",
            "-",
            "--axis",
            "toolkit",
            "--name",
            "x",
            "--version",
            "9",
            "--origin",
            &origin,
            "--json",
        ];
        let input = Stdio::from(File::open(world.path(file)).unwrap());
        let built = json(&ok(dsec_reading(&world, &args, input)));
        assert_eq!(built["layer"], wanted, "{file} on standard input");
    }
}

#[test]
fn what_the_origin_holds_changes_what_is_stored_and_not_the_name() {
    let world = World::new();
    let tree = rich_tree(&world, "tree");
    let wanted = world.build("tree", "empty", &[]);
    // A full origin: other trees, one of which shares files with ours.
    let other = world.folder("other");
    std::fs::write(other.join("other"), noise(9, 900_000)).unwrap();
    world.build("other", "full", &["--version", "0"]);
    sh(world.root(), "cp -a tree/usr/lib/large.so.1 other/");
    world.build("other", "full", &["--version", "00"]);
    let again = world.build("tree", "full", &["--threads", "4"]);
    assert_eq!(again["layer"], wanted["layer"]);
    assert!(again["segments_reused"].as_u64().unwrap() > 0, "{again}");
    let third = world.build("tree", "full", &["--version", "3", "--threads", "1"]);
    assert_eq!(third["layer"], wanted["layer"]);
    assert_eq!(
        (&third["segments_new"], &third["bytes_stored"]),
        (&0.into(), &0.into())
    );
    // And it is the tree that gives the name: one nanosecond makes another.
    sh(
        &tree,
        "touch -d '2242-05-06 07:08:09.000000002 UTC' usr/tool",
    );
    assert_ne!(world.build("tree", "full", &[])["layer"], wanted["layer"]);
}
