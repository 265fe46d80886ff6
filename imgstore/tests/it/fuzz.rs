//! Every parser is given damaged, cut and made-up input, in bounded time and memory.
//!
//! A target is a corpus made by code, a repair of checksums (so that damage gets behind them), and a function that parses.
//! Inputs are mutated from a seed; one whose result is of a new kind (its error text without numbers) joins the corpus: that
//! leads into a parser as coverage would, on a stable compiler. A panic, a request for more than [`MEMORY_MAX`] beyond
//! [`MEMORY_FACTOR`] times the input, or an input that takes longer than [`TIME_MAX`] fails the test and saves the input
//! under `TMPDIR/dsec-fuzz`.
//!
//! Without `frame::check_claim` the target `frame` aborts at once: 1 GiB asked for on the word of a few bytes.
//!
//! `DSEC_FUZZ_SECONDS` is the time of all targets together (`tools/fuzz`); with `DSEC_FUZZ_SHARE=1` each takes all of it.
//! `DSEC_FUZZ_SEED` repeats a run, `DSEC_FUZZ_INPUT` parses one file only. A new parser is one line in `targets!`.

#[path = "fuzz/harness.rs"]
mod harness;
mod targets;
mod targets_disk;
mod targets_image;
mod targets_net;

pub(crate) use harness::sys;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use harness::{LEN_MAX, Target, fuzz, parse_once};

macro_rules! targets {
    ($($from:ident::$name:ident,)*) => {
        const TARGETS: usize = [$(stringify!($name)),*].len();
        $(#[test] fn $name() { fuzz(stringify!($name), &$from::$name(), TARGETS); })*
    };
}

targets! {
    targets::manifest,
    targets::placement,
    targets::tag,
    targets::index,
    targets::lease,
    targets::condemned,
    targets::trace,
    targets::names,
    targets::chunk_table,
    targets::frame,
    targets::erofs_image,
    targets::pack,
    targets::hostile_origin,
    targets_disk::overlaybd,
    targets_disk::overlaybd_zfile,
    targets_disk::overlaybd_pair,
    targets_disk::disk_state,
    targets_disk::published_disk,
    targets_image::tar,
    targets_image::compressed_tar,
    targets_image::pax_records,
    targets_image::acl_text,
    targets_image::oci_layout,
    targets_image::docker_archive,
    targets_image::upper_dir,
    targets_net::bundle,
    targets_net::s3_reply,
    targets_net::oci_reply,
    targets_net::auth_challenge,
    targets_net::docker_config,
}

/// The bounds bite: a panic is caught with its input, memory is counted, and the watcher is told.
#[test]
fn a_parser_without_bounds_is_caught() {
    let target = Target {
        corpus: Vec::new(),
        fix: |_| (),
        run: Box::new(|_| panic!("on purpose")),
    };
    let caught = catch_unwind(AssertUnwindSafe(|| parse_once("broken", &target, b"x")));
    let said = *caught.unwrap_err().downcast::<String>().unwrap();
    let path = said.split('`').nth(3).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"x", "{said}");
    std::fs::remove_file(path).unwrap();

    let (_, peak) = sys::peak_of(|| std::hint::black_box(vec![1_u8; 3 << 20]));
    assert!(peak >= 3 << 20, "{peak}");
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    sys::limit(1 << 20, |bytes| SEEN.store(bytes, Ordering::Relaxed));
    drop(std::hint::black_box(vec![1_u8; 2 << 20]));
    sys::unlimit();
    assert_eq!(SEEN.load(Ordering::Relaxed), 2 << 20);
}
