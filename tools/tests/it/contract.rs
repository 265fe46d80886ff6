//! What scripts rely on: field names, exit statuses, and silence in a pipe.

use std::fs;

use serde_json::Value;

use crate::world::{World, dsec, failed, json, noise, ok, rich_tree, sh};

fn is_digest(value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[test]
fn build_reports_what_was_read_and_stored() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 700_000)).unwrap();
    fs::write(tree.join("b"), "text\n".repeat(1000)).unwrap();
    let first = world.build("tree", "origin", &[]);
    assert!(is_digest(&first["layer"]), "{first}");
    assert_eq!(first["bytes_in"], 705_000);
    let new = first["segments_new"].as_u64().unwrap();
    assert!(new >= 2, "{first}");
    assert_eq!(first["segments_reused"], 0);
    let packs = sh(world.root(), "find origin/packs -type f -printf '%s\n'");
    let on_disk: u64 = packs.lines().map(|n| n.parse::<u64>().unwrap()).sum();
    let stored = first["bytes_stored"].as_u64().unwrap();
    assert!(
        stored >= on_disk && on_disk >= 700_000,
        "{first}, {on_disk} in packs"
    );
    fs::write(tree.join("c"), noise(2, 300_000)).unwrap();
    let second = world.build("tree", "origin", &["--version", "2"]);
    assert_ne!(second["layer"], first["layer"]);
    assert!(second["segments_reused"].as_u64().unwrap() >= 2, "{second}");
    let stored = second["bytes_stored"].as_u64().unwrap();
    assert!((300_000..400_000).contains(&stored), "{second}");
}

/// A web server of another user, or another host on a shared mount, reads what a builder published.
#[test]
fn published_objects_are_as_readable_as_the_umask_says() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 300_000)).unwrap();
    world.build("tree", "origin", &[]);
    let umask = sh(world.root(), "umask");
    let umask = u32::from_str_radix(umask.trim(), 8).unwrap();
    let modes = sh(world.root(), "find origin -type f -printf '%m\n' | sort -u");
    assert_eq!(modes, format!("{:o}\n", 0o666 & !umask));
}

#[test]
fn layers_and_inspect_say_what_is_there() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 700_000)).unwrap();
    let built = world.build("tree", "origin", &[]);
    let layer = built["layer"].as_str().unwrap();
    let origin = world.origin("origin");
    let layers = json(&ok(dsec(
        &world,
        &["layers", "--origin", &origin, "--json"],
    )));
    assert_eq!(
        layers,
        serde_json::json!([{"tag": "base/t:1", "layer": layer}])
    );
    let text = ok(dsec(&world, &["layers", "--origin", &origin]));
    assert_eq!(text, format!("base/t:1  {layer}\n"));
    for reference in ["base/t:1", layer] {
        let seen = json(&ok(dsec(
            &world,
            &["inspect", reference, "--origin", &origin, "--json"],
        )));
        assert_eq!(seen["layer"], layer);
        assert!(is_digest(&seen["meta"]["digest"]), "{seen}");
        assert_eq!(seen["meta"]["size"].as_u64().unwrap() % 4096, 0);
        let segments = seen["segments"].as_array().unwrap();
        assert_eq!(Value::from(segments.len()), built["segments_new"]);
        let plain: u64 = segments.iter().map(|s| s["len"].as_u64().unwrap()).sum();
        assert_eq!(plain, 700_000u64.next_multiple_of(4096));
        let packs = seen["packs"].as_array().unwrap();
        assert_eq!(packs.len(), 1);
        let pack = packs[0]["digest"].as_str().unwrap();
        let file = world.path(&format!("origin/packs/{}/{pack}.zst", &pack[..2]));
        assert_eq!(
            fs::metadata(file).unwrap().len(),
            packs[0]["size"].as_u64().unwrap()
        );
        let text = ok(dsec(&world, &["inspect", reference, "--origin", &origin]));
        assert!(text.contains(layer) && text.contains(pack), "{text}");
    }
}

#[test]
fn verify_names_the_damaged_pack_and_segment() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 700_000)).unwrap();
    let built = world.build("tree", "origin", &[]);
    let origin = world.origin("origin");
    let verify = ["verify", "base/t:1", "--origin", &origin];
    let said = ok(dsec(&world, &verify));
    assert!(said.contains("all right"), "{said}");
    let report = json(&ok(dsec(&world, &[&verify[..], &["--json"]].concat())));
    assert_eq!(report["segments_right"], built["segments_new"]);
    assert_eq!(report["damage"], serde_json::json!([]));
    let seen = json(&ok(dsec(
        &world,
        &["inspect", "base/t:1", "--origin", &origin, "--json"],
    )));
    let pack = seen["packs"][0]["digest"].as_str().unwrap();
    let offset = seen["segments"][1]["offset"].as_u64().unwrap();
    let file = world.path(&format!("origin/packs/{}/{pack}.zst", &pack[..2]));
    let mut bytes = fs::read(&file).unwrap();
    bytes[usize::try_from(offset).unwrap() + 5000] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let output = dsec(&world, &verify);
    assert_eq!(failed(&output, 1), "");
    let said = String::from_utf8(output.stdout).unwrap();
    let line = said
        .lines()
        .find(|line| line.starts_with("damaged: "))
        .unwrap();
    let digest = seen["segments"][1]["digest"].as_str().unwrap();
    for part in [pack, "segment 1 ", &format!("offset {offset}"), digest] {
        assert!(line.contains(part), "`{part}` is missing in: {line}");
    }
    assert!(said.contains("publish the layer again"), "{said}");
    let output = dsec(&world, &[&verify[..], &["--json"]].concat());
    failed(&output, 1);
    let report = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(report["damage"].as_array().unwrap().len(), 1);
    assert_eq!(
        report["segments_right"].as_u64().unwrap() + 1,
        built["segments_new"].as_u64().unwrap()
    );
}

#[test]
fn layers_lists_the_rest_when_a_tag_is_damaged() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), "x").unwrap();
    let built = world.build("tree", "origin", &[]);
    world.build("tree", "origin", &["--version", "2"]);
    fs::write(world.path("origin/tags/base/t/2.json"), "{").unwrap();
    let origin = world.origin("origin");
    let output = dsec(&world, &["layers", "--origin", &origin, "--json"]);
    let error = failed(&output, 1);
    assert!(error.contains("tags/base/t/2.json"), "{error}");
    let listed = json(&String::from_utf8(output.stdout).unwrap());
    let layer = &built["layer"];
    assert_eq!(
        listed,
        serde_json::json!([{"tag": "base/t:1", "layer": layer}])
    );
}

/// The list of attributes is where the help says.
#[test]
fn help_of_keep_xattr_names_the_right_document() {
    let world = World::new();
    let help = ok(dsec(&world, &["build", "--help"]));
    let words: Vec<&str> = help.split_whitespace().collect();
    let see = words.iter().position(|word| *word == "(see").unwrap();
    let named = words[see + 1].trim_end_matches([')', ',']);
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join(named)).unwrap();
    assert!(text.contains("keep-xattr"), "`{named}` does not tell of it");
}

#[test]
fn building_again_repairs_a_damaged_pack() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("a"), noise(1, 700_000)).unwrap();
    let built = world.build("tree", "origin", &[]);
    let pack = sh(world.root(), "find origin/packs -type f");
    let mut bytes = fs::read(world.path(pack.trim())).unwrap();
    let right = bytes.clone();
    let origin = world.origin("origin");
    let verify = ["verify", "base/t:1", "--origin", &origin];
    // The first bytes of each segment's frame, so that no segment is left; then the end.
    bytes.iter_mut().for_each(|b| *b ^= 1);
    for damaged in [&bytes[..], &right[..500_000]] {
        fs::write(world.path(pack.trim()), damaged).unwrap();
        failed(&dsec(&world, &verify), 1);
        let args = [
            "build",
            "tree",
            "--axis",
            "base",
            "--name",
            "t",
            "--version",
            "1",
        ];
        let again = dsec(
            &world,
            &[&args[..], &["--json", "--origin", &origin]].concat(),
        );
        let said = failed(&again, 0);
        assert!(said.contains("damaged"), "{said}");
        let report = json(&String::from_utf8(again.stdout).unwrap());
        assert_eq!(report["layer"], built["layer"]);
        ok(dsec(&world, &verify));
        assert!(fs::read(world.path(pack.trim())).unwrap() == right);
    }
}

#[test]
fn export_gives_the_same_layer_again() {
    let world = World::new();
    rich_tree(&world, "tree");
    let built = world.build("tree", "origin", &[]);
    let origin = world.origin("origin");
    let export = ["export", "base/t:1", "--origin", &origin, "--to"];
    ok(dsec(&world, &[&export[..], &["out.tar"]].concat()));
    assert_eq!(
        world.build("out.tar", "origin-2", &[])["layer"],
        built["layer"]
    );
    let output = dsec(&world, &[&export[..], &["-"]].concat());
    assert!(output.status.success() && output.stderr.is_empty());
    assert!(output.stdout == fs::read(world.path("out.tar")).unwrap());
}

#[test]
fn sockets_are_named_and_left_out_only_when_told() {
    let world = World::new();
    let tree = world.folder("tree");
    fs::write(tree.join("file"), "x").unwrap();
    let bare = world.build("tree", "origin", &["--version", "bare"]);
    let time = "2020-01-01 UTC";
    fs::create_dir(tree.join("run")).unwrap();
    sh(&tree, &format!("touch -d '{time}' run ."));
    let without = world.build("tree", "origin", &["--version", "without"]);
    drop(std::os::unix::net::UnixListener::bind(tree.join("run/a.sock")).unwrap());
    drop(std::os::unix::net::UnixListener::bind(tree.join("run/b.sock")).unwrap());
    sh(&tree, &format!("touch -d '{time}' run ."));
    let with = world.build("tree", "origin", &[]);
    assert!(with["layer"] != without["layer"] && without["layer"] != bare["layer"]);
    let origin = world.origin("origin");
    let export = ["export", "base/t:1", "--origin", &origin, "--to", "out.tar"];
    let error = failed(&dsec(&world, &export), 1);
    for part in ["run/a.sock", "run/b.sock", "--skip-sockets"] {
        assert!(error.contains(part), "`{part}` is missing in: {error}");
    }
    let output = dsec(
        &world,
        &[&export[..], &["--skip-sockets", "--json"]].concat(),
    );
    let notes = failed(&output, 0);
    assert!(
        notes.contains("run/a.sock") && notes.contains("run/b.sock"),
        "{notes}"
    );
    let report = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(report["skipped_sockets"], 2);
    assert_eq!(
        world.build("out.tar", "origin", &["--version", "2"])["layer"],
        without["layer"]
    );
}

#[test]
fn every_command_shows_examples() {
    let world = World::new();
    let top = ok(dsec(&world, &["--help"]));
    assert!(top.contains("Example"), "{top}");
    let start = top.find("Commands:").unwrap();
    let listed = top[start..]
        .lines()
        .skip(1)
        .take_while(|line| !line.is_empty());
    let mut commands: Vec<&str> = listed
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    commands.sort_unstable();
    let contract = [
        "bench",
        "build",
        "cache",
        "disk",
        "export",
        "export-set",
        "fsck",
        "gc",
        "import",
        "inspect",
        "layers",
        "lease",
        "mount",
        "mounts",
        "optimize",
        "pull",
        "push",
        "repair",
        "rm",
        "run",
        "sandbox",
        "stats",
        "tag",
        "trace",
        "trajectory",
        "umount",
        "untag",
        "verify",
    ];
    assert_eq!(commands, contract);
    for command in commands {
        // `bench --help` is another program's; `help bench` is ours.
        let help = ok(dsec(&world, &["help", command]));
        assert!(
            help.contains("Example") && help.contains(&format!("  dsec {command}")),
            "{help}"
        );
        if command != "bench" {
            let long = ok(dsec(&world, &[command, "--help"]));
            assert!(long.contains("Example"), "{long}");
        }
    }
}
