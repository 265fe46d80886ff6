//! OverlayBD files that other implementations wrote read right, record by record and byte by byte; damaged ones are refused.
//!
//! Red with a reader that takes the tag for a layer, skips a digest, or cuts the place of a zeroed record.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use imgstore::disk::DiskError;
use imgstore::disk::layer::{Layer, unwrap};
use imgstore::disk::map::Piece;
use imgstore::disk::stack::Stack;
use imgstore::format::overlaybd::record::Record;
use imgstore::media::Media;
use imgstore::media::file::FileMedia;
use serde_json::Value;

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/overlaybd")
}

pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(name)).unwrap()).unwrap()
}

pub(crate) fn media(name: &str) -> Arc<dyn Media> {
    Arc::new(FileMedia::open(&folder().join(name)).unwrap())
}

pub(crate) fn open(name: &str) -> Result<Layer, DiskError> {
    Layer::open(media(name), name)
}

pub(crate) fn numbers(row: &Value) -> Vec<u64> {
    let row = row.as_array().unwrap();
    row.iter().filter_map(Value::as_u64).collect()
}

/// 512 bytes of one sector, as the README of the files describes them.
pub(crate) fn sector(kind: &str, lba: u64, id: u64) -> Vec<u8> {
    let seed = [lba.to_le_bytes(), id.to_le_bytes()].concat();
    match kind {
        "pattern" => seed.repeat(32),
        "noise" => {
            let mut out = vec![0; 512];
            let mut reader = blake3::Hasher::new();
            reader.update(&seed).finalize_xof().fill(&mut out);
            out
        }
        _ => vec![0; 512],
    }
}

pub(crate) fn check_content(stack: &Stack, of: &Value) {
    check_bytes(stack, of);
    check_extents(stack, of);
}

pub(crate) fn check_bytes(stack: &Stack, of: &Value) {
    assert_eq!(Some(stack.len()), of["virtual_size"].as_u64());
    for part in of["content"].as_array().unwrap() {
        let (mut at, bytes) = (
            part["offset"].as_u64().unwrap(),
            part["bytes"].as_u64().unwrap(),
        );
        let (end, mut hasher) = (at + bytes, blake3::Hasher::new());
        let mut buffer = vec![0xEE; 1 << 20];
        while at < end {
            let step = usize::try_from((end - at).min(1 << 20)).unwrap();
            stack.read_at(&mut buffer[..step], at).unwrap();
            hasher.update(&buffer[..step]);
            at += u64::try_from(step).unwrap();
        }
        let found = hasher.finalize().to_hex().to_string();
        assert_eq!(part["blake3"].as_str(), Some(&*found), "{part}");
    }
}

pub(crate) fn check_extents(stack: &Stack, of: &Value) {
    let mut mapped = 0;
    for extent in of["expected_extents_lba_sectors_kind_id"]
        .as_array()
        .unwrap()
    {
        let mut row = numbers(extent);
        let kind = extent[2].as_str().unwrap();
        // What lies past the disk's end is not served.
        row[1] = (row[0] + row[1])
            .min(stack.len().div_ceil(512))
            .saturating_sub(row[0]);
        if row[1] == 0 {
            continue;
        }
        mapped += row[1];
        for piece in stack.map().pieces(row[0]..row[0] + row[1]) {
            let Piece::Mapped(record) = piece else {
                panic!("{extent} has a hole: {piece:?}");
            };
            assert_eq!(record.is_zeroed(), kind == "zero", "{extent}");
        }
        for lba in [row[0], row[0] + row[1] - 1] {
            let mut found = vec![0xEE; 512];
            stack.read_at(&mut found, lba * 512).unwrap();
            let expected = match kind.strip_prefix("same bytes as LBA ") {
                Some(other) => sector("pattern", other.parse().unwrap(), 12),
                None => sector(kind, lba, row.get(2).copied().unwrap_or(0)),
            };
            assert!(found == expected, "{extent} at {lba}");
        }
    }
    let all: u64 = stack.map().records().iter().map(|r| r.sectors()).sum();
    assert_eq!(all, mapped, "nothing else is mapped");
}

#[test]
fn layers_that_others_wrote_read_right() {
    let mut count = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_layer = [".lsmt", ".zfile", ".tar"]
            .iter()
            .any(|e| name.ends_with(e));
        if !is_layer || name.starts_with("plain.") {
            continue;
        }
        let of = json(&format!("{name}.json"));
        let layer = open(&name).unwrap();
        let expected: Vec<_> = of["records_lba_sectors_moffset_zeroed_tag"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| numbers(row)[..4].to_vec())
            .collect();
        let row = |r: &Record| vec![r.lba(), r.sectors(), r.place(), u64::from(r.is_zeroed())];
        let found: Vec<_> = layer.records.iter().map(row).collect();
        assert_eq!(found, expected, "{name}");
        let uuid = layer.trailer.uuid.map(|u| u.to_string().to_lowercase());
        let expected = of["uuid"].as_str().map(str::to_lowercase);
        assert_eq!(uuid, expected, "{name}");
        assert_eq!(layer.wrapping.tar, name.ends_with(".tar"));
        if let Some(zfile) = of.get("zfile") {
            let media = layer.wrapping.zfile.as_ref().unwrap();
            let lengths: Vec<_> = media
                .stored_lengths()
                .iter()
                .map(|n| u64::from(*n))
                .collect();
            if let Some(expected) = zfile.get("block_lengths") {
                assert_eq!(lengths, numbers(expected), "{name}");
            }
        }
        check_content(&Stack::new(&[layer]).unwrap(), &of);
        count += 1;
    }
    assert_eq!(count, 42, "every golden layer was read");
}

#[test]
fn a_zfile_of_plain_bytes_reads_right() {
    let name = "plain.lz4-4096.containerd.zfile";
    let (plain, wrapping) = unwrap(media(name), name).unwrap();
    assert!(wrapping.zfile.is_some());
    let mut bytes = vec![0; 10_000];
    plain.read_at(&mut bytes, 0).unwrap();
    let found = blake3::hash(&bytes).to_hex().to_string();
    let of = json("plain.lz4-4096.containerd.zfile.json");
    assert_eq!(of["content"][0]["blake3"].as_str(), Some(&*found));
    let mut part = vec![0; 5000];
    plain.read_at(&mut part, 4000).unwrap();
    assert_eq!(part, bytes[4000..9000]);
    plain.read_at(&mut part, 5001).unwrap_err();
}

#[test]
fn stacks_read_right_whoever_wrote_their_layers() {
    let stacks = json("stacks.json");
    let stacks = stacks["stacks"].as_array().unwrap();
    assert_eq!(stacks.len(), 5);
    for of in stacks {
        let names = of["layers_bottom_to_top"].as_array().unwrap();
        let layers: Vec<_> = names
            .iter()
            .map(|name| open(name.as_str().unwrap()).unwrap())
            .collect();
        let stack = Stack::new(&layers);
        if of["name"] == "top under base (order matters)" {
            assert!(stack.is_ok(), "the base names no parent");
        }
        check_content(&stack.unwrap(), of);
    }
    let wrong = [
        open("base.commit.containerd.lsmt").unwrap(),
        open("top.commit.containerd.lsmt").unwrap(),
    ];
    let error = Stack::new(&wrong).unwrap_err();
    assert!(matches!(error, DiskError::WrongParent { .. }), "{error}");
    Stack::unrelated(&wrong).unwrap();
}

#[test]
fn damaged_layers_are_refused_by_name() {
    let expected = json("bad/expected.json");
    let mut count = 0;
    for bad in expected["files"].as_array().unwrap() {
        let files = bad["files"].as_array().unwrap();
        let [file] = &**files else { continue };
        let name = format!("bad/{}", file.as_str().unwrap());
        let may_read = bad["advice"].as_str().unwrap().starts_with("may accept");
        let read = open(&name).map_err(|e| e.to_string()).and_then(|layer| {
            let stack = Stack::new(&[layer]).map_err(|e| e.to_string())?;
            let mut all = vec![0; usize::try_from(stack.len()).unwrap()];
            let read = stack.read_at(&mut all, 0).map(|()| all);
            read.map_err(|e| e.to_string())
        });
        match read {
            Ok(_) => assert!(may_read, "{bad}"),
            Err(error) => {
                assert!(!may_read, "{name}: {error}");
                assert!(error.contains(&name), "{error}");
                assert!(
                    error.contains("expected") && error.contains("found"),
                    "{error}"
                );
            }
        }
        count += 1;
    }
    assert_eq!(count, 21);
}
