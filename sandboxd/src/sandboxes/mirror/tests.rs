//! The copy against its source: every kind of file, changes between the steps, stores through mappings, links in the way.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::process::Command;

use super::*;

/// Everything of a tree that a copy must have, as `find` and `getfattr` see it.
pub(super) fn shown(folder: &Path) -> String {
    let line = "cd \"$1\" && find . -printf '%P|%y|%m|%U:%G|%l|%T@\\n' | sort; find . ! -type d -printf '%P %s\\n' | sort
        find . -type f -links +1 -printf '%P\\n' | sort | while read f; do find . -samefile \"$f\" | sort | tr '\\n' ' '; echo; done
        find . -type c -exec stat -c '%n %t:%T' {} + | sort
        find . -type f -exec sha256sum {} + | sort -k 2
        getfattr -hRd -m - . 2>/dev/null";
    let ran = Command::new("sh")
        .args(["-euc", line, "sh"])
        .arg(folder)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{ran:?}");
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

pub(super) fn sh(folder: &Path, line: &str) {
    let status = Command::new("sh")
        .args(["-euc", line])
        .current_dir(folder)
        .status();
    assert!(status.unwrap().success(), "{line}");
}

struct Two {
    _folder: tempfile::TempDir,
    from: PathBuf,
    to: PathBuf,
}

fn two(line: &str) -> Two {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::create_dir(&from).unwrap();
    sh(&from, line);
    Two {
        _folder: folder,
        from,
        to,
    }
}

const ALL_KINDS: &str = "mkdir -p a/b/c d; echo one > a/one; ln a/one a/b/two; ln -s ../one a/b/link; mkfifo a/fifo
    mknod d/gone c 0 0; truncate -s 10M a/holes; printf x | dd of=a/holes bs=1 seek=5000000 conv=notrunc 2>/dev/null
    chown 7:8 a/one; chmod 4711 a/one; setfattr -n trusted.overlay.opaque -v y a/b; setfattr -n user.note -v hi a/one
    touch -h -d '2001-02-03 04:05:06.789' a/b/link a/one; touch -d '2002-01-01' a a/b d; chmod 700 d; : > 'a/new
line'";

/// Mutations: no `copy_attributes`; no links; `Data` is 0 and `Hole` the end (sizes on disk differ).
#[test]
fn everything_that_an_upper_folder_has_is_copied() {
    let Two { from, to, _folder } = two(ALL_KINDS);
    let mut mirror = Mirror::new(&from, &to).unwrap();
    assert!(mirror.step(true).unwrap() >= 12);
    assert_eq!(shown(&to), shown(&from));
    assert!(fs::metadata(to.join("a/holes")).unwrap().blocks() < 100);
}

/// Mutations: no `remove_others`; it goes through links (children of a folder that became a link).
#[test]
fn the_second_step_copies_what_changed_and_takes_away_what_is_gone() {
    let Two { from, to, _folder } = two(ALL_KINDS);
    let outside = to.with_file_name("outside");
    fs::create_dir_all(outside.join("c")).unwrap();
    fs::write(outside.join("two"), "precious").unwrap();
    sh(
        &from,
        "mkdir many; for n in 1 2 3 4 5 6 7 8 9; do echo $n > many/$n; done; find . -exec touch -h -d 2020-01-01 {} +",
    );
    let mut mirror = Mirror::new(&from, &to).unwrap();
    mirror.step(false).unwrap();
    sh(
        &from,
        "rm -r a/b; ln -s ../../outside a/b; echo more >> a/one; rm d/gone; mkdir d/gone; echo x > d/gone/x; mv many/9 many/10; rm a/fifo; echo file > a/fifo",
    );
    // Times of change are coarse: what was copied a moment ago is copied again. So wait for the clock, then settle.
    let settled = |mirror: &Mirror| mirror.entries.values().all(|e| e.settled);
    let mut steps = 0;
    while !settled(&mirror) {
        mirror.step(false).unwrap();
        steps += 1;
        assert!(steps < 1000, "never settled");
    }
    assert_eq!(mirror.step(true).unwrap(), 0);
    assert_eq!(shown(&to), shown(&from));
    sh(&from, "echo changed > many/3");
    // The file; its folder did not change.
    assert_eq!(mirror.step(true).unwrap(), 1);
    assert_eq!(shown(&to), shown(&from));
    assert_eq!(fs::read_to_string(outside.join("two")).unwrap(), "precious");
    assert!(outside.join("c").is_dir());
}

/// Mutation: no `copy_piece`.
#[test]
fn another_file_system_is_no_obstacle() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let Two { from, _folder, .. } = two("seq 100000 > many; truncate -s 3M holes; echo x >> holes");
    let to = folder.path().join("to");
    let other = rustix::fs::stat(folder.path()).unwrap().st_dev;
    assert_ne!(other, rustix::fs::stat(&from).unwrap().st_dev);
    Mirror::new(&from, &to).unwrap().step(true).unwrap();
    assert_eq!(shown(&to), shown(&from));
}

/// Mutation: `settled` is always true.
#[test]
fn what_changed_just_before_it_was_copied_is_copied_once_more() {
    let Two { from, to, _folder } = two("echo old > file");
    let mut mirror = Mirror::new(&from, &to).unwrap();
    mirror.step(false).unwrap();
    // As if the clock had not gone on: the same stamp, other bytes.
    let file = Path::new("file");
    fs::write(from.join("file"), "new\n").unwrap();
    let stat = rustix::fs::stat(from.join("file")).unwrap();
    mirror.entries.get_mut(file).unwrap().stamp = Stamp::of(&stat);
    mirror.step(true).unwrap();
    assert_eq!(fs::read_to_string(to.join("file")).unwrap(), "new\n");
}

/// A store through a mapping that is dirty already changes no time; after `write_out` it does. Mutation: no `write_out`.
#[test]
fn stores_through_a_mapping_are_seen() {
    let Two { from, to, _folder } = two("dd if=/dev/zero of=file bs=4096 count=1 2>/dev/null");
    // perl's mmap is not in the base package; python's is.
    let line = "import mmap, sys
f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); m[0] = 65
print('dirty', flush=True); sys.stdin.readline(); m[1] = 66; print('again', flush=True); sys.stdin.readline()";
    let mut child = Command::new("python3")
        .args(["-c", line])
        .arg(from.join("file"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    use std::io::{BufRead as _, Write as _};
    let mut said = io::BufReader::new(child.stdout.take().unwrap()).lines();
    let mut stdin = child.stdin.take().unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "dirty");
    let mut mirror = Mirror::new(&from, &to).unwrap();
    let mut steps = 0;
    while steps == 0 || !mirror.entries.values().all(|e| e.settled) {
        mirror.step(false).unwrap();
        steps += 1;
        assert!(steps < 1000, "never settled");
    }
    stdin.write_all(b"\n").unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "again");
    assert_eq!(mirror.step(true).unwrap(), 1);
    assert_eq!(fs::read(to.join("file")).unwrap()[..3], *b"AB\0");
    stdin.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}

/// Mutation: `open` without `NO_SYMLINKS`.
#[test]
fn a_folder_that_became_a_link_is_not_followed() {
    let Two { from, to, _folder } = two("mkdir a; echo x > a/file");
    let outside = to.with_file_name("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "secret").unwrap();
    let mirror = Mirror::new(&from, &to).unwrap();
    fs::remove_dir_all(from.join("a")).unwrap();
    symlink(&outside, from.join("a")).unwrap();
    let stat = rustix::fs::stat(outside.join("file")).unwrap();
    let failed = mirror
        .copy_file(Path::new("a/file"), Stamp::of(&stat), true)
        .unwrap_err();
    assert!(is_gone(&failed), "{failed}");
}
