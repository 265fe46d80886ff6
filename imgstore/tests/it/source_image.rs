//! OCI images and docker archives: layers written here byte by byte, and images that umoci, skopeo and buildah made.

use std::fs;
use std::path::{Path, PathBuf};

use imgstore::source::{EntryFault, Loaded, SourceError};
use imgstore::tree::Tree;
use sha2::{Digest, Sha256};

use crate::model::{bytes, line, lines, load_path, load_text, paths, run, sh};
use crate::tar_bytes::{dir, entry, file, link, symlink, tar};

fn sha256(bytes: &[u8]) -> String {
    let hex: Vec<String> = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    hex.concat()
}

/// An image layout being written.
struct Image {
    dir: tempfile::TempDir,
    manifests: Vec<String>,
}

impl Image {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        fs::write(
            dir.path().join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
        Self {
            dir,
            manifests: Vec::new(),
        }
    }

    fn blob(&self, bytes: &[u8]) -> String {
        let digest = sha256(bytes);
        fs::write(self.blob_path(&digest), bytes).unwrap();
        format!(r#""digest":"sha256:{digest}","size":{}"#, bytes.len())
    }

    fn blob_path(&self, digest: &str) -> PathBuf {
        self.dir.path().join("blobs/sha256").join(digest)
    }

    /// Adds an image of these plain layers; gives its descriptor without the closing brace.
    fn add(&mut self, layers: &[Vec<u8>], arch: &str, extra: &str) {
        let diff_ids: Vec<String> = layers
            .iter()
            .map(|l| format!(r#""sha256:{}""#, sha256(l)))
            .collect();
        let config = format!(
            r#"{{"architecture":"{arch}","os":"linux","config":{{"Env":["A=b"],"Cmd":["/bin/sh"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            diff_ids.join(",")
        );
        let config = self.blob(config.as_bytes());
        let layers: Vec<String> = layers
            .iter()
            .map(|layer| {
                format!(
                    r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar",{}}}"#,
                    self.blob(layer)
                )
            })
            .collect();
        let manifest = format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"application/vnd.oci.image.config.v1+json",{config}}},"layers":[{}]}}"#,
            layers.join(",")
        );
        let descriptor = self.blob(manifest.as_bytes());
        self.manifests.push(format!(
            r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json",{descriptor}{extra}}}"#
        ));
    }

    fn load(&self, tag: &str) -> Result<Loaded, SourceError> {
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
            self.manifests.join(",")
        );
        fs::write(self.dir.path().join("index.json"), index).unwrap();
        load_text(&format!("oci:{}{tag}", self.dir.path().display()))
    }
}

fn layers(layers: &[&[Vec<u8>]]) -> Result<Tree, SourceError> {
    let mut image = Image::new();
    let layers: Vec<Vec<u8>> = layers.iter().map(|entries| tar(entries)).collect();
    image.add(&layers, "amd64", "");
    image.load("").map(|loaded| loaded.tree)
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let lower = [
        file("a", b""),
        dir("d"),
        file("d/x", b"old"),
        file("d/y", b""),
        file("e/deep/z", b""),
    ];
    for order in [0, 1] {
        let mut upper = vec![
            file(".wh.a", b""),
            file("d/.wh.x", b""),
            file("d/x", b"new"),
            file(".wh.e", b""),
            file("e/own", b""),
            file("gone/.wh.never", b""),
        ];
        if order == 1 {
            upper.reverse();
        }
        let tree = layers(&[&lower, &upper]).unwrap();
        assert_eq!(
            paths(&tree),
            ["d", "d/x", "d/y", "e", "e/own"],
            "order {order}"
        );
        assert_eq!(bytes(&tree, "d/x"), b"new");
    }
}

#[test]
fn an_opaque_marker_hides_lower_entries_wherever_it_stands_in_the_layer() {
    let lower = [
        dir("d"),
        file("d/low", b""),
        dir("d/sub"),
        file("d/sub/low", b""),
        file("keep", b""),
    ];
    let marker = file("d/.wh..wh..opq", b"");
    for at in 0..3 {
        let mut upper = vec![dir("d"), file("d/new", b"")];
        upper.insert(at, marker.clone());
        let tree = layers(&[&lower, &upper]).unwrap();
        assert_eq!(paths(&tree), ["d", "d/new", "keep"], "marker at {at}");
    }
    let root = layers(&[&lower, &[file(".wh..wh..opq", b""), file("only", b"")]]).unwrap();
    assert_eq!(paths(&root), ["only"]);
}

#[test]
fn control_files_of_aufs_are_skipped_and_links_into_them_work() {
    let upper = [
        dir(".wh..wh.plnk"),
        file(".wh..wh.plnk/7.1", b"linked"),
        file(".wh..wh.aufs", b""),
        dir(".wh..wh.orph"),
        link("a", ".wh..wh.plnk/7.1"),
        link("b", ".wh..wh.plnk/7.1"),
        file(".wh.low", b""),
    ];
    let tree = layers(&[&[file("low", b"")], &upper]).unwrap();
    assert_eq!(paths(&tree), ["a", "b"]);
    assert_eq!(bytes(&tree, "b"), b"linked");
    assert!(line(&tree, "b").ends_with("=/a"));
}

#[test]
fn malformed_whiteouts_are_refused() {
    for name in [".wh.", "d/.wh..", ".wh..."] {
        let found = layers(&[&[file(name, b"")]]);
        assert!(
            matches!(
                &found,
                Err(SourceError::Entry {
                    fault: EntryFault::Whiteout,
                    ..
                })
            ),
            "{name}: {found:?}"
        );
    }
}

/// The rule for merged `/usr`, as containerd and docker have it: an entry below a link goes where the link points; a
/// directory entry named like the link replaces it.
#[test]
fn entries_below_a_lower_link_go_where_it_points() {
    let lower = [
        dir("usr/bin"),
        file("usr/bin/sh", b""),
        symlink("bin", "usr/bin"),
        dir("usr/lib"),
        symlink("lib", "usr/lib"),
    ];
    let tree = layers(&[
        &lower,
        &[
            file("bin/x", b""),
            file("bin/.wh.sh", b""),
            dir("lib/"),
            file("lib/y", b""),
        ],
    ])
    .unwrap();
    assert_eq!(
        paths(&tree),
        [
            "bin",
            "lib",
            "lib/y",
            "usr",
            "usr/bin",
            "usr/bin/x",
            "usr/lib"
        ]
    );
    assert!(line(&tree, "bin").contains("-> usr/bin"));
    assert!(line(&tree, "lib").contains(" 40644 "));
}

#[test]
fn hard_links_reach_into_lower_layers() {
    let tree = layers(&[
        &[file("low", b"content"), symlink("s", "t")],
        &[link("up", "low"), link("s2", "s")],
        &[file("low", b"replaced"), link("up2", "up")],
    ])
    .unwrap();
    assert_eq!(bytes(&tree, "up2"), b"content");
    assert_eq!(bytes(&tree, "low"), b"replaced");
    assert!(line(&tree, "up2").ends_with("=/up"));
    assert!(line(&tree, "s2").ends_with("=/s"));
}

#[test]
fn types_replace_each_other_and_directories_take_the_upper_attributes() {
    let mut meta = entry(b'5', b"d", b"", b"");
    meta.patches.push((100, b"0000700\0".to_vec()));
    let tree = layers(&[
        &[
            dir("d"),
            file("d/kept", b""),
            dir("f"),
            file("f/lost", b""),
            file("g", b""),
        ],
        &[
            meta.bytes(),
            file("f", b"file"),
            dir("g"),
            file("g/in", b""),
        ],
    ])
    .unwrap();
    assert_eq!(paths(&tree), ["d", "d/kept", "f", "g", "g/in"]);
    assert!(line(&tree, "d").contains(" 40700 "));
}

#[test]
fn a_damaged_blob_is_named() {
    let mut image = Image::new();
    let layer = tar(&[file("a", b"data")]);
    image.add(std::slice::from_ref(&layer), "amd64", "");
    let mut bad = layer.clone();
    bad[512] ^= 1;
    fs::write(image.blob_path(&sha256(&layer)), &bad).unwrap();
    let error = image.load("").unwrap_err();
    assert!(
        matches!(error, SourceError::Blob { what: "layer", .. }),
        "{error}"
    );
    assert!(error.to_string().contains(&sha256(&layer)), "{error}");
    bad.push(0);
    fs::write(image.blob_path(&sha256(&layer)), &bad).unwrap();
    let error = image.load("").unwrap_err().to_string();
    assert!(error.contains(&format!("{} bytes", bad.len())), "{error}");
    fs::remove_file(image.blob_path(&sha256(&layer))).unwrap();
    assert!(
        image
            .load("")
            .unwrap_err()
            .to_string()
            .contains(&sha256(&layer))
    );
}

#[test]
fn a_compressed_layer_must_have_its_diff_id_too() {
    let mut image = Image::new();
    let layer = tar(&[file("a", b"data")]);
    image.add(std::slice::from_ref(&layer), "amd64", "");
    // The manifest of another compressed layer, the config of the first.
    let other = zstd::encode_all(tar(&[file("b", b"")]).as_slice(), 1).unwrap();
    let text = format!(
        r#""digest":"sha256:{}","size":{}"#,
        sha256(&layer),
        layer.len()
    );
    let manifest = image.manifests[0].split("sha256:").nth(1).unwrap()[..64].to_owned();
    let manifest = fs::read_to_string(image.blob_path(&manifest)).unwrap();
    let forged = image.blob(manifest.replace(&text, &image.blob(&other)).as_bytes());
    image.manifests = vec![format!(r#"{{"mediaType":"x",{forged}}}"#)];
    let error = image.load("").unwrap_err();
    assert!(
        matches!(&error, SourceError::Blob { expected, .. } if expected.ends_with(&sha256(&layer))),
        "{error}"
    );
}

#[test]
fn the_image_is_chosen_by_name_and_then_by_platform() {
    let mut image = Image::new();
    let named =
        |name: &str| format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}"#);
    image.add(&[tar(&[file("one", b"")])], "amd64", &named("v1"));
    image.add(&[tar(&[file("two", b"")])], "amd64", &named("v2:x"));
    image.add(
        &[tar(&[file("arm", b"")])],
        "arm64",
        r#","platform":{"os":"linux","architecture":"arm64"}"#,
    );
    assert_eq!(paths(&image.load(":v1").unwrap().tree), ["one"]);
    let error = image.load("").unwrap_err().to_string();
    assert!(
        error.contains("more than one image") && error.contains("v1, v2:x"),
        "{error}"
    );
    let error = image.load(":v3").unwrap_err().to_string();
    assert!(error.contains("no image for v3"), "{error}");
    image.manifests.remove(1);
    if cfg!(target_arch = "x86_64") {
        assert_eq!(paths(&image.load("").unwrap().tree), ["one"]);
    }
    image.manifests.remove(0);
    let only = image.load("").unwrap();
    assert_eq!(paths(&only.tree), ["arm"]);
    assert_eq!(only.labels["oci.cmd"], r#"["/bin/sh"]"#);
    assert_eq!(only.labels["oci.env"], r#"["A=b"]"#);
    assert_eq!(only.labels["oci.architecture"], r#""arm64""#);
}

/// Makes an image of two layers with umoci and gives what it must contain.
fn umoci_image(dir: &Path) -> Vec<String> {
    sh(
        dir,
        "umoci init --layout img; umoci new --image img:t; umoci unpack --image img:t b >/dev/null 2>&1; \
         cd b/rootfs; mkdir -p usr/bin etc/conf.d d/sub; printf sh > usr/bin/sh; chmod 4755 usr/bin/sh; ln -s usr/bin bin; \
         ln usr/bin/sh usr/bin/bash; touch etc/conf.d/a d/sub/x d/y; chown 1000:70000 d/y; mkfifo p; touch -d @1234567890.5 d/y; \
         truncate -s 2M hole; setfattr -n user.k -v v d; setcap cap_net_raw+ep usr/bin/sh; cd ../..; umoci repack --image img:t b >/dev/null 2>&1; \
         rm -rf b; umoci unpack --image img:t b >/dev/null 2>&1; cd b/rootfs; rm -rf d/sub; mkdir d/sub; touch d/sub/new; rm etc/conf.d/a; \
         rm p; mkdir p; touch p/in; rm usr/bin/bash; printf 2 >> d/y; cd ../..; umoci repack --image img:t b >/dev/null 2>&1; \
         rm -rf b; umoci unpack --image img:t b >/dev/null 2>&1; umoci config --image img:t --config.entrypoint /bin/sh --config.user 1000",
    );
    lines(&load_path(&dir.join("b/rootfs")).tree)
}

#[test]
fn images_of_umoci_skopeo_and_docker_form_load_as_umoci_unpacks_them() {
    let dir = tempfile::tempdir().unwrap();
    let expected = umoci_image(dir.path());
    sh(
        dir.path(),
        "skopeo --insecure-policy copy -q oci:img:t docker-archive:plain.tar:a/b:c; gzip -k plain.tar; \
         skopeo --insecure-policy copy -q --dest-compress-format zstd oci:img:t oci:zst:t",
    );
    let at = |text: &str| text.replace("DIR", dir.path().to_str().unwrap());
    for source in [
        "oci:DIR/img:t",
        "oci:DIR/img",
        "oci:DIR/zst:t",
        "docker-archive:DIR/plain.tar",
        "docker-archive:DIR/plain.tar.gz",
    ] {
        let loaded = load_text(&at(source)).unwrap();
        assert_eq!(lines(&loaded.tree), expected, "{source}");
        assert_eq!(
            loaded.labels["oci.entrypoint"], r#"["/bin/sh"]"#,
            "{source}"
        );
        assert_eq!(loaded.labels["oci.user"], r#""1000""#);
        loaded.check_unchanged().unwrap();
    }
}

#[test]
fn a_buildah_image_loads_as_its_own_mount() {
    let dir = tempfile::tempdir().unwrap();
    let script = "export STORAGE_DRIVER=vfs; b='buildah --root root --runroot run'; c=$($b from scratch); m=$($b mount $c); \
         mkdir -p $m/bin $m/x/y; printf a > $m/bin/a; touch $m/x/y/z; $b commit -q --rm=false $c one >/dev/null; rm -r $m/x/y; ln -s bin $m/l; \
         $b config --cmd /bin/a $c; $b commit -q $c oci:out:v >/dev/null; $b umount -a >/dev/null 2>&1 || true; $b rm -a >/dev/null 2>&1 || true";
    sh(dir.path(), script);
    let loaded = load_text(&format!("oci:{}/out:v", dir.path().display())).unwrap();
    assert_eq!(paths(&loaded.tree), ["bin", "bin/a", "l", "x"]);
    assert_eq!(bytes(&loaded.tree, "bin/a"), b"a");
}

#[test]
fn a_docker_archive_of_several_images_or_with_a_changed_layer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    umoci_image(dir.path());
    sh(
        dir.path(),
        "skopeo --insecure-policy copy -q oci:img:t docker-archive:a.tar:a/b:c; mkdir x; tar -C x -xf a.tar; \
         sed 's/^\\[\\(.*\\)\\]$/[\\1,\\1]/' x/manifest.json > m; cp -r x y; cp m y/manifest.json; tar -C y -cf two.tar .; \
         cd x; for l in *.tar; do printf X | dd of=$l bs=1 seek=700 conv=notrunc status=none; done; tar -cf ../bad.tar .",
    );
    let load = |name: &str| load_text(&format!("docker-archive:{}/{name}", dir.path().display()));
    let error = load("two.tar").unwrap_err();
    assert!(matches!(error, SourceError::Choice { .. }), "{error}");
    let error = load("bad.tar").unwrap_err();
    assert!(
        matches!(error, SourceError::Blob { what: "layer", .. }),
        "{error}"
    );
    run("true", &[]);
}
