//! Reading many segments where they lie, verified: neighbours are fetched as one range, several ranges at a time.
//!
//! Memory is bounded by [`THREADS`] ranges. Results come in the order of the runs, so that what is written from them does
//! not depend on timing. A damaged frame is a result and not an end; an origin that fails is an end, because "cannot be
//! read now" must never be taken for "is damaged".

use crate::format::manifest::{Manifest, Segment};
use crate::format::placement::{Pack, Placement};
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, to_usize};
use crate::origin::{ByteRange, Origin, OriginError};

/// Most stored bytes fetched at once.
pub(crate) const RANGE_BYTES_MAX: u64 = 4 << 20;
/// Ranges fetched at the same time: enough to hide an origin's latency.
pub(crate) const THREADS: usize = 4;

/// A place where a segment's frame should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// The pack.
    pub(crate) pack: Pack,
    /// The frame in it.
    pub(crate) range: ByteRange,
}

/// A segment to be read at a place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sought {
    /// Which one of its layer it is.
    pub(crate) index: usize,
    /// What it must be.
    pub(crate) segment: Segment,
    /// Where it should be.
    pub(crate) place: Place,
}

/// Where a placement says the segments of a layer are.
pub(crate) fn sought(manifest: &Manifest, placement: &Placement) -> Vec<Sought> {
    let segments = manifest.segments.iter().enumerate();
    let one = |(index, segment): (usize, &Segment)| {
        let (pack, range) = placement.find(index)?;
        Some(Sought {
            index,
            segment: *segment,
            place: Place { pack: *pack, range },
        })
    };
    segments.filter_map(one).collect()
}

/// Segments that lie one behind the other in a pack.
#[derive(Debug)]
struct Run {
    pack: Pack,
    range: ByteRange,
    sought: Vec<Sought>,
}

/// Joins neighbours; runs are in the order of packs and offsets.
fn runs(mut sought: Vec<Sought>) -> Vec<Run> {
    sought.sort_by_key(|s| (s.place.pack.digest, s.place.range.start, s.place.range.len));
    let mut out: Vec<Run> = Vec::new();
    for one in sought {
        let Place { pack, range } = one.place;
        match out.last_mut() {
            Some(run)
                if run.pack.digest == pack.digest
                    && run.range.start + run.range.len == range.start
                    && run.range.len + range.len <= RANGE_BYTES_MAX =>
            {
                run.range.len += range.len;
                run.sought.push(one);
            }
            _ => out.push(Run {
                pack,
                range,
                sought: vec![one],
            }),
        }
    }
    out
}

/// Whether `stored` is a frame of exactly `segment`.
///
/// # Errors
/// Says how it differs.
pub(crate) fn check_frame(segment: Segment, stored: &[u8]) -> Result<(), FormatError> {
    let plain = frame::decode(stored, segment.len())?;
    let found = Digest::of(&plain);
    if found == segment.digest() {
        Ok(())
    } else {
        Err(FormatError::new(
            "digest of its plain bytes",
            segment.digest().to_hex(),
            found,
        ))
    }
}

/// What an origin said about an object: its bytes, or that they are not there or not right.
pub(crate) fn or_damaged<T>(
    read: Result<T, OriginError>,
) -> Result<Result<T, String>, OriginError> {
    match read {
        Ok(found) => Ok(Ok(found)),
        Err(e @ (OriginError::NotFound { .. } | OriginError::WrongAnswer { .. })) => {
            Ok(Err(e.to_string()))
        }
        Err(e) => Err(e),
    }
}

/// One frame that verified, or why it did not.
pub(crate) type Frame = Result<Vec<u8>, String>;

fn fetch_frame(origin: &dyn Origin, one: &Sought) -> Result<Frame, OriginError> {
    let object = names::pack(&one.place.pack.digest);
    let stored = or_damaged(origin.fetch_of(&object, one.place.pack.size, one.place.range))?;
    Ok(stored.and_then(|stored| {
        check_frame(one.segment, &stored).map_err(|e| e.to_string())?;
        Ok(stored)
    }))
}

fn read_run(origin: &dyn Origin, run: &Run) -> Result<Vec<(Sought, Frame)>, OriginError> {
    let bytes =
        or_damaged(origin.fetch_of(&names::pack(&run.pack.digest), run.pack.size, run.range))?;
    let frame = |one: &Sought| -> Result<Frame, OriginError> {
        if let Ok(bytes) = &bytes {
            let from = to_usize(one.place.range.start - run.range.start);
            let stored = bytes
                .get(from..from + to_usize(one.place.range.len))
                .unwrap_or_default();
            if check_frame(one.segment, stored).is_ok() {
                return Ok(Ok(stored.to_vec()));
            }
        }
        // The range as a whole failed, or this frame came wrong: asked for once more, by itself.
        fetch_frame(origin, one)
    };
    run.sought
        .iter()
        .map(|one| Ok((*one, frame(one)?)))
        .collect()
}

/// Reads all of `sought` and hands each to `take`, grouped by pack, by rising offset.
///
/// # Errors
/// The first failure of the origin, or of `take`.
pub(crate) fn read<E: From<OriginError>>(
    origin: &dyn Origin,
    sought: Vec<Sought>,
    take: &mut dyn FnMut(Sought, Frame) -> Result<(), E>,
) -> Result<(), E> {
    for batch in runs(sought).chunks(THREADS) {
        let done: Vec<_> = std::thread::scope(|scope| {
            let others: Vec<_> = batch
                .iter()
                .skip(1)
                .map(|run| scope.spawn(|| read_run(origin, run)))
                .collect();
            let mine = batch.iter().take(1).map(|run| read_run(origin, run));
            let mut done: Vec<_> = mine.collect();
            done.extend(others.into_iter().map(|other| {
                other
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }));
            done
        });
        for run in done {
            for (one, frame) in run? {
                take(one, frame)?;
            }
        }
    }
    Ok(())
}
