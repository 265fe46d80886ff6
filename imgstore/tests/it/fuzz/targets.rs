//! Parsers of what lies on an origin, and of an origin that lies as a whole.

use std::sync::{Arc, OnceLock};

use imgstore::build::BuildOptions;
use imgstore::format::condemned::Condemned;
use imgstore::format::lease::{Lease, Purpose};
use imgstore::format::manifest::Manifest;
use imgstore::format::placement::Placement;
use imgstore::format::tag::{Index, Tag};
use imgstore::format::trace::{Blocks, Trace, segments_of};
use imgstore::format::{chunk_table, erofs, frame, names};
use imgstore::ids::{Digest, LayerRef, TagName};
use imgstore::origin::mem::MemOrigin;
use imgstore::origin::url::OriginUrl;
use imgstore::store::reader::LayerReader;
use imgstore::store::{copy, export, fsck_origin, layer, tar_export, verify};

use super::Target;
use crate::build::build_as;
use crate::random_tree::random_tree;
use crate::two_origins::{clone_of, faults};

/// What most targets start from.
struct Published {
    origin: Arc<MemOrigin>,
    layer: Digest,
    manifest: Manifest,
    placement: Placement,
}

fn published() -> &'static Published {
    static PUBLISHED: OnceLock<Published> = OnceLock::new();
    PUBLISHED.get_or_init(|| {
        let origin = Arc::new(MemOrigin::default());
        let (tree, _spool) = random_tree(42, 12);
        let options = BuildOptions {
            threads: 1,
            ..BuildOptions::default()
        };
        let layer = build_as(&tree, "1", origin.as_ref(), &options).layer;
        let loaded = layer::open(origin.as_ref(), &layer).unwrap();
        Published {
            origin,
            layer,
            manifest: loaded.manifest,
            placement: loaded.placement,
        }
    })
}

fn object(folder: &str) -> Vec<u8> {
    let all = published().origin.snapshot();
    all.into_iter()
        .find(|(name, _)| name.starts_with(folder))
        .unwrap()
        .1
}

/// `ok`, or the error's text.
pub(super) fn told<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    match result {
        Ok(_) => "ok".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// An origin with a layer.
pub(super) fn origin() -> (Arc<MemOrigin>, Digest) {
    (Arc::clone(&published().origin), published().layer)
}

pub(super) fn simple(corpus: Vec<Vec<u8>>, run: impl Fn(&[u8]) -> String + 'static) -> Target {
    Target {
        corpus,
        fix: |_| (),
        run: Box::new(run),
    }
}

pub(super) fn manifest() -> Target {
    simple(vec![published().manifest.to_bytes()], |bytes| {
        told(Manifest::parse(bytes, &Digest::of(bytes)))
    })
}

pub(super) fn placement() -> Target {
    let Published {
        layer, manifest, ..
    } = published();
    simple(vec![published().placement.to_bytes()], |bytes| {
        told(Placement::parse(bytes, layer, manifest))
    })
}

pub(super) fn tag() -> Target {
    simple(vec![object("tags/")], |bytes| {
        told(Tag::parse(bytes, &crate::build::tag("1")))
    })
}

pub(super) fn index() -> Target {
    simple(vec![object("index.json")], |bytes| {
        told(Index::parse(bytes))
    })
}

pub(super) fn lease() -> Target {
    let lease = Lease {
        format: 1,
        holder: "host".into(),
        layers: vec![published().layer],
        objects: vec!["packs/x".into()],
        process: String::new(),
        purpose: Purpose::Mount,
        seconds: 60,
    };
    simple(vec![lease.to_bytes()], |bytes| told(Lease::parse(bytes)))
}

pub(super) fn condemned() -> Target {
    let record = Condemned {
        format: 1,
        holder: "host".into(),
        objects: vec!["packs/x".into()],
        process: String::new(),
        seconds: 60,
    };
    simple(vec![record.to_bytes()], |bytes| {
        told(Condemned::parse(bytes))
    })
}

/// First touches, and what they mean for a layer.
pub(super) fn trace() -> Target {
    let digest = published().layer;
    let touch = |first| (digest, Blocks { first, count: 3 });
    let trace = Trace::new([touch(0), touch(40), touch(9)]);
    simple(vec![trace.to_bytes()], move |bytes| {
        let parsed = Trace::parse(bytes);
        if let Ok(trace) = &parsed {
            drop(segments_of(&published().manifest, &trace.of_layer(&digest)));
            assert!(trace.bytes() > 0 || trace.runs.is_empty());
        }
        told(parsed)
    })
}

/// Everything that users and listings write as text.
pub(super) fn names() -> Target {
    let digest = published().layer.to_hex();
    let texts = [
        "base/python:3.11",
        "workspace/a:b",
        &digest,
        "dir:/srv/layers",
        "http://host:80/layers",
        "tags/base/python/3.11.json",
        "docker://host:5000/a/b:tag",
        "docker-archive:/x",
    ];
    simple(texts.map(|text| text.as_bytes().to_vec()).into(), |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let tag = text.parse::<TagName>();
        if let Ok(tag) = &tag {
            // No name leads out of its folder, and each has one object.
            let object = names::tag(tag);
            assert_eq!(names::parse_tag(&object).as_ref(), Some(tag));
            assert!(
                object
                    .split('/')
                    .all(|part| !part.is_empty() && part != ".." && part != ".")
            );
        }
        if let Some(tag) = names::parse_tag(&text) {
            assert_eq!(names::tag(&tag), text);
        }
        let parts = [
            told(tag),
            told(text.parse::<LayerRef>()),
            told(text.parse::<Digest>()),
            told(text.parse::<OriginUrl>()),
            told(text.parse::<imgstore::process::Process>()),
            told(text.parse::<imgstore::registry::reference::ImageReference>()),
        ];
        let any = parts.iter().find(|part| *part == "ok");
        any.cloned().unwrap_or_else(|| parts.join(" "))
    })
}

pub(super) fn chunk_table() -> Target {
    let size = published().manifest.chunks.size;
    let table = frame::decode(&object("chunks/"), size).unwrap();
    simple(vec![table], |bytes| told(chunk_table::parse(bytes)))
}

/// One frame, whose reader was told any length.
pub(super) fn frame() -> Target {
    let text: Vec<u8> = b"some words, and again "
        .iter()
        .copied()
        .cycle()
        .take(65_536)
        .collect();
    let noise = crate::random_tree::Rng::new(1).bytes(65_536);
    simple(
        vec![
            frame::encode(&text, 1),
            frame::encode(&text, 19),
            frame::encode(&noise, 1),
        ],
        |bytes| {
            for claimed in [0, 4096, 4 << 20, 1 << 30] {
                drop(frame::decode(bytes, claimed));
            }
            told(frame::decode(bytes, 65_536))
        },
    )
}

/// The superblock's checksum and size fields follow what is there.
fn fix_image(image: &mut Vec<u8>) {
    image.resize(image.len().next_multiple_of(4096).max(4096), 0);
    let blocks = u32::try_from(image.len() / 4096).unwrap();
    image[1024 + 0x24..1024 + 0x28].copy_from_slice(&blocks.to_le_bytes());
    image[1028..1032].fill(0);
    let checksum = !crc32c::crc32c(&image[1024..4096]);
    image[1028..1032].copy_from_slice(&checksum.to_le_bytes());
}

/// Superblock, device table, chunk indexes, and the whole tree by the independent reader.
pub(super) fn erofs_image() -> Target {
    let Published {
        origin, manifest, ..
    } = published();
    let image = layer::read_meta(origin.as_ref(), manifest).unwrap();
    Target {
        corpus: vec![image],
        fix: fix_image,
        run: Box::new(|bytes| {
            let checked = told(erofs::check::check(bytes, manifest));
            for nid in [2, 4, 100, u64::MAX] {
                drop(erofs::extents::data_runs(bytes, nid));
            }
            let no_data = |_: usize| Err("no data".to_owned());
            match LayerReader::open(bytes, manifest, &no_data) {
                Ok(reader) => match reader.tree() {
                    Ok(tree) => {
                        drop(tree.tree.walk());
                        format!("{}{}", "ok".repeat(usize::from(checked == "ok")), checked)
                    }
                    Err(error) => error.to_string(),
                },
                Err(error) => error.to_string(),
            }
        }),
    }
}

/// A pack with other bytes: `verify` and `export` say so or find the right ones.
pub(super) fn pack() -> Target {
    let Published { origin, layer, .. } = published();
    let name = origin
        .snapshot()
        .into_keys()
        .find(|name| name.starts_with("packs/"))
        .unwrap();
    simple(vec![object("packs/")], move |bytes| {
        let origin = clone_of(origin);
        origin.tamper(|objects| drop(objects.insert(name.clone(), bytes.to_vec())));
        let report = verify::verify(origin.as_ref(), layer, &|_, _| ()).unwrap();
        match report.damage.first() {
            None => "ok".to_owned(),
            Some(damage) => damage.what.clone(),
        }
    })
}

/// An origin of which any object is made up, with names that fit: whoever reads it gets an error, or a layer that is right.
/// The first byte of an input says which object the rest replaces.
pub(super) fn hostile_origin() -> Target {
    let good = published().origin.snapshot();
    let folders = [
        "manifests/",
        "placements/",
        "meta/",
        "chunks/",
        "packs/",
        "tags/",
    ];
    let corpus = (0_u8..)
        .zip(folders)
        .map(|(n, folder)| [vec![n], object(folder)].concat());
    let corpus = corpus
        .filter(|input| input.len() < super::LEN_MAX)
        .collect();
    simple(corpus, move |input| {
        let Some((which, bytes)) = input.split_first() else {
            return "empty".to_owned();
        };
        let folder = folders[usize::from(*which) % folders.len()];
        let origin = MemOrigin::default();
        let mut objects = good.clone();
        let name = objects
            .keys()
            .find(|name| name.starts_with(folder))
            .unwrap()
            .clone();
        objects.insert(name, bytes.to_vec());
        let mut digest = published().layer;
        match folder {
            // A manifest that nobody can tell from a right one by its name; metadata and table under the names it gives.
            "manifests/" => {
                digest = Digest::of(bytes);
                objects.insert(names::manifest(&digest), bytes.to_vec());
                let placement = Placement {
                    layer: digest,
                    ..published().placement.clone()
                };
                objects.insert(names::placement(&digest), placement.to_bytes());
            }
            "meta/" | "chunks/" => {
                let plain = bytes.to_vec();
                let mut manifest = published().manifest.clone();
                let blob = if folder == "meta/" {
                    &mut manifest.meta
                } else {
                    &mut manifest.chunks
                };
                (blob.digest, blob.size) = (Digest::of(&plain), plain.len() as u64);
                digest = manifest.layer();
                let stored = frame::encode(&plain, 1);
                objects.insert(names::meta(&manifest.meta.digest), stored.clone());
                objects
                    .entry(names::chunks(&manifest.chunks.digest))
                    .or_insert(stored);
                objects.insert(names::manifest(&digest), manifest.to_bytes());
                let placement = Placement {
                    layer: digest,
                    ..published().placement.clone()
                };
                objects.insert(names::placement(&digest), placement.to_bytes());
            }
            _ => {}
        }
        origin.tamper(|all| *all = objects);
        read_all(Arc::new(origin), digest)
    })
}

/// Everything that reads a layer.
fn read_all(origin: Arc<MemOrigin>, digest: Digest) -> String {
    let report = verify::verify(origin.as_ref(), &digest, &|_, _| ());
    let options = tar_export::ExportOptions { skip_sockets: true };
    let exported = export::export(
        origin.as_ref(),
        &digest,
        &mut std::io::sink(),
        &options,
        &|_, _| (),
    );
    drop(fsck_origin::fsck(origin.as_ref(), false, &|_, _| ()));
    let to = MemOrigin::default();
    let references = [LayerRef::Layer(digest), LayerRef::Tag(tag_name())];
    let copied = copy::copy(origin, &to, &references, &|_, _| ());
    if copied.is_ok() {
        assert_eq!(faults(&to, "1"), [""; 0], "a copy that succeeded is right");
    }
    match report {
        Ok(report) if report.damage.is_empty() => told(exported),
        Ok(report) => report.damage[0].what.clone(),
        Err(error) => error.to_string(),
    }
}

fn tag_name() -> TagName {
    crate::build::tag("1")
}
