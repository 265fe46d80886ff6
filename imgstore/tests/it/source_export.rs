//! Trees to tars and back.

use std::path::Path;

use imgstore::source::content::ContentReader;
use imgstore::source::load_tar_stream;
use imgstore::store::tar_export::{ExportError, ExportOptions, ExportReport, OpenFile, write_tar};
use imgstore::tree::{InodeId, Kind, Tree};
use proptest::prelude::*;

use crate::random_tree::cases;

use crate::model::{
    Allow, content, escaped, lines, load_path, options, run, sh, tree, write_to_disk,
};

pub(crate) fn export(
    tree: &Tree,
    skip_sockets: bool,
) -> Result<(Vec<u8>, ExportReport), ExportError> {
    let open = |id: InodeId| {
        let Kind::File(content) = &tree.inode(id).kind else {
            panic!("only files are opened");
        };
        let reader = ContentReader::open(content)?;
        Ok(OpenFile {
            runs: reader.runs().to_vec(),
            read_at: Box::new(move |at, buf: &mut [u8]| Ok(reader.read_exact_at(buf, at)?)),
        })
    };
    let mut out = Vec::new();
    let report = write_tar(tree, &open, &mut out, &ExportOptions { skip_sockets })?;
    Ok((out, report))
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn an_exported_tree_loads_as_itself(tree in tree(Allow { sockets: false, special_links: true })) {
        let layer = escaped(&tree);
        let (tar, report) = export(&layer, false).unwrap();
        prop_assert_eq!(report.bytes, u64::try_from(tar.len()).unwrap());
        let again = load_tar_stream(tar.as_slice(), "export", &options()).unwrap();
        prop_assert_eq!(lines(&again.tree), lines(&layer));
    }
}

proptest! {
    #![proptest_config(cases(25))]

    #[test]
    fn gnu_tar_extracts_an_export_to_the_same_tree(tree in tree(Allow { sockets: false, special_links: true })) {
        let dir = tempfile::tempdir().unwrap();
        let (tar, _) = export(&tree, false).unwrap();
        extract(&tar, dir.path());
        let found = load_path(&dir.path().join("out"));
        prop_assert_eq!(lines(&found.tree), lines(&escaped(&tree)));
    }
}

fn extract(tar: &[u8], dir: &Path) {
    std::fs::write(dir.join("a.tar"), tar).unwrap();
    sh(
        dir,
        "mkdir out; tar --xattrs --xattrs-include='*' --numeric-owner --same-owner -p --warning=no-timestamp \
         --warning=no-unknown-keyword -C out -xf a.tar 2>err || { cat err >&2; exit 1; }; \
         test ! -s err || { cat err >&2; exit 1; }",
    );
}

#[test]
fn gnu_tar_and_python_list_an_export() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir s; cd s; printf x > f; ln f g; ln -s f l; mkfifo p; mknod b b 8 1; mkdir d; touch d/ä; truncate -s 9G big; \
         printf end | dd of=big bs=1 seek=9000000000 conv=notrunc status=none",
    );
    let tree = load_path(&dir.path().join("s")).tree;
    let (tar, report) = export(&tree, false).unwrap();
    assert!(tar.len() < 40_000, "a hole of 9 GiB takes no room");
    assert_eq!(report.entries, 9);
    let path = dir.path().join("a.tar");
    std::fs::write(&path, &tar).unwrap();
    let path = path.to_str().unwrap();
    let listed = String::from_utf8(run("tar", &["-tf", path, "--quoting-style=literal"])).unwrap();
    let expected = "./\n./b\n./big\n./d/\n./d/ä\n./f\n./g\n./l\n./p\n";
    let mut lines: Vec<&str> = listed.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, expected.lines().collect::<Vec<_>>());
    let script = "import tarfile,sys\nfor m in tarfile.open(sys.argv[1]): print(m.name, m.size, m.type.decode())";
    let python = String::from_utf8(run("python3", &["-c", script, path])).unwrap();
    assert!(
        python.contains("./big 9663676416 0") || python.contains("big 9663676416 "),
        "{python}"
    );
}

#[test]
fn sockets_are_named_and_left_out_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    sh(dir.path(), "mkdir d; touch f");
    for name in ["d/s1", "s2"] {
        std::os::unix::net::UnixListener::bind(dir.path().join(name)).unwrap();
    }
    let tree = load_path(dir.path()).tree;
    let error = export(&tree, false).unwrap_err().to_string();
    assert!(error.contains("d/s1, s2"), "{error}");
    let (tar, report) = export(&tree, true).unwrap();
    assert_eq!(report.skipped_sockets, [b"d/s1".to_vec(), b"s2".to_vec()]);
    let again = load_tar_stream(tar.as_slice(), "export", &options()).unwrap();
    assert_eq!(again.tree.walk().len(), 3);
}

#[test]
fn holes_from_one_mebibyte_are_kept_and_smaller_ones_filled() {
    let mut tree = Tree::new(Default::default());
    let mib = 1 << 20;
    for (name, len, pieces) in [
        ("all", 3 * mib, vec![]),
        ("tail", 2 * mib + 1, vec![(0, vec![1; 10])]),
        ("head", 3 * mib, vec![(2 * mib, vec![2; 100])]),
        (
            "small",
            2 * mib,
            vec![(0, vec![3; 1000]), (mib - 5000, vec![4; 5000])],
        ),
    ] {
        let kind = Kind::File(content(len, &pieces));
        let id = tree.add(imgstore::tree::Inode {
            meta: Default::default(),
            kind,
        });
        tree.dir_mut(imgstore::tree::ROOT)
            .unwrap()
            .insert(name.into(), id);
    }
    let dir = tempfile::tempdir().unwrap();
    write_to_disk(&tree, dir.path());
    let tree = load_path(dir.path()).tree;
    let (tar, _) = export(&tree, false).unwrap();
    let data = 4096 + 4096 + (2 << 20);
    assert!((data..data + 20_000).contains(&tar.len()), "{}", tar.len());
    let again = load_tar_stream(tar.as_slice(), "export", &options()).unwrap();
    assert_eq!(lines(&again.tree), lines(&tree));
}
