//! API keys of `sandboxd`: whose sandboxes a key sees, and that no daemon is open by mistake.

use std::fs;
use std::process::Command;

use crate::sandboxd::{Sandboxd, beside};
use crate::world::{World, sh};

/// Mutations: `find` without the project lets `green` run something; `list` without it shows the sandbox; a daemon that logs the keys
/// it is shown, and one that logs its key file, fail a search of the log each.
#[test]
fn a_key_sees_its_projects_sandboxes_and_no_others() {
    let world = World::new();
    let key = |project: &str| {
        let dsec = env!("CARGO_BIN_EXE_dsec");
        sh(
            world.root(),
            &format!("{dsec} sandbox new-key {project} --file keys > key"),
        );
        fs::read_to_string(world.path("key"))
            .unwrap()
            .trim()
            .to_owned()
    };
    let (blue, same, green) = (key("blue"), key("blue"), key("green"));
    assert_eq!((&blue[..4], blue.len()), ("e2b_", 44));
    let kept = fs::read_to_string(world.path("keys")).unwrap();
    assert_eq!(kept.lines().count(), 3);
    assert!(!kept.contains(&blue[4..]), "{kept}");
    let keys = world.path("keys").display().to_string();
    let daemon = Sandboxd::start_with(&world, "127.0.0.1:0", &["--api-keys", &keys], &blue);
    let id = daemon.ok(&["sandbox", "create", "--base", "base/mini:1"]);
    let as_key = |key: &str, args: &[&str]| {
        let ran = daemon.dsec_as(key, args);
        let said = [ran.stdout, ran.stderr].concat();
        (
            ran.status.code().unwrap(),
            String::from_utf8(said).unwrap().trim().to_owned(),
        )
    };
    let exec = ["sandbox", "exec", &id, "--", "echo", "mine"];
    assert_eq!(as_key(&same, &exec), (0, "mine".to_owned()));
    let missing = (1, format!("dsec: no sandbox `{id}` (not_found)"));
    for args in [
        &exec[..],
        &["sandbox", "kill", &id],
        &["sandbox", "fork", &id, "1"],
        &["sandbox", "pause", &id],
        &["sandbox", "logs", &id],
    ] {
        assert_eq!(as_key(&green, args), missing, "{args:?}");
    }
    assert_eq!(
        as_key(&green, &["sandbox", "ls", "--all"]),
        (0, String::new())
    );
    let (status, said) = as_key("e2b_00", &exec);
    assert_eq!(
        (status, &*said),
        (1, "dsec: this API key is not known here (unauthenticated)")
    );
    let (status, said) = as_key("", &exec);
    assert!(
        status == 1 && said.ends_with("(clients read DSEC_API_KEY) (unauthenticated)"),
        "{said}"
    );
    // The hash in the file is no key.
    let hash = kept.lines().next().unwrap().split(' ').next().unwrap();
    assert_eq!(as_key(hash, &exec).0, 1);
    let python = "import libdsec, sys\ntry: libdsec.Sandbox.connect(sys.argv[1])\nexcept libdsec.SandboxException as e: print(type(e).__name__, e.kind)";
    let typed = |key: &str| {
        let package = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("libdsec");
        let ran = Command::new("python3")
            .args(["-B", "-c", python, &id])
            .env("PYTHONPATH", package.join("src"))
            .env("DSEC_URL", daemon.url())
            .env("DSEC_API_KEY", key)
            .output()
            .unwrap();
        String::from_utf8(ran.stdout).unwrap()
    };
    assert_eq!(typed(&green), "NotFoundException not_found\n");
    assert_eq!(typed("e2b_00"), "AuthenticationException unauthenticated\n");
    assert_eq!(typed(&blue), "");
    let log = daemon.log();
    for key in [&blue, &same, &green] {
        assert!(!log.contains(&key[4..]), "{log}");
    }
    for line in kept.lines() {
        let (hash, _) = line.split_once(' ').unwrap();
        assert!(!log.contains(hash), "{log}");
    }
}

/// Mutation: without the check in `daemon::run` it goes on, to `layerd`.
#[test]
fn a_daemon_that_others_can_reach_needs_keys() {
    let world = World::new();
    let refused = |args: &[&str]| {
        let ran = Command::new(beside("sandboxd"))
            .args(["--layerd", "/nonexistent", "--state"])
            .arg(world.path("state"))
            .args(args)
            .output()
            .unwrap();
        assert!(!ran.status.success());
        String::from_utf8_lossy(&ran.stderr).into_owned()
    };
    let said = refused(&["--listen", "0.0.0.0:0"]);
    assert!(
        said.contains("`0.0.0.0:0` can be reached from other machines: give API keys"),
        "{said}"
    );
    fs::write(world.path("keys"), "a-plain-key project\n").unwrap();
    let keys = world.path("keys").display().to_string();
    let said = refused(&["--listen", "0.0.0.0:0", "--api-keys", &keys]);
    assert!(
        said.contains("keys` line 1: `HASH PROJECT` is expected"),
        "{said}"
    );
    assert!(!said.contains("a-plain-key"), "{said}");
}
