//! Images that umoci and skopeo made, through the command line.

use crate::world::{World, dsec, json, noise, ok, sh};

#[test]
fn images_of_umoci_and_skopeo_are_one_layer() {
    let world = World::new();
    let bundle = world.folder("work");
    std::fs::write(bundle.join("noise"), noise(5, 400_000)).unwrap();
    sh(
        world.root(),
        "umoci init --layout image; umoci new --image image:one
        umoci unpack --image image:one bundle >&2
        mkdir -p bundle/rootfs/usr/bin; cp work/noise bundle/rootfs/usr/bin/tool; echo old > bundle/rootfs/gone
        ln bundle/rootfs/usr/bin/tool bundle/rootfs/usr/bin/tool2; chmod 4755 bundle/rootfs/usr/bin/tool
        umoci repack --image image:one bundle >&2
        rm -r bundle; umoci unpack --image image:one bundle >&2
        rm bundle/rootfs/gone; echo new > bundle/rootfs/new; ln -s usr/bin bundle/rootfs/bin
        umoci repack --image image:two bundle >&2
        skopeo copy -q oci:image:two docker-archive:image.tar:t:latest
        skopeo copy -q oci:image:two oci:copy:two
        rm -r bundle; umoci unpack --image image:two bundle >&2",
    );
    let wanted = world.build("bundle/rootfs", "origin", &[])["layer"].clone();
    for source in ["oci:image:two", "oci:copy", "docker-archive:image.tar"] {
        let built = world.build(source, "origin", &["--version", "2"]);
        assert_eq!(built["layer"], wanted, "{source}");
        let origin = world.origin("origin");
        let seen = json(&ok(dsec(
            &world,
            &["inspect", "base/t:2", "--origin", &origin, "--json"],
        )));
        assert_eq!(seen["tag"]["build"]["source"], source);
    }
    let one = world.build("oci:image:one", "origin", &["--version", "1"]);
    assert_ne!(
        one["layer"], wanted,
        "the lower layer alone still has `gone`"
    );
}
