//! The merged index of a stack: which layer answers for which sectors.
//!
//! A sorted run of records of 16 bytes without overlaps; the tag of each is its layer. A directory says, for ranges of sectors of equal
//! size, where their records begin; a look-up is a binary search among those of one range. There are at most an eighth as many ranges
//! as records: half a byte a record. Where records crowd in few ranges the search is what it would be without.

use std::ops::Range;

use crate::format::overlaybd::record::Record;
use crate::ids::{to_u64, to_usize};

/// Records a range of the directory, at least, on average.
const RECORDS_A_RANGE: usize = 8;

/// See the head of this file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Map {
    records: Vec<Record>,
    directory: Directory,
}

/// Where to look for a sector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Directory {
    /// A range has two to the power of this sectors.
    shift: u32,
    /// Of each range, the first record that ends behind its start; one more entry at the end.
    firsts: Vec<u32>,
}

impl Directory {
    fn new(records: &[Record]) -> Self {
        let Some(last) = records.last() else {
            return Self::default();
        };
        let ranges_max = to_u64(records.len() / RECORDS_A_RANGE) + 1;
        let mut shift = 0;
        while last.end() >> shift >= ranges_max {
            shift += 1;
        }
        let mut at = 0;
        let firsts = (0..=(last.end() >> shift) + 1).map(|range| {
            let start = range << shift;
            let rest = records.get(at..).unwrap_or_default();
            at += rest
                .iter()
                .take_while(|record| record.end() <= start)
                .count();
            u32::try_from(at).expect("records are fewer than 2^32, which would take 64 GiB")
        });
        Self {
            firsts: firsts.collect(),
            shift,
        }
    }

    /// The first record that may end behind `lba`, and the first that surely does; `None` behind the last record.
    #[inline]
    fn around(&self, lba: u64) -> Option<(usize, usize)> {
        let range = to_usize(lba >> self.shift);
        let mut firsts = self.firsts.get(range..)?.iter();
        let from = firsts.next()?;
        let to = firsts.next()?;
        Some((usize::try_from(*from).ok()?, usize::try_from(*to).ok()?))
    }
}

/// A piece of an answer: sectors that one layer holds, or that none does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Mapped by this record, cut to what was asked for.
    Mapped(Record),
    /// In no layer; reads as zeros.
    Hole {
        /// First sector.
        lba: u64,
        /// Sectors.
        sectors: u64,
    },
}

impl Map {
    /// From sorted records without overlaps; neighbours that continue each other become one.
    pub fn new(sorted: impl IntoIterator<Item = Record>) -> Self {
        let mut records: Vec<Record> = Vec::new();
        for record in sorted {
            match records.last_mut() {
                Some(last) if last.continues(record) => *last = last.join(record),
                _ => records.push(record),
            }
        }
        records.shrink_to_fit();
        let directory = Directory::new(&records);
        Self { records, directory }
    }

    /// `upper` over `lower`, each sorted: what is below shows only where the upper one has nothing.
    pub fn over(upper: &[Record], lower: &[Record]) -> Self {
        let mut out = Vec::with_capacity(upper.len() + lower.len());
        let mut rest = lower.iter().copied();
        let mut below = rest.next();
        for top in upper {
            while let Some(low) = below.filter(|low| low.lba() < top.end()) {
                if low.lba() < top.lba() {
                    out.push(low.cut(low.lba(), top.lba()));
                }
                if low.end() > top.end() {
                    below = Some(low.cut(top.end(), low.end()));
                    break;
                }
                below = rest.next();
            }
            out.push(*top);
        }
        out.extend(below);
        out.extend(rest);
        Self::new(out)
    }

    /// The map of a stack, bottom to top, tagged with the layer's number; each layer is cut at its end in sectors, and all
    /// at `sectors`.
    pub fn stack<'a>(layers: impl IntoIterator<Item = (&'a [Record], u64)>, sectors: u64) -> Self {
        let mut map = Self::default();
        for (number, (records, end)) in (0..=u8::MAX).zip(layers) {
            let end = end.min(sectors);
            let tagged: Vec<Record> = records
                .iter()
                .take_while(|record| record.lba() < end)
                .map(|record| record.cut(0, end).with_layer(number))
                .collect();
            map = Self::over(&tagged, &map.records);
        }
        map
    }

    /// The records, in order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The first record that ends behind `lba`.
    #[inline]
    fn first_after(&self, lba: u64) -> usize {
        let Some((from, to)) = self.directory.around(lba) else {
            return self.records.len();
        };
        let records = self.records.get(from..to).unwrap_or_default();
        from + records.partition_point(|record| record.end() <= lba)
    }

    /// The record that maps a sector.
    #[inline]
    pub fn find(&self, lba: u64) -> Option<Record> {
        let record = self.records.get(self.first_after(lba))?;
        (record.lba() <= lba).then_some(*record)
    }

    /// What maps these sectors: pieces in order, without gaps.
    pub fn pieces(&self, sectors: Range<u64>) -> impl Iterator<Item = Piece> {
        let records = self.records.get(self.first_after(sectors.start)..);
        pieces(records.unwrap_or_default().iter().copied(), sectors)
    }
}

/// Cuts sorted records to `sectors` and fills the gaps with holes.
pub fn pieces(
    records: impl Iterator<Item = Record>,
    sectors: Range<u64>,
) -> impl Iterator<Item = Piece> {
    let mut records = records
        .skip_while({
            let start = sectors.start;
            move |record| record.end() <= start
        })
        .peekable();
    let mut at = sectors.start;
    std::iter::from_fn(move || {
        if at >= sectors.end {
            return None;
        }
        let from = records.peek().map_or(sectors.end, |record| record.lba());
        if from > at {
            let lba = at;
            at = from.min(sectors.end);
            return Some(Piece::Hole {
                lba,
                sectors: at - lba,
            });
        }
        let record = records.next()?.cut(at, sectors.end);
        at = record.end();
        Some(Piece::Mapped(record))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a sector shows: nothing, zeros of a layer, or a place in a layer.
    type Model = Vec<Option<(u8, Option<u64>)>>;

    const SECTORS: u64 = 400;

    fn apply(model: &mut Model, records: &[Record], layer: u8) {
        for record in records {
            for lba in record.lba()..record.end() {
                let place = (!record.is_zeroed()).then(|| record.place() + lba - record.lba());
                if let Some(sector) = model.get_mut(usize::try_from(lba).unwrap()) {
                    *sector = Some((layer, place));
                }
            }
        }
    }

    fn of_map(map: &Map) -> Model {
        let mut model = vec![None; usize::try_from(SECTORS).unwrap()];
        for record in map.records() {
            apply(&mut model, &[*record], record.layer());
        }
        model
    }

    prop_compose! {
        fn layer()(steps in proptest::collection::vec((0_u64..20, 1_u64..30, any::<bool>()), 0..30)) -> Vec<Record> {
            let (mut at, mut place) = (0, 8);
            let mut out = Vec::new();
            for (gap, len, zeroed) in steps {
                at += gap;
                if at + len > SECTORS {
                    break;
                }
                out.push(if zeroed { Record::zeroed(at, len, place, 0) } else { Record::data(at, len, place, 0) });
                at += len;
                place += if zeroed { 0 } else { len };
            }
            out
        }
    }

    proptest! {
        /// Red without the `cut` of what lies below, or with `upper` and `lower` exchanged.
        #[test]
        fn a_stack_equals_its_model(
            layers in proptest::collection::vec(layer(), 1..6),
            end in 1..SECTORS,
            asked in 0..SECTORS,
            len in 1..SECTORS,
        ) {
            let mut model: Model = vec![None; usize::try_from(SECTORS).unwrap()];
            for (number, records) in (0..).zip(&layers) {
                apply(&mut model, records, number);
            }
            for sector in model.iter_mut().skip(usize::try_from(end).unwrap()) {
                *sector = None;
            }
            let map = Map::stack(layers.iter().map(|l| (&**l, u64::MAX)), end);
            prop_assert_eq!(&of_map(&map), &model);
            for pair in map.records().windows(2) {
                prop_assert!(pair[0].end() <= pair[1].lba());
                prop_assert!(!pair[0].continues(pair[1]));
            }
            let mut at = asked;
            for piece in map.pieces(asked..asked + len) {
                let (lba, sectors) = match piece {
                    Piece::Hole { lba, sectors } => (lba, sectors),
                    Piece::Mapped(record) => (record.lba(), record.sectors()),
                };
                prop_assert_eq!(lba, at);
                for lba in lba..lba + sectors {
                    let expected = model.get(usize::try_from(lba).unwrap()).copied().flatten();
                    let found = match piece {
                        Piece::Hole { .. } => None,
                        Piece::Mapped(record) => {
                            let place = record.place() + lba - record.lba();
                            Some((record.layer(), (!record.is_zeroed()).then_some(place)))
                        }
                    };
                    prop_assert_eq!(found, expected);
                    prop_assert_eq!(map.find(lba).is_some(), expected.is_some());
                }
                at = lba + sectors;
            }
            prop_assert_eq!(at, asked + len);
        }
    }

    /// Evenly spread, crowded at both ends of a huge disk, and alone at its end: what a plain search finds. Red with the wrong end of a
    /// range.
    #[test]
    fn every_map_is_searched_through_its_directory() {
        let even: Vec<Record> = (0..1000)
            .map(|n| Record::data(n * 10, 5, 8 + n * 7, 0))
            .collect();
        let crowded = |n: u64| if n < 500 { n * 3 } else { (1 << 49) + n * 3 };
        let crowded = (0..1000).map(|n| Record::data(crowded(n), 1, 8 + n * 7, 0));
        let alone = vec![Record::data((1 << 50) - 9, 8, 8, 0)];
        for records in [even, crowded.collect(), alone, Vec::new()] {
            let map = Map::new(records.clone());
            assert_eq!(map.records(), records);
            let entries = map.directory.firsts.len();
            assert!(entries <= records.len() / RECORDS_A_RANGE + 2, "{entries}");
            let around = |record: &Record| {
                [
                    record.lba().saturating_sub(1),
                    record.lba(),
                    record.end() - 1,
                    record.end(),
                ]
            };
            let asked = records.iter().flat_map(around);
            for lba in asked.chain([0, 1 << 40, u64::MAX]) {
                let expected = records.iter().find(|r| r.end() > lba && r.lba() <= lba);
                assert_eq!(map.find(lba).as_ref(), expected, "{lba}");
            }
        }
        assert_eq!(size_of::<Record>(), 16);
    }
}
