//! Changes inputs: bytes, numbers of any width and form, pieces, and the values of JSON documents.

use crate::rng::Rng;

/// Numbers on which arithmetic goes wrong.
const NUMBERS: [u64; 18] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];
/// Texts that stand in for a decimal number.
const TEXTS: [&str; 8] = [
    "0",
    "-1",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
    "1e309",
    "4294967296",
    "00000000000000000001",
];
/// Pieces that mean something to one parser or another.
const TOKENS: [&[u8]; 22] = [
    b"..",
    b"/",
    b"../../etc/passwd",
    b"/etc/shadow",
    b"\0",
    b"\n",
    b"ustar\0",
    b"path=",
    b"GNU.sparse.map",
    b"GNU.sparse.size=18446744073709551615\n",
    b"SCHILY.xattr.user.a=",
    b".wh.",
    b".wh..wh..opq",
    b"sha256:",
    b"{}",
    b"[]",
    b"null",
    b"\x28\xb5\x2f\xfd",
    b"\x1f\x8b\x08",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"dsecchnk",
    b"\"",
];

fn at(rng: &mut Rng, len: usize) -> usize {
    usize::try_from(rng.below(u64::try_from(len.max(1)).unwrap())).unwrap()
}

/// One to six changes; `corpus` lends pieces.
pub(crate) fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>, corpus: &[Vec<u8>], len_max: usize) {
    for _ in 0..=rng.below(6) {
        change(rng, bytes, corpus);
    }
    bytes.truncate(len_max);
}

fn change(rng: &mut Rng, bytes: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let place = at(rng, bytes.len());
    match rng.below(11) {
        0 if !bytes.is_empty() => bytes[place] ^= 1 << rng.below(8),
        1 if !bytes.is_empty() => bytes[place] = rng.next().to_le_bytes()[0],
        2 => number(rng, bytes, place),
        3 => bytes.truncate(place),
        4 => {
            let end = bytes.len().min(place + at(rng, 64));
            bytes.drain(place..end);
        }
        5 => {
            let end = bytes.len().min(place + at(rng, 600));
            let piece = bytes[place..end].to_vec();
            let to = at(rng, bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
        6 => {
            let other = rng.pick(corpus);
            let from = at(rng, other.len());
            let end = other.len().min(from + at(rng, 1024));
            bytes.splice(place..place, other[from..end].iter().copied());
        }
        7 => {
            let token = rng.pick(&TOKENS);
            if rng.below(2) == 0 {
                bytes.splice(place..place, token.iter().copied());
            } else {
                let end = bytes.len().min(place + token.len());
                bytes.splice(place..end, token.iter().copied());
            }
        }
        8 => decimal(rng, bytes, place),
        9 => json(rng, bytes),
        _ => {
            // Whole blocks: entries of tars, blocks of images.
            let size = rng.pick(&[32usize, 64, 512, 4096]);
            let from = place / size * size;
            let end = bytes.len().min(from + size);
            let block = bytes[from..end].to_vec();
            let to = at(rng, bytes.len() + 1) / size * size;
            if rng.below(3) == 0 {
                bytes.drain(from..end);
            } else {
                bytes.splice(to..to, block);
            }
        }
    }
}

/// A number of 2, 4 or 8 bytes over what is there.
fn number(rng: &mut Rng, bytes: &mut [u8], place: usize) {
    let width = rng.pick(&[2usize, 4, 8]);
    let number = rng.pick(&NUMBERS).wrapping_add(rng.below(3)).to_le_bytes();
    let end = bytes.len().min(place + width);
    let len = end - place;
    bytes[place..end].copy_from_slice(&number[..len]);
}

/// Another number in the place of the next decimal one.
fn decimal(rng: &mut Rng, bytes: &mut Vec<u8>, place: usize) {
    let digit = |b: &u8| b.is_ascii_digit();
    let Some(from) = bytes[place..].iter().position(digit).map(|n| place + n) else {
        return;
    };
    let len = bytes[from..].iter().take_while(|b| digit(b)).count();
    let text = if rng.below(2) == 0 {
        rng.pick(&TEXTS).to_owned()
    } else {
        rng.pick(&NUMBERS).to_string()
    };
    bytes.splice(from..from + len, text.into_bytes());
}

/// A value below `node`, at most `depth` levels down.
fn descend<'v>(
    rng: &mut Rng,
    node: &'v mut serde_json::Value,
    depth: u64,
) -> &'v mut serde_json::Value {
    let len = match &*node {
        serde_json::Value::Array(items) => items.len(),
        serde_json::Value::Object(fields) => fields.len(),
        _ => 0,
    };
    if depth == 0 || len == 0 {
        return node;
    }
    let place = at(rng, len);
    let below = match node {
        serde_json::Value::Array(items) => items.get_mut(place),
        serde_json::Value::Object(fields) => fields.values_mut().nth(place),
        _ => None,
    };
    descend(rng, below.unwrap(), depth - 1)
}

/// Another value somewhere in a JSON document.
fn json(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let Ok(mut document) = serde_json::from_slice::<serde_json::Value>(bytes) else {
        return;
    };
    let depth = rng.below(6);
    let node = descend(rng, &mut document, depth);
    match (rng.below(6), node) {
        (0, serde_json::Value::Array(items)) if !items.is_empty() => {
            let item = rng.pick(items);
            items.extend(std::iter::repeat_n(item, at(rng, 40)));
        }
        (1, serde_json::Value::Array(items)) => items.clear(),
        (2, serde_json::Value::Object(fields)) => {
            let key = fields.keys().next().cloned();
            key.map(|key| fields.remove(&key));
        }
        (_, node) => {
            *node = match rng.below(5) {
                0 => serde_json::Value::Null,
                1 => rng.pick(&NUMBERS).into(),
                2 => String::from_utf8_lossy(rng.pick(&TOKENS))
                    .into_owned()
                    .into(),
                3 => (-1).into(),
                _ => serde_json::json!([[], {}, 0]),
            }
        }
    }
    *bytes = serde_json::to_vec(&document).unwrap();
}
