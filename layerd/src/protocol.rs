//! What the two processes say to each other over `CACHE/run/data-plane.sock`.
//!
//! A message is a head in JSON and, for frames, bytes behind it:
//!
//! ```text
//! u32 le  length of the head      u32 le  length of the bytes      head      bytes
//! ```
//! The data plane listens, the control process connects; one connection at a time, the newest wins. Requests of the control
//! process carry an `id` that the answer repeats; what the data plane needs is not a request but a wish: it may be
//! said again after a reconnection, and is answered by [`ToData::Frame`] or [`ToData::NoFrame`], for any digest, at any time.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, Read, Write};
use std::path::PathBuf;

use imgstore::ids::Digest;
use layerd_client::api::{Counters, ErrorKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::driver::Driver;
use crate::histogram::Observed;

/// Both sides must have the same; a data plane of another version is not adopted.
pub(crate) const VERSION: u32 = 2;
/// What this build can do beyond the first one of [`VERSION`].
pub(crate) const FEATURES: [&str; 2] = [HISTOGRAMS, FORESEEN];
/// The data plane measures how long reads take, and says how much is waiting.
pub(crate) const HISTOGRAMS: &str = "histograms";
/// The data plane says what is read of what a trace brought ([`ToControl::Foreseen`]).
pub(crate) const FORESEEN: &str = "foreseen";
/// Features without which this control process cannot work with a data plane.
pub(crate) const FEATURES_NEEDED: [&str; 0] = [];
/// Longest head: statistics of some ten thousand layers.
const HEAD_BYTES_MAX: u32 = 8 << 20;
/// Longest bytes: one frame of a 4 MiB segment and zstd's worst case.
const BLOB_BYTES_MAX: u32 = 5 << 20;

/// Where a frame came from, for the log line when it is damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Provenance {
    /// Address of the origin.
    pub(crate) origin: String,
    /// The pack.
    pub(crate) pack: Digest,
    /// Offset of the frame in the pack.
    pub(crate) offset: u64,
}

/// What fetching a range cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// The layer it was fetched for.
    pub(crate) layer: Digest,
    /// Requests sent.
    pub(crate) requests: u64,
    /// Of those, repeated ones.
    pub(crate) retries: u64,
    /// Bytes received.
    pub(crate) bytes: u64,
    /// Plain bytes of the segments in them.
    pub(crate) plain_bytes: u64,
}

impl Cost {
    /// The counters it belongs to.
    pub(crate) fn counters(&self) -> Counters {
        Counters {
            remote_requests: self.requests,
            remote_bytes: self.bytes,
            fetched_plain_bytes: self.plain_bytes,
            retries: self.retries,
            ..Counters::default()
        }
    }
}

/// The place of a segment that was fetched because of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traced {
    /// The layer.
    pub(crate) layer: Digest,
    /// The segment's index.
    pub(crate) index: usize,
}

/// Blocks that were read for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Touch {
    /// When, in microseconds of the data plane's life.
    pub(crate) at_us: u64,
    /// First block of the layer's data.
    pub(crate) first: u32,
    /// How many.
    pub(crate) count: u32,
}

/// The first touches of a layer since it is served, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Touches {
    /// The touches.
    pub(crate) touches: Vec<Touch>,
    /// There were more than are kept.
    pub(crate) full: bool,
}

/// From the control process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ToData {
    /// First message of a connection.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// [`FEATURES`].
        #[serde(default)]
        features: Vec<String>,
    },
    /// Serve this layer; its manifest and metadata are in `CACHE/layers`. Adding a served layer again is fine.
    AddImage {
        /// Repeated in the answer.
        id: u64,
        /// The layer.
        layer: Digest,
        /// What is read of it is nobody's business: it is in no counter.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        uncounted: bool,
        /// Whether the hot segments behind one that is read may be loaded ahead.
        ahead: bool,
    },
    /// Stop serving this layer.
    RemoveImage {
        /// Repeated in the answer.
        id: u64,
        /// The layer.
        layer: Digest,
    },
    /// A segment's stored frame, in the bytes. Not verified.
    Frame {
        /// The segment.
        digest: Digest,
        /// Where it came from.
        from: Provenance,
        /// What fetching cost, for the layer; with the first frame of a range. A message of its own would make the reader
        /// wait for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cost: Option<Box<Cost>>,
        /// It came because of a trace, and is in the cache: nobody needs to keep it who does not wait for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        traced: Option<Traced>,
    },
    /// There is no frame for these segments now.
    NoFrame {
        /// The segments.
        digests: Vec<Digest>,
        /// Why, for the log.
        reason: String,
        /// What came to nothing was a trace's: whoever reads one of them asks, or has asked, in their own name.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        foreseen: bool,
    },
    /// Count this, for a layer or (none) only in the total.
    Count {
        /// The layer.
        layer: Option<Digest>,
        /// What to add.
        counters: Box<Counters>,
    },
    /// Give all counters.
    Stats {
        /// Repeated in the answer.
        id: u64,
    },
    /// Give the first touches of a layer.
    Trace {
        /// Repeated in the answer.
        id: u64,
        /// The layer.
        layer: Digest,
    },
    /// Unmount and end.
    Exit {
        /// Repeated in the answer.
        id: u64,
    },
    /// Something that a later build says.
    #[serde(other)]
    Unknown,
}

/// Why a request of the control process failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// What can be done about it.
    pub(crate) kind: ErrorKind,
    /// What happened.
    pub(crate) message: String,
}

/// All counters of a data plane.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct PlaneStats {
    /// Per layer that is served now.
    pub(crate) layers: BTreeMap<String, Counters>,
    /// All layers that ever were, and what belongs to none.
    pub(crate) total: Counters,
    /// How long pieces of reads took, and what is waiting; `None` from a data plane without [`HISTOGRAMS`].
    #[serde(default)]
    pub(crate) now: Option<PlaneNow>,
}

/// What a data plane measures besides counters.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PlaneNow {
    /// Pieces of reads answered from memory or from the cache on disk.
    pub(crate) hit: Observed,
    /// Pieces of reads that waited for an origin.
    pub(crate) miss: Observed,
    /// Pieces of reads that failed.
    pub(crate) failed: Observed,
    /// Segments that somebody or read-ahead waits for.
    pub(crate) pending_segments: u64,
    /// Pieces of reads that wait.
    pub(crate) waiting_reads: u64,
    /// Tasks for the workers.
    pub(crate) queued_tasks: u64,
    /// Plain bytes of segments kept in memory.
    pub(crate) memory_bytes: u64,
    /// The process's resident memory.
    pub(crate) resident_bytes: u64,
}

/// From the data plane.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ToControl {
    /// Answer to [`ToData::Hello`].
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// The data plane's process.
        pid: u32,
        /// The layers it serves.
        layers: Vec<Digest>,
        /// [`FEATURES`] of its build.
        #[serde(default)]
        features: Vec<String>,
        /// How it offers layers.
        #[serde(default)]
        driver: Driver,
    },
    /// Answer to a request with an id.
    Done {
        /// The request's.
        id: u64,
        /// Why it failed, if it did.
        failure: Option<Failure>,
        /// Answer to [`ToData::Stats`].
        stats: Option<Box<PlaneStats>>,
        /// Answer to [`ToData::Trace`].
        touches: Option<Box<Touches>>,
        /// Answer to [`ToData::AddImage`]: where the kernel finds the layer; none from a build that has FUSE only.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source: Option<PathBuf>,
    },
    /// Frames are needed: segments `first .. first + count` of a layer.
    Need {
        /// The layer.
        layer: Digest,
        /// Index of the first segment.
        first: usize,
        /// How many.
        count: usize,
        /// Nobody waits for them yet.
        prefetch: bool,
    },
    /// A frame came and was damaged: fetch it once more.
    Again {
        /// The layer.
        layer: Digest,
        /// Index of the segment.
        index: usize,
    },
    /// Somebody now waits for a segment that was asked for as prefetch.
    Promote {
        /// The segment.
        digest: Digest,
    },
    /// Bytes `start .. end` of a layer's file in the FUSE mount need not be in its page cache any more.
    Drop {
        /// The layer.
        layer: Digest,
        /// First byte.
        start: u64,
        /// First byte behind it.
        end: u64,
    },
    /// These cached segments were read.
    Used {
        /// The segments.
        digests: Vec<Digest>,
    },
    /// So many stored bytes of what a trace brought were read for the first time.
    Foreseen {
        /// The layer.
        layer: Digest,
        /// How many.
        bytes: u64,
    },
    /// Something that a later build says.
    #[serde(other)]
    Unknown,
}

/// The features of this build, as they are said.
pub(crate) fn features() -> Vec<String> {
    FEATURES.map(str::to_owned).to_vec()
}

/// Writes one message.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a message that the other side would refuse: nothing was written. Otherwise what
/// the socket said; the connection is useless then, a part may have been written.
pub(crate) fn write_message<T: Serialize>(
    stream: &mut impl Write,
    head: &T,
    bytes: &[u8],
) -> io::Result<()> {
    let json = serde_json::to_vec(head)?;
    let length = |bytes: &[u8], max: u32| {
        let len = u32::try_from(bytes.len()).ok().filter(|len| *len <= max);
        len.ok_or_else(|| {
            let text = format!(
                "message part of {} bytes: expected at most {max}",
                bytes.len()
            );
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })
    };
    let (head_len, blob_len) = (
        length(&json, HEAD_BYTES_MAX)?,
        length(bytes, BLOB_BYTES_MAX)?,
    );
    let mut start = Vec::with_capacity(json.len() + 8);
    start.extend_from_slice(&head_len.to_le_bytes());
    start.extend_from_slice(&blob_len.to_le_bytes());
    start.extend_from_slice(&json);
    let sent = stream.write_vectored(&[IoSlice::new(&start), IoSlice::new(bytes)])?;
    if let Some(rest) = start.get(sent..) {
        stream.write_all(rest)?;
    }
    let sent = sent.saturating_sub(start.len());
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

/// Reads one message; `None` at the end of the stream.
///
/// # Errors
/// What the socket said, or what is wrong with the message.
pub(crate) fn read_message<T: DeserializeOwned>(
    stream: &mut impl Read,
) -> io::Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0; 8];
    match stream.read_exact(&mut lengths) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [a, b, c, d, e, f, g, h] = lengths;
    let head_len = u32::from_le_bytes([a, b, c, d]);
    let blob_len = u32::from_le_bytes([e, f, g, h]);
    if head_len > HEAD_BYTES_MAX || blob_len > BLOB_BYTES_MAX {
        let text = format!(
            "message of {head_len} + {blob_len} bytes: expected at most {HEAD_BYTES_MAX} + {BLOB_BYTES_MAX}"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let read = |stream: &mut dyn Read, len: u32| {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let mut bytes = vec![0; len];
        stream.read_exact(&mut bytes).map(|()| bytes)
    };
    let json = read(stream, head_len)?;
    let bytes = read(stream, blob_len)?;
    Ok(Some((serde_json::from_slice(&json)?, bytes)))
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_with_their_bytes_and_the_end_is_none() {
        let mut wire = Vec::new();
        let digest = Digest::of(b"segment");
        let from = Provenance {
            origin: "dir:/o".to_owned(),
            pack: Digest::of(b"pack"),
            offset: 7,
        };
        let head = ToData::Frame {
            digest,
            from,
            cost: None,
            traced: None,
        };
        write_message(&mut wire, &head, b"stored frame").unwrap();
        write_message(&mut wire, &ToData::Exit { id: 3 }, b"").unwrap();
        let mut wire = &*wire;
        let (message, bytes) = read_message::<ToData>(&mut wire).unwrap().unwrap();
        assert!(
            matches!(message, ToData::Frame { digest: d, from, cost: None, traced: None } if d == digest && from.offset == 7)
        );
        assert_eq!(bytes, b"stored frame");
        let (message, bytes) = read_message::<ToData>(&mut wire).unwrap().unwrap();
        assert!(matches!(message, ToData::Exit { id: 3 }) && bytes.is_empty());
        assert!(read_message::<ToData>(&mut wire).unwrap().is_none());
    }

    /// Mutation: without the variants `Unknown`, reading such a message is an error, which ends the connection.
    #[test]
    fn messages_and_fields_of_later_builds_are_passed_over() {
        for head in [
            r#"{"type":"dance","id":7,"tempo":[1,2]}"#,
            r#"{"type":"hello","version":1,"mood":"good"}"#,
        ] {
            let mut wire = Vec::new();
            let len = u32::try_from(head.len()).unwrap();
            wire.extend_from_slice(&len.to_le_bytes());
            wire.extend_from_slice(&3_u32.to_le_bytes());
            wire.extend_from_slice(head.as_bytes());
            wire.extend_from_slice(b"abc");
            write_message(&mut wire, &ToData::Exit { id: 3 }, b"").unwrap();
            let mut wire = &*wire;
            let (message, _) = read_message::<ToData>(&mut wire).unwrap().unwrap();
            assert!(
                matches!(&message, ToData::Unknown)
                    || matches!(&message, ToData::Hello { version: 1, features } if features.is_empty()),
                "{message:?}"
            );
            let (message, _) = read_message::<ToData>(&mut wire).unwrap().unwrap();
            assert!(matches!(message, ToData::Exit { id: 3 }));
        }
    }

    #[test]
    fn what_the_other_side_would_refuse_is_not_sent() {
        let mut wire = Vec::new();
        let bytes = vec![0; usize::try_from(BLOB_BYTES_MAX).unwrap() + 1];
        let error = write_message(&mut wire, &ToData::Exit { id: 1 }, &bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(wire.is_empty());
    }

    #[test]
    fn absurd_lengths_are_refused_before_memory_is_taken() {
        let wire = [0xff; 64];
        let error = read_message::<ToData>(&mut &wire[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
