//! Disks over published layers: read on demand through layerd, published again, never written to.

use std::path::Path;

use serde_json::Value;

use crate::daemon::Layerd;
use crate::nbd_client::NbdClient;
use crate::world::{World, dsec, failed, json, noise, ok, rich_tree, sh};

/// Names and contents of everything on an origin but leases, which say who is reading.
fn objects(world: &World) -> String {
    sh(
        &world.path("origin"),
        "find . -type f -not -path './leases/*' -print0 | sort -z | xargs -0 sha256sum",
    )
}

fn disk(layerd: &Layerd<'_>, args: &[&str]) -> std::process::Output {
    let start = [&["disk"], args, &["--disks", "disks"]].concat();
    layerd.run(&start)
}

fn attach(layerd: &Layerd<'_>, name: &str) -> Value {
    json(&ok(disk(
        layerd,
        &["attach", name, "--nbd", "sock", "--json"],
    )))
}

fn fill(world: &World, more: usize) {
    let tree = rich_tree(world, "tree");
    std::fs::write(tree.join("more"), noise(77, more)).unwrap();
}

/// Red when parents are not named, when the image is not the lowest part, or when anything is written where layers are.
#[test]
#[expect(clippy::too_many_lines, reason = "one story")]
fn a_disk_over_published_layers_is_published_and_found_again() {
    let world = World::new();
    fill(&world, 3_000_000);
    world.build("tree", "origin", &[]);
    let origin = world.origin("origin");
    let layerd = Layerd::start(&world, &origin);
    let before = objects(&world);
    ok(disk(
        &layerd,
        &["create", "first", "--from", "base/t:1", "--size", "64MiB"],
    ));
    attach(&layerd, "first");
    let mut client = NbdClient::connect(&world.path("sock"));
    assert_eq!(client.size, 64 << 20);
    // The magic of EROFS: the image is there, and it is read when it is asked for.
    assert_eq!(client.read(1024, 4).unwrap(), [0xE2, 0xE1, 0xF5, 0xE0]);
    let fetched = layerd.stats()["total"]["served_bytes"].as_u64().unwrap();
    assert!(
        fetched < 3_000_000,
        "{fetched} bytes were read before anybody asked"
    );
    client.write(40 << 20, &noise(5, 1_000_000)).unwrap();
    client.flush().unwrap();
    ok(disk(&layerd, &["snapshot", "first"]));
    client.write(50 << 20, b"second layer").unwrap();
    let all = client.read_all();
    assert!(
        before == objects(&world),
        "a running disk wrote to the origin"
    );
    let tag = "workspace/vm:1";
    let publish = [
        "commit",
        "first",
        "--publish",
        tag,
        "--origin",
        &origin,
        "--json",
    ];
    let report = json(&ok(disk(&layerd, &publish)));
    let stored = report["bytes_stored"].as_u64().unwrap();
    assert!(
        stored < 1_100_000,
        "only what the disk wrote is published: {stored}"
    );
    drop(client);
    ok(disk(&layerd, &["detach", "first", "--force"]));
    // Nothing of it stays mounted.
    let mounts = json(&ok(layerd.run(&["mounts", "--json"])));
    assert_eq!(mounts["mounts"].as_array().unwrap().len(), 0, "{mounts}");

    // The tree of the image is the tree it was built from.
    ok(disk(&layerd, &["create", "image", "--from", "base/t:1"]));
    ok(disk(&layerd, &["export", "image", "--to", "image.raw"]));
    sh(
        world.root(),
        "mkdir mnt; mount -t erofs -o ro,loop image.raw mnt; trap 'umount mnt' EXIT
        cmp mnt/more tree/more; cmp mnt/usr/lib/large.so.1 tree/usr/lib/large.so.1",
    );

    // Found again on its name alone: the image below, the disk's layer above.
    let made = ok(disk(
        &layerd,
        &["create", "second", "--from", tag, "--json"],
    ));
    let layers = json(&made)["disk"]["layers"].clone();
    assert_eq!(layers[0]["published"]["form"], "image");
    assert_eq!(layers[1]["published"]["form"], "disk");
    assert_eq!(layers[1]["published"]["layer"], report["layer"]);
    attach(&layerd, "second");
    let mut client = NbdClient::connect(&world.path("sock"));
    assert!(client.read_all() == all);
    client.write(60 << 20, b"third").unwrap();
    drop(client);
    ok(disk(&layerd, &["detach", "second", "--force"]));
    let again = [
        "commit",
        "second",
        "--publish",
        "workspace/vm:2",
        "--origin",
        &origin,
        "--json",
    ];
    ok(disk(&layerd, &again));
    let made = ok(disk(
        &layerd,
        &["create", "third", "--from", "workspace/vm:2", "--json"],
    ));
    assert_eq!(json(&made)["disk"]["layers"].as_array().unwrap().len(), 3);
    ok(disk(&layerd, &["export", "third", "--to", "third.raw"]));
    let mut expected = all;
    expected[60 << 20..(60 << 20) + 5].copy_from_slice(b"third");
    assert!(std::fs::read(world.path("third.raw")).unwrap() == expected);

    // All in one: nothing below is needed.
    let complete = ["commit", "second", "--to", "complete.lsmt"];
    ok(disk(&layerd, &complete));
    ok(dsec(
        &world,
        &["disk", "export", "complete.lsmt", "--to", "complete.raw"],
    ));
    sh(world.root(), "cmp complete.raw third.raw");
}

/// Red when a read of a lower layer that fails is answered with zeros.
#[test]
fn a_damaged_origin_gives_errors_never_other_bytes() {
    let world = World::new();
    fill(&world, 8_000_000);
    world.build("tree", "origin", &[]);
    let layerd = Layerd::start(&world, &world.origin("origin"));
    ok(disk(&layerd, &["create", "d", "--from", "base/t:1"]));
    attach(&layerd, "d");
    sh(
        &world.path("origin"),
        "for pack in $(find packs -type f); do size=$(stat -c %s $pack)
        dd if=/dev/zero of=$pack bs=1 seek=$((size / 2)) count=5000 conv=notrunc status=none; done",
    );
    let mut client = NbdClient::connect(&world.path("sock"));
    let size = usize::try_from(client.size).unwrap();
    let mut wrong = 0;
    let mut read = Vec::new();
    for at in (0..size).step_by(64 << 10) {
        let len = (size - at).min(64 << 10);
        match client.read(u64::try_from(at).unwrap(), len) {
            Ok(bytes) => read.push((at, bytes)),
            Err(error) => {
                assert_eq!(error, "NBD error 5");
                wrong += 1;
            }
        }
    }
    drop(client);
    assert!(
        wrong > 0 && read.len() > 10,
        "{wrong} of {} reads failed",
        read.len()
    );
    ok(disk(&layerd, &["detach", "d", "--force"]));
    drop(layerd);
    // The same image from an origin that is whole.
    world.build("tree", "whole", &[]);
    let clean = World::new();
    let layerd = Layerd::start(&clean, &world.origin("whole"));
    ok(disk(&layerd, &["create", "d", "--from", "base/t:1"]));
    ok(disk(&layerd, &["export", "d", "--to", "whole.raw"]));
    let whole = std::fs::read(clean.path("whole.raw")).unwrap();
    for (at, bytes) in read {
        assert!(whole[at..at + bytes.len()] == bytes, "other bytes at {at}");
    }
}

#[test]
fn without_layerd_a_disk_over_published_layers_says_so() {
    let world = World::new();
    fill(&world, 1000);
    world.build("tree", "origin", &[]);
    {
        let layerd = Layerd::start(&world, &world.origin("origin"));
        ok(disk(&layerd, &["create", "d", "--from", "base/t:1"]));
        let error = failed(&disk(&layerd, &["create", "e", "--from", "base/none:1"]), 1);
        assert!(error.contains("base/none:1"), "{error}");
        assert!(!Path::new(&world.path("disks/e/disk.json")).exists());
    }
    let socket = world.path("socket").display().to_string();
    let args = [
        "disk", "attach", "d", "--nbd", "sock", "--disks", "disks", "--socket", &socket,
    ];
    let error = failed(&dsec(&world, &args), 1);
    assert!(error.contains("is `layerd` running"), "{error}");
}
