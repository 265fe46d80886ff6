//! Three axes at the scale they are for: many compositions of few layers, and what a new version costs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::daemon::{Daemon, mounts_below};
use crate::fixture::World;

const BASES: usize = 20;
const WORKSPACES: usize = 200;
const TOOLKITS: usize = 10;

fn publish(world: &World, axis: &str, name: usize, version: &str) {
    let tree = world.folder(&format!("{axis}-{name}-{version}"));
    let content = format!("{axis} {name} {version}");
    fs::write(tree.join(axis), &content).unwrap();
    fs::create_dir(tree.join("shared")).unwrap();
    fs::write(tree.join(format!("shared/{axis}")), content).unwrap();
    world.publish(&tree, &format!("{axis}/n{name}:{version}"));
}

/// Every object of the origin with its bytes, temporary files left out.
fn objects(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path
                    .strip_prefix(root)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned();
                out.insert(name, fs::read(path).unwrap());
            }
        }
    }
    out
}

#[test]
fn two_hundred_compositions_share_their_layers_and_a_new_toolkit_is_one_layer() {
    let world = World::new();
    for (axis, count) in [
        ("base", BASES),
        ("workspace", WORKSPACES),
        ("toolkit", TOOLKITS),
    ] {
        (0..count).for_each(|n| publish(&world, axis, n, "1"));
    }
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    let mount = |n: usize, version: &str| {
        let (base, toolkit) = (n % BASES, n % TOOLKITS);
        let refs = [
            format!("base/n{base}:1"),
            format!("workspace/n{n}:1"),
            format!("toolkit/n{toolkit}:{version}"),
        ];
        let refs: Vec<&str> = refs.iter().map(String::as_str).collect();
        let point = world.folder(&format!("m{n}"));
        daemon.mount(&refs, &point, n % 2 == 1);
        for (axis, name, version) in [
            ("base", base, "1"),
            ("workspace", n, "1"),
            ("toolkit", toolkit, version),
        ] {
            let wanted = format!("{axis} {name} {version}");
            assert_eq!(fs::read_to_string(point.join(axis)).unwrap(), wanted);
            assert_eq!(
                fs::read_to_string(point.join("shared").join(axis)).unwrap(),
                wanted
            );
        }
    };
    (0..WORKSPACES).for_each(|n| mount(n, "1"));
    let layers = daemon.cache().join("run/layers");
    assert_eq!(mounts_below(&layers).len(), BASES + WORKSPACES + TOOLKITS);
    assert_eq!(daemon.stats().mounts.len(), WORKSPACES);

    // A new version of a toolkit: its own objects and its tag appear, the index changes, and nothing else.
    let before = objects(&world.origin());
    publish(&world, "toolkit", 3, "2");
    let after = objects(&world.origin());
    let kinds: BTreeMap<&str, usize> = after
        .keys()
        .filter(|name| !before.contains_key(*name))
        .fold(BTreeMap::new(), |mut kinds, name| {
            *kinds.entry(name.split('/').next().unwrap()).or_insert(0) += 1;
            kinds
        });
    let wanted = [
        ("bundles", 1),
        ("chunks", 1),
        ("manifests", 1),
        ("meta", 1),
        ("packs", 1),
        ("placements", 1),
        ("tags", 1),
    ];
    assert_eq!(kinds, BTreeMap::from(wanted));
    let changed: Vec<&String> = before
        .keys()
        .filter(|name| after.get(*name) != before.get(*name))
        .collect();
    assert_eq!(changed, ["index.json"]);

    // And every composition that wants it costs one more kernel mount between them all.
    for n in (3..WORKSPACES).step_by(TOOLKITS) {
        daemon
            .client()
            .umount(&world.path(&format!("m{n}")))
            .unwrap();
        mount(n, "2");
    }
    assert_eq!(mounts_below(&layers).len(), BASES + WORKSPACES + TOOLKITS);
    assert_eq!(daemon.stats().mounts.len(), WORKSPACES);
}
