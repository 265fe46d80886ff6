//! The side files of a pair: a process that is killed at any operation loses nothing that was answered; a loss of power makes
//! them worth nothing; a failed flush does too.

use std::sync::Arc;

use imgstore::disk::pair::Pair;
use imgstore::disk::recent::{BootId, Recent};
use imgstore::media::Media;
use imgstore::media::mem::MemMedia;
use imgstore::media::power_cut::{Power, PowerCutMedia};
use proptest::prelude::*;

use crate::overlaybd_writing::{
    Model, SECTORS, Step, cases, new_pair, set, shown, small_header, step, write_sectors,
};

const THIS: &[u8; 36] = b"11111111-1111-4111-8111-111111111111";
const NEXT: &[u8; 36] = b"22222222-2222-4222-8222-222222222222";

/// A pair in four files, opened in a boot.
fn open(files: [Arc<dyn Media>; 4], boot: &[u8]) -> Pair {
    let [data, index, first, second] = files;
    let (recent, found) = Recent::open([first, second], BootId::parse(boot).unwrap()).unwrap();
    let pair = Pair::open(data, index, "pair").unwrap();
    pair.with_recent(recent, found).unwrap()
}

fn in_memory(bytes: [Vec<u8>; 4]) -> [Arc<dyn Media>; 4] {
    bytes.map(|bytes| -> Arc<dyn Media> { Arc::new(MemMedia::new(bytes)) })
}

fn nothing() -> Model {
    vec![None; usize::try_from(SECTORS).unwrap()]
}

proptest! {
    #![proptest_config(cases())]

    /// Red when records are kept after the write is answered, when a flush empties the file that grows, and when files of
    /// another boot count.
    #[test]
    fn a_kill_loses_nothing_and_a_power_failure_nothing_flushed(
        steps in proptest::collection::vec(step(), 1..20),
        seed in any::<u64>(),
    ) {
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        let (empty, data, index) = new_pair(small_header());
        drop(empty);
        let start = [data.snapshot(), index.snapshot(), Vec::new(), Vec::new()];
        // Opening takes three.
        for operations in 3.. {
            let power = Power::failing_after(operations);
            let media = start.clone().map(|bytes| Arc::new(PowerCutMedia::new(Arc::clone(&power), bytes)));
            let files = media.clone().map(|media| -> Arc<dyn Media> { media });
            let pair = open(files, THIS);
            let mut model = nothing();
            let mut possible = vec![model.clone()];
            // What was answered, and what the operation that failed would have made of it.
            let (mut answered, mut last) = (model.clone(), model.clone());
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
                last.clone_from(&model);
                if done.is_err() {
                    break;
                }
                answered.clone_from(&model);
            }
            // A flush that fails is no kill: what it leaves is tested below.
            let killed = in_memory(media.clone().map(|media| media.after_kill()));
            let pair = open(killed.clone(), THIS);
            let found = shown(&pair);
            prop_assert!(found == answered || found == last || possible.contains(&found),
                "killed after {operations} operations: {found:?}, answered {answered:?}");
            if !power.is_out() {
                prop_assert_eq!(&found, &answered);
            }
            drop(pair);
            prop_assert_eq!(shown(&open(killed, THIS)), found);
            let cut = media.map(|media| media.after_failure(&mut random));
            let found = shown(&open(in_memory(cut), NEXT));
            prop_assert!(possible.contains(&found), "power out after {operations} operations: {found:?} is none of {possible:?}");
            if !power.is_out() {
                break;
            }
        }
    }

    /// A copy of the files after each step is what a kill leaves there.
    #[test]
    fn what_was_answered_is_there_after_a_kill_at_every_step(steps in proptest::collection::vec(step(), 1..40)) {
        let (empty, data, index) = new_pair(small_header());
        drop(empty);
        let files = [data, index, Arc::default(), Arc::default()];
        let shared = files.clone().map(|media| -> Arc<dyn Media> { media });
        let mut pair = open(shared.clone(), THIS);
        let mut model = nothing();
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
                    drop(pair);
                    pair = open(shared.clone(), THIS);
                }
            }
            let copy = open(in_memory(files.clone().map(|media| media.snapshot())), THIS);
            prop_assert_eq!(shown(&copy), model.clone(), "after step {}", number);
        }
    }
}

/// What a failed sync left is unknown, so its records must not come back through the side files.
///
/// Red when a failed flush leaves them.
#[test]
fn a_failed_flush_takes_the_side_files_with_it() {
    let (empty, data, index) = new_pair(small_header());
    drop(empty);
    let power = Power::failing_after(1);
    let files: [Arc<MemMedia>; 2] = [Arc::default(), Arc::default()];
    // Only the data file fails: at the sync, after one write.
    let failing = Arc::new(PowerCutMedia::new(power, data.snapshot()));
    let pair = open(
        [
            failing.clone(),
            index.clone(),
            files[0].clone(),
            files[1].clone(),
        ],
        THIS,
    );
    write_sectors(&pair, 3, 2, 1).unwrap();
    pair.flush().unwrap_err();
    drop(pair);
    let bytes = [
        failing.after_kill(),
        index.snapshot(),
        files[0].snapshot(),
        files[1].snapshot(),
    ];
    assert_eq!(shown(&open(in_memory(bytes), THIS)), nothing());
}
