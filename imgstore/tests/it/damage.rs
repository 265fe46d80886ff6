//! Damaged, cut and unknown objects give errors that name them.

use imgstore::build::BuildOptions;
use imgstore::format::manifest::Manifest;
use imgstore::format::placement::Placement;
use imgstore::format::{erofs, frame};
use imgstore::ids::Digest;
use imgstore::origin::Origin;
use imgstore::origin::mem::MemOrigin;
use imgstore::store::reader::LayerReader;
use imgstore::store::{layer, verify};

use crate::build::build_as;
use crate::random_tree::{Rng, random_tree};

fn published() -> (MemOrigin, Digest) {
    let origin = MemOrigin::default();
    let (tree, _spool) = random_tree(42, 80);
    let layer = build_as(&tree, "1", &origin, &BuildOptions::default()).layer;
    (origin, layer)
}

/// What `verify` says is wrong: the damaged objects, or why the layer cannot be opened.
fn damaged_objects(origin: &MemOrigin, layer: &Digest) -> String {
    match verify::verify(origin, layer, &|_, _| ()) {
        Ok(report) => {
            let objects: Vec<String> = report.damage.into_iter().map(|d| d.object).collect();
            objects.join(" ")
        }
        Err(e) => e.to_string(),
    }
}

/// One bit flipped in, or the end cut off, any object: loading or verifying says so and names the object.
#[test]
fn any_damage_is_found_and_named() {
    let (origin, layer) = published();
    let good = origin.snapshot();
    let mut rng = Rng::new(5);
    for (name, bytes) in &good {
        if name.starts_with("tags/") || name == "index.json" {
            continue; // mutable, and told apart by their own checks below
        }
        for cut in [false, true] {
            let at = usize::try_from(rng.below(u64::try_from(bytes.len()).unwrap())).unwrap();
            // The seek table at the end of a pack is for other tools; we never read it.
            if name.starts_with("packs/") && at + 2000 > bytes.len() {
                continue;
            }
            origin.tamper(|objects| {
                let object = objects.get_mut(name).unwrap();
                if cut {
                    object.truncate(at)
                } else {
                    object[at] ^= 0x10
                }
            });
            let found = damaged_objects(&origin, &layer);
            assert!(
                found.contains(name),
                "damage at {at} of `{name}` (cut {cut}): `{found}`"
            );
            origin.tamper(|objects| *objects = good.clone());
        }
    }
    assert_eq!(
        verify::verify(&origin, &layer, &|_, _| ()).unwrap().damage,
        Vec::new()
    );
}

#[test]
fn missing_objects_are_named() {
    let (origin, layer) = published();
    let good = origin.snapshot();
    for name in good
        .keys()
        // Only a tag says that there must be a bundle.
        .filter(|n| !n.starts_with("tags/") && !n.starts_with("bundles/") && *n != "index.json")
    {
        origin.tamper(|objects| drop(objects.remove(name)));
        let found = damaged_objects(&origin, &layer);
        assert!(
            found.contains(name) || found.contains("no layer"),
            "`{name}`: {found}"
        );
        origin.tamper(|objects| *objects = good.clone());
    }
}

/// Swapped packs of the same size: right length, wrong bytes.
#[test]
fn swapped_segments_are_found() {
    let (origin, layer) = published();
    let mut loaded = layer::open(&origin, &layer).unwrap();
    loaded.placement.segments.swap(0, 1);
    let bytes = loaded.placement.to_bytes();
    origin
        .replace(&imgstore::format::names::placement(&layer), &bytes)
        .unwrap();
    let damage = verify::verify(&origin, &layer, &|_, _| ()).unwrap().damage;
    // Both, and the bundle, which says where they were.
    let objects: Vec<&str> = damage.iter().map(|d| &d.object[..5]).collect();
    assert_eq!(objects, ["bundl", "packs", "packs"]);
}

/// A placement cannot make a reader fetch more than a frame of the segment can have, however large it says the pack is.
#[test]
fn spots_longer_than_any_frame_of_the_segment_are_refused() {
    let (origin, layer) = published();
    let mut loaded = layer::open(&origin, &layer).unwrap();
    let frame_max = frame::frame_len_max(loaded.manifest.segments[0].len());
    assert_eq!(frame::frame_len_max(4 << 20), (4 << 20) + (32 << 10) + 1024);
    let parse = |placement: &Placement| {
        Placement::parse(&placement.to_bytes(), &layer, &loaded.manifest).map(drop)
    };
    loaded.placement.packs[0].size = u64::MAX;
    loaded.placement.segments[0].2 = u32::try_from(frame_max).unwrap();
    parse(&loaded.placement).unwrap();
    loaded.placement.segments[0].2 += 1;
    let error = parse(&loaded.placement).unwrap_err();
    let wanted = format!("at most {frame_max}");
    assert!(error.to_string().contains(&wanted), "{error}");
}

/// The uuid as `docs/format.md` describes it.
#[test]
fn uuid_is_the_digest_of_the_image_without_it() {
    let (origin, layer) = published();
    let manifest = layer::read_manifest(&origin, &layer).unwrap();
    let mut image = layer::read_meta(&origin, &manifest).unwrap();
    let uuid: Vec<u8> = image.drain(1024 + 0x30..1024 + 0x40).collect();
    image.splice(1024 + 0x30..1024 + 0x30, [0; 16]);
    image[1028..1032].fill(0);
    let checksum = !crc32c::crc32c(&image[1024..4096]);
    image[1028..1032].copy_from_slice(&checksum.to_le_bytes());
    assert_eq!(Digest::of(&image).as_bytes()[..16], uuid);
}

/// A directory that two names lead to is refused: a chain of such pairs would double the walk at every step.
#[test]
fn directories_with_two_names_are_refused() {
    let (mut tree, _spool) = random_tree(42, 1);
    let mut dir = |children: [(&str, imgstore::tree::InodeId); 1]| {
        let children = children.map(|(name, id)| (name.as_bytes().to_vec(), id));
        tree.add(imgstore::tree::Inode {
            meta: imgstore::tree::Meta::default(),
            kind: imgstore::tree::Kind::Dir(children.into()),
        })
    };
    let deepest = dir([("x", imgstore::tree::InodeId(0))]);
    let (a, b) = (dir([("deep", deepest)]), dir([("deep", deepest)]));
    tree.inode_mut(deepest).kind = imgstore::tree::Kind::Dir([].into());
    let root = [(b"a".to_vec(), a), (b"b".to_vec(), b)];
    tree.inode_mut(imgstore::tree::ROOT).kind = imgstore::tree::Kind::Dir(root.into());
    let manifest = Manifest {
        segments: Vec::new(),
        ..layer::open(&published().0, &published().1)
            .unwrap()
            .manifest
    };
    let image = erofs::write::image(&tree, &std::collections::HashMap::new(), &[]).unwrap();
    let no_data = |_: usize| Err("no data".to_owned());
    let reader = LayerReader::open(&image, &manifest, &no_data).unwrap();
    let error = reader.tree().unwrap_err().to_string();
    assert!(error.contains("second name"), "{error}");
}

#[test]
fn unknown_features_and_versions_are_refused_or_ignored_by_class() {
    let (origin, layer) = published();
    let manifest = layer::read_manifest(&origin, &layer).unwrap();
    let parse = |m: &Manifest| Manifest::parse(&m.to_bytes(), &m.layer());
    let mut compat = manifest.clone();
    compat.features_compat.push("something-new".into());
    assert!(parse(&compat).is_ok());
    let mut incompat = manifest.clone();
    incompat.features_incompat.push("something-new".into());
    assert!(
        parse(&incompat)
            .unwrap_err()
            .to_string()
            .contains("something-new")
    );
    let mut version = manifest.clone();
    version.format = 2;
    assert!(
        parse(&version)
            .unwrap_err()
            .to_string()
            .contains("newer dsec")
    );
    let mut long = manifest.clone();
    long.segments[0].1 = (4 << 20) + 4096;
    assert!(parse(&long).is_err());
    // What is decompressed in memory is bounded by the manifest, and the manifest by these.
    let mut large = manifest;
    (large.meta.size, large.chunks.size) = (1 << 30, 1 << 30);
    parse(&large).unwrap();
    large.chunks.size += 1;
    let error = parse(&large).unwrap_err().to_string();
    assert!(error.contains("chunk table size"), "{error}");
    (large.meta.size, large.chunks.size) = ((1 << 30) + 4096, 16);
    let error = parse(&large).unwrap_err().to_string();
    assert!(error.contains("metadata size"), "{error}");
}
