//! What `verify` says of every kind of damage: the object, what was expected, and what was found.

use imgstore::format::names;
use imgstore::store::{layer, verify};

use crate::build::tag;
use crate::two_origins::{Pair, clone_of, faults, pair, tagged};

/// One object damaged one way, and the words that must be said of it.
struct Case {
    what: &'static str,
    object: String,
    damage: fn(&mut Vec<u8>),
    says: Vec<String>,
}

fn case(what: &'static str, object: &str, damage: fn(&mut Vec<u8>), says: &[&str]) -> Case {
    Case {
        what,
        object: object.to_owned(),
        damage,
        says: says.iter().map(|s| (*s).to_owned()).collect(),
    }
}

fn cases(loaded: &layer::Layer, second: &imgstore::ids::Digest) -> Vec<Case> {
    let (manifest, placement) = (names::manifest(second), names::placement(second));
    let meta = names::meta(&loaded.manifest.meta.digest);
    let chunks = names::chunks(&loaded.manifest.chunks.digest);
    let flip: fn(&mut Vec<u8>) = |b| {
        let at = b.len() / 2;
        b[at] ^= 1;
    };
    vec![
        case(
            "manifest changed",
            &manifest,
            flip,
            &["manifest digest", &second.to_hex()],
        ),
        case(
            "placement cut",
            &placement,
            |b| b.truncate(50),
            &["placement", "JSON"],
        ),
        case(
            "placement of nobody",
            &placement,
            |b| *b = b.replace_hex(),
            &["placement field `layer`", &second.to_hex()],
        ),
        case(
            "metadata cut",
            &meta,
            |b| b.truncate(20),
            &["zstd frame", "plain bytes"],
        ),
        case(
            "metadata of another",
            &meta,
            |b| *b = imgstore::format::frame::encode(&[0; 8192], 3),
            &["plain bytes"],
        ),
        case("chunk table changed", &chunks, flip, &["expected"]),
        case(
            "tag of another",
            &names::tag(&tag("2")),
            |b| *b = text(b).replace("t:2", "t:1").into_bytes(),
            &["tag field `tag`", "workspace/t:2", "workspace/t:1"],
        ),
    ]
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn pack_cases(loaded: &layer::Layer) -> Vec<Case> {
    let (pack, range) = loaded.placement.find(0).unwrap();
    let pack_object = names::pack(&pack.digest);
    let segment = loaded.manifest.segments[0].digest().to_hex();
    let size = pack.size.to_string();
    assert!(range.start == 0 && range.len > 100_000);
    vec![
        case(
            "pack cut",
            &pack_object,
            |b| b.truncate(1000),
            &[&size, "one of 1000 bytes", "segment 0 at offset 0"],
        ),
        case(
            "pack longer",
            &pack_object,
            |b| b.push(0),
            &[&size, "found one of"],
        ),
        case(
            "segment changed",
            &pack_object,
            |b| b[1000] ^= 1,
            &[
                "segment 0 at offset 0",
                "digest of its plain bytes",
                &segment,
            ],
        ),
        case(
            "segment zeroed",
            &pack_object,
            |b| b[..4096].fill(0),
            &["segment 0 at offset 0", "zstd frame"],
        ),
    ]
}

/// Red when any check of `verify` is left out: each line here has its own.
#[test]
fn each_kind_of_damage_is_told() {
    let Pair {
        origin: good,
        second,
        ..
    } = pair();
    let loaded = layer::open(good.as_ref(), &second).unwrap();
    let cases = cases(&loaded, &second).into_iter();
    for case in cases.chain(pack_cases(&loaded)) {
        let origin = clone_of(&good);
        origin.tamper(|objects| (case.damage)(objects.get_mut(&case.object).unwrap()));
        let said = faults(&origin, "2").join("\n");
        for part in [&case.object, "expected", "found"]
            .into_iter()
            .chain(case.says.iter().map(String::as_str))
        {
            assert!(
                said.contains(part),
                "{}: `{part}` is missing in:\n{said}",
                case.what
            );
        }
    }
}

/// A missing object is one damage, and of two in each other's place both are.
#[test]
fn missing_and_swapped_objects_are_told() {
    let Pair {
        origin: good,
        second,
        first,
    } = pair();
    let loaded = layer::open(good.as_ref(), &second).unwrap();
    let pack_object = names::pack(&loaded.placement.packs[0].digest);
    let (manifest, placement) = (names::manifest(&second), names::placement(&second));
    let meta = names::meta(&loaded.manifest.meta.digest);
    let chunks = names::chunks(&loaded.manifest.chunks.digest);
    for object in [&manifest, &placement, &meta, &chunks, &pack_object] {
        let origin = clone_of(&good);
        origin.tamper(|objects| drop(objects.remove(object)));
        let said = faults(&origin, "2");
        assert_eq!(said.len(), 1, "one missing object is one damage: {said:?}");
        assert!(
            said[0].contains(object.as_str()) && said[0].contains("found none"),
            "{said:?}"
        );
    }
    // Two objects in each other's place.
    for (a, b) in [
        (&manifest, names::manifest(&first)),
        (&placement, names::placement(&first)),
    ] {
        let origin = clone_of(&good);
        origin.tamper(|objects| {
            let (one, two) = (objects[a].clone(), objects[&b].clone());
            objects.insert(a.clone(), two);
            objects.insert(b.clone(), one);
        });
        for version in ["1", "2"] {
            let said = faults(&origin, version).join("\n");
            assert!(
                said.contains("expected") && said.contains(&second.to_hex()),
                "{said}"
            );
        }
    }
}

trait ReplaceHex {
    fn replace_hex(&self) -> Vec<u8>;
}

impl ReplaceHex for Vec<u8> {
    /// The same placement with the name of no layer.
    fn replace_hex(&self) -> Vec<u8> {
        let text = String::from_utf8(self.clone()).unwrap();
        let at = text.find("\"layer\":\"").unwrap() + 9;
        format!("{}{}{}", &text[..at], "0".repeat(64), &text[at + 64..]).into_bytes()
    }
}

/// What is not there at all is no damage but an error that says how to look.
#[test]
fn unknown_layers_are_no_damage() {
    let Pair { origin, .. } = pair();
    for reference in [
        "workspace/t:9".parse().unwrap(),
        imgstore::ids::LayerRef::Layer(imgstore::ids::Digest::of(b"x")),
    ] {
        let error = verify::verify_ref(origin.as_ref(), &reference, &|_, _| ()).unwrap_err();
        assert!(error.to_string().contains("dsec layers"), "{error}");
    }
    assert_eq!(
        verify::verify_ref(origin.as_ref(), &tagged("1"), &|_, _| ())
            .unwrap()
            .segments_right,
        5
    );
}
