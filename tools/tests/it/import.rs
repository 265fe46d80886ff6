//! `dsec import` of images that skopeo put on Debian's docker-registry.

use std::fs;

use imgstore::credentials::environment::Environment;
use imgstore::registry::client::RegistryClient;
use imgstore::registry::reference::Repository;
use serde_json::{Value, json};

use crate::docker_registry::{DockerRegistry, Kind};
use crate::world::{World, dsec, failed, json as parsed, noise, ok, sh};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// An OCI layout `image` with the images `one` and `two`, both on the registry as `app:one` and `app:two`.
fn filled(world: &World) -> DockerRegistry {
    let work = world.folder("work");
    fs::write(work.join("noise"), noise(5, 400_000)).unwrap();
    let registry = DockerRegistry::start(&world.folder("registry"), Kind::default());
    let to = format!("docker://{}", registry.at("team/app"));
    let copy = "skopeo copy -q --dest-tls-verify=false";
    sh(
        world.root(),
        &format!(
            "umoci init --layout image; umoci new --image image:one
            umoci unpack --image image:one bundle >&2
            mkdir -p bundle/rootfs/usr/bin; cp work/noise bundle/rootfs/usr/bin/tool; echo old > bundle/rootfs/gone
            ln bundle/rootfs/usr/bin/tool bundle/rootfs/usr/bin/tool2; chmod 4755 bundle/rootfs/usr/bin/tool
            umoci repack --image image:one bundle >&2
            rm -r bundle; umoci unpack --image image:one bundle >&2
            rm bundle/rootfs/gone; echo new > bundle/rootfs/new; ln -s usr/bin bundle/rootfs/bin
            umoci repack --image image:two bundle >&2
            umoci config --image image:two --config.entrypoint /usr/bin/tool --config.env A=b --architecture arm64
            {copy} oci:image:one {to}:one
            {copy} oci:image:two {to}:two
            {copy} --format v2s2 oci:image:two {to}:docker
            {copy} --dest-compress-format zstd oci:image:two {to}:zstd"
        ),
    );
    registry
}

fn import(world: &World, image: &str, version: &str, more: &[&str]) -> std::process::Output {
    let origin = world.origin("origin");
    let args = [
        "import",
        image,
        "--axis",
        "base",
        "--name",
        "i",
        "--version",
        version,
        "--json",
    ];
    dsec(world, &[&args[..], &["--origin", &origin], more].concat())
}

fn inspect(world: &World, version: &str) -> Value {
    let (layer, origin) = (format!("base/i:{version}"), world.origin("origin"));
    parsed(&ok(dsec(
        world,
        &["inspect", &layer, "--origin", &origin, "--json"],
    )))
}

/// Meant to turn red (not tried): the first part of an index whatever its platform.
#[test]
fn an_imported_image_is_the_layer_that_its_layout_builds() {
    let world = World::new();
    let registry = filled(&world);
    let at = |version: &str| format!("docker://{}{version}", registry.at("team/app"));
    let built =
        |tag: &str| world.build(&format!("oci:image:{tag}"), "origin", &[])["layer"].clone();
    let (one, two) = (built("one"), built("two"));
    assert_ne!(one, two);
    let imported = |version: &str, more: &[&str]| {
        let report = ok(import(&world, &at(version), "1", more));
        parsed(&report)["layer"].clone()
    };
    for tag in [":two", ":docker", ":zstd"] {
        assert_eq!(imported(tag, &[]), two, "{tag}");
    }
    let seen = inspect(&world, "1");
    assert_eq!(
        seen["tag"]["labels"]["oci.entrypoint"],
        r#"["/usr/bin/tool"]"#
    );
    assert_eq!(seen["tag"]["build"]["source"], at(":zstd"));
    // By digest, and the digest that the tag notes is the image's.
    imported(":two", &[]);
    let digest = inspect(&world, "1")["tag"]["build"]["image"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(imported(&format!("@{digest}"), &[]), two);

    // An image for several platforms: `one` for this host's, `two` for another.
    let repository = Repository::parse(&registry.at("team/app"), false).unwrap();
    let client = RegistryClient::new(&repository, &Environment::default()).unwrap();
    let part = |tag: &str, platform: Value| {
        let manifest = client.manifest(tag).unwrap();
        let (kind, size) = (manifest.media_type, manifest.bytes.len());
        json!({"mediaType": kind, "digest": manifest.digest, "size": size, "platform": platform})
    };
    let host = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
        part("two", json!({"os": "linux", "architecture": "s390x", "variant": "v1"})),
        part("one", json!({"os": "linux", "architecture": host})),
        part("docker", json!({"os": "windows", "architecture": host})),
    ]});
    let bytes = serde_json::to_vec(&index).unwrap();
    client.put_manifest("many", INDEX, bytes).unwrap();
    assert_eq!(imported(":many", &[]), one);
    assert_eq!(imported(":many", &["--platform", "linux/s390x"]), two);
    assert_eq!(imported(":many", &["--platform", "linux/s390x/v1"]), two);
    for (tag, platform) in [
        (":many", "linux/mips"),
        (":many", "linux/s390"),
        (":two", "linux/mips"),
    ] {
        let error = failed(&import(&world, &at(tag), "2", &["--platform", platform]), 1);
        assert!(
            error.contains(platform) && error.contains("choose one with --platform"),
            "{error}"
        );
        assert!(error.contains("linux/"), "{error}");
    }
    assert_eq!(imported(":two", &["--platform", "linux/arm64"]), two);
}

/// Meant to turn red (not tried): a blob that is not compared with its digest while it comes in (found later, by another message).
#[test]
fn what_cannot_be_imported_is_said_and_leaves_no_tag() {
    let world = World::new();
    let registry = filled(&world);
    let at = |version: &str| format!("docker://{}{version}", registry.at("team/app"));
    let none = format!("@sha256:{}", "0".repeat(64));
    for (version, text) in [(":none", "it is not there"), (&none, "it is not there")] {
        let error = failed(&import(&world, &at(version), "1", &[]), 1);
        assert!(
            error.contains(&at(version)) && error.contains(text),
            "{error}"
        );
    }
    let wrong = dsec(&world, &["import", "debian", "--axis", "base"]);
    assert!(
        failed(&wrong, 2).contains("docker://HOST"),
        "names what is expected"
    );
    // A blob with one byte changed on the registry's disk.
    let largest = sh(
        &world.path("registry"),
        "find registry -path '*blobs*' -name data -size +100k -printf '%s %p\\n' | sort -n | tail -1 | cut -d' ' -f2",
    );
    let blob = world.path("registry").join(largest.trim());
    let mut bytes = fs::read(&blob).unwrap();
    let at_byte = bytes.len() / 2;
    bytes[at_byte] ^= 1;
    fs::write(&blob, &bytes).unwrap();
    let digest = blob
        .parent()
        .unwrap()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    let damaged: Vec<String> = [":one", ":two", ":zstd", ":docker"]
        .iter()
        .map(|tag| import(&world, &at(tag), "1", &[]))
        .filter(|output| !output.status.success())
        .map(|output| failed(&output, 1))
        .collect();
    assert!(!damaged.is_empty());
    for error in damaged {
        assert!(
            error.contains(&format!("blob `sha256:{digest}`")),
            "{error}"
        );
    }
    // Cut short.
    bytes.truncate(at_byte);
    fs::write(&blob, &bytes).unwrap();
    let failures = [":one", ":two", ":zstd", ":docker"]
        .iter()
        .filter(|tag| !import(&world, &at(tag), "9", &[]).status.success());
    assert!(failures.count() > 0);
    // No folder of an image is left behind.
    let left = sh(
        world.root(),
        "ls -d \"${TMPDIR:-/tmp}\"/dsec-import-* 2>/dev/null | wc -l",
    );
    let mine = left.trim().parse::<u32>().unwrap();
    assert!(mine <= 1, "at most that of the other test");
}
