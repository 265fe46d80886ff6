//! Which extended attributes reach a layer.

use imgstore::source::{SourceSpec, load};

use crate::model::{line, load_path, options, sh};

#[test]
fn one_list_holds_for_directories_and_tars() {
    let dir = tempfile::tempdir().unwrap();
    sh(
        dir.path(),
        "mkdir s; touch s/f; cd s; \
         setfattr -n user.u -v 1 f; setfattr -n user.overlay.opaque -v y f; setfattr -n trusted.t -v 2 f; \
         setfattr -n trusted.overlay.opaque -v y f; setfattr -n security.ima -v 0x04 f; setfattr -n security.other -v 3 f; \
         setcap cap_net_raw+ep f; cd ..; tar --xattrs --xattrs-include='*' -C s -cf s.tar .",
    );
    let kept = "[security.capability=\\x01\\x00\\x00\\x02\\x00 \\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00 \
                security.other=3 trusted.overlay.overlay.opaque=y trusted.t=2 user.overlay.opaque=y user.u=1]";
    for name in ["s", "s.tar"] {
        let found = line(&load_path(&dir.path().join(name)).tree, "f");
        assert!(found.contains(kept), "{name}: {found}");
    }
    let mut keep = options();
    keep.keep_xattrs.push("security.ima".to_owned());
    let spec = SourceSpec::Directory(dir.path().join("s"));
    let found = line(&load(&spec, &keep).unwrap().tree, "f");
    assert!(found.contains("security.ima=\\x04"), "{found}");
}
