//! A trace: which blocks of which layers were touched, in the order in which they were touched first.
//!
//! ```json
//! {"format":1,"layers":["<layer>",…],"runs":[[0,118,32],[1,7,4],…]}
//! ```
//! A run is `[index into layers, first block, blocks]`; block 0 is the first 4 KiB block of the layer's first segment. There
//! is one text for one trace: layers are in the order of their first run, no block comes twice, and a run that goes on
//! where the last one ended is part of it. A reader refuses every other text.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::flat::{FlatLayout, Piece};
use super::manifest::{FORMAT, Manifest};
use crate::ids::{BLOCK_SIZE, Digest, to_u64};

/// Longest trace in bytes.
pub const TRACE_BYTES_MAX: u64 = 8 << 20;
/// Most layers of a trace: those of one composition (the kernel's limit for an overlay).
pub const LAYERS_MAX: usize = 500;
/// Most runs of a trace.
pub const RUNS_MAX: usize = 1 << 18;
/// The label of a tag that names its layer's published trace.
pub const TRACE_LABEL: &str = "dsec.trace";

/// `[index into the layers, first block, blocks]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run(pub u32, pub u32, pub u32);

/// Blocks of one layer's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Blocks {
    /// The first one.
    pub first: u32,
    /// How many; at least one.
    pub count: u32,
}

impl Blocks {
    fn end(self) -> u64 {
        u64::from(self.first) + u64::from(self.count)
    }
}

/// See the head of this file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// [`FORMAT`].
    pub format: u32,
    /// The layers that were read.
    pub layers: Vec<Digest>,
    /// What was read of them.
    pub runs: Vec<Run>,
}

/// Blocks that were seen, as ranges that do not touch: first block to the block behind the last.
#[derive(Debug, Default)]
struct Seen(BTreeMap<u64, u64>);

impl Seen {
    /// Adds `[start, end)`; the parts of it that were not there.
    fn add(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut fresh = Vec::new();
        let (mut at, mut from, mut to) = (start, start, end);
        // The range that holds or touches `start`, and all that begin before or at `end`.
        let before = self.0.range(..start).next_back();
        let first = before.filter(|(_, e)| **e >= start).map_or(start, |b| *b.0);
        let over: Vec<(u64, u64)> = self.0.range(first..=end).map(|(s, e)| (*s, *e)).collect();
        for (s, e) in over {
            if at < s.min(end) {
                fresh.push((at, s.min(end)));
            }
            at = at.max(e);
            (from, to) = (from.min(s), to.max(e));
            self.0.remove(&s);
        }
        if at < end {
            fresh.push((at, end));
        }
        self.0.insert(from, to);
        fresh
    }
}

impl Trace {
    /// A trace of touches in their order; blocks that came before are left out. At most [`LAYERS_MAX`] layers and
    /// [`RUNS_MAX`] runs are kept: the first ones. Touches without blocks, or beyond block 2^32, count for nothing.
    pub fn new(touches: impl IntoIterator<Item = (Digest, Blocks)>) -> Self {
        let mut layers: Vec<Digest> = Vec::new();
        let mut index: HashMap<Digest, u32> = HashMap::new();
        let mut seen: Vec<Seen> = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        for (layer, blocks) in touches {
            if blocks.count == 0 || blocks.end() > u64::from(u32::MAX) {
                continue;
            }
            let known = index.get(&layer).copied();
            if known.is_none() && layers.len() == LAYERS_MAX {
                continue;
            }
            let next = u32::try_from(layers.len()).unwrap_or(u32::MAX);
            let at = *index.entry(layer).or_insert(next);
            if known.is_none() {
                layers.push(layer);
                seen.push(Seen::default());
            }
            let seen = seen.get_mut(usize::try_from(at).unwrap_or(usize::MAX));
            let fresh = seen.map(|s| s.add(u64::from(blocks.first), blocks.end()));
            for (start, end) in fresh.into_iter().flatten() {
                let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX); // never: checked above
                let (first, count) = (small(start), small(end - start));
                let room = runs.len() < RUNS_MAX;
                match runs.last_mut() {
                    Some(Run(l, f, c)) if *l == at && *f + *c == first => *c += count,
                    _ if room => runs.push(Run(at, first, count)),
                    _ => {}
                }
            }
        }
        // The last layers may have lost all their runs to the bound.
        let used = runs.iter().map(|run| run.0 + 1).max().unwrap_or(0);
        layers.truncate(usize::try_from(used).unwrap_or(usize::MAX));
        Self {
            format: FORMAT,
            layers,
            runs,
        }
    }

    /// One trace of several: what the first one touched comes first.
    pub fn merge<'a>(traces: impl IntoIterator<Item = &'a Self>) -> Self {
        Self::new(traces.into_iter().flat_map(Self::touches))
    }

    /// What was touched, in order.
    pub fn touches(&self) -> impl Iterator<Item = (Digest, Blocks)> + '_ {
        self.runs.iter().filter_map(|Run(layer, first, count)| {
            let layer = self.layers.get(usize::try_from(*layer).ok()?)?;
            let blocks = Blocks {
                first: *first,
                count: *count,
            };
            Some((*layer, blocks))
        })
    }

    /// What was touched of one layer, in order.
    pub fn of_layer(&self, layer: &Digest) -> Vec<Blocks> {
        let touches = self.touches();
        touches
            .filter(|(l, _)| l == layer)
            .map(|(_, b)| b)
            .collect()
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        self.runs
            .iter()
            .map(|run| u64::from(run.2) * BLOCK_SIZE)
            .sum()
    }

    /// The canonical bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a trace has only strings and integers")
    }

    /// The digest of the canonical bytes: the name under which a trace is published.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Parses a trace.
    ///
    /// # Errors
    /// Names the field that is wrong. A text that is not the canonical one of its trace is refused.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        if to_u64(bytes.len()) > TRACE_BYTES_MAX {
            let expected = format!("at most {TRACE_BYTES_MAX} bytes");
            return Err(FormatError::new("trace", expected, bytes.len()));
        }
        let trace: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("trace", "JSON of format version 1", e))?;
        if trace.format != FORMAT {
            let expected = "1 (use a newer dsec)";
            return Err(FormatError::new(
                "trace field `format`",
                expected,
                trace.format,
            ));
        }
        if let Some(run) = trace.runs.iter().find(|run| {
            usize::try_from(run.0).is_ok_and(|layer| layer >= trace.layers.len())
                || run.2 == 0
                || u64::from(run.1) + u64::from(run.2) > u64::from(u32::MAX)
        }) {
            let expected = "a listed layer and at least one block, none beyond 2^32";
            return Err(FormatError::new(
                "run of a trace",
                expected,
                format!("{run:?}"),
            ));
        }
        if Self::new(trace.touches()) != trace || trace.to_bytes() != bytes {
            let expected = "each block once, runs as long as possible, layers in the order of their runs, one line";
            return Err(FormatError::new("trace", expected, "another form"));
        }
        Ok(trace)
    }
}

/// The segments that hold `blocks` of a layer, each once, in the order of the blocks.
///
/// # Errors
/// When a block lies outside the layer: the trace is of another one.
pub fn segments_of(manifest: &Manifest, blocks: &[Blocks]) -> Result<Vec<usize>, FormatError> {
    let layout = FlatLayout::new(manifest);
    let data = manifest.segment_bytes() / BLOCK_SIZE;
    let mut seen = std::collections::HashSet::new();
    let mut segments = Vec::new();
    for run in blocks {
        if run.end() > data {
            let expected = format!("inside the layer's {data} blocks");
            let found = format!("{} from {}", run.count, run.first);
            return Err(FormatError::new("blocks of a trace", expected, found));
        }
        let start = manifest.meta.size + u64::from(run.first) * BLOCK_SIZE;
        for piece in layout.pieces(start, u64::from(run.count) * BLOCK_SIZE) {
            if let Piece::Segment { index, .. } = piece
                && seen.insert(index)
            {
                segments.push(index);
            }
        }
    }
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n: u8) -> Digest {
        Digest::of(&[n])
    }

    fn touch(n: u8, first: u32, count: u32) -> (Digest, Blocks) {
        (layer(n), Blocks { first, count })
    }

    #[test]
    fn first_touches_stay_in_order_and_repeated_blocks_go() {
        let trace = Trace::new([
            touch(1, 10, 4),
            touch(1, 14, 2),
            touch(2, 0, 1),
            touch(1, 8, 10),
            touch(1, 9, 3),
            touch(2, 1, 1),
        ]);
        assert_eq!(trace.layers, [layer(1), layer(2)]);
        let runs = [
            Run(0, 10, 6),
            Run(1, 0, 1),
            Run(0, 8, 2),
            Run(0, 16, 2),
            Run(1, 1, 1),
        ];
        assert_eq!(trace.runs, runs);
        assert_eq!(trace.bytes(), 12 * 4096);
        assert_eq!(Trace::parse(&trace.to_bytes()).unwrap(), trace);
        assert_eq!(Trace::merge([&trace, &trace]), trace);
    }

    /// Mutation that turns it red: no comparison with the canonical text in `parse`.
    #[test]
    fn only_the_canonical_text_is_accepted() {
        let l = layer(1).to_hex();
        let m = layer(2).to_hex();
        let good = format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,2],[0,5,1]]}}"#);
        Trace::parse(good.as_bytes()).unwrap();
        let bad = [
            format!(r#"{{"format":2,"layers":["{l}"],"runs":[[0,1,2]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[1,1,2]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,0]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,4294967295,1]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,2],[0,2,1]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,2],[0,3,1]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}","{l}"],"runs":[[0,1,2],[1,9,1]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}","{m}"],"runs":[[1,1,2],[0,9,1]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}","{m}"],"runs":[[0,1,2]]}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,2]],"x":1}}"#),
            format!(r#"{{"format":1,"layers":["{l}"],"runs":[[0,1,-2]]}}"#),
            format!("{good}\n"),
            String::new(),
        ];
        for text in bad {
            assert!(Trace::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn random_touches_keep_each_block_once_at_its_first_place() {
        let mut at: u64 = 7;
        let mut next = |n: u64| {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
            (at >> 33) % n
        };
        for _ in 0..200 {
            let touches: Vec<_> = (0..next(40))
                .map(|_| {
                    let small = |n| u32::try_from(n).unwrap();
                    touch(
                        u8::try_from(next(3)).unwrap(),
                        small(next(60)),
                        small(1 + next(9)),
                    )
                })
                .collect();
            let mut expected: Vec<(Digest, u32)> = Vec::new();
            for (layer, b) in &touches {
                for block in b.first..b.first + b.count {
                    if !expected.contains(&(*layer, block)) {
                        expected.push((*layer, block));
                    }
                }
            }
            let trace = Trace::new(touches);
            let found: Vec<(Digest, u32)> = trace
                .touches()
                .flat_map(|(l, b)| (b.first..b.first + b.count).map(move |n| (l, n)))
                .collect();
            assert_eq!(found, expected);
            assert_eq!(Trace::parse(&trace.to_bytes()).unwrap(), trace);
        }
    }

    /// Damaged texts are refused or are the canonical text of another trace; nothing panics, and memory is bounded by the text.
    #[test]
    fn damaged_texts_are_refused_or_canonical() {
        let cases: u64 = std::env::var("DSEC_CASES")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(3000);
        let good = Trace::new([touch(1, 10, 4), touch(2, 0, 1), touch(1, 800, 70)]).to_bytes();
        let mut at: u64 = 11;
        let mut next = |n: usize| {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(17);
            usize::try_from(at >> 33).unwrap() % n
        };
        for _ in 0..cases {
            let mut text = good.clone();
            for _ in 0..1 + next(3) {
                if text.is_empty() {
                    break;
                }
                let place = next(text.len());
                match next(4) {
                    0 => text[place] ^= 1 << next(8),
                    1 => text[place] = b"0123456789[],{}\"-e. \n"[next(21)],
                    2 => drop(text.remove(place)),
                    _ => text.truncate(place.max(1)),
                }
            }
            if let Ok(trace) = Trace::parse(&text) {
                assert_eq!(trace.to_bytes(), text);
            }
        }
    }
}
