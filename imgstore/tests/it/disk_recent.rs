//! The side files of a pair: a process that is killed at any operation loses nothing that was answered; after a loss of power what is
//! found is what was there at some moment since the last flush; a failed flush makes them worth nothing.

use std::sync::Arc;

use imgstore::disk::pair::Pair;
use imgstore::media::Media;
use imgstore::media::mem::MemMedia;
use imgstore::media::power_cut::{Power, PowerCutMedia};
use proptest::prelude::*;

use crate::overlaybd_writing::{
    Model, SECTORS, Step, cases, new_pair, set, shown, small_header, step, write_sectors,
};

fn open(files: [Arc<dyn Media>; 4]) -> Pair {
    try_open(files).unwrap()
}

fn try_open(files: [Arc<dyn Media>; 4]) -> Result<Pair, imgstore::disk::DiskError> {
    let [data, index, first, second] = files;
    Pair::open(data, index, "pair")?.with_recent([first, second])
}

/// Nothing can be read where the power is out already.
fn shown_if_powered(pair: &Pair, power: &Power) -> Option<Model> {
    (!power.is_out()).then(|| shown(pair))
}

fn in_memory(bytes: [Vec<u8>; 4]) -> [Arc<dyn Media>; 4] {
    bytes.map(|bytes| -> Arc<dyn Media> { Arc::new(MemMedia::new(bytes)) })
}

fn nothing() -> Model {
    vec![None; usize::try_from(SECTORS).unwrap()]
}

/// Runs steps until one fails; the states that may be found then if the power is out, and if only the process is gone: with
/// what failed, and without it.
fn run(
    pair: &Pair,
    steps: &[Step],
    first: u64,
    mut model: Model,
) -> (Vec<Model>, [Model; 2], bool) {
    let mut possible = vec![model.clone()];
    for (number, step) in (first..).zip(steps) {
        let before = model.clone();
        let done = match *step {
            Step::Write(lba, n) => {
                set(&mut model, lba, n, number);
                write_sectors(pair, lba, n, number)
            }
            Step::Discard(lba, n) => {
                set(&mut model, lba, n, 0);
                pair.discard(lba, n)
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
            let flush = matches!(step, Step::Flush | Step::Reopen);
            return (possible, [before, model], flush);
        }
    }
    (possible, [model.clone(), model], false)
}

proptest! {
    #![proptest_config(cases())]

    /// The power fails three times in a row, after any operation, also while the pair is opened.
    ///
    /// Red when the data's checksum is not compared, and when the removal of entries that were found is not synced. (That a flush leaves
    /// the file that grows alone shows only under several writers: `what_was_answered_survives_kills`.)
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
        for _ in 0..20 {
            let mut bytes = [data.snapshot(), index.snapshot(), Vec::new(), Vec::new()];
            let mut found = nothing();
            for life in 0..4_u64 {
                let power = Power::failing_after(random() % 70);
                let media = bytes.map(|bytes| Arc::new(PowerCutMedia::new(Arc::clone(&power), bytes)));
                let files = media.clone().map(|media| -> Arc<dyn Media> { media });
                let mut possible = vec![found.clone()];
                if let Ok(pair) = try_open(files) {
                    prop_assert_eq!(&shown_if_powered(&pair, &power).unwrap_or_else(|| found.clone()), &found);
                    let (states, killed, in_flush) = run(&pair, &steps, life * 1000 + 1, found);
                    possible = states;
                    if !in_flush {
                        let copy = open(in_memory(media.clone().map(|media| media.after_kill())));
                        let shown = shown(&copy);
                        prop_assert!(killed.contains(&shown), "killed: {shown:?} is none of {killed:?}");
                    }
                }
                bytes = media.map(|media| media.after_failure(&mut random));
                found = shown(&open(in_memory(bytes.clone())));
                prop_assert!(possible.contains(&found), "power out: {found:?} is none of {possible:?}");
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
        let mut pair = open(shared.clone());
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
                    pair = open(shared.clone());
                }
            }
            let copy = open(in_memory(files.clone().map(|media| media.snapshot())));
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
    let pair = open([
        failing.clone(),
        index.clone(),
        files[0].clone(),
        files[1].clone(),
    ]);
    write_sectors(&pair, 3, 2, 1).unwrap();
    pair.flush().unwrap_err();
    drop(pair);
    let bytes = [
        failing.after_kill(),
        index.snapshot(),
        files[0].snapshot(),
        files[1].snapshot(),
    ];
    assert_eq!(shown(&open(in_memory(bytes))), nothing());
}
