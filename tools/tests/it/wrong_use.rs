//! What an error says: which file, digest or address; what was expected, what was found; what to do.

#![expect(clippy::too_many_lines, reason = "tables read best in one piece")]

use std::fs;

use crate::world::{World, dsec, failed, noise, sh};

/// Arguments, exit status, and what the text must have.
type Case<'a> = (Vec<&'a str>, i32, Vec<&'a str>);

fn check(world: &World, cases: &[Case<'_>]) {
    for (args, status, parts) in cases {
        let output = dsec(world, args);
        let error = failed(&output, *status);
        assert!(output.stdout.is_empty(), "{args:?} printed a result");
        for part in parts {
            assert!(
                error.contains(part),
                "{args:?}: `{part}` is missing in: {error}"
            );
        }
        let start = if *status == 2 { "error: " } else { "dsec: " };
        assert!(error.starts_with(start), "{args:?}: {error}");
        assert!(!error.contains("panicked"), "{args:?}: {error}");
    }
}

fn build<'a>(source: &'a str, origin: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let start = [
        "build",
        source,
        "--axis",
        "base",
        "--name",
        "t",
        "--version",
        "1",
        "--origin",
        origin,
    ];
    [&start[..], more].concat()
}

#[test]
fn arguments_that_mean_nothing() {
    let world = World::new();
    world.folder("tree");
    let origin = &*world.origin("origin");
    let short = "abcdef";
    let axis = [
        "build",
        "tree",
        "--axis",
        "top",
        "--name",
        "t",
        "--version",
        "1",
        "--origin",
        origin,
    ];
    let name = [
        "build",
        "tree",
        "--axis",
        "base",
        "--name",
        "a b",
        "--version",
        "1",
        "--origin",
        origin,
    ];
    check(
        &world,
        &[
            (
                axis.to_vec(),
                2,
                vec!["`top`", "`base`, `workspace` or `toolkit`"],
            ),
            (
                name.to_vec(),
                1,
                vec!["`a b`", "layer name", "expected 1 to 128"],
            ),
            (
                vec!["inspect", short, "--origin", origin],
                2,
                vec!["`abcdef`", "axis/name:version", "64 hex digits"],
            ),
            (
                vec!["inspect", "base/t", "--origin", origin],
                2,
                vec!["`base/t`", "axis/name:version"],
            ),
            (
                vec!["layers", "--origin", "ftp://x"],
                2,
                vec!["`ftp://x`", "`dir:/absolute/path`", "`http(s)://host/…`"],
            ),
            (
                vec!["layers", "--origin", "dir:here"],
                2,
                vec!["`dir:here`", "`dir:/absolute/path`"],
            ),
            (
                build("tree", origin, &["--segment-kib", "100"]),
                1,
                vec!["segment size", "power of two from 128 KiB", "102400"],
            ),
            (
                build("tree", origin, &["--threads", "0"]),
                1,
                vec!["threads", "1 to 256"],
            ),
            (
                build("tree", origin, &["--level", "77"]),
                2,
                vec!["77", "1..=19"],
            ),
            (
                build("tree", origin, &["--label", "x"]),
                2,
                vec!["`x`", "KEY=VALUE"],
            ),
        ],
    );
    assert!(!world.path("origin/manifests").exists());
}

#[test]
fn things_that_are_not_there() {
    let world = World::new();
    world.folder("tree");
    world.build("tree", "origin", &[]);
    let origin = &*world.origin("origin");
    let missing = &*world.origin("missing");
    let none = "0".repeat(64);
    // A port that nothing listens on: it was free a moment ago and is held, not listened on, by this socket.
    let held = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let web = &*format!(
        "http://127.0.0.1:{}/layers",
        held.local_addr().unwrap().port()
    );
    let tar = &*world.path("no/out.tar").display().to_string();
    let socket = &*world.path("socket").display().to_string();
    let list = &*format!("dsec layers --origin {origin}");
    check(
        &world,
        &[
            (
                vec!["inspect", "base/x:1", "--origin", origin],
                1,
                vec!["`base/x:1`", origin, list],
            ),
            (
                vec!["verify", &none, "--origin", origin],
                1,
                vec![&none, origin, list],
            ),
            (
                vec!["export", "base/t:2", "--origin", origin, "--to", "x.tar"],
                1,
                vec!["`base/t:2`", list],
            ),
            (
                vec!["layers", "--origin", missing],
                1,
                vec![missing, "could not be opened: No such file or directory"],
            ),
            (
                vec!["layers", "--origin", web],
                1,
                vec![web, "index.json", "refused"],
            ),
            (
                build("tree", web, &[]),
                1,
                vec![web, "cannot be written", "`dir:`"],
            ),
            (
                build("tree", origin, &["--dict", "base/y:3"]),
                1,
                vec!["`base/y:3`", list],
            ),
            (
                build("nothing", origin, &[]),
                2,
                vec!["`nothing`", "No such file or directory"],
            ),
            (
                build("oci:tree", origin, &[]),
                1,
                vec!["tree", "oci-layout"],
            ),
            (
                vec!["export", "base/t:1", "--origin", origin, "--to", tar],
                1,
                vec![tar, "No such file or directory"],
            ),
            (
                vec!["mount", "base/t:1", "tree", "--socket", socket],
                1,
                vec![socket, "is `layerd` running"],
            ),
            (
                vec!["umount", "tree", "--socket", socket],
                1,
                vec![socket, "is `layerd` running"],
            ),
            (
                vec!["stats", "--socket", socket],
                1,
                vec![socket, "is `layerd` running"],
            ),
        ],
    );
    assert!(!world.path("x.tar").exists() && !world.path("missing").exists());
}

#[test]
fn things_that_are_damaged() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("noise"), noise(1, 300_000)).unwrap();
    let built = world.build("tree", "origin", &[]);
    let layer = built["layer"].as_str().unwrap();
    sh(
        world.root(),
        "tar -cf whole.tar tree; head -c 200000 whole.tar > cut.tar; yes 'no archive' | head -n 100 > text
        gzip -c whole.tar | head -c 100000 > cut.tar.gz
        for copy in manifest short placement tag index meta; do cp -r origin $copy; done
        sed -i 's/\"files\":1/\"files\":2/' manifest/manifests/*/*
        truncate -s 20 short/placements/*/*
        echo '{}' > tag/tags/base/t/1.json
        truncate -s -1 meta/meta/*/*",
    );
    let manifest = &*format!("manifests/{}/{layer}.json", &layer[..2]);
    let placement = &*format!("placements/{}/{layer}.json", &layer[..2]);
    let at = |name: &str| world.origin(name);
    let (damaged, short, tag, meta) = (&*at("manifest"), &*at("short"), &*at("tag"), &*at("meta"));
    let new = &*world.origin("new");
    check(
        &world,
        &[
            (
                vec!["inspect", "base/t:1", "--origin", damaged],
                1,
                vec![manifest, damaged, "damaged", "expected", layer, "found"],
            ),
            (
                vec!["layers", "--origin", tag],
                1,
                vec!["tags/base/t/1.json", tag, "damaged", "expected JSON"],
            ),
            (
                vec!["export", "base/t:1", "--origin", meta, "--to", "-"],
                1,
                vec!["meta/", meta, "damaged"],
            ),
            (
                build("text", new, &[]),
                1,
                vec!["`text`", "entry at byte 0", "expected", "found"],
            ),
            (
                build("cut.tar", new, &[]),
                1,
                vec!["`cut.tar`", "expected 300000 more bytes", "found 198976"],
            ),
            (
                build("cut.tar.gz", new, &[]),
                1,
                vec!["`cut.tar.gz`", "incomplete deflate stream"],
            ),
        ],
    );
    let output = dsec(&world, &["verify", layer, "--origin", short]);
    failed(&output, 1);
    let said = String::from_utf8(output.stdout).unwrap();
    for part in [placement, short, "damaged", "expected", "dsec repair"] {
        assert!(said.contains(part), "`{part}` is missing in: {said}");
    }
    assert!(
        !world.path("new/tags").exists(),
        "nothing of a cut tar is published"
    );
}
