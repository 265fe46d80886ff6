//! The books without a disk.

use super::*;

fn digest(n: u32) -> Digest {
    Digest::of(&n.to_le_bytes())
}

fn put(ledger: &mut Ledger, n: u32, bytes: u64) {
    ledger.reserve(digest(n), bytes);
    ledger.settle(&digest(n), bytes, Some(bytes));
}

fn bytes(wanted: u64) -> Wanted {
    Wanted {
        bytes: wanted,
        files: 0,
    }
}

#[test]
fn the_oldest_that_may_go_goes_and_stays_counted_until_it_is_gone() {
    let mut ledger = Ledger::new(1000, 100);
    for n in 0..5 {
        put(&mut ledger, n, 4096);
    }
    ledger.touch(&digest(0));
    ledger.pin(digest(100), &[(digest(1), 4096)]);
    ledger.reserve(digest(2), 4096);
    assert_eq!(ledger.bytes(), 6 * 4096);
    let victims = ledger.choose(bytes(5000));
    let mut expected = [
        Victim::Segment(digest(3), 4096),
        Victim::Segment(digest(4), 4096),
    ];
    let mut found = victims.clone();
    let key = |v: &Victim| match *v {
        Victim::Segment(d, _) | Victim::Layer(d, _) => d,
    };
    expected.sort_by_key(key);
    found.sort_by_key(key);
    assert_eq!(found, expected);
    assert_eq!(ledger.bytes(), 6 * 4096);
    assert!(ledger.is_leaving(&digest(3)) && ledger.segment(&digest(3)).is_none());
    ledger.freed(victims[0], false);
    ledger.freed(victims[1], true);
    assert_eq!(ledger.bytes(), 5 * 4096);
    ledger.settle(&digest(2), 4096, None);
    assert_eq!(ledger.bytes(), 4 * 4096);
    assert_eq!(ledger.usage().segments, 4);
}

#[test]
fn held_and_pinned_layers_stay_and_others_go_in_their_turn() {
    let mut ledger = Ledger::new(1000, 100);
    for n in 0..3 {
        ledger.reserve(digest(n), 100);
        ledger.settle_layer(&digest(n), 100, Some(8192));
    }
    put(&mut ledger, 9, 4096);
    ledger.hold(digest(0));
    ledger.pin(digest(1), &[]);
    let all = ledger.choose(bytes(u64::MAX));
    assert_eq!(all.len(), 2);
    assert!(all.contains(&Victim::Layer(digest(2), 8192)));
    for victim in all {
        ledger.freed(victim, false);
    }
    ledger.release(&digest(0));
    ledger.unpin(&digest(1), &[]);
    assert_eq!(
        ledger.choose(bytes(1)),
        [Victim::Layer(digest(1), 8192)],
        "a release is a use"
    );
}

#[test]
fn shared_pinned_segments_are_counted_once_and_stay_until_the_last_pin_goes() {
    let mut ledger = Ledger::new(0, 100);
    let (a, b) = ([(digest(1), 100), (digest(2), 100)], [(digest(2), 100)]);
    assert_eq!(ledger.pin_cost(&a), 200);
    ledger.pin(digest(10), &a);
    assert_eq!(ledger.pin_cost(&b), 0);
    ledger.pin(digest(11), &b);
    assert_eq!(ledger.sure_bytes(), 200);
    put(&mut ledger, 2, 512);
    ledger.unpin(&digest(10), &a);
    assert_eq!(ledger.sure_bytes(), 100);
    assert_eq!(ledger.choose(bytes(1)), []);
    ledger.unpin(&digest(11), &b);
    assert_eq!(ledger.sure_bytes(), 0);
    assert_eq!(ledger.choose(bytes(1)), [Victim::Segment(digest(2), 512)]);
}

#[test]
fn too_many_files_are_as_much_as_too_many_bytes() {
    let mut ledger = Ledger::new(1000, 10);
    ledger.found((0..25).map(|n| Entry::new(digest(n), 512, 7)));
    assert_eq!(ledger.files_over(), 15);
    let wanted = Wanted {
        bytes: 0,
        files: 15,
    };
    assert_eq!(ledger.choose(wanted).len(), 15);
    assert_eq!(ledger.files_over(), 0);
}

#[test]
fn what_is_found_later_is_older_than_what_is_known() {
    let mut ledger = Ledger::new(1000, 100);
    put(&mut ledger, 1, 4096);
    let found = [
        Entry::new(digest(1), 512, 5),
        Entry::new(digest(2), 512, u64::MAX),
    ];
    ledger.found(found.into_iter());
    assert_eq!(ledger.segment(&digest(1)), Some(4096));
    put(&mut ledger, 3, 4096);
    // The one from the future is not younger than what was used in this run.
    let first = ledger.choose(bytes(1));
    assert!(matches!(first[..], [Victim::Segment(d, _)] if d != digest(3)));
}

/// Random operations against a map; the sum is exact after each.
#[test]
fn the_sum_is_that_of_a_simple_model() {
    let mut ledger = Ledger::new(0, 1 << 20);
    let mut model: HashMap<u32, u64> = HashMap::new();
    let mut state = 1_u64;
    for _ in 0..20_000 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let n = u32::try_from((state >> 33) % 500).unwrap();
        let size = (1 + (state >> 50) % 64) * 512;
        if state >> 60 == 0 {
            let wanted = ledger.bytes() / 4;
            for victim in ledger.choose(bytes(wanted)) {
                ledger.freed(victim, false);
                let Victim::Segment(gone, _) = victim else {
                    panic!("no layers here");
                };
                let n = *model.keys().find(|n| digest(**n) == gone).unwrap();
                model.remove(&n);
            }
        } else {
            put(&mut ledger, n, size);
            model.insert(n, size);
        }
        assert_eq!(ledger.bytes(), model.values().sum::<u64>());
    }
    assert_eq!(ledger.usage().segments, model.len() as u64);
}
