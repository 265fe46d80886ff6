//! Streams of frames, damaged and made up: each is some messages and an end or an error, never a panic, and never more memory than
//! the lengths allow. What is read and written again reads the same.
//!
//! `DSEC_FUZZ_SEED` repeats a run.

use super::*;

/// Streams tried.
const STREAMS: usize = 30_000;
/// Longest stream.
const STREAM_BYTES_MAX: usize = 64 << 10;

/// A generator that is good enough to choose where to break something.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let below = u64::try_from(below.max(1)).unwrap();
        usize::try_from(self.0 % below).unwrap()
    }
}

fn wire<T: Serialize>(messages: &[(T, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (head, bytes) in messages {
        write_message(&mut out, head, bytes).unwrap();
    }
    out
}

fn to_data() -> Vec<u8> {
    let digest = Digest::of(b"segment");
    let from = Provenance {
        origin: "dir:/o".to_owned(),
        pack: Digest::of(b"pack"),
        offset: 7,
    };
    let traced = Some(Traced {
        layer: digest,
        index: 3,
    });
    let add = ToData::AddImage {
        id: 1,
        layer: digest,
        uncounted: true,
        ahead: false,
    };
    let hello = ToData::Hello {
        version: VERSION,
        features: features(),
    };
    let frame = ToData::Frame {
        digest,
        from,
        cost: None,
        traced,
    };
    let none = ToData::NoFrame {
        digests: vec![digest; 3],
        reason: "gone".to_owned(),
        foreseen: true,
    };
    let exit = ToData::Exit { id: 4 };
    wire(&[
        (hello, &b""[..]),
        (add, b""),
        (frame, b"stored frame"),
        (none, b""),
        (exit, b""),
    ])
}

fn to_control() -> Vec<u8> {
    let layer = Digest::of(b"layer");
    let need = ToControl::Need {
        layer,
        first: 0,
        count: 9,
        prefetch: true,
    };
    let again = ToControl::Again { layer, index: 5 };
    let drop = ToControl::Drop {
        layer,
        start: 0,
        end: 4096,
    };
    let used = ToControl::Used {
        digests: vec![layer; 2],
    };
    wire(&[(need, &b""[..]), (again, b""), (drop, b""), (used, b"xyz")])
}

/// Pieces of the two, cut, doubled, exchanged, with bits flipped and lengths that lie.
fn damaged(dice: &mut Dice, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[dice.roll(corpus.len())].clone();
    for _ in 0..=dice.roll(4) {
        let at = dice.roll(bytes.len() + 1);
        match dice.roll(7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, u8::try_from(dice.roll(256)).unwrap()),
            2 => {
                let other = &corpus[dice.roll(corpus.len())];
                let from = dice.roll(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            3 if at + 4 <= bytes.len() => {
                let odd = [0, 1, HEAD_BYTES_MAX, HEAD_BYTES_MAX + 1, u32::MAX];
                bytes[at..at + 4].copy_from_slice(&odd[dice.roll(odd.len())].to_le_bytes());
            }
            4 => {
                let words: [&[u8]; 5] =
                    [b"null", b"18446744073709551615", b"-1", b"1e999", b"[[[["];
                let word = words[dice.roll(words.len())];
                bytes.splice(at..at, word.iter().copied());
            }
            _ if at < bytes.len() => bytes[at] ^= 1 << dice.roll(8),
            _ => {}
        }
    }
    bytes.truncate(STREAM_BYTES_MAX);
    bytes
}

/// Messages that could be read, and whether the end was one.
fn read_all<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> (usize, bool) {
    let (mut rest, mut count) = (bytes, 0);
    loop {
        let at = rest;
        match read_message::<T>(&mut rest) {
            Ok(None) => return (count, true),
            Err(error) => {
                // Mutation: `&&` in place of `||` where the lengths are compared with their bounds.
                let long = |at: &[u8], max: u32| {
                    let bytes: [u8; 4] = at[..4].try_into().unwrap();
                    u32::from_le_bytes(bytes) > max
                };
                if at.len() >= 8 && (long(at, HEAD_BYTES_MAX) || long(&at[4..], BLOB_BYTES_MAX)) {
                    assert!(error.to_string().contains("expected at most"), "{error}");
                }
                return (count, false);
            }
            Ok(Some((message, blob))) => {
                count += 1;
                let mut again = Vec::new();
                // What only later builds say is not repeated.
                let text = serde_json::to_string(&message).unwrap();
                if !text.contains(r#""type":"unknown""#) {
                    write_message(&mut again, &message, &blob).unwrap();
                    let (same, same_blob) = read_message::<T>(&mut &*again).unwrap().unwrap();
                    assert_eq!(serde_json::to_string(&same).unwrap(), text);
                    assert_eq!(same_blob, blob);
                }
            }
        }
    }
}

/// Not seen red by a mutation.
#[test]
fn damaged_streams_are_messages_or_errors() {
    let seed = std::env::var("DSEC_FUZZ_SEED").ok();
    let seed = seed.and_then(|s| s.parse().ok()).unwrap_or(0x5eed);
    let mut dice = Dice(seed);
    let corpus = [to_data(), to_control()];
    assert_eq!(read_all::<ToData>(&corpus[0]), (5, true));
    assert_eq!(read_all::<ToControl>(&corpus[1]), (4, true));
    let (mut messages, mut errors, mut ends) = (0, 0, 0);
    for _ in 0..STREAMS {
        let bytes = damaged(&mut dice, &corpus);
        for (count, ended) in [read_all::<ToData>(&bytes), read_all::<ToControl>(&bytes)] {
            messages += count;
            ends += usize::from(ended);
            errors += usize::from(!ended);
        }
    }
    // All three happen, or the damage is of one kind only.
    let least = STREAMS / 20;
    assert!(
        messages > least && errors > least && ends > least,
        "{messages} {errors} {ends}"
    );
}
