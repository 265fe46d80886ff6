//! The map of a layer that is being written: newer records replace what they overlap.

use std::collections::BTreeMap;
use std::ops::Range;

use super::map::{Piece, pieces};
use crate::format::overlaybd::record::Record;

/// Records by their first sector, without overlaps.
#[derive(Debug, Clone, Default)]
pub struct LiveMap {
    records: BTreeMap<u64, Record>,
}

impl LiveMap {
    /// Maps anew what `record` covers.
    pub fn insert(&mut self, record: Record) {
        let before = self.records.range(..record.lba()).next_back();
        let mut hit: Vec<Record> = before
            .map(|(_, old)| *old)
            .filter(|old| old.end() > record.lba())
            .into_iter()
            .collect();
        let inside = self.records.range(record.lba()..record.end());
        hit.extend(inside.map(|(_, old)| *old));
        for old in hit {
            self.records.remove(&old.lba());
            if old.lba() < record.lba() {
                let left = old.cut(old.lba(), record.lba());
                self.records.insert(left.lba(), left);
            }
            if old.end() > record.end() {
                let right = old.cut(record.end(), old.end());
                self.records.insert(right.lba(), right);
            }
        }
        self.records.insert(record.lba(), record);
    }

    /// All records in order.
    pub fn records(&self) -> impl Iterator<Item = Record> {
        self.records.values().copied()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// What maps these sectors: pieces in order, without gaps.
    pub fn pieces(&self, sectors: Range<u64>) -> impl Iterator<Item = Piece> {
        let before = self.records.range(..sectors.start).next_back();
        let first = before
            .map(|(_, record)| *record)
            .filter(|record| record.end() > sectors.start);
        let rest = self.records.range(sectors.clone());
        pieces(first.into_iter().chain(rest.map(|(_, r)| *r)), sectors)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::disk::map::Map;

    /// What every mapped sector shows: its place, or zeros.
    fn sectors_of(records: impl Iterator<Item = Record>) -> BTreeMap<u64, Option<u64>> {
        let of = |r: Record| {
            (r.lba()..r.end())
                .map(move |lba| (lba, (!r.is_zeroed()).then(|| r.place() + lba - r.lba())))
        };
        records.flat_map(of).collect()
    }

    proptest! {
        /// Red when either remainder of an overlapped record is dropped.
        #[test]
        fn inserting_equals_laying_layers_on_each_other(
            writes in proptest::collection::vec((0_u64..200, 1_u64..40, any::<bool>()), 1..40),
        ) {
            let mut live = LiveMap::default();
            let mut model = Map::default();
            let mut place = 8;
            for (lba, sectors, zeroed) in writes {
                let record = if zeroed {
                    Record::zeroed(lba, sectors, place, 0)
                } else {
                    Record::data(lba, sectors, place, 0)
                };
                place += sectors;
                live.insert(record);
                model = Map::over(&[record], model.records());
                prop_assert_eq!(sectors_of(live.records()), sectors_of(model.records().iter().copied()));
                let found: Vec<_> = live.pieces(50..150).collect();
                let sectors: u64 = found
                    .iter()
                    .map(|piece| match piece {
                        Piece::Hole { sectors, .. } => *sectors,
                        Piece::Mapped(record) => record.sectors(),
                    })
                    .sum();
                prop_assert_eq!(sectors, 100);
                for piece in found {
                    match piece {
                        Piece::Hole { lba, .. } => prop_assert_eq!(model.find(lba), None),
                        Piece::Mapped(record) => {
                            let shown = sectors_of(std::iter::once(record));
                            let all = sectors_of(model.records().iter().copied());
                            prop_assert!(shown.iter().all(|(lba, place)| all.get(lba) == Some(place)));
                        }
                    }
                }
            }
        }
    }
}
