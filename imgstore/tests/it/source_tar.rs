//! Tars that real programs made.

use std::path::Path;
use std::process::Stdio;

use imgstore::source::load_tar_stream;
use imgstore::tree::Tree;
use proptest::prelude::*;

use crate::random_tree::cases;

use crate::model::{
    Allow, bytes, escaped, line, lines, load_path, options, paths, run, sh, tree, write_to_disk,
};

/// GNU tar of a directory, to standard output.
fn gnu_tar(dir: &Path, args: &[&str]) -> Vec<u8> {
    let dir = dir.to_str().unwrap();
    let mut all = vec!["-C", dir, "--numeric-owner"];
    all.extend_from_slice(args);
    all.extend_from_slice(&["-c", "."]);
    run("tar", &all)
}

const WHOLE: [&str; 3] = ["--format=pax", "--xattrs", "--xattrs-include=*"];

fn load_bytes(tar: &[u8]) -> Tree {
    load_tar_stream(tar, "test.tar", &options()).unwrap().tree
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn a_pax_tar_of_a_directory_loads_as_the_same_tree(tree in tree(Allow { sockets: false, special_links: false })) {
        let dir = tempfile::tempdir().unwrap();
        write_to_disk(&tree, dir.path());
        let expected = lines(&escaped(&tree));
        let plain = gnu_tar(dir.path(), &WHOLE);
        prop_assert_eq!(lines(&load_bytes(&plain)), expected.clone());
        for sparse in ["0.0", "0.1", "1.0"] {
            let version = format!("--sparse-version={sparse}");
            let tar = gnu_tar(dir.path(), &[&WHOLE[..], &["--sparse", &version]].concat());
            prop_assert_eq!(lines(&load_bytes(&tar)), expected.clone());
        }
    }
}

/// A tree that all old formats can hold.
fn simple_tree(dir: &Path) {
    sh(
        dir,
        "mkdir -p a/b; printf hello > a/f; ln a/f a/b/g; ln -s ../f a/b/s; ln a/b/s a/b/s2; mkfifo p; mknod c c 1 3; mkdir empty; truncate -s 3M a/sparse; printf x | dd of=a/sparse bs=1 seek=2000000 conv=notrunc status=none; \
         chmod 6755 a/f; chmod 1777 empty; chown 70000:123 a/f; find . -print0 | xargs -0 touch -h -d @1600000000",
    );
}

#[test]
fn every_format_of_gnu_tar_gives_the_same_tree() {
    let dir = tempfile::tempdir().unwrap();
    simple_tree(dir.path());
    let expected = lines(&load_path(dir.path()).tree);
    assert!(expected[5].ends_with("=/a/b/s"), "{expected:#?}");
    for args in [
        ["--format=gnu", "--no-xattrs"],
        ["--format=gnu", "--sparse"],
        ["--format=oldgnu", "--sparse"],
        ["--format=pax", "--sparse"],
        ["--format=ustar", "--no-xattrs"],
    ] {
        let tree = load_bytes(&gnu_tar(dir.path(), &args));
        assert_eq!(lines(&tree), expected, "{args:?}");
    }
}

#[test]
fn plain_gzip_and_zstd_files_of_any_name_and_pipes_give_the_same_tree() {
    let dir = tempfile::tempdir().unwrap();
    let src = dir.path().join("src");
    std::fs::create_dir(&src).unwrap();
    simple_tree(&src);
    let expected = lines(&load_path(&src).tree);
    sh(
        dir.path(),
        "tar -C src --format=pax -cf a .; gzip -k -c a > b; zstd -q -c a > c; \
         head -c 5000 a | gzip > d; tail -c +5001 a | gzip >> d; mkfifo pipe; (cat c > pipe) >/dev/null 2>&1 &",
    );
    for name in ["a", "b", "c", "d", "pipe"] {
        let loaded = load_path(&dir.path().join(name));
        assert_eq!(lines(&loaded.tree), expected, "{name}");
        loaded.check_unchanged().unwrap();
    }
}

#[test]
fn an_archive_that_changes_after_it_was_read_is_found() {
    let dir = tempfile::tempdir().unwrap();
    sh(dir.path(), "printf x > f; tar -cf a.tar f");
    let loaded = load_path(&dir.path().join("a.tar"));
    loaded.check_unchanged().unwrap();
    sh(
        dir.path(),
        "printf y | dd of=a.tar bs=1 seek=512 conv=notrunc status=none",
    );
    let error = loaded.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("a.tar"), "{error}");
}

#[test]
fn long_names_and_targets_are_exact_in_gnu_and_pax_form() {
    let dir = tempfile::tempdir().unwrap();
    let name = "n".repeat(255);
    let target = format!("{}/x", "t".repeat(4093));
    assert_eq!(target.len(), 4095);
    sh(
        dir.path(),
        &format!(
            "mkdir {name}; cd {name}; mkdir {name}; touch {name}/.wh.{}; ln -s {target} l; ln l m; touch {name}/f; ln {name}/f g",
            "w".repeat(251)
        ),
    );
    let expected = lines(&load_path(dir.path()).tree);
    for format in ["--format=gnu", "--format=pax"] {
        let tar = gnu_tar(dir.path(), &[format]);
        let found = load_bytes(&tar);
        assert_eq!(paths(&found).len(), expected.len() - 1);
        let link = line(&found, &format!("{name}/l"));
        assert!(link.contains(&target), "{link}");
        if format == "--format=pax" {
            assert_eq!(lines(&found), expected);
        }
    }
}

#[test]
fn acls_are_kept_byte_for_byte_from_directory_attribute_and_text() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "touch f; mkdir d; setfacl -m u:1234:r,g:77:rwx,m:rx f; setfacl -d -m u:1234:rwx,o:- d",
    );
    let expected = lines(&load_path(dir.path()).tree);
    assert!(expected[2].contains("posix_acl_access"), "{expected:#?}");
    assert!(expected[1].contains("posix_acl_default"), "{expected:#?}");
    for args in [
        &WHOLE[..],
        &["--format=pax", "--acls"],
        &["--format=pax", "--acls", "--xattrs"],
    ] {
        let tree = load_bytes(&gnu_tar(dir.path(), args));
        assert_eq!(lines(&tree), expected, "{args:?}");
    }
}

#[test]
fn python_tars_of_all_formats_load() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import tarfile, io, sys
for name, fmt in (("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT)):
    t = tarfile.open(sys.argv[1] + "/" + name, "w", format=fmt, encoding="utf-8", errors="surrogateescape")
    def add(name, data=b"", **kw):
        i = tarfile.TarInfo(name); i.size = len(data)
        for k, v in kw.items(): setattr(i, k, v)
        t.addfile(i, io.BytesIO(data))
    add("f", b"data", uid=4000000000, gid=3000000000, mtime=20000000000)
    add("b\udcff\udcfe", b"bytes")
    add("x" * 200 + "/y", b"long")
    add("old", mtime=-5)
    t.close()
"#;
    run("python3", &["-c", script, dir.path().to_str().unwrap()]);
    for name in ["pax", "gnu"] {
        let tree = load_path(&dir.path().join(name)).tree;
        assert!(line(&tree, "f").contains(" 4000000000:3000000000 20000000000.000000000 "));
        assert!(line(&tree, "old").contains(" -5.000000000 "));
        assert_eq!(bytes(&tree, &format!("{}/y", "x".repeat(200))), b"long");
        let odd = tree.walk().iter().any(|(path, _)| path == b"b\xff\xfe");
        assert!(odd, "{name}: {:?}", paths(&tree));
    }
}

#[test]
fn a_tar_on_standard_input_of_another_process_is_read_as_a_stream() {
    let dir = tempfile::tempdir().unwrap();
    sh(dir.path(), "seq 300000 > f");
    let mut tar = std::process::Command::new("tar")
        .args(["-C", dir.path().to_str().unwrap(), "-cz", "f"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stream = tar.stdout.take().unwrap();
    let loaded = load_tar_stream(stream, "-", &options()).unwrap();
    assert!(tar.wait().unwrap().success());
    let expected = std::fs::read(dir.path().join("f")).unwrap();
    assert_eq!(bytes(&loaded.tree, "f"), expected);
}
