//! Upper directories of real overlay mounts, and the model of what a stack of layers shows.

use std::path::Path;

use imgstore::source::merge::merge_stack;
use imgstore::source::{Loaded, SourceError, load_tar_stream};

use crate::model::{line, lines, load_path, load_text, options, paths, sh};
use crate::source_export::export;

fn load_upper(dir: &Path) -> Result<Loaded, SourceError> {
    load_text(&format!("upper:{}", dir.display()))
}

#[test]
fn changes_on_a_real_mount_become_marks_and_the_model_shows_the_mount() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir l u w m; mkdir -p l/d/sub l/e l/f; touch l/a l/d/x l/d/sub/y l/e/z l/f/q; ln l/a l/b; \
         mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w,metacopy=off,redirect_dir=off m; \
         rm m/a; rm -r m/d/sub; rm -r m/e; mkdir m/e; touch m/e/new; rm m/f/q; mkdir m/f/q; setfattr -n trusted.overlay.data -v 1 m/f/q; \
         chmod 700 m/d; printf x >> m/d/x; mkdir m/n; touch m/n/k",
    );
    let mount = load_path(&dir.path().join("m"));
    let shown = lines(&mount.tree);
    sh(dir.path(), "umount m");
    let lower = load_path(&dir.path().join("l")).tree;
    let upper = load_upper(&dir.path().join("u")).unwrap().tree;
    assert!(line(&upper, "a").contains(" 20000 0:0 0.000000000 char 0:0 [] "));
    assert!(
        line(&upper, "d").contains("trusted.overlay.origin= ")
            || line(&upper, "d").contains("[trusted.overlay.origin=]")
    );
    assert!(line(&upper, "e").contains("[trusted.overlay.opaque=y]"));
    assert!(line(&upper, "f/q").contains("trusted.overlay.overlay.data=1"));
    let merged = merge_stack([&lower, &upper]);
    let view: Vec<String> = lines(&merged)
        .iter()
        .map(|l| l.replace("trusted.overlay.data", "trusted.overlay.overlay.data"))
        .collect();
    assert_eq!(view, shown);
}

#[test]
fn the_marks_of_a_layer_survive_export_and_only_they_may_come_from_a_tar() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir a b; mknod a/gone c 0 0; setfattr -n trusted.overlay.opaque -v y b; touch b/f; \
         setfattr -n trusted.overlay.overlay.data -v 1 b/f",
    );
    let tree = load_upper(dir.path()).unwrap().tree;
    let (tar, _) = export(&tree, false).unwrap();
    let again = load_tar_stream(tar.as_slice(), "layer.tar", &options()).unwrap();
    assert_eq!(lines(&again.tree), lines(&tree));
    // The same length, so that the tar stays whole.
    let text = b"trusted.overlay.opaque=y";
    let at = tar.windows(text.len()).position(|w| w == text).unwrap();
    let mut forged = tar.clone();
    forged[at..at + text.len()].copy_from_slice(b"trusted.overlay.redirec=");
    let error = load_tar_stream(forged.as_slice(), "layer.tar", &options()).unwrap_err();
    assert!(
        error.to_string().contains("trusted.overlay.redirec"),
        "{error}"
    );
}

#[test]
fn whiteouts_in_the_form_of_attributes_count_in_marked_directories() {
    for prefix in ["trusted", "user"] {
        let dir = tempfile::tempdir().unwrap();
        sh(
            dir.path(),
            &format!(
                "mkdir d o; touch d/gone d/kept o/x; setfattr -n {prefix}.overlay.opaque -v x d; \
                 setfattr -n {prefix}.overlay.whiteout -v y d/gone; setfattr -n {prefix}.overlay.opaque -v y o; \
                 setfattr -n {prefix}.overlay.impure -v y .; setfattr -n {prefix}.overlay.overlay.data -v 1 o/x"
            ),
        );
        let tree = load_upper(dir.path()).unwrap().tree;
        assert!(line(&tree, "d/gone").contains(" char 0:0 []"), "{prefix}");
        assert!(
            line(&tree, "d").contains("[trusted.overlay.origin=]"),
            "{prefix}"
        );
        assert!(
            line(&tree, "o").contains("[trusted.overlay.opaque=y]"),
            "{prefix}"
        );
        assert!(line(&tree, "").contains(" [] "), "{prefix}");
        let data = if prefix == "user" {
            "[user.overlay.data=1]"
        } else {
            "[trusted.overlay.overlay.data=1]"
        };
        assert!(line(&tree, "o/x").contains(data), "{prefix}");
        sh(
            dir.path(),
            &format!("setfattr -x {prefix}.overlay.opaque d"),
        );
        assert!(matches!(
            load_upper(dir.path()),
            Err(SourceError::Overlay { .. })
        ));
    }
}

#[test]
fn with_both_kinds_of_marks_those_of_the_mount_count() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir a b; setfattr -n trusted.overlay.opaque -v y a; setfattr -n user.overlay.opaque -v y a; \
         setfattr -n user.overlay.opaque -v y b",
    );
    let tree = load_upper(dir.path()).unwrap().tree;
    assert!(line(&tree, "a").contains("[trusted.overlay.opaque=y user.overlay.opaque=y]"));
    assert!(line(&tree, "b").contains("[user.overlay.opaque=y]"));
}

#[test]
fn uppers_that_need_their_lowers_are_refused_with_the_way_out() {
    for (options, change) in [
        ("metacopy=on,redirect_dir=on", "chmod 600 m/f"),
        ("metacopy=off,redirect_dir=on", "mv m/d m/moved"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        sh(
            dir.path(),
            &format!(
                "mkdir l u w m; mkdir l/d; printf data > l/f; \
                 mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w,{options} m; {change}; umount m"
            ),
        );
        let error = load_upper(&dir.path().join("u")).unwrap_err().to_string();
        assert!(error.contains("metacopy=off,redirect_dir=off"), "{error}");
    }
}

#[test]
fn a_directory_of_whiteouts_lists_clean_where_no_lower_has_it() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir l u w m; mkdir l/d; touch l/d/a l/d/b; mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m; rm m/d/a; touch m/d/c; umount m; mkdir other layer",
    );
    let tree = load_upper(&dir.path().join("u")).unwrap().tree;
    crate::model::write_to_disk(&tree, &dir.path().join("layer"));
    let listed = sh(
        dir.path(),
        "mount -t overlay none -o lowerdir=layer:other m; ls m/d; umount m",
    );
    assert_eq!(listed, "c\n");
    let merged = merge_stack([&load_path(&dir.path().join("other")).tree, &tree]);
    assert_eq!(paths(&merged), ["d", "d/c"]);
}
