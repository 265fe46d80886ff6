//! An origin behind Debian's nginx: everything that reads works over HTTP, and what the server spoils is never believed.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use serde_json::Value;

use crate::daemon::Layerd;
use crate::nginx::Nginx;
use crate::world::{World, dsec, failed, json, noise, ok, rich_tree, same_contents, sh};

/// The pack files of `origin`.
fn packs(world: &World, origin: &str) -> Vec<PathBuf> {
    let found = sh(
        world.root(),
        &format!("find {origin}/packs -type f -name '*.zst'"),
    );
    found.lines().map(|name| world.path(name)).collect()
}

fn inspect(world: &World, origin: &str) -> Value {
    json(&ok(dsec(
        world,
        &["inspect", "base/t:1", "--origin", origin, "--json"],
    )))
}

#[test]
fn reading_commands_work_over_http() {
    let world = World::new();
    rich_tree(&world, "tree");
    let built = world.build("tree", "origin", &[]);
    let server = Nginx::serve(&world, &world.path("origin"), "");
    let (web, local) = (server.origin(), world.origin("origin"));
    for args in [
        &["layers", "--json"][..],
        &["inspect", "base/t:1", "--json"],
        &["verify", "base/t:1", "--json"],
    ] {
        let over = |origin: &str| ok(dsec(&world, &[args, &["--origin", origin]].concat()));
        assert_eq!(over(&web), over(&local), "{args:?}");
    }
    ok(dsec(
        &world,
        &["export", "base/t:1", "--origin", &web, "--to", "out.tar"],
    ));
    assert_eq!(
        world.build("out.tar", "again", &[])["layer"],
        built["layer"]
    );
    let error = failed(&dsec(&world, &["verify", "base/t:7", "--origin", &web]), 1);
    assert!(
        error.contains("base/t:7") && error.contains(&web),
        "{error}"
    );
}

#[test]
fn a_mount_over_http_is_equal_to_its_source() {
    let world = World::new();
    let tree = rich_tree(&world, "tree");
    world.build("tree", "origin", &[]);
    let server = Nginx::serve(&world, &world.path("origin"), "");
    let daemon = Layerd::start(&world, &server.origin());
    let mnt = world.folder("mnt");
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    // `diff` cannot compare devices and pipes; it compares all contents, `find` compares the rest.
    let kinds = "find . -printf '%p %y %m %U:%G %T@ %l\\n' | sort";
    assert_eq!(sh(&mnt, kinds), sh(&tree, kinds));
    same_contents(&tree.join("usr/lib"), &mnt.join("usr/lib"));
    assert!(fs::read(mnt.join("usr/holes")).unwrap() == fs::read(tree.join("usr/holes")).unwrap());
    let stats = daemon.stats();
    let total = &stats["total"];
    for field in [
        "remote_requests",
        "remote_bytes",
        "served_bytes",
        "cache_misses",
    ] {
        assert!(total[field].as_u64().unwrap() > 0, "{field}: {total}");
        assert!(stats["mounts"][0][field].is_u64(), "{field}: {stats}");
    }
    assert!(total["cache_hits"].is_u64(), "{total}");
    assert_eq!(total["verify_failures"], 0);
    let mounts = json(&ok(daemon.run(&["mounts", "--json"])));
    assert_eq!(mounts["mounts"][0]["mountpoint"], mnt.display().to_string());
    ok(daemon.run(&["umount", "mnt"]));
    assert_eq!(fs::read_dir(&mnt).unwrap().count(), 0);
}

#[test]
fn a_byte_that_flipped_on_the_server_is_eio_there_and_right_elsewhere() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("bad"), noise(1, 600_000)).unwrap();
    fs::write(tree.join("good"), noise(2, 600_000)).unwrap();
    world.build("tree", "origin", &[]);
    let seen = inspect(&world, &world.origin("origin"));
    // Files are in the order of their names, so the first segment is of `bad`.
    let segment = &seen["segments"][0];
    let at = segment["offset"].as_u64().unwrap() + 1000;
    let pack = File::options()
        .read(true)
        .write(true)
        .open(&packs(&world, "origin")[0])
        .unwrap();
    let mut byte = [0];
    pack.read_exact_at(&mut byte, at).unwrap();
    pack.write_all_at(&[byte[0] ^ 4], at).unwrap();
    drop(pack);
    let server = Nginx::serve(&world, &world.path("origin"), "");
    let daemon = Layerd::start(&world, &server.origin());
    let mnt = world.folder("mnt");
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    let error = fs::read(mnt.join("bad")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert!(fs::read(mnt.join("good")).unwrap() == fs::read(tree.join("good")).unwrap());
    // What lies behind the damaged segment of the same file is right too.
    let mut end = vec![0; 4096];
    let bad = File::open(mnt.join("bad")).unwrap();
    bad.read_exact_at(&mut end, 500_000).unwrap();
    drop(bad);
    assert!(end == noise(1, 600_000)[500_000..504_096]);
    let failures = daemon.stats()["total"]["verify_failures"].as_u64().unwrap();
    assert!(failures >= 1);
    let digest = segment["digest"].as_str().unwrap();
    let pack = seen["packs"][0]["digest"].as_str().unwrap();
    let log = daemon.log();
    let named = log
        .lines()
        .any(|line| line.contains(digest) && line.contains(pack) && line.contains("found="));
    assert!(named, "no line names segment and pack: {log}");
    ok(daemon.run(&["umount", "mnt"]));
}

#[test]
fn a_server_that_compresses_is_asked_not_to() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("text"), "all work and no play\n".repeat(50_000)).unwrap();
    world.build("tree", "origin", &[]);
    // Compressed files beside the plain ones, which a client that accepts gzip would get.
    sh(world.root(), "find origin -type f -exec gzip -k {} +");
    let on = "default_type application/zstd; gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any; gzip_static on;";
    let server = Nginx::serve(&world, &world.path("origin"), on);
    let web = server.origin();
    ok(dsec(&world, &["verify", "base/t:1", "--origin", &web]));
    ok(dsec(
        &world,
        &["export", "base/t:1", "--origin", &web, "--to", "out.tar"],
    ));
    let tar = File::open(world.path("out.tar")).unwrap();
    let mut bytes = Vec::new();
    tar.take(4 << 20).read_to_end(&mut bytes).unwrap();
    let text = fs::read(tree.join("text")).unwrap();
    assert!(bytes.windows(text.len()).any(|window| window == text));
}

#[test]
fn packs_that_a_server_encodes_anyway_are_refused() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("data"), noise(1, 300_000)).unwrap();
    world.build("tree", "origin", &[]);
    for pack in packs(&world, "origin") {
        sh(world.root(), &format!("gzip -k '{}'", pack.display()));
    }
    let always = "location ~ /packs/ { gzip_static always; }";
    let server = Nginx::serve(&world, &world.path("origin"), always);
    let web = server.origin();
    let output = dsec(&world, &["verify", "base/t:1", "--origin", &web]);
    failed(&output, 1);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("packs/")
            && said.contains("expected an unencoded body, found `Content-Encoding: gzip`"),
        "{said}"
    );
    let error = failed(
        &dsec(
            &world,
            &["export", "base/t:1", "--origin", &web, "--to", "out.tar"],
        ),
        1,
    );
    assert!(
        error.contains("Content-Encoding: gzip") && error.contains(&web),
        "{error}"
    );
    let daemon = Layerd::start(&world, &web);
    let mnt = world.folder("mnt");
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    let error = fs::read(mnt.join("data")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert_eq!(daemon.stats()["total"]["served_bytes"], 0);
    assert!(
        daemon.log().contains("Content-Encoding: gzip"),
        "{}",
        daemon.log()
    );
    ok(daemon.run(&["umount", "mnt"]));
}
