//! Directories as sources.

use std::fs::{self, File};
use std::io::Write;

use imgstore::source::content::{ContentError, ContentReader};
use imgstore::source::{SourceError, SourceSpec, load};
use imgstore::tree::{InodeId, Kind};
use proptest::prelude::*;

use crate::random_tree::cases;

use crate::model::{
    Allow, bytes, escaped, line, lines, load_path, load_text, options, paths, run, sh, tree,
    write_to_disk,
};

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn a_directory_on_disk_loads_as_the_tree_it_was_written_from(tree in tree(Allow { sockets: true, special_links: true })) {
        let dir = tempfile::tempdir().unwrap();
        write_to_disk(&tree, dir.path());
        let loaded = load_path(dir.path());
        prop_assert_eq!(lines(&loaded.tree), lines(&escaped(&tree)));
    }
}

#[test]
fn holes_of_a_sparse_file_above_4_gib_are_not_data() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "truncate -s 6G big; printf end | dd of=big bs=1 seek=5368709120 conv=notrunc status=none",
    );
    let loaded = load_path(dir.path());
    assert_eq!(loaded.bytes_in, 6 << 30);
    let Kind::File(content) = &loaded.tree.inode(InodeId(1)).kind else {
        panic!("no file");
    };
    let reader = ContentReader::open(content).unwrap();
    let data: u64 = reader.runs().iter().map(|run| run.len).sum();
    assert_eq!(data, 4096);
    let mut buf = [0xff; 6];
    reader.read_exact_at(&mut buf, (5 << 30) - 2).unwrap();
    assert_eq!(&buf, b"\0\0end\0");
}

#[test]
fn a_file_that_changes_between_walk_and_read_is_an_error_that_names_it() {
    let changes = [
        "printf longer >> f",
        "printf y > f",
        "touch -d 2001-01-01 f",
        "cp f g; mv g f",
        "rm f",
        "rm f; mkfifo f",
        "mv f g; ln -s g f",
    ];
    for change in changes {
        let dir = tempfile::tempdir().unwrap();
        sh(dir.path(), "printf x > f");
        let loaded = load_path(dir.path());
        sh(dir.path(), change);
        let Kind::File(content) = &loaded.tree.inode(InodeId(1)).kind else {
            panic!("no file");
        };
        let error = ContentReader::open(content).unwrap_err();
        assert!(error.to_string().contains("/f`"), "{change}: {error}");
    }
}

#[test]
fn a_file_that_changes_while_it_is_read_is_found_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    sh(dir.path(), "printf abc > f");
    let loaded = load_path(dir.path());
    let Kind::File(content) = &loaded.tree.inode(InodeId(1)).kind else {
        panic!("no file");
    };
    let reader = ContentReader::open(content).unwrap();
    let mut file = File::options()
        .append(true)
        .open(dir.path().join("f"))
        .unwrap();
    file.write_all(b"d").unwrap();
    assert!(matches!(
        reader.check_unchanged(),
        Err(ContentError::Changed { .. })
    ));
}

#[test]
fn paths_longer_than_the_kernel_takes_in_one_call_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let script = "import os, sys; os.chdir(sys.argv[1])\n\
         for i in range(40): os.mkdir('d' * 250); os.chdir('d' * 250)\n\
         open('f', 'w').write('deep')";
    run("python3", &["-c", script, dir.path().to_str().unwrap()]);
    let loaded = load_path(dir.path());
    let deepest = paths(&loaded.tree).last().unwrap().clone();
    assert_eq!(deepest.len(), 40 * 251 + 1);
    assert_eq!(bytes(&loaded.tree, &deepest), b"deep");
    sh(dir.path(), "rm -rf ./*");
}

#[test]
fn links_inside_are_never_followed_and_a_link_named_as_source_is() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir real out; touch out/secret; ln -s ../out real/l; ln -s /etc/passwd real/p; ln -s real alias",
    );
    let loaded = load_path(&dir.path().join("alias"));
    assert_eq!(paths(&loaded.tree), ["l", "p"]);
    assert!(line(&loaded.tree, "l").contains("-> ../out"));
}

#[test]
fn a_mounted_file_system_is_part_of_the_tree_and_one_that_contains_it_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir -p a/m; mount -t tmpfs none a/m; printf in > a/m/f",
    );
    let loaded = load_path(dir.path());
    sh(dir.path(), "umount a/m; mount --bind . a/m");
    let looped = load_text(dir.path().to_str().unwrap());
    sh(dir.path(), "umount a/m");
    assert_eq!(paths(&loaded.tree), ["a", "a/m", "a/m/f"]);
    assert!(matches!(looped, Err(SourceError::Loop(_))), "{looped:?}");
}

#[test]
fn hard_links_are_found_although_their_count_is_wrong() {
    // OverlayFS shows a copied-up name of a hard-linked lower file with a count of its own.
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir l u w m; printf x > l/a; ln l/a l/b; ln l/a l/c; \
         mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w,index=off m; printf y >> m/c; ln m/c m/d",
    );
    let loaded = load(&SourceSpec::Directory(dir.path().join("m")), &options());
    let counts = sh(dir.path(), "stat -c %h m/a m/c; umount m");
    let groups: Vec<usize> = loaded
        .unwrap()
        .tree
        .walk()
        .iter()
        .map(|(_, id)| id.0)
        .collect();
    assert_eq!(counts, "3\n2\n");
    assert_eq!(groups, [0, 1, 1, 2, 2]);
}

#[test]
fn folders_of_every_size_are_listed_whole() {
    let dir = tempfile::tempdir().unwrap();
    for count in [0, 1, 10_000] {
        let sub = dir.path().join(format!("{count}"));
        fs::create_dir(&sub).unwrap();
        for i in 0..count {
            File::create(sub.join(format!("{i:05}"))).unwrap();
        }
    }
    assert_eq!(load_path(dir.path()).tree.walk().len(), 1 + 3 + 10_001);
}

#[test]
fn a_source_that_is_not_there_is_named() {
    let error = load_text("/no/such/source").unwrap_err().to_string();
    assert!(error.contains("`/no/such/source`"), "{error}");
}
