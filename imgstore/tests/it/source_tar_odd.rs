//! Tars with entries in odd orders and of odd forms.

use imgstore::source::{EntryFault, SourceError, load_tar_stream};
use imgstore::tree::Tree;

use crate::model::{bytes, line, options, paths};
use crate::tar_bytes::{dir, entry, file, link, pax, symlink, tar};

fn load(entries: &[Vec<u8>]) -> Result<Tree, SourceError> {
    load_tar_stream(tar(entries).as_slice(), "odd.tar", &options()).map(|loaded| loaded.tree)
}

fn fault(entries: &[Vec<u8>]) -> EntryFault {
    match load(entries) {
        Err(SourceError::Entry { fault, .. }) => fault,
        other => panic!("expected an entry fault, found {other:?}"),
    }
}

fn node(kind: u8, name: &str) -> Vec<u8> {
    entry(kind, name.as_bytes(), b"", b"").bytes()
}

#[test]
fn the_last_entry_of_a_path_wins() {
    let tree = load(&[
        file("a", b"1"),
        file("./a", b"2"),
        dir("d"),
        file("d/x", b"in"),
        file("d", b"now a file"),
        dir("d/"),
        file("d/y", b"new"),
        symlink("s", "d"),
        file("s", b"no link"),
    ])
    .unwrap();
    assert_eq!(paths(&tree), ["a", "d", "d/y", "s"]);
    assert_eq!(bytes(&tree, "a"), b"2");
    assert_eq!(bytes(&tree, "s"), b"no link");
}

#[test]
fn a_directory_entry_over_a_directory_only_changes_its_attributes() {
    let mut late = entry(b'5', b"d", b"", b"");
    late.patches.push((100, b"0000700\0".to_vec()));
    let tree = load(&[dir("d"), file("d/x", b""), late.bytes()]).unwrap();
    assert_eq!(paths(&tree), ["d", "d/x"]);
    assert!(line(&tree, "d").contains(" 40700 "));
}

#[test]
fn the_root_entry_sets_the_attributes_of_the_root() {
    let mut root = entry(b'5', b"./", b"", b"");
    root.patches.push((100, b"0000711\0".to_vec()));
    let tree = load(&[root.bytes()]).unwrap();
    assert!(line(&tree, "").contains(" 40711 0:0 7."));
    let without = load(&[file("a", b"")]).unwrap();
    assert!(line(&without, "").contains(" 40755 0:0 0.000000000 "));
    assert_eq!(fault(&[file("./", b"x")]), EntryFault::RootNotDirectory);
}

#[test]
fn missing_parents_are_made_with_fixed_attributes() {
    let tree = load(&[file("a/b/c", b"")]).unwrap();
    assert_eq!(paths(&tree), ["a", "a/b", "a/b/c"]);
    assert!(line(&tree, "a/b").contains(" 40755 0:0 0.000000000 "));
}

#[test]
fn slashes_in_front_and_dots_mean_nothing_and_parent_parts_are_refused() {
    let tree = load(&[file("//etc/./x", b"1"), dir("./y/"), link("z", "/etc/x")]).unwrap();
    assert_eq!(paths(&tree), ["etc", "etc/x", "y", "z"]);
    for bad in ["../x", "a/../../x", "a/..", ".."] {
        assert!(
            matches!(fault(&[file(bad, b"")]), EntryFault::UnsafePath(_)),
            "{bad}"
        );
    }
    assert!(matches!(
        fault(&[file("x", b""), link("a", "../x")]),
        EntryFault::UnsafePath(_)
    ));
    assert!(matches!(
        fault(&[pax(&[(b"path", b"a\0b")]), file("x", b"")]),
        EntryFault::UnsafePath(_)
    ));
    assert!(matches!(fault(&[file("", b"")]), EntryFault::UnsafePath(_)));
}

#[test]
fn an_empty_pax_path_gives_the_header_its_say() {
    let tree = load(&[pax(&[(b"path", b"")]), file("header", b"")]).unwrap();
    assert_eq!(paths(&tree), ["header"]);
}

#[test]
fn hard_links_work_for_all_types_and_before_their_targets() {
    let tree = load(&[
        link("early", "z/file"),
        link("chain2", "chain1"),
        link("chain1", "early"),
        symlink("s", "nowhere"),
        link("s2", "s"),
        node(b'6', "p"),
        link("p2", "p"),
        node(b'3', "c"),
        link("c2", "c"),
        file("z/file", b"x"),
        link("z/file", "z/file"),
    ])
    .unwrap();
    for (name, same) in [
        ("chain1", "/chain1"),
        ("chain2", "/chain1"),
        ("early", "/chain1"),
        ("z/file", "/chain1"),
        ("s2", "/s"),
        ("p2", "/p"),
        ("c2", "/c"),
    ] {
        assert!(line(&tree, name).ends_with(&format!("={same}")), "{name}");
    }
    assert!(line(&tree, "s2").contains("-> nowhere"));
}

#[test]
fn hard_links_to_nothing_to_themselves_only_or_to_directories_are_refused() {
    for entries in [
        vec![link("a", "missing")],
        vec![link("a", "a")],
        vec![link("a", "b"), link("b", "a")],
    ] {
        assert!(matches!(fault(&entries), EntryFault::MissingLinkTarget(_)));
    }
    assert_eq!(
        fault(&[dir("d"), link("a", "d")]),
        EntryFault::LinkToDirectory("d".to_owned())
    );
}

#[test]
fn a_later_entry_wins_over_a_link_that_waited_for_its_target() {
    let tree = load(&[link("a", "b"), file("a", b"own"), file("b", b"other")]).unwrap();
    assert_eq!(bytes(&tree, "a"), b"own");
    let tree = load(&[file("a", b"own"), link("a", "b"), file("b", b"other")]).unwrap();
    assert_eq!(bytes(&tree, "a"), b"other");
}

#[test]
fn parents_that_are_links_are_followed_inside_the_root() {
    let tree = load(&[
        dir("usr/bin"),
        symlink("bin", "usr/bin"),
        symlink("abs", "/usr"),
        symlink("out", "../../usr"),
        file("bin/a", b""),
        file("abs/bin/b", b""),
        file("out/bin/c", b""),
        symlink("new", "made/here"),
        file("new/d", b""),
    ])
    .unwrap();
    assert_eq!(
        paths(&tree),
        [
            "abs",
            "bin",
            "made",
            "made/here",
            "made/here/d",
            "new",
            "out",
            "usr",
            "usr/bin",
            "usr/bin/a",
            "usr/bin/b",
            "usr/bin/c"
        ]
    );
    assert_eq!(
        fault(&[symlink("x", "y"), symlink("y", "x"), file("x/a", b"")]),
        EntryFault::SymlinkLoop
    );
    assert_eq!(
        fault(&[file("x", b""), file("x/a", b"")]),
        EntryFault::ParentNotDirectory("x".to_owned())
    );
}

#[test]
fn whiteout_names_and_devices_in_a_plain_tar_are_themselves() {
    let mut zero = entry(b'3', b"gone", b"", b"");
    zero.patches.push((124, b"00000000777\0".to_vec()));
    let tree = load(&[file("x", b""), file(".wh.x", b""), zero.bytes()]).unwrap();
    assert_eq!(paths(&tree), [".wh.x", "gone", "x"]);
    assert!(line(&tree, "gone").contains(" char 0:0 "));
}

#[test]
fn numbers_beyond_octal_are_read_in_every_form() {
    let mut base256 = entry(b'0', b"big", b"", b"");
    base256
        .patches
        .push((108, b"\x80\0\0\0\xee\x6b\x28\0".to_vec()));
    let minus_two = [0xff; 11].iter().copied().chain([0xfe]).collect();
    base256.patches.push((136, minus_two));
    let tree = load(&[
        base256.bytes(),
        pax(&[
            (b"uid", b"4294967294"),
            (b"gid", b"70000"),
            (b"mtime", b"-1.5"),
        ]),
        file("pax", b""),
    ])
    .unwrap();
    assert!(line(&tree, "big").contains(" 4000000000:0 -2.000000000 "));
    assert!(line(&tree, "pax").contains(" 4294967294:70000 -2.500000000 "));
}

#[test]
fn what_a_layer_cannot_hold_is_refused_by_path() {
    let long = "n".repeat(256);
    let target = "t".repeat(4096);
    let mut device = entry(b'4', b"dev", b"", b"");
    device.patches.push((329, b"0010000\0".to_vec()));
    let value = vec![7; 65_536];
    let cases: Vec<(Vec<Vec<u8>>, &str)> = vec![
        (
            vec![pax(&[(b"path", long.as_bytes())]), file("x", b"")],
            "at most 255 bytes",
        ),
        (
            vec![pax(&[(b"linkpath", target.as_bytes())]), symlink("l", "t")],
            "1 to 4095 bytes",
        ),
        (vec![symlink("l", "")], "1 to 4095 bytes"),
        (
            vec![pax(&[(b"uid", b"4294967295")]), file("x", b"")],
            "4294967294",
        ),
        (vec![device.bytes()], "major up to 4095"),
        (
            vec![pax(&[(b"SCHILY.xattr.user.v", &value)]), file("x", b"")],
            "65535",
        ),
        (
            vec![pax(&[(b"SCHILY.xattr.weird.v", b"1")]), file("x", b"")],
            "weird.v",
        ),
        (
            vec![
                pax(&[(
                    b"SCHILY.acl.access",
                    b"user::rw-,user:bob:r--,group::r--,mask::r--,other::r--",
                )]),
                file("x", b""),
            ],
            "user:bob:r--",
        ),
    ];
    for (entries, expected) in cases {
        let error = load(&entries).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
