//! Parsers of disks: OverlayBD layers in any wrapping, compressed files behind right digests, writable pairs, and the two JSON
//! files.

use std::sync::Arc;

use imgstore::disk::layer::Layer;
use imgstore::disk::pair::Recovered;
use imgstore::disk::published::PublishedDisk;
use imgstore::disk::stack::Stack;
use imgstore::disk::state::read_state;
use imgstore::disk::zfile::ZFileMedia;
use imgstore::format::overlaybd::crc::{SEED_HEADER, crc};
use imgstore::media::Media;
use imgstore::media::mem::MemMedia;

use super::targets::{simple, told};
use super::{LEN_MAX, Target};
use crate::overlaybd_golden::folder;

/// Golden files of these endings that are short enough.
fn golden(ends: &[&str]) -> Vec<Vec<u8>> {
    let paths = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let wanted = paths.filter(|path| {
        let name = path.display().to_string();
        path.is_file() && ends.iter().any(|end| name.ends_with(end))
    });
    let files = wanted.map(|path| std::fs::read(path).unwrap());
    files.filter(|bytes| bytes.len() < LEN_MAX).collect()
}

/// Reads through a layer's map, where it has data and at its end.
fn read_through(layer: Layer) -> String {
    let stack = match Stack::new(&[layer]) {
        Ok(stack) => stack,
        Err(error) => return error.to_string(),
    };
    let mut buffer = vec![0; 8192];
    for record in stack.map().records().iter().take(64) {
        let offset = (record.lba() * 512).min(stack.len().saturating_sub(8192));
        let len = usize::try_from((stack.len() - offset).min(8192)).unwrap();
        if let Err(error) = stack.read_at(&mut buffer[..len], offset) {
            return error.to_string();
        }
    }
    "ok".to_owned()
}

/// A sealed layer: tar, ZFile, header, trailer, index.
pub(super) fn overlaybd() -> Target {
    let corpus = golden(&[".lsmt", ".zfile", ".tar"]);
    simple(corpus, |bytes| {
        let media = MemMedia::new(bytes.to_vec());
        match Layer::open(Arc::new(media), "input") {
            Ok(layer) => read_through(layer),
            Err(error) => error.to_string(),
        }
    })
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(field) = bytes.get_mut(at..at + 4) {
        field.copy_from_slice(&value.to_le_bytes());
    }
}

/// Makes both digests of a ZFile's header and trailer right.
fn fix_zfile(bytes: &mut [u8]) {
    let word = |bytes: &[u8], at: usize| {
        let field = bytes.get(at..at + 8)?;
        usize::try_from(u64::from_le_bytes(field.try_into().ok()?)).ok()
    };
    for start in [0, bytes.len().saturating_sub(512)] {
        let header = bytes.get(start..).unwrap_or_default();
        if header.len() < 512 || !header.starts_with(b"ZFile") {
            continue;
        }
        let table = word(header, 40)
            .zip(word(header, 48))
            .and_then(|(at, count)| Some(at..at.checked_add(count.checked_mul(4)?)?))
            .and_then(|range| bytes.get(range))
            .map(|table| crc(SEED_HEADER, table));
        if let Some(table) = table {
            put(bytes, start + 64, table);
        }
        put(bytes, start + 28, 0);
        let digest = crc(SEED_HEADER, &bytes[start..start + 512]);
        put(bytes, start + 28, digest);
    }
}

/// A compressed file: header, trailer, jump table, blocks.
pub(super) fn overlaybd_zfile() -> Target {
    Target {
        corpus: golden(&[".zfile"]),
        fix: |bytes| fix_zfile(bytes),
        run: Box::new(|bytes| {
            let media = Arc::new(MemMedia::new(bytes.to_vec()));
            let zfile = match ZFileMedia::open(media, "input") {
                Ok(zfile) => zfile,
                Err(error) => return error.to_string(),
            };
            let len = zfile.size().unwrap();
            let mut buffer = vec![0; usize::try_from(len.min(256 << 10)).unwrap()];
            told(zfile.read_at(&mut buffer, 0))
        }),
    }
}

/// A writable pair in one input: two bytes with the sectors of the data file, the data file, the index file.
pub(super) fn overlaybd_pair() -> Target {
    let pair = |name: &str| {
        let read = |end: &str| std::fs::read(folder().join(format!("{name}.{end}"))).unwrap();
        let (data, index) = (read("data"), read("index"));
        let sectors = u16::try_from(data.len() / 512).unwrap();
        [&sectors.to_le_bytes()[..], &data, &index].concat()
    };
    let corpus = ["rw.containerd", "rw.agentenv", "rwtop.containerd"]
        .map(pair)
        .to_vec();
    simple(corpus, |bytes| {
        let Some((sectors, rest)) = bytes.split_first_chunk::<2>() else {
            return "too short".to_owned();
        };
        let cut = usize::from(u16::from_le_bytes(*sectors)) * 512;
        let (data, index) = rest.split_at(cut.min(rest.len()));
        let data = Arc::new(MemMedia::new(data.to_vec()));
        let found = Recovered::read(&*data, &MemMedia::new(index.to_vec()), "input");
        match found {
            Ok(found) => read_through(Layer::of_pair(data, &found, "input")),
            Err(error) => error.to_string(),
        }
    })
}

/// The state of a disk's folder.
pub(super) fn disk_state() -> Target {
    let text = r#"{"format":1,"virtual_size":1048576,"layers":[{"lsmt":"w0.data"},{"raw":"/a"},{"pair":"w3"},
        {"published":{"layer":"0000000000000000000000000000000000000000000000000000000000000000","form":"image"}}],"top":"w1","next":2}"#;
    let scratch = tempfile::tempdir().unwrap();
    simple(vec![text.as_bytes().to_vec()], move |bytes| {
        std::fs::write(scratch.path().join("disk.json"), bytes).unwrap();
        told(read_state(scratch.path()))
    })
}

/// What a published disk says of what lies below it.
pub(super) fn published_disk() -> Target {
    let text = r#"{"format":1,"virtual_size":1048576,"parents":[
        {"layer":"0000000000000000000000000000000000000000000000000000000000000000","form":"image"}]}"#;
    simple(vec![text.as_bytes().to_vec()], |bytes| {
        told(PublishedDisk::parse(bytes, "input"))
    })
}
