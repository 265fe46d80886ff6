//! Which workloads to serve from a set of bounded size. Pure.
//!
//! A workload runs without the origin only if everything it reads is in the set, and what several read is in it once. With
//! up to [`EXACT_MAX`] workloads the fewest bytes for every number of workloads are found exactly: the items are summed by the
//! set of workloads that read them, and a sum over subsets gives the cost of all 2^n choices. For more, two greedy orders
//! are tried (add the workload that costs the least more; drop the one that frees the most) and the better is taken for each
//! number. Where workloads share nothing that is exact too; in general there is no such promise, for the problem contains that
//! of the densest part of a graph, for which no good bound is known.

use std::collections::{BTreeSet, HashMap};

/// Most workloads that are decided exactly.
pub const EXACT_MAX: usize = 20;

/// Some workloads, and what everything they read costs together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Bytes.
    pub bytes: u64,
    /// Indexes of the workloads, sorted.
    pub workloads: Vec<usize>,
}

/// The least bytes found for each number of workloads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curve {
    /// Whether no choice is better.
    pub exact: bool,
    /// For one workload, two, …, all; bytes never go down.
    pub points: Vec<Choice>,
}

impl Curve {
    /// The most workloads within `bytes_max`.
    pub fn best(&self, bytes_max: u64) -> Option<&Choice> {
        let fits = |point: &&Choice| point.bytes <= bytes_max;
        self.points.iter().rev().find(fits)
    }
}

/// The curve of workloads that need these items of these costs.
pub fn curve(costs: &[u64], workloads: &[Vec<usize>]) -> Curve {
    let cost = |item: &usize| costs.get(*item).copied().unwrap_or(0);
    let mut needs: Vec<Vec<usize>> = workloads.to_vec();
    for need in &mut needs {
        need.sort_unstable();
        need.dedup();
    }
    if needs.len() <= EXACT_MAX {
        return Curve {
            exact: true,
            points: exact(&cost, &needs),
        };
    }
    let mut readers: HashMap<usize, Vec<usize>> = HashMap::new();
    for (workload, need) in needs.iter().enumerate() {
        for item in need {
            readers.entry(*item).or_default().push(workload);
        }
    }
    let up = prefixes(&cost, &needs, &adding(&cost, &needs, &readers));
    let down = prefixes(&cost, &needs, &dropping(&cost, &needs, &readers));
    let better = |(a, b): (Choice, Choice)| if b.bytes < a.bytes { b } else { a };
    let mut points: Vec<Choice> = up.into_iter().zip(down).map(better).collect();
    // A larger set may turn out cheaper than a smaller one: then the smaller is a part of it.
    for n in (1..points.len()).rev() {
        let (Some(more), Some(less)) = (points.get(n).cloned(), points.get_mut(n - 1)) else {
            break;
        };
        if more.bytes < less.bytes {
            let mut workloads = more.workloads;
            workloads.pop();
            let bytes = union(&cost, &needs, &workloads);
            *less = Choice { bytes, workloads };
        }
    }
    Curve {
        exact: false,
        points,
    }
}

fn union(cost: &dyn Fn(&usize) -> u64, needs: &[Vec<usize>], workloads: &[usize]) -> u64 {
    let needs = workloads.iter().filter_map(|w| needs.get(*w));
    let items: BTreeSet<&usize> = needs.flatten().collect();
    items.into_iter().map(cost).sum()
}

fn exact(cost: &dyn Fn(&usize) -> u64, needs: &[Vec<usize>]) -> Vec<Choice> {
    let n = needs.len();
    let mut readers: HashMap<usize, usize> = HashMap::new();
    for (workload, need) in needs.iter().enumerate() {
        for item in need {
            *readers.entry(*item).or_insert(0) |= 1 << workload;
        }
    }
    // First by exactly which workloads read an item, then (summed over subsets) by which at most.
    let mut within = vec![0_u64; 1 << n];
    for (item, mask) in &readers {
        if let Some(sum) = within.get_mut(*mask) {
            *sum += cost(item);
        }
    }
    for bit in 0..n {
        for mask in 0..1 << n {
            if mask & (1 << bit) != 0 {
                let without = within.get(mask ^ (1 << bit)).copied().unwrap_or(0);
                if let Some(sum) = within.get_mut(mask) {
                    *sum += without;
                }
            }
        }
    }
    let all = (1_usize << n) - 1;
    let total = within.get(all).copied().unwrap_or(0);
    let mut best: Vec<Option<(u64, usize)>> = vec![None; n + 1];
    for mask in 1..=all {
        let bytes = total - within.get(all ^ mask).copied().unwrap_or(0);
        let count = usize::try_from(mask.count_ones()).unwrap_or(0);
        if let Some(best) = best.get_mut(count)
            && best.is_none_or(|(least, _)| bytes < least)
        {
            *best = Some((bytes, mask));
        }
    }
    let choice = |(bytes, mask): (u64, usize)| Choice {
        bytes,
        workloads: (0..n).filter(|w| mask & (1 << w) != 0).collect(),
    };
    best.into_iter().flatten().map(choice).collect()
}

/// The first workload of an order, the first two, and so on.
fn prefixes(cost: &dyn Fn(&usize) -> u64, needs: &[Vec<usize>], order: &[usize]) -> Vec<Choice> {
    let mut seen = BTreeSet::new();
    let mut bytes = 0;
    let mut chosen = Vec::new();
    let mut out = Vec::with_capacity(order.len());
    for workload in order {
        for item in needs.get(*workload).into_iter().flatten() {
            if seen.insert(*item) {
                bytes += cost(item);
            }
        }
        chosen.push(*workload);
        let mut workloads: Vec<usize> = chosen.clone();
        workloads.sort_unstable();
        out.push(Choice { bytes, workloads });
    }
    out
}

type Readers = HashMap<usize, Vec<usize>>;

/// Workloads in the order in which each costs the least more.
fn adding(cost: &dyn Fn(&usize) -> u64, needs: &[Vec<usize>], readers: &Readers) -> Vec<usize> {
    let mut price: Vec<u64> = needs.iter().map(|n| n.iter().map(cost).sum()).collect();
    let mut queue: BTreeSet<(u64, usize)> = price.iter().copied().zip(0..).collect();
    let mut have = BTreeSet::new();
    let mut order = Vec::with_capacity(needs.len());
    while let Some((_, workload)) = queue.pop_first() {
        order.push(workload);
        for item in needs.get(workload).into_iter().flatten() {
            if !have.insert(*item) {
                continue;
            }
            for other in readers.get(item).into_iter().flatten() {
                if let Some(price) = price.get_mut(*other)
                    && queue.remove(&(*price, *other))
                {
                    *price -= cost(item);
                    queue.insert((*price, *other));
                }
            }
        }
    }
    order
}

/// Workloads in the reverse of the order in which each frees the most when it is dropped.
fn dropping(cost: &dyn Fn(&usize) -> u64, needs: &[Vec<usize>], readers: &Readers) -> Vec<usize> {
    let mut left: HashMap<usize, usize> = readers.iter().map(|(i, r)| (*i, r.len())).collect();
    let own = |left: &HashMap<usize, usize>, need: &Vec<usize>| -> u64 {
        let alone = need.iter().filter(|item| left.get(item) == Some(&1));
        alone.map(cost).sum()
    };
    let mut frees: Vec<u64> = needs.iter().map(|need| own(&left, need)).collect();
    let mut queue: BTreeSet<(u64, usize)> = frees.iter().copied().zip(0..).collect();
    let mut order = Vec::with_capacity(needs.len());
    while let Some((_, workload)) = queue.pop_last() {
        order.push(workload);
        for item in needs.get(workload).into_iter().flatten() {
            let Some(count) = left.get_mut(item) else {
                continue;
            };
            *count -= 1;
            if *count != 1 {
                continue;
            }
            // The one that is left has it for itself now.
            for other in readers.get(item).into_iter().flatten() {
                if let Some(frees) = frees.get_mut(*other)
                    && queue.remove(&(*frees, *other))
                {
                    *frees += cost(item);
                    queue.insert((*frees, *other));
                }
            }
        }
    }
    order.reverse();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(curve: &Curve) -> Vec<u64> {
        curve.points.iter().map(|p| p.bytes).collect()
    }

    #[test]
    fn what_is_shared_counts_once() {
        // 0 and 1 share an item of 100; 2 is alone.
        let curve = curve(&[100, 1, 2, 60], &[vec![0, 1], vec![0, 2], vec![3]]);
        assert_eq!(bytes(&curve), [60, 103, 163]);
        assert_eq!(curve.points[1].workloads, [0, 1]);
        assert_eq!(curve.best(59), None);
        assert_eq!(curve.best(102).unwrap().workloads, [2]);
        assert_eq!(curve.best(1 << 40).unwrap().workloads, [0, 1, 2]);
    }

    /// Random workloads over few items: every subset is tried.
    fn random(n: usize, items: u64, seed: u64) -> (Vec<u64>, Vec<Vec<usize>>) {
        let mut at = seed | 1;
        let mut next = |n: u64| {
            at = at
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (at >> 33) % n
        };
        let costs = (0..items).map(|_| 1 + next(50)).collect();
        let small = |n| usize::try_from(n).unwrap();
        let needs = (0..n)
            .map(|_| (0..1 + next(6)).map(|_| small(next(items))).collect())
            .collect();
        (costs, needs)
    }

    /// Mutation: the sum over subsets without its inner condition.
    #[test]
    fn few_workloads_are_decided_exactly() {
        for seed in 0..60 {
            let (costs, needs) = random(7, 12, seed);
            let found = curve(&costs, &needs);
            assert!(found.exact);
            let mut least = [u64::MAX; 8];
            for mask in 1_usize..1 << 7 {
                let chosen: Vec<usize> = (0..7).filter(|w| mask & (1 << w) != 0).collect();
                let cost = union(&|i| costs[*i], &needs, &chosen);
                let count = chosen.len();
                least[count] = least[count].min(cost);
            }
            assert_eq!(bytes(&found), least[1..], "seed {seed}");
            for point in &found.points {
                assert_eq!(union(&|i| costs[*i], &needs, &point.workloads), point.bytes);
            }
        }
    }

    /// How far greedy may be from exact is not promised; that its sums are right and its curve rises is, and on these it is near.
    #[test]
    fn many_workloads_are_decided_consistently_and_well() {
        let (mut worst, mut sum) = (1.0_f64, (0.0, 0.0));
        for seed in 0..40 {
            let (costs, needs) = random(12, 20, seed);
            let best = curve(&costs, &needs);
            // The same ones beside nine that cost far too much.
            let mut costs = costs;
            let mut needs = needs;
            for _ in 0..9 {
                needs.push(vec![costs.len()]);
                costs.push(1_000_000);
            }
            let greedy = curve(&costs, &needs);
            assert!(!greedy.exact && greedy.points.len() == 21);
            assert!(greedy.points.is_sorted_by_key(|p| p.bytes));
            for point in &greedy.points {
                assert_eq!(union(&|i| costs[*i], &needs, &point.workloads), point.bytes);
            }
            for (g, b) in greedy.points.iter().zip(&best.points) {
                let (g, b) = (
                    f64::from(u32::try_from(g.bytes).unwrap()),
                    f64::from(u32::try_from(b.bytes).unwrap()),
                );
                worst = worst.max(g / b);
                sum = (sum.0 + g, sum.1 + b);
            }
        }
        assert!(worst < 1.6 && sum.0 / sum.1 < 1.05, "{worst} {sum:?}");
    }

    #[test]
    fn workloads_that_share_nothing_are_taken_by_size() {
        let costs: Vec<u64> = (0..30).map(|n| 1 + n * 7 % 30).collect();
        let needs: Vec<Vec<usize>> = (0..30).map(|n| vec![n]).collect();
        let found = curve(&costs, &needs);
        let mut sorted = costs.clone();
        sorted.sort_unstable();
        let sums: Vec<u64> = (1..=30).map(|k| sorted[..k].iter().sum()).collect();
        assert_eq!(bytes(&found), sums);
        assert_eq!(curve(&[], &[]).points, []);
    }
}
