//! Rules that no compiler checks: file heads, where `unsafe` may stand, which crate may use which, forgotten tests, sizes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Most packages in Cargo.lock; raised in the commit that needs it.
const LOCKED_PACKAGES_MAX: usize = 430;
/// Most lines of a product file.
const LINES_MAX: usize = 700;
/// Who may link which of our crates.
const MAY_USE: [(&str, &[&str]); 12] = [
    ("imgstore", &[]),
    ("layerd/client", &[]),
    ("fuse-driver", &["imgstore"]),
    ("ublk-driver", &["imgstore"]),
    ("disk-server", &["fuse-driver", "imgstore", "ublk-driver"]),
    (
        "layerd",
        &["fuse-driver", "imgstore", "layerd-client", "ublk-driver"],
    ),
    // Asks layerd over its socket, and runs `dsec` to pack.
    ("sandboxd", &["layerd-client"]),
    ("tools", &["disk-server", "imgstore", "layerd-client"]),
    (
        "benches",
        &["disk-server", "imgstore", "fuse-driver", "layerd-client"],
    ),
    // Support of tests: none of ours, and none of ours but tests uses it.
    ("testing/test-vm", &[]),
    ("testing/power-folder", &[]),
    ("testing/three-fs-stand-in", &[]),
];

fn root() -> PathBuf {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR"));
    tools.parent().unwrap().to_owned()
}

/// All tracked files, relative to the repository.
fn tracked() -> Vec<String> {
    let listing = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listing.status.success(), "this test needs a git checkout");
    let names = String::from_utf8(listing.stdout).unwrap();
    let present = |name: &&str| !name.is_empty() && root().join(name).is_file();
    let files: Vec<String> = names
        .split('\0')
        .filter(present)
        .map(str::to_owned)
        .collect();
    assert!(
        files.len() > 100,
        "only {} files are tracked: no checkout of this repository",
        files.len()
    );
    files
}

fn rust_files() -> Vec<(String, String)> {
    let files = tracked().into_iter();
    let rust = files.filter(|name| Path::new(name).extension().is_some_and(|e| e == "rs"));
    rust.map(|name| {
        let text = fs::read_to_string(root().join(&name)).unwrap();
        (name, text)
    })
    .collect()
}

fn none(rule: &str, offenders: &[String]) {
    assert!(offenders.is_empty(), "{rule}:\n{}", offenders.join("\n"));
}

#[test]
fn every_file_says_what_it_is_for() {
    let silent: Vec<String> = rust_files()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//! "))
        .map(|(name, _)| name)
        .collect();
    none("these files do not open with `//!`", &silent);
}

fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let word = "unsafe";
    ["{", "fn", "impl", "trait", "extern"].iter().any(|what| {
        code.contains(&format!("{word} {what}")) || code.contains(&format!("{word}({what}"))
    })
}

#[test]
fn unsafe_code_is_in_sys_modules() {
    assert!(has_unsafe(&["let x = un", "safe { y };"].concat()));
    let in_sys = |name: &str| {
        let path = Path::new(name);
        path.components()
            .any(|part| part.as_os_str() == "sys" || part.as_os_str() == "sys.rs")
    };
    let offenders: Vec<String> = rust_files()
        .into_iter()
        .filter(|(name, text)| !in_sys(name) && text.lines().any(has_unsafe))
        .map(|(name, _)| name)
        .collect();
    none("unsafe code outside of `sys`", &offenders);
}

/// Our crates that a manifest names in `[dependencies]` or another kind of them.
fn ours_used_by(manifest: &str) -> BTreeSet<String> {
    let ours = [
        "imgstore",
        "fuse-driver",
        "layerd-client",
        "layerd",
        "tools",
        "benches",
    ];
    let mut inside = false;
    let mut used = BTreeSet::new();
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            inside = section.contains("dependencies");
            continue;
        }
        let name = line
            .split(['.', '=', ' '])
            .next()
            .unwrap_or_default()
            .trim_matches('"');
        if inside && ours.contains(&name) {
            used.insert(name.to_owned());
        }
    }
    used
}

#[test]
fn dependencies_point_down() {
    let members: BTreeSet<String> = tracked()
        .iter()
        .filter_map(|name| name.strip_suffix("/Cargo.toml").map(str::to_owned))
        .collect();
    let known: BTreeSet<String> = MAY_USE.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(members, known, "every crate is in the table of this test");
    for (name, may_use) in MAY_USE {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let may_use: BTreeSet<String> = may_use.iter().map(|s| (*s).to_owned()).collect();
        let used = ours_used_by(&manifest);
        let more: Vec<_> = used.difference(&may_use).collect();
        assert!(more.is_empty(), "`{name}` must not use {more:?}");
    }
    let layerd = fs::read_to_string(root().join("layerd/Cargo.toml")).unwrap();
    assert_eq!(ours_used_by(&layerd).len(), 3, "the manifest was read");
}

#[test]
fn no_test_is_forgotten() {
    let files = rust_files();
    let mut forgotten = Vec::new();
    let mut mains = 0;
    for (name, text) in &files {
        let Some(folder) = name.strip_suffix("tests/it/main.rs") else {
            continue;
        };
        mains += 1;
        let folder = format!("{folder}tests/it/");
        for (other, _) in &files {
            let Some(module) = other.strip_prefix(&folder) else {
                continue;
            };
            // A file in a folder belongs to the module of the folder's name.
            let module = module.split(['/', '.']).next().unwrap_or_default();
            let declared = text.lines().any(|line| line == format!("mod {module};"));
            if module != "main" && !declared {
                forgotten.push(other.clone());
            }
        }
    }
    assert!(mains >= 4, "only {mains} test binaries were found");
    none("not declared in tests/it/main.rs", &forgotten);
    let elsewhere: Vec<String> = files
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| name.contains("/tests/") && !name.contains("/tests/it/"))
        .collect();
    none("a second test binary", &elsewhere);
}

#[test]
fn few_packages_are_locked() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    assert!(packages > 50, "only {packages} packages: not a lock file");
    assert!(
        packages <= LOCKED_PACKAGES_MAX,
        "{packages} packages in Cargo.lock, at most {LOCKED_PACKAGES_MAX} are wanted"
    );
}

#[test]
fn no_file_names_a_place_of_one_machine() {
    let needle = ["/wo", "rk/"].concat();
    let offenders: Vec<String> = tracked()
        .into_iter()
        .filter(|name| {
            let bytes = fs::read(root().join(name)).unwrap();
            String::from_utf8_lossy(&bytes)
                .match_indices(&needle)
                .any(|(at, _)| at == 0 || is_path_start(&bytes, at))
        })
        .collect();
    none("a path that only one machine has", &offenders);
}

/// Whether a path starts here, in contrast to one that merely goes through a folder of that name.
fn is_path_start(bytes: &[u8], at: usize) -> bool {
    let before = bytes.get(at - 1).copied().unwrap_or(b' ');
    !before.is_ascii_alphanumeric() && !b"._-}*$".contains(&before)
}

#[test]
fn product_files_are_short() {
    let long: Vec<String> = rust_files()
        .into_iter()
        .filter(|(name, text)| name.contains("src/") && text.lines().count() > LINES_MAX)
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    none("split these files by concept", &long);
}
