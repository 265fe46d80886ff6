//! Writable pairs: what others left opens, what we write has the same extents and contents, random work equals a model,
//! and after a power failure at any operation everything that was flushed is there.

use std::sync::Arc;

use imgstore::disk::layer::Layer;
use imgstore::disk::map::{Map, Piece};
use imgstore::disk::pair::{Pair, Recovered};
use imgstore::disk::seal::{commit, seal};
use imgstore::disk::stack::Stack;
use imgstore::disk::zfile::{ZFileMedia, ZOptions, compress};
use imgstore::format::overlaybd::header::{Header, Uuid};
use imgstore::format::overlaybd::record::Record;
use imgstore::format::overlaybd::zfile::Algorithm;
use imgstore::media::Media;
use imgstore::media::mem::MemMedia;
use imgstore::media::power_cut::{Power, PowerCutMedia};
use proptest::prelude::*;
use serde_json::Value;

use crate::overlaybd_golden::{
    check_bytes, check_content, check_extents, folder, json, media, numbers, open, sector,
};

fn header(of: &Value) -> Header {
    let uuid = |name: &str| of[name].as_str().and_then(|t| Uuid::parse(t.as_bytes()));
    Header {
        flags: 0,
        index_offset: 0,
        index_records: 0,
        virtual_size: of["virtual_size"].as_u64().unwrap(),
        uuid: uuid("uuid"),
        parent: uuid("parent_uuid"),
        user_tag: of["user_tag"].as_str().unwrap_or("").as_bytes().to_vec(),
    }
}

pub(crate) fn new_pair(header: Header) -> (Pair, Arc<MemMedia>, Arc<MemMedia>) {
    let data = Arc::new(MemMedia::default());
    let index = Arc::new(MemMedia::default());
    let pair = Pair::create(data.clone(), index.clone(), header, "pair").unwrap();
    (pair, data, index)
}

/// Does what the sidecar's steps say, in words like `write 3 pattern sectors at LBA 5 with id 2`.
fn apply_steps(pair: &Pair, of: &Value) -> usize {
    let mut done = 0;
    for step in of["steps"].as_array().unwrap() {
        let words: Vec<&str> = step.as_str().unwrap().split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match *words {
            ["write", _, kind, _, "at", "LBA", _, "with", "id", _] => {
                let (lba, id) = (number(6), number(9));
                let sectors = (lba..lba + number(1)).flat_map(|lba| sector(kind, lba, id));
                pair.write(lba, &sectors.collect::<Vec<_>>()).unwrap();
            }
            ["discard", _, _, "from", "LBA", _] => pair.discard(number(5), number(1)).unwrap(),
            _ => continue,
        }
        done += 1;
    }
    done
}

/// A pair read as the top of a stack, sealed in memory.
fn sealed_copy(data: &dyn Media, index: &dyn Media, name: &str) -> Layer {
    let copy = |media: &dyn Media| {
        let mut bytes = vec![0; usize::try_from(media.size().unwrap()).unwrap()];
        media.read_at(&mut bytes, 0).unwrap();
        Arc::new(MemMedia::new(bytes))
    };
    let data = copy(data);
    let pair = Pair::open(data.clone(), copy(index), name).unwrap();
    seal(&pair).unwrap();
    Layer::open(data, name).unwrap()
}

#[test]
fn pairs_that_others_left_open_with_every_record() {
    for name in [
        "rw.agentenv",
        "rw.containerd",
        "rwtop.agentenv",
        "rwtop.containerd",
    ] {
        let of = json(&format!("{name}.json"));
        let (data, index) = (
            media(&format!("{name}.data")),
            media(&format!("{name}.index")),
        );
        let found = Recovered::read(&*data, &*index, name).unwrap();
        let expected = of["records_in_append_order_lba_sectors_moffset_zeroed_tag"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| numbers(row)[..4].to_vec());
        let row = |r: &Record| vec![r.lba(), r.sectors(), r.place(), u64::from(r.is_zeroed())];
        let records: Vec<_> = found.records.iter().map(row).collect();
        assert_eq!(records, expected.collect::<Vec<_>>(), "{name}");
        assert_eq!(found.dropped_bytes, 0);
        let lowers = of["lowers_bottom_to_top"].as_array().unwrap().iter();
        let mut layers: Vec<_> = lowers.map(|l| open(l.as_str().unwrap()).unwrap()).collect();
        let own = sealed_copy(&*data, &*index, name);
        check_extents(&Stack::new(std::slice::from_ref(&own)).unwrap(), &of);
        layers.push(own);
        check_bytes(&Stack::unrelated(&layers).unwrap(), &of);
    }
}

#[test]
fn damaged_pairs_are_recovered_or_refused() {
    let pair = |name: &str| {
        let data = media(&format!("bad/{name}.data"));
        let index = media(&format!("bad/{name}.index"));
        Recovered::read(&*data, &*index, name).map(|found| (found, data, index))
    };
    let of = json("rw.containerd.json");
    for (name, dropped, more_data) in [
        ("rw-index-torn", 7, 0),
        ("rw-data-ahead", 0, 3),
        ("rw-data-torn", 0, 1),
    ] {
        let (found, data, index) = pair(name).unwrap();
        assert_eq!(
            (found.dropped_bytes, found.records.len()),
            (dropped, 11),
            "{name}"
        );
        assert_eq!(found.data_end, 59 + more_data, "{name}");
        check_content(
            &Stack::new(&[sealed_copy(&*data, &*index, name)]).unwrap(),
            &of,
        );
    }
    let error = pair("rw-index-sealed").unwrap_err().to_string();
    assert!(
        error.contains("flags of the index file's header"),
        "{error}"
    );
}

/// Sealed and committed, in both forms of compression too: contents and extents are those of the other writers' files.
#[test]
fn the_same_steps_give_the_same_extents_and_contents() {
    let mut count = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let ours = [".lsmt.json", ".zfile.json", ".tar.json"];
        let skip = ["merged", "plain", "max", "odd", "header", "sparse", "rwtop"];
        if !ours.iter().any(|e| name.ends_with(e)) || skip.iter().any(|s| name.starts_with(s)) {
            continue;
        }
        let of = json(&name);
        let (pair, data, _) = new_pair(header(&of));
        let steps = apply_steps(&pair, &of);
        assert!(steps > 0 || name.starts_with("empty"), "{name}");
        let committed = Arc::new(MemMedia::default());
        let map = Map::new(pair.records());
        let mut read =
            |record: Record, buffer: &mut [u8]| data.read_at(buffer, record.place() * 512);
        commit(&map, pair.header(), &mut read, &*committed, &name).unwrap();
        let layer = Layer::open(committed.clone(), &name).unwrap();
        assert_eq!(layer.trailer.user_tag, header(&of).user_tag);
        check_content(&Stack::new(&[layer]).unwrap(), &of);

        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            let options = ZOptions {
                algorithm,
                ..ZOptions::default()
            };
            let packed = Arc::new(MemMedia::default());
            compress(&*committed, &*packed, options).unwrap();
            let layer = Layer::open(packed, &name).unwrap();
            assert!(layer.wrapping.zfile.is_some());
            let plain = layer.media.size().unwrap();
            assert_eq!(plain, committed.size().unwrap());
            check_content(&Stack::new(&[layer]).unwrap(), &of);
        }

        seal(&pair).unwrap();
        let layer = Layer::open(data.clone(), &name).unwrap();
        check_content(&Stack::new(&[layer]).unwrap(), &of);
        count += 1;
    }
    assert_eq!(count, 35);
}

#[test]
fn merging_layers_equals_the_others_merge() {
    for writer in ["agentenv", "containerd"] {
        let names = ["base", "mid", "top"].map(|n| format!("{n}.commit.{writer}.lsmt"));
        let layers: Vec<_> = names.iter().map(|n| open(n).unwrap()).collect();
        let stack = Stack::new(&layers).unwrap();
        let of = json(&format!("merged.{writer}.lsmt.json"));
        let out = Arc::new(MemMedia::default());
        let mut read = |record, buffer: &mut [u8]| stack.read_record(record, buffer);
        commit(stack.map(), &header(&of), &mut read, &*out, "merged").unwrap();
        let merged = Layer::open(out, "merged").unwrap();
        let theirs = open(&format!("merged.{writer}.lsmt")).unwrap();
        let extents = |layer: &Layer| Map::new(layer.records.iter().copied());
        let lengths = |map: &Map| map.records().iter().map(|r| r.sectors()).sum::<u64>();
        assert_eq!(lengths(&extents(&merged)), lengths(&extents(&theirs)));
        check_content(&Stack::new(&[merged]).unwrap(), &of);
    }
}

/// Sectors of the model's disk.
pub(crate) const SECTORS: u64 = 96;

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Write(u64, u64),
    Discard(u64, u64),
    Flush,
    Reopen,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let range = (0..SECTORS, 1..24_u64).prop_map(|(lba, n)| (lba, n.min(SECTORS - lba)));
    prop_oneof![
        6 => range.clone().prop_map(|(lba, n)| Step::Write(lba, n)),
        2 => range.prop_map(|(lba, n)| Step::Discard(lba, n)),
        2 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// What every sector shows: `None` where this layer has nothing, 0 for zeros, else the number of the write.
pub(crate) type Model = Vec<Option<u64>>;

pub(crate) fn write_sectors(
    pair: &Pair,
    lba: u64,
    sectors: u64,
    number: u64,
) -> std::io::Result<()> {
    let bytes: Vec<u8> = (lba..lba + sectors)
        .flat_map(|lba| sector("pattern", lba, number))
        .collect();
    pair.write(lba, &bytes)
}

pub(crate) fn set(model: &mut Model, lba: u64, sectors: u64, number: u64) {
    let from = usize::try_from(lba).unwrap();
    model[from..from + usize::try_from(sectors).unwrap()].fill(Some(number));
}

/// What a pair shows, read sector by sector.
pub(crate) fn shown(pair: &Pair) -> Model {
    (0..SECTORS)
        .map(|lba| match *pair.pieces(lba..lba + 1) {
            [Piece::Mapped(record)] if record.is_zeroed() => Some(0),
            [Piece::Mapped(record)] => {
                let mut bytes = vec![0; 512];
                pair.data()
                    .read_at(&mut bytes, record.place() * 512)
                    .unwrap();
                let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
                assert!(
                    bytes == sector("pattern", lba, number),
                    "sector {lba} is torn"
                );
                Some(number)
            }
            _ => None,
        })
        .collect()
}

pub(crate) fn cases() -> ProptestConfig {
    let cases = std::env::var("DSEC_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    ProptestConfig::with_cases(cases.unwrap_or(48))
}

pub(crate) fn small_header() -> Header {
    header(&serde_json::json!({
        "virtual_size": SECTORS * 512, "uuid": "00000001-0000-4000-8000-000000000001",
    }))
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn random_work_equals_the_model(steps in proptest::collection::vec(step(), 1..60)) {
        let (mut pair, data, index) = new_pair(small_header());
        let mut model: Model = vec![None; usize::try_from(SECTORS).unwrap()];
        for (number, step) in (1..).zip(steps) {
            match step {
                Step::Write(lba, n) => {
                    write_sectors(&pair, lba, n, number).unwrap();
                    set(&mut model, lba, n, number);
                }
                Step::Discard(lba, n) => {
                    pair.discard(lba, n).unwrap();
                    set(&mut model, lba, n, 0);
                }
                Step::Flush => pair.flush().unwrap(),
                Step::Reopen => {
                    pair.flush().unwrap();
                    pair = Pair::open(data.clone(), index.clone(), "pair").unwrap();
                }
            }
            prop_assert_eq!(&shown(&pair), &model);
        }
        seal(&pair).unwrap();
        let stack = Stack::new(&[Layer::open(data, "sealed").unwrap()]).unwrap();
        for (lba, expected) in (0..).zip(&model) {
            let mut found = vec![0xEE; 512];
            stack.read_at(&mut found, lba * 512).unwrap();
            prop_assert_eq!(stack.map().find(lba).is_some(), expected.is_some());
            let content = match expected {
                Some(number) if *number > 0 => sector("pattern", lba, *number),
                _ => vec![0; 512],
            };
            prop_assert!(found == content);
        }
    }

    /// Red when the data is not synced before the index is written, when the index is not synced, or when a flush between
    /// reserving room and writing takes the mark away.
    #[test]
    fn what_was_flushed_survives_a_power_failure_at_every_operation(
        steps in proptest::collection::vec(step(), 1..25),
        seed in any::<u64>(),
    ) {
        let mut random = {
            let mut state = seed;
            move || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state >> 33
            }
        };
        let (empty, data, index) = new_pair(small_header());
        drop(empty);
        let (data, index) = (data.snapshot(), index.snapshot());
        for operations in 0.. {
            let power = Power::failing_after(operations);
            let disk = |bytes: &[u8]| Arc::new(PowerCutMedia::new(Arc::clone(&power), bytes.to_vec()));
            let (data, index) = (disk(&data), disk(&index));
            let pair = Pair::open(data.clone(), index.clone(), "pair").unwrap();
            // Every state from the last answered flush on may be what is found.
            let mut model: Model = vec![None; usize::try_from(SECTORS).unwrap()];
            let mut possible = vec![model.clone()];
            for (number, step) in (1..).zip(&steps) {
                let done = match *step {
                    Step::Write(lba, n) => {
                        let done = write_sectors(&pair, lba, n, number);
                        set(&mut model, lba, n, number);
                        done
                    }
                    Step::Discard(lba, n) => {
                        let done = pair.discard(lba, n);
                        set(&mut model, lba, n, 0);
                        done
                    }
                    Step::Flush | Step::Reopen => {
                        let done = pair.flush();
                        if done.is_ok() {
                            possible.clear();
                        }
                        done
                    }
                };
                possible.push(model.clone());
                if done.is_err() {
                    break;
                }
            }
            let survived = |disk: &PowerCutMedia, random: &mut dyn FnMut() -> u64| {
                Arc::new(MemMedia::new(disk.after_failure(random)))
            };
            let (data, index) = (survived(&data, &mut random), survived(&index, &mut random));
            let pair = Pair::open(data.clone(), index.clone(), "pair").unwrap();
            let found = shown(&pair);
            prop_assert!(possible.contains(&found), "after {operations} operations: {found:?} is none of {possible:?}");
            // And the pair goes on from there.
            write_sectors(&pair, 7, 3, 1 << 40).unwrap();
            pair.flush().unwrap();
            drop(pair);
            let pair = Pair::open(data, index, "pair").unwrap();
            let mut expected = found;
            set(&mut expected, 7, 3, 1 << 40);
            prop_assert_eq!(shown(&pair), expected);
            if !power.is_out() {
                break;
            }
        }
    }

    /// Sealing is interrupted at every operation: the pair is still one, or the layer is whole.
    #[test]
    fn a_seal_that_is_cut_off_loses_nothing(
        writes in proptest::collection::vec((0..80_u64, 1..16_u64), 1..12),
        seed in any::<u64>(),
    ) {
        let (pair, data, index) = new_pair(small_header());
        let mut model: Model = vec![None; usize::try_from(SECTORS).unwrap()];
        for (number, (lba, n)) in (1..).zip(writes) {
            write_sectors(&pair, lba, n, number).unwrap();
            set(&mut model, lba, n, number);
        }
        pair.flush().unwrap();
        let (data, index) = (data.snapshot(), index.snapshot());
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for operations in 0.. {
            let power = Power::failing_after(operations);
            let disk = |bytes: &[u8]| Arc::new(PowerCutMedia::new(Arc::clone(&power), bytes.to_vec()));
            let (data, index) = (disk(&data), disk(&index));
            let pair = Pair::open(data.clone(), index.clone(), "pair").unwrap();
            let sealed = seal(&pair);
            let data = Arc::new(MemMedia::new(data.after_failure(&mut random)));
            match Layer::open(data.clone(), "sealed") {
                Ok(layer) => {
                    let stack = Stack::new(&[layer]).unwrap();
                    for (lba, expected) in (0..).zip(&model) {
                        let mut found = vec![0; 512];
                        stack.read_at(&mut found, lba * 512).unwrap();
                        let content = expected.map_or(vec![0; 512], |n| sector("pattern", lba, n));
                        prop_assert!(found == content);
                    }
                }
                Err(error) => {
                    prop_assert!(sealed.is_err(), "{error}");
                    let index = Arc::new(MemMedia::new(index.after_failure(&mut random)));
                    let pair = Pair::open(data, index, "pair").unwrap();
                    prop_assert_eq!(shown(&pair), model.clone());
                }
            }
            if sealed.is_ok() {
                break;
            }
        }
    }
}

/// Red when recovery skips a torn record in place of cutting there, or appends without having cut: what lies behind it was
/// never flushed, and a later record would bring it back.
#[test]
fn the_index_ends_at_its_first_torn_record() {
    let (pair, data, index) = new_pair(small_header());
    for (lba, number) in [(0, 1), (10, 2), (20, 3)] {
        write_sectors(&pair, lba, 2, number).unwrap();
    }
    pair.flush().unwrap();
    drop(pair);
    index.write_at(&[0; 16], 4096 + 16).unwrap();
    let pair = Pair::open(data.clone(), index.clone(), "pair").unwrap();
    let mut expected: Model = vec![None; usize::try_from(SECTORS).unwrap()];
    set(&mut expected, 0, 2, 1);
    assert_eq!(shown(&pair), expected);
    write_sectors(&pair, 30, 2, 4).unwrap();
    pair.flush().unwrap();
    drop(pair);
    set(&mut expected, 30, 2, 4);
    let pair = Pair::open(data, index.clone(), "pair").unwrap();
    assert_eq!(shown(&pair), expected);
    assert_eq!(index.size().unwrap(), 4096 + 32);
}

#[test]
fn a_flipped_bit_anywhere_in_a_zfile_is_an_error_or_harmless() {
    let (pair, data, _) = new_pair(small_header());
    write_sectors(&pair, 3, 40, 1).unwrap();
    seal(&pair).unwrap();
    let packed = MemMedia::default();
    let options = ZOptions {
        block_size: 4096,
        ..ZOptions::default()
    };
    compress(&*data, &packed, options).unwrap();
    let (good, plain) = (packed.snapshot(), data.snapshot());
    let mut refused = 0;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        let read = ZFileMedia::open(Arc::new(MemMedia::new(bad)), "bad").map(|media| {
            let mut all = vec![0; plain.len()];
            media.read_at(&mut all, 0).map(|()| all)
        });
        match read {
            Ok(Ok(all)) => assert!(all == plain, "byte {at}"),
            _ => refused += 1,
        }
    }
    // Only the trailer is not looked at, for the header was overwritten.
    assert_eq!(refused, good.len() - 512);
}
