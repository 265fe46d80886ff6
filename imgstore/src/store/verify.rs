//! Reading and checking all of a layer on its origin.
//!
//! Damage does not stop the check: everything that can still be read is read, and each damaged part is named once.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::layer::{self, Layer, LayerError};
use super::reader::LayerReader;
use crate::format::placement::Pack;
use crate::format::{FormatError, chunk_table, erofs, frame, names};
use crate::ids::{Digest, to_u64, to_usize};
use crate::origin::{ByteRange, Origin};

/// Most stored bytes fetched at once.
const RANGE_BYTES_MAX: u64 = 4 << 20;
/// Worker threads: enough to hide an origin's latency.
const THREADS: usize = 4;

/// One damaged or missing part.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Damage {
    /// The object on the origin.
    pub object: String,
    /// Which part of it, and how it differs.
    pub what: String,
}

/// What was checked.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct VerifyReport {
    /// Segments whose bytes were read and are right.
    pub segments_right: u64,
    /// Plain bytes of those segments.
    pub bytes_right: u64,
    /// Everything that is not right, in the layer's order.
    pub damage: Vec<Damage>,
}

/// Segments that lie one behind the other in a pack.
#[derive(Debug)]
struct Run {
    first: usize,
    count: usize,
    pack: Pack,
    range: ByteRange,
}

fn runs(layer: &Layer) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    for index in 0..layer.manifest.segments.len() {
        let Some((pack, range)) = layer.placement.find(index) else {
            continue;
        };
        match out.last_mut() {
            Some(run)
                if run.pack.digest == pack.digest
                    && run.first + run.count == index
                    && run.range.start + run.range.len == range.start
                    && run.range.len + range.len <= RANGE_BYTES_MAX =>
            {
                run.count += 1;
                run.range.len += range.len;
            }
            _ => out.push(Run {
                first: index,
                count: 1,
                pack: *pack,
                range,
            }),
        }
    }
    out
}

struct Findings {
    right: AtomicU64,
    bytes: AtomicU64,
    damage: Mutex<Vec<(usize, Damage)>>,
}

fn check_frame(layer: &Layer, index: usize, stored: &[u8]) -> Result<u64, String> {
    let segment = layer
        .manifest
        .segments
        .get(index)
        .ok_or("no such segment")?;
    let plain = frame::decode(stored, segment.len()).map_err(|e| e.to_string())?;
    let found = Digest::of(&plain);
    if found == segment.digest() {
        Ok(segment.len())
    } else {
        Err(format!(
            "digest of its plain bytes: expected {}, found {found}",
            segment.digest()
        ))
    }
}

impl Findings {
    fn take(&self, layer: &Layer, index: usize, checked: Result<u64, String>) {
        let error = match checked {
            Ok(len) => {
                self.right.fetch_add(1, Ordering::Relaxed);
                self.bytes.fetch_add(len, Ordering::Relaxed);
                return;
            }
            Err(error) => error,
        };
        let (object, offset) = layer.placement.find(index).map_or_else(
            || (names::placement(&layer.digest), 0),
            |(pack, range)| (names::pack(&pack.digest), range.start),
        );
        let damage = Damage {
            object,
            what: format!("segment {index} at offset {offset}: {error}"),
        };
        self.damage
            .lock()
            .expect("no check panics while it holds the lock")
            .push((index, damage));
    }

    fn check_run(&self, origin: &dyn Origin, layer: &Layer, run: &Run) {
        let bytes = origin.fetch_of(&names::pack(&run.pack.digest), run.pack.size, run.range);
        for index in run.first..run.first + run.count {
            let Some((pack, range)) = layer.placement.find(index) else {
                continue;
            };
            let checked = match &bytes {
                Ok(bytes) => {
                    let from = to_usize(range.start - run.range.start);
                    let stored = bytes
                        .get(from..from + to_usize(range.len))
                        .unwrap_or_default();
                    check_frame(layer, index, stored)
                }
                // The range as a whole failed: find out which segments can be had.
                Err(_) => origin
                    .fetch_of(&names::pack(&pack.digest), pack.size, range)
                    .map_err(|e| e.to_string())
                    .and_then(|stored| check_frame(layer, index, &stored)),
            };
            self.take(layer, index, checked);
        }
    }
}

fn check_meta(origin: &dyn Origin, layer: &Layer) -> Result<(), (String, String)> {
    let object = names::meta(&layer.manifest.meta.digest);
    let here = |e: String| (object.clone(), e);
    let meta = layer::read_meta(origin, &layer.manifest).map_err(|e| here(e.to_string()))?;
    erofs::check::check(&meta, &layer.manifest).map_err(|e| here(e.to_string()))?;
    let no_data = |_: usize| Err("not read here".to_owned());
    let reader =
        LayerReader::open(&meta, &layer.manifest, &no_data).map_err(|e| here(e.to_string()))?;
    reader.tree().map_err(|e| here(e.to_string()))?;
    let blob = layer.manifest.chunks;
    let object = names::chunks(&blob.digest);
    let table = layer::read_frame(origin, &object, blob.digest, blob.size)
        .map_err(|e| (object.clone(), e.to_string()))?;
    chunk_table::parse(&table).map_err(|e: FormatError| (object.clone(), e.to_string()))?;
    Ok(())
}

/// Reads and checks everything of `layer`. `progress` is called with plain bytes done and in all.
///
/// # Errors
/// Only when the layer is not there at all or its manifest or placement cannot be read; other damage is in the report.
pub fn verify(
    origin: &dyn Origin,
    layer: &Digest,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<VerifyReport, LayerError> {
    let layer = layer::open(origin, layer)?;
    let mut report = VerifyReport::default();
    if let Err((object, what)) = check_meta(origin, &layer) {
        report.damage.push(Damage { object, what });
    }
    let runs = runs(&layer);
    let total = layer.manifest.segment_bytes();
    let findings = Findings {
        right: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        damage: Mutex::new(Vec::new()),
    };
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            findings.check_run(origin, &layer, run);
            progress(findings.bytes.load(Ordering::Relaxed), total);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS {
            scope.spawn(work);
        }
        work();
    });
    report.segments_right = findings.right.into_inner();
    report.bytes_right = findings.bytes.into_inner();
    let mut damage = findings
        .damage
        .into_inner()
        .expect("all threads have ended");
    damage.sort_by_key(|(index, _)| *index);
    report.damage.extend(damage.into_iter().map(|(_, d)| d));
    let checked = report.segments_right + to_u64(report.damage.len());
    debug_assert!(checked >= to_u64(layer.manifest.segments.len()));
    Ok(report)
}
