//! `dsec disk create`, `export`, `inspect` and `ls`: files that others wrote, damaged ones, images of other tools.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::world::{World, dsec, failed, json, noise, ok, sh};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../imgstore/tests/golden/overlaybd")
}

fn sidecar(name: &str) -> Value {
    json(&std::fs::read_to_string(golden().join(name)).unwrap())
}

/// The raw file has the contents that a sidecar describes.
fn has_content(raw: &Path, of: &Value, what: &str) {
    use std::io::{Read as _, Seek as _};
    let mut file = std::fs::File::open(raw).unwrap();
    assert_eq!(
        Some(file.metadata().unwrap().len()),
        of["virtual_size"].as_u64(),
        "{what}"
    );
    for part in of["content"].as_array().unwrap() {
        file.seek(std::io::SeekFrom::Start(part["offset"].as_u64().unwrap()))
            .unwrap();
        let mut hasher = blake3::Hasher::new();
        let bytes = part["bytes"].as_u64().unwrap();
        hasher.update_reader(file.by_ref().take(bytes)).unwrap();
        assert_eq!(hasher.count(), bytes);
        let found = hasher.finalize().to_hex().to_string();
        assert_eq!(part["blake3"].as_str(), Some(&*found), "{what}: {part}");
    }
}

fn allocated(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

/// Red when layers are taken top first, or when zeros of an upper layer do not hide what lies below.
#[test]
fn files_of_other_writers_export_with_the_right_contents() {
    let world = World::new();
    let raw = world.path("raw.img");
    let export = |files: &[String]| {
        let files = files.iter().map(|f| golden().join(f).display().to_string());
        let mut args = vec!["disk".to_owned(), "export".to_owned()];
        args.extend(files);
        args.extend(["--to".to_owned(), "raw.img".to_owned(), "--json".to_owned()]);
        let args: Vec<&str> = args.iter().map(|a| &**a).collect();
        json(&ok(dsec(&world, &args)))
    };
    let stacks = sidecar("stacks.json");
    for of in stacks["stacks"].as_array().unwrap() {
        let files: Vec<String> = of["layers_bottom_to_top"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f.as_str().unwrap().to_owned())
            .collect();
        let done = export(&files);
        has_content(&raw, of, &of["name"].to_string());
        assert!(allocated(&raw) < (8 << 20), "holes stay holes: {done}");
    }
    for name in [
        "base.agentenv.tar",
        "base.ustar.own.tar",
        "base.zstd-4096-crc1-ow0.containerd.zfile",
        "top.sealed.containerd.lsmt",
        "odd-but-legal.own.lsmt",
        "empty.commit.agentenv.lsmt",
        "huge.commit.containerd.lsmt",
    ] {
        export(&[name.to_owned()]);
        has_content(&raw, &sidecar(&format!("{name}.json")), name);
    }
    // A writable data file with its index beside it, alone and on layers.
    for name in [
        "rw.containerd",
        "rw.agentenv",
        "rwtop.containerd",
        "rwtop.agentenv",
    ] {
        let of = sidecar(&format!("{name}.json"));
        let lowers = of["lowers_bottom_to_top"].as_array().unwrap().iter();
        let mut files: Vec<String> = lowers.map(|f| f.as_str().unwrap().to_owned()).collect();
        files.push(format!("{name}.data"));
        export(&files);
        has_content(&raw, &of, name);
    }
}

#[test]
fn damaged_files_are_named_and_nothing_is_written() {
    let world = World::new();
    let expected = sidecar("bad/expected.json");
    let mut refused = 0;
    for bad in expected["files"].as_array().unwrap() {
        let [file] = &**bad["files"].as_array().unwrap() else {
            continue;
        };
        let path = golden()
            .join("bad")
            .join(file.as_str().unwrap())
            .display()
            .to_string();
        let inspected = dsec(&world, &["disk", "inspect", &path, "--deep", "--json"]);
        let sound = inspected.status.success();
        let report = json(&String::from_utf8(inspected.stdout).unwrap());
        let checks = report["checks"].as_array().unwrap();
        assert_eq!(sound, checks.iter().all(|c| c["ok"] == true), "{report}");
        let exported = dsec(&world, &["disk", "export", &path, "--to", "raw.img"]);
        if bad["advice"].as_str().unwrap().starts_with("may accept") {
            assert!(sound && exported.status.success(), "{bad}");
            std::fs::remove_file(world.path("raw.img")).unwrap();
            continue;
        }
        assert!(!sound, "{bad}");
        let error = failed(&exported, 1);
        assert!(error.contains(&path), "{error}");
        refused += 1;
    }
    assert!(refused >= 18, "{refused}");
    assert_eq!(
        sh(world.root(), "ls -A"),
        "",
        "nothing is left of a failed export"
    );
}

#[test]
fn inspect_says_what_a_file_is() {
    let world = World::new();
    let inspect = |name: &str, more: &[&str]| {
        let path = golden().join(name).display().to_string();
        ok(dsec(&world, &[&["disk", "inspect", &path], more].concat()))
    };
    let found = json(&inspect("top.sealed.containerd.lsmt", &["--json"]));
    assert_eq!(found["kind"], "sealed");
    assert_eq!(found["header"]["index_offset"], 9728);
    assert_eq!(found["header"]["index_records"], 7);
    assert_eq!(found["header"]["virtual_size"], 80 << 20);
    assert_eq!(
        found["extents"][0],
        serde_json::json!({"lba": 0, "sectors": 1, "place": null})
    );
    assert_eq!(
        found["extents"][1],
        serde_json::json!({"lba": 3, "sectors": 1, "place": 8})
    );
    let found = json(&inspect(
        "base.zstd-4096-crc1-ow0.containerd.zfile",
        &["--json", "--deep"],
    ));
    assert_eq!(found["zfile"]["algorithm"], "zstd");
    assert_eq!(found["zfile"]["block_size"], 4096);
    assert_eq!(found["zfile"]["header_overwritten"], false);
    let names: Vec<_> = found["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["name"].clone())
        .collect();
    assert_eq!(names, ["zfile", "trailer", "index", "data"]);
    let found = json(&inspect("rw.containerd.data", &["--json"]));
    assert_eq!(found["kind"], "writable");
    assert!(
        found["index_file"]
            .as_str()
            .unwrap()
            .ends_with("rw.containerd.index")
    );
    let text = inspect("base.agentenv.tar", &[]);
    assert!(text.contains("sealed, in a tar"), "{text}");
}

#[test]
#[expect(clippy::too_many_lines, reason = "one story")]
fn images_of_other_tools_become_disks() {
    let world = World::new();
    let root = world.root();
    std::fs::write(world.path("file"), noise(5, 700_000)).unwrap();
    sh(
        root,
        "mkdir tree; mv file tree/file; truncate -s 64M fs.raw
        mkfs.ext4 -q -F -d tree fs.raw
        qemu-img convert -f raw -O qcow2 fs.raw fs.qcow2
        qemu-img create -q -f qcow2 -b fs.raw -F raw child.qcow2",
    );
    let create = |name: &str, more: &[&str]| {
        let start = ["disk", "create", name, "--disks", "disks", "--json"];
        json(&ok(dsec(&world, &[&start[..], more].concat())))
    };
    create("raw", &["--from", "fs.raw"]);
    create("qcow", &["--from", "fs.qcow2", "--size", "96MiB"]);
    create("placed", &["--from", "fs.raw", "--in-place"]);
    create("empty", &["--size", "1GiB"]);
    let layer = &*world.path("disks/raw/w0.lsmt").display().to_string();
    create("child", &["--from", layer]);
    // Holes of the image take no room.
    assert!(std::fs::metadata(layer).unwrap().len() < 8 << 20);
    let export = |name: &str| {
        ok(dsec(
            &world,
            &[
                "disk", "export", name, "--disks", "disks", "--to", "out.raw",
            ],
        ));
    };
    for name in ["raw", "placed", "child"] {
        export(name);
        sh(root, "cmp fs.raw out.raw");
    }
    export("qcow");
    sh(
        root,
        "truncate -s 64M out.raw; cmp fs.raw out.raw; e2fsck -fn out.raw",
    );
    export("empty");
    assert_eq!(
        std::fs::metadata(world.path("out.raw")).unwrap().len(),
        1 << 30
    );
    assert_eq!(allocated(&world.path("out.raw")), 0);
    let listed = json(&ok(dsec(
        &world,
        &["disk", "ls", "--disks", "disks", "--json"],
    )));
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["name"].clone())
        .collect();
    assert_eq!(names, ["child", "empty", "placed", "qcow", "raw"]);
    let inspected = json(&ok(dsec(
        &world,
        &["disk", "inspect", "child", "--disks", "disks", "--json"],
    )));
    assert_eq!(inspected["layers"].as_array().unwrap().len(), 2);

    let refuse = |args: &[&str], parts: &[&str]| {
        let start = ["disk", "create", "other", "--disks", "disks"];
        let error = failed(&dsec(&world, &[&start[..], args].concat()), 1);
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(!world.path("disks/other/disk.json").exists());
    };
    refuse(&["--from", "child.qcow2"], &["child.qcow2", "backing"]);
    refuse(&[], &["--size"]);
    refuse(
        &["--from", "fs.raw", "--size", "1MiB"],
        &["67108864", "at least"],
    );
    refuse(
        &["--from", layer, "--from", "fs.raw"],
        &["fs.raw", "no OverlayBD layer"],
    );
    let again = [
        "disk", "create", "raw", "--disks", "disks", "--size", "1MiB",
    ];
    assert!(failed(&dsec(&world, &again), 1).contains("is a disk already"));
    let same = ["disk", "export", layer, "--to", layer];
    assert!(failed(&dsec(&world, &same), 1).contains("is one of the layers"));
}

#[test]
fn qcow2_without_its_tool_says_what_to_install() {
    let world = World::new();
    sh(
        world.root(),
        "qemu-img create -q -f qcow2 a.qcow2 1M; mkdir empty",
    );
    let args = ["disk", "create", "./d", "--from", "a.qcow2"];
    let path = world.path("empty").display().to_string();
    let output = crate::world::dsec_with(&world, &[("PATH", &path)], &args);
    let error = failed(&output, 1);
    assert!(
        error.contains("qemu-utils") && error.contains("a.qcow2"),
        "{error}"
    );
}
