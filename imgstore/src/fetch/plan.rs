//! Ranges of packs for runs of segments. Pure.
//!
//! A builder writes a layer's new segments next to each other and in order, so a run of missing segments is mostly one
//! range of one pack: one request. A run breaks where the pack changes, where the next frame is not the next byte, and
//! where the range would get longer than a bound (so that several requests can run side by side).

use crate::format::placement::Placement;
use crate::ids::Digest;
use crate::origin::ByteRange;
use crate::store::layer::Layer;

/// Most stored bytes in one request.
pub const RANGE_BYTES_MAX: u64 = 2 << 20;

/// A frame longer than this (stored bytes) is fetched alone: a second one would take longer than a round trip.
const PAIRED_BYTES_MAX: u64 = 160 << 10;

/// A demanded segment and, if it is worth it, the other half of its aligned pair (0 and 1, 2 and 3, …).
///
/// A round trip to an origin costs about as much as a second small segment, and neighbours are wanted together more often
/// than not: with pairs, importing numpy takes a third fewer requests for a seventh more bytes (`docs/benchmarks.md`). The
/// partner comes along only if it lies next to the segment in the same pack and `wanted` says so of its digest and stored length.
pub fn with_partner(
    layer: &Layer,
    index: usize,
    wanted: impl Fn(&Digest, u64) -> bool,
) -> Vec<usize> {
    let (first, second) = (index & !1, index | 1);
    let segments = &layer.manifest.segments;
    let (Some(a), Some(b)) = (segments.get(first), segments.get(second)) else {
        return vec![index];
    };
    let (partner, spare) = if index == first {
        (b, second)
    } else {
        (a, first)
    };
    let touching = match (layer.placement.find(first), layer.placement.find(second)) {
        (Some((p, at)), Some((q, next))) => {
            p.digest == q.digest
                && at.start + at.len == next.start
                && at.len <= PAIRED_BYTES_MAX
                && next.len <= PAIRED_BYTES_MAX
        }
        _ => false,
    };
    let spare = layer.placement.find(spare).map_or(0, |(_, at)| at.len);
    if touching && wanted(&partner.digest(), spare) {
        vec![first, second]
    } else {
        vec![index]
    }
}

/// One segment's frame inside a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Index of the segment in its layer.
    pub index: usize,
    /// Offset in the pack.
    pub offset: u64,
    /// Stored bytes.
    pub len: u64,
}

/// A range of a pack that holds the frames of some segments, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangePlan {
    /// The pack.
    pub pack: Digest,
    /// The bytes to ask for.
    pub range: ByteRange,
    /// What they hold, in order, without gaps.
    pub parts: Vec<Part>,
}

impl RangePlan {
    /// The range of these parts of one pack, which lie one behind the other; `None` without parts.
    fn of(pack: Digest, parts: Vec<Part>) -> Option<Self> {
        let start = parts.first()?.offset;
        let len = parts.iter().map(|part| part.len).sum();
        Some(Self {
            pack,
            range: ByteRange { start, len },
            parts,
        })
    }

    /// Takes the part of segment `index` out, with those behind it as long as all have at most `bytes_max` stored bytes; what
    /// was before and behind them stays.
    pub fn take(self, index: usize, bytes_max: u64) -> (Option<Self>, Option<Self>, Option<Self>) {
        let Some(at) = self.parts.iter().position(|part| part.index == index) else {
            return (Some(self), None, None);
        };
        let mut bytes = 0;
        let mut fits = |part: &&Part| {
            bytes += part.len;
            bytes <= bytes_max
        };
        let count = self.parts.iter().skip(at).take_while(|part| fits(part));
        let count = count.count().max(1);
        self.cut(at, count)
    }

    /// What is before parts `[at, at + count)`, these, and what is behind them.
    fn cut(mut self, at: usize, count: usize) -> (Option<Self>, Option<Self>, Option<Self>) {
        let mut taken = self.parts.split_off(at.min(self.parts.len()));
        let behind = taken.split_off(count.min(taken.len()));
        let of = |parts| Self::of(self.pack, parts);
        (of(self.parts), of(taken), of(behind))
    }

    /// As [`RangePlan::take`], the segment and the other half of its aligned pair if that is next to it, short, and `worth` its bytes.
    pub fn take_pair(
        self,
        index: usize,
        worth: impl Fn(u64) -> bool,
    ) -> (Option<Self>, Option<Self>, Option<Self>) {
        let place = |index| self.parts.iter().position(|part| part.index == index);
        let Some(at) = place(index) else {
            return (Some(self), None, None);
        };
        let short = |at: usize| {
            let len = self.parts.get(at).map_or(u64::MAX, |part| part.len);
            (len <= PAIRED_BYTES_MAX).then_some(len)
        };
        let spare = place(index ^ 1).filter(|spare| spare.abs_diff(at) == 1);
        match spare.and_then(|spare| Some((spare, short(at).and(short(spare))?))) {
            Some((spare, bytes)) if worth(bytes) => self.cut(at.min(spare), 2),
            _ => self.cut(at, 1),
        }
    }

    /// The range's frames; `None` where `bytes` is too short for one.
    pub fn split<'a>(
        &'a self,
        bytes: &'a [u8],
    ) -> impl Iterator<Item = (Part, Option<&'a [u8]>)> + 'a {
        self.parts.iter().map(|part| {
            let start = part.offset.checked_sub(self.range.start);
            let start = start.and_then(|s| usize::try_from(s).ok());
            let len = usize::try_from(part.len).ok();
            let frame = start
                .zip(len)
                .and_then(|(s, l)| bytes.get(s..s.checked_add(l)?));
            (*part, frame)
        })
    }
}

/// Ranges that cover these segments (in this order); indexes outside the layer are left out.
pub fn plan(
    placement: &Placement,
    indexes: impl IntoIterator<Item = usize>,
    bytes_max: u64,
) -> Vec<RangePlan> {
    let mut plans: Vec<RangePlan> = Vec::new();
    for index in indexes {
        let Some((pack, range)) = placement.find(index) else {
            continue;
        };
        let part = Part {
            index,
            offset: range.start,
            len: range.len,
        };
        if let Some(last) = plans.last_mut() {
            let next = last.range.start + last.range.len == range.start;
            let fits = last.range.len + range.len <= bytes_max;
            if last.pack == pack.digest && next && fits {
                last.range.len += range.len;
                last.parts.push(part);
                continue;
            }
        }
        plans.push(RangePlan {
            pack: pack.digest,
            range,
            parts: vec![part],
        });
    }
    plans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::placement::{Pack, Spot};

    fn placement(spots: &[(u32, u64, u32)]) -> Placement {
        let pack = |n: u8| Pack {
            digest: Digest::of(&[n]),
            size: 1 << 30,
        };
        Placement {
            format: 1,
            layer: Digest::of(b"layer"),
            packs: vec![pack(0), pack(1)],
            segments: spots.iter().map(|s| Spot(s.0, s.1, s.2)).collect(),
        }
    }

    fn ranges(plans: &[RangePlan]) -> Vec<(u64, u64, usize)> {
        plans
            .iter()
            .map(|p| (p.range.start, p.range.len, p.parts.len()))
            .collect()
    }

    #[test]
    fn a_lone_segment_brings_its_partner_if_that_costs_no_request() {
        use crate::format::manifest::{Blob, FORMAT, Manifest, Segment, Totals};
        let blob = Blob {
            digest: Digest::of(b""),
            size: 4096,
        };
        let segment = |n: u8| Segment(Digest::of(&[n]), 262_144);
        let manifest = Manifest {
            chunks: blob,
            features_compat: Vec::new(),
            features_incompat: Vec::new(),
            format: FORMAT,
            meta: blob,
            segments: (0..7).map(segment).collect(),
            totals: Totals::default(),
        };
        // 3 is long; 4 and 5 do not touch; 6 has no partner.
        let spots = [
            (0, 0, 10),
            (0, 10, 10),
            (0, 20, 10),
            (0, 30, 170_000),
            (0, 200_000, 10),
            (0, 200_020, 10),
            (0, 200_030, 10),
        ];
        let layer = Layer {
            digest: Digest::of(b"layer"),
            manifest,
            placement: placement(&spots),
        };
        let any = |_: &Digest, len: u64| len == 10;
        assert_eq!(with_partner(&layer, 0, any), [0, 1]);
        assert_eq!(with_partner(&layer, 1, any), [0, 1]);
        assert_eq!(with_partner(&layer, 1, |_, _| false), [1]);
        for alone in [2, 3, 4, 5, 6] {
            assert_eq!(with_partner(&layer, alone, |_, _| true), [alone]);
        }
    }

    #[test]
    fn neighbours_join_and_breaks_do_not() {
        let p = placement(&[(0, 0, 10), (0, 10, 20), (1, 30, 5), (1, 40, 5), (1, 45, 1)]);
        assert_eq!(
            ranges(&plan(&p, 0..5, 1000)),
            [(0, 30, 2), (30, 5, 1), (40, 6, 2)]
        );
        assert_eq!(ranges(&plan(&p, [0, 2], 1000)), [(0, 10, 1), (30, 5, 1)]);
    }

    #[test]
    fn a_range_ends_at_the_bound_but_one_frame_may_exceed_it() {
        let p = placement(&[(0, 0, 60), (0, 60, 60), (0, 120, 300)]);
        assert_eq!(
            ranges(&plan(&p, 0..3, 100)),
            [(0, 60, 1), (60, 60, 1), (120, 300, 1)]
        );
    }

    /// Mutations: `^ 1` is `+ 1`; no `short`; no `worth`.
    #[test]
    fn a_pair_is_taken_if_it_is_short_and_worth_it() {
        let long = u32::try_from(PAIRED_BYTES_MAX).unwrap() + 1;
        let lens = [10, 20, 30, long, 40, 50, 60];
        let mut spots = Vec::new();
        let mut at = 0;
        for len in lens {
            spots.push((0, at, len));
            at += u64::from(len);
        }
        let whole = plan(&placement(&spots), 0..7, u64::MAX).remove(0);
        let indexes = |plan: Option<RangePlan>| -> Vec<usize> {
            plan.map_or_else(Vec::new, |p| {
                p.parts.iter().map(|part| part.index).collect()
            })
        };
        let take = |index, most| {
            let (before, taken, behind) = whole.clone().take_pair(index, |bytes| bytes <= most);
            (indexes(before), indexes(taken), indexes(behind))
        };
        assert_eq!(take(4, 50), (vec![0, 1, 2, 3], vec![4, 5], vec![6]));
        assert_eq!(take(5, 40), (vec![0, 1, 2, 3], vec![4, 5], vec![6]));
        assert_eq!(take(4, 49).1, [4]);
        assert_eq!(take(2, u64::MAX).1, [2]);
        assert_eq!(take(3, u64::MAX).1, [3]);
        assert_eq!(take(6, u64::MAX), (vec![0, 1, 2, 3, 4, 5], vec![6], vec![]));
        assert_eq!(take(9, 0), (vec![0, 1, 2, 3, 4, 5, 6], vec![], vec![]));
    }

    #[test]
    fn unknown_indexes_are_left_out() {
        let p = placement(&[(0, 0, 10)]);
        assert_eq!(ranges(&plan(&p, [0, 1, 7], 100)), [(0, 10, 1)]);
    }

    #[test]
    fn a_short_answer_gives_no_frame_for_what_it_lacks() {
        let p = placement(&[(0, 100, 2), (0, 102, 3)]);
        let plans = plan(&p, 0..2, 100);
        let frames: Vec<_> = plans[0].split(b"abcd").map(|(_, f)| f).collect();
        assert_eq!(frames, [Some(&b"ab"[..]), None]);
        let frames: Vec<_> = plans[0].split(b"abcde").map(|(_, f)| f).collect();
        assert_eq!(frames, [Some(&b"ab"[..]), Some(&b"cde"[..])]);
    }
}
