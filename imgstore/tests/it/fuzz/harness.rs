//! The engine: inputs from a corpus and a seed, bounds, and what is saved of an input that fails. See `fuzz.rs`.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a seed and a saved input are of use only where they are read"
)]

mod mutate;
#[allow(
    dead_code,
    reason = "each of the test binaries with this file uses a part of it"
)]
pub(crate) mod sys;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::rng::Rng;

/// Memory that any input may cause, in bytes: buffers of a fixed size, a spool's, zstd's.
const MEMORY_MAX: usize = 64 << 20;
/// And for each byte of input: JSON values, inodes.
const MEMORY_FACTOR: usize = 256;
/// The longest that an input may take in a debug build on a busy machine.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Longest input.
pub(crate) const LEN_MAX: usize = 256 << 10;
/// Most inputs kept for their kind of result.
const CORPUS_MAX: usize = 400;

/// Parses; the text of the error, or `ok`.
type Run = Box<dyn Fn(&[u8]) -> String>;

/// One parser.
pub(crate) struct Target {
    /// Inputs to start from; at least one must parse.
    pub(crate) corpus: Vec<Vec<u8>>,
    /// Makes checksums right again.
    pub(crate) fix: fn(&mut Vec<u8>),
    /// The parser.
    pub(crate) run: Run,
}

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The part of the time that one of so many targets has.
fn time_of_a_target(targets: usize) -> Duration {
    let all = setting("DSEC_FUZZ_SECONDS")
        .and_then(|s| s.parse().ok())
        .unwrap_or(20);
    let share = setting("DSEC_FUZZ_SHARE").and_then(|s| s.parse().ok());
    let share = share.unwrap_or_else(|| u32::try_from(targets).unwrap());
    Duration::from_secs(all) / share
}

/// What is being parsed, for whoever finds that it does not end.
static CURRENT: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));

/// Saves the current input; gives where.
fn save() -> String {
    let current = CURRENT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = std::env::temp_dir().join("dsec-fuzz");
    std::fs::create_dir_all(&folder).unwrap();
    let digest = imgstore::ids::Digest::of(&current.1).to_hex();
    let path = folder.join(format!("{}-{}.bin", current.0, &digest[..12]));
    std::fs::write(&path, &current.1).unwrap();
    path.display().to_string()
}

fn too_much(bytes: usize) {
    eprintln!(
        "fuzz: asked for {bytes} bytes beyond the limit; input saved as `{}`",
        save()
    );
    std::process::abort();
}

/// Ends the process if no input is finished within the time.
fn watch() -> Sender<()> {
    let (alive, watched) = channel();
    std::thread::spawn(move || {
        loop {
            match watched.recv_timeout(2 * TIME_MAX) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("fuzz: an input does not end; saved as `{}`", save());
                    std::process::abort();
                }
            }
        }
    });
    alive
}

/// The kind of a result: its text without numbers and digests.
fn kind(result: &str) -> String {
    let plain = result
        .chars()
        .filter(|c| c.is_ascii_alphabetic() && !matches!(c, 'a'..='f'));
    plain.take(80).collect()
}

/// Parses one input within the bounds.
pub(crate) fn parse_once(name: &'static str, target: &Target, input: &[u8]) -> String {
    {
        let mut current = CURRENT.lock().unwrap();
        current.0 = name;
        current.1.clear();
        current.1.extend_from_slice(input);
    }
    let begun = Instant::now();
    sys::limit(MEMORY_MAX + MEMORY_FACTOR * input.len(), too_much);
    let result = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    sys::unlimit();
    let took = begun.elapsed();
    let Ok(result) = result else {
        panic!("`{name}` panicked; input saved as `{}`", save());
    };
    assert!(
        took < TIME_MAX,
        "`{name}` took {took:?}; input saved as `{}`",
        save()
    );
    result
}

/// Fuzzes one of `targets` targets.
pub(crate) fn fuzz(name: &'static str, target: &Target, targets: usize) {
    let alive = watch();
    if let Some(path) = setting("DSEC_FUZZ_INPUT") {
        println!(
            "{}",
            parse_once(name, target, &std::fs::read(path).unwrap())
        );
        return;
    }
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let seed = setting("DSEC_FUZZ_SEED")
        .and_then(|s| s.parse().ok())
        .unwrap_or(now.subsec_nanos().into());
    println!("`{name}`: DSEC_FUZZ_SEED={seed}");
    let mut rng = Rng::new(seed);
    let mut corpus = target.corpus.clone();
    let mut kinds = HashSet::new();
    let mut parsed = 0;
    for input in &target.corpus {
        let result = parse_once(name, target, input);
        parsed += usize::from(result.starts_with("ok"));
        kinds.insert(kind(&result));
    }
    assert!(
        parsed > 0,
        "no input of the corpus of `{name}` parses: {kinds:?}"
    );
    let end = Instant::now() + time_of_a_target(targets);
    let mut runs = 0_u64;
    while Instant::now() < end || runs < 20 {
        let mut input = rng.pick(&corpus);
        mutate::mutate(&mut rng, &mut input, &corpus, LEN_MAX);
        if rng.below(5) > 0 {
            (target.fix)(&mut input);
        }
        let result = parse_once(name, target, &input);
        if corpus.len() < CORPUS_MAX && kinds.insert(kind(&result)) {
            corpus.push(input);
        }
        runs += 1;
        alive.send(()).unwrap();
    }
    println!("`{name}`: {runs} inputs, {} kinds of results", kinds.len());
    assert!(
        kinds.len() > 1,
        "nothing but {kinds:?}: the mutations do not reach `{name}`"
    );
}
