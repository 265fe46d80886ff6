//! A private registry as an origin: published with a login, mounted, and what happens when the login is lost.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use crate::daemon::Layerd;
use crate::docker_registry::{DockerRegistry, Kind, PASSWORD, USER};
use crate::world::{World, dsec_with, failed, json, noise, ok, sh};

const LOGIN: [(&str, &str); 2] = [
    ("DSEC_REGISTRY_USERNAME", USER),
    ("DSEC_REGISTRY_PASSWORD", PASSWORD),
];
const NOBODY: [(&str, &str); 2] = [
    ("HOME", "/nonexistent"),
    ("XDG_RUNTIME_DIR", "/nonexistent"),
];
/// Logs as much as there is.
const LOUD: (&str, &str) = ("DSEC_LOG", "trace");

fn read(file: &File, at: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 100_000];
    file.read_exact_at(&mut bytes, at).map(|()| bytes)
}

/// A restart without credentials: what is cached serves, what is not gives EIO and a line that says why; with credentials
/// again the next read succeeds. No log, message or state file has the password.
#[test]
fn cached_layers_outlive_their_credentials() {
    let world = World::new();
    let tree = world.folder("tree");
    let (warm, cold) = (noise(1, 3_000_000), noise(2, 3_000_000));
    fs::write(tree.join("warm"), &warm).unwrap();
    fs::write(tree.join("zcold"), &cold).unwrap();
    let kind = Kind {
        delete: true,
        login: true,
    };
    let registry = DockerRegistry::start(&world.folder("registry"), kind);
    let origin = format!("oci://{}", registry.at("team/layers"));
    let build = [
        "build",
        "tree",
        "--axis",
        "base",
        "--name",
        "t",
        "--version",
        "1",
        "--json",
        "--origin",
        &origin,
    ];
    let refused = dsec_with(&world, &[NOBODY[0], NOBODY[1], LOUD], &build);
    assert!(failed(&refused, 1).contains("docker login"));
    let output = dsec_with(&world, &[LOGIN[0], LOGIN[1], LOUD], &build);
    let mut logs = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{logs}");
    for args in [
        &["layers"][..],
        &["verify", "base/t:1"],
        &["inspect", "base/t:1", "--json"],
    ] {
        ok(dsec_with(
            &world,
            &LOGIN,
            &[args, &["--origin", &origin]].concat(),
        ));
    }

    let mut daemon = Layerd::start_with(&world, &origin, &[LOGIN[0], LOGIN[1], LOUD]);
    let mnt = world.folder("mnt");
    ok(daemon.run(&["mount", "base/t:1", "mnt"]));
    let open = |name: &str| File::open(mnt.join(name)).unwrap();
    assert!(read(&open("warm"), 0).unwrap() == warm[..100_000]);
    daemon.replace(&origin, &[NOBODY[0], NOBODY[1], LOUD]);
    let forget = format!(
        "dd if='{0}/warm' iflag=nocache count=0 status=none",
        mnt.display()
    );
    sh(world.root(), &forget);
    assert!(read(&open("warm"), 0).unwrap() == warm[..100_000], "cached");
    let error = read(&open("zcold"), 2_000_000).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    let said = daemon.log();
    let named = |line: &str| line.contains("refused") && line.contains("docker login");
    assert!(said.lines().any(named), "{said}");
    daemon.replace(&origin, &[LOGIN[0], LOGIN[1], LOUD]);
    assert!(read(&open("zcold"), 2_000_000).unwrap() == cold[2_000_000..2_100_000]);
    let stats = json(&ok(daemon.run(&["stats", "--json"])));
    assert_eq!(stats["total"]["verify_failures"], 0);
    ok(daemon.run(&["umount", "mnt"]));

    logs.push_str(&daemon.log());
    assert!(logs.len() > 10_000, "the log is loud");
    // In plain and as `Basic` has it.
    for secret in [PASSWORD, "cmVhZGVyOnBhNTUtdzByZA"] {
        assert!(!logs.contains(secret));
        let kept = sh(
            world.root(),
            &format!("grep -rlF -e '{secret}' cache origin 2>/dev/null || true"),
        );
        assert_eq!(kept, "");
    }
}
