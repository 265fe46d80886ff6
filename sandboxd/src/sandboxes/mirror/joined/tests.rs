//! Joined changes against the kernel: layers with the join on top look as layers with all generations on top.

use std::fs;
use std::process::Command;

use super::super::tests::{sh, shown};
use super::*;

/// What the generations lie on.
const LAYER: &str = "mkdir -p l/dir/deep l/gone l/file-to-be l/again l/kept; echo layer > l/dir/file; echo 1 > l/dir/deep/1
    echo x > l/gone/x; echo x > l/file-to-be/x; echo x > l/again/x; echo k > l/kept/k; echo f > l/f; echo g > l/g; ln l/g l/h";

/// What each generation does in the overlay `m` that it writes to.
const GENERATIONS: [&str; 3] = [
    "cd m; echo one > dir/one; rm -r gone; rm f; rm -r file-to-be; echo file > file-to-be; mkdir -p new/deep; echo n > new/deep/n
    ln new/deep/n new/link; rm -r again; mkdir again; echo 1 > again/1; echo a > a; ln a b; ln a c; mkdir plain; echo p > plain/p
    setfattr -n user.note -v 1 dir; mkfifo fifo; ln -s f dangling; echo s > s; ln s plain/t",
    "cd m; rm dir/one; echo two > dir/deep/two; mkdir f; echo in > f/in; rm file-to-be; mkdir file-to-be; echo y > file-to-be/y
    rm -r new; rm c; echo more >> a; echo 2 > again/2; chmod 700 plain; chown 7:8 plain; mkdir gone; echo z > gone/z
    setfattr -n user.note -v 2 dir; echo w > g",
    "cd m; rm -r f; echo f3 > f; mkdir -p new/other; echo o > new/other/o; rm -r again/1; rm -r dir/deep; mkdir dir/deep; echo 3 > dir/deep/3
    touch -d 2001-01-01 kept; rm dangling; mkdir dangling; rm gone/z; setfattr -x user.note dir; truncate -s 5M holes",
];

/// `folders` as lowers (topmost first) of an overlay at `m`, as the test's own programs see them; `then` runs there.
fn overlay(root: &Path, (lowers, upper): (&str, Option<&str>), then: &str) -> String {
    let upper = upper.map_or(String::new(), |upper| {
        format!(",upperdir={upper},workdir=work-{upper}")
    });
    // What is joined is what sandboxes write: whole files and folders.
    let options = format!("lowerdir={lowers}{upper},index=off,redirect_dir=off,metacopy=off");
    let line = format!("mount -t overlay o -o {options} m; {then}");
    let ran = Command::new("unshare")
        .args(["-m", "sh", "-euc", &line])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{line}: {ran:?}");
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

fn generations() -> (tempfile::TempDir, Vec<PathBuf>) {
    let world = tempfile::tempdir().unwrap();
    let root = world.path();
    sh(root, LAYER);
    sh(root, "mkdir m u0 u1 u2 work-u0 work-u1 work-u2");
    let mut lowers = "l".to_owned();
    for (n, line) in GENERATIONS.iter().enumerate() {
        let upper = format!("u{n}");
        overlay(root, (&lowers, Some(&upper)), line);
        lowers = format!("{upper}:{lowers}");
    }
    let folders = ["u0", "u1", "u2"].map(|name| root.join(name)).to_vec();
    (world, folders)
}

const SHOW: &str = "cd m && find . -printf '%P|%y|%m|%U:%G|%l|%T@\\n' | sort; find . ! -type d -printf '%P %s\\n' | sort
    for f in $(find . -type f | sort); do find . -samefile $f | sort | tr '\\n' ' '; done
    find . -type f -exec sha256sum {} + | sort -k 2; getfattr -hRd -m 'user.*' . 2>/dev/null";

/// Mutations: a folder over a whiteout or a file is not opaque (`gone/x` and `file-to-be/x` are there again); what is hidden is not
/// removed; an opaque folder that was joined with is not any more; no links.
#[test]
fn the_join_of_generations_is_what_the_kernel_shows_of_them() {
    let (world, folders) = generations();
    let root = world.path();
    join(&folders, &root.join("joined")).unwrap();
    let expected = overlay(root, ("u2:u1:u0:l", None), SHOW);
    assert_eq!(overlay(root, ("joined:l", None), SHOW), expected);
    // The same without the layer: what was made in vain leaves no more than a whiteout.
    sh(root, "mkdir empty");
    let expected = overlay(root, ("u2:u1:u0:empty", None), SHOW);
    assert_eq!(overlay(root, ("joined:empty", None), SHOW), expected);
    assert!(expected.contains("./plain/t ./s"), "{expected}");
}

/// Mutation: no attributes of folders.
#[test]
fn the_join_of_one_generation_is_its_copy() {
    let (world, folders) = generations();
    for (n, folder) in folders.iter().enumerate() {
        let to = world.path().join(format!("copy{n}"));
        join(std::slice::from_ref(folder), &to).unwrap();
        assert_eq!(shown(&to), shown(folder), "{n}");
    }
    assert!(
        fs::metadata(world.path().join("copy2/holes"))
            .unwrap()
            .len()
            == 5 << 20
    );
}
