//! The systemd unit: what must be in it, and what must not.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

fn unit() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/layerd.service");
    fs::read_to_string(path).unwrap()
}

/// Mutation: `KillMode=control-group` (the default) kills the data plane at each upgrade; any key here that is changed or lost
/// is named.
#[test]
fn the_unit_keeps_the_data_plane_alive() {
    let text = unit();
    let pairs = text.lines().filter(|l| !l.starts_with('#'));
    let keys: BTreeMap<&str, &str> = pairs.filter_map(|l| l.split_once('=')).collect();
    for (key, value) in [
        ("Type", "notify"),
        ("Restart", "always"),
        ("KillMode", "process"),
        ("ExecReload", "/bin/kill -USR1 $MAINPID"),
        ("OOMPolicy", "continue"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("LimitNOFILE", "1048576"),
        ("TasksMax", "infinity"),
    ] {
        assert_eq!(keys.get(key), Some(&value), "{key}");
    }
    for key in keys.keys() {
        let namespace = [
            "Private",
            "Protect",
            "ReadWrite",
            "ReadOnly",
            "Inaccessible",
            "Temporary",
            "Bind",
            "Root",
            "Mount",
        ];
        assert!(
            !namespace.iter().any(|start| key.starts_with(start)),
            "{key} gives it a mount namespace of its own"
        );
    }
    let start = keys["ExecStart"];
    assert!(
        start.contains("--cache /var/cache/dsec") && start.contains("/run/dsec/layerd.sock"),
        "{start}"
    );
}

/// systemd's own opinion, where it is installed.
#[test]
fn systemd_understands_the_unit() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layerd.service");
    // The program need not be installed here.
    let text = unit().replace("/usr/local/bin/layerd", "/bin/true");
    fs::write(&path, text).unwrap();
    let out = match Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&path)
        .output()
    {
        Ok(out) => out,
        Err(error) => {
            println!("systemd-analyze: {error}");
            return;
        }
    };
    let said = String::from_utf8_lossy(&out.stderr);
    let wrong: Vec<&str> = said
        .lines()
        .filter(|l| l.contains("layerd.service"))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
