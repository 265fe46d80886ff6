//! As much of DNS as answering a sandbox takes: one question in, addresses out. Pure.

use std::net::Ipv4Addr;

/// Seconds that an answer may be kept.
const TTL_SECONDS: u32 = 30;
/// Most addresses of one answer: it stays below 512 bytes.
const ADDRESSES_MAX: usize = 16;
const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;

/// A question.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// Lower case, without a last dot.
    pub(super) name: String,
    /// Whether IPv4 addresses are asked for.
    pub(super) addresses: bool,
    /// Where the question ends in the message.
    end: usize,
}

/// What the answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    Done = 0,
    Failed = 2,
    NoSuchName = 3,
}

fn number(message: &[u8], at: usize) -> Option<u16> {
    let bytes = [*message.get(at)?, *message.get(at + 1)?];
    Some(u16::from(bytes[0]) << 8 | u16::from(bytes[1]))
}

/// The one question of a query; `None` for what is none.
pub(super) fn question(message: &[u8]) -> Option<Question> {
    let flags = number(message, 2)?;
    // A response, another operation, or several questions.
    if flags & 0xf800 != 0 || number(message, 4)? != 1 {
        return None;
    }
    let mut at = 12;
    let mut name = String::new();
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1;
        if len == 0 {
            break;
        }
        // Compression has no place in a question.
        if len > 63 || name.len() + len > 253 {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        for byte in message.get(at..at + len)? {
            if !byte.is_ascii_graphic() || *byte == b'.' {
                return None;
            }
            name.push(char::from(byte.to_ascii_lowercase()));
        }
        at += len;
    }
    let (kind, class) = (number(message, at)?, number(message, at + 2)?);
    Some(Question {
        name,
        addresses: kind == TYPE_A && class == CLASS_IN,
        end: at + 4,
    })
}

fn put(out: &mut Vec<u8>, value: u16) {
    out.push(u8::try_from(value >> 8).unwrap_or(0));
    out.push(u8::try_from(value & 0xff).unwrap_or(0));
}

/// The answer to a query whose question was understood.
pub(super) fn answer(
    query: &[u8],
    question: &Question,
    code: Code,
    addresses: &[Ipv4Addr],
) -> Vec<u8> {
    let addresses = addresses
        .get(..ADDRESSES_MAX.min(addresses.len()))
        .unwrap_or_default();
    let mut out = query.get(..2).unwrap_or_default().to_vec();
    let wants_recursion = number(query, 2).unwrap_or(0) & 0x0100;
    let code = match code {
        Code::Done => 0,
        Code::Failed => 2,
        Code::NoSuchName => 3,
    };
    // A response; recursion is available.
    put(&mut out, 0x8080 | wants_recursion | code);
    put(&mut out, 1);
    put(&mut out, u16::try_from(addresses.len()).unwrap_or(0));
    put(&mut out, 0);
    put(&mut out, 0);
    out.extend_from_slice(query.get(12..question.end).unwrap_or_default());
    for address in addresses {
        // The name of the question, by its place.
        put(&mut out, 0xc00c);
        put(&mut out, TYPE_A);
        put(&mut out, CLASS_IN);
        put(&mut out, 0);
        put(&mut out, u16::try_from(TTL_SECONDS).unwrap_or(0));
        put(&mut out, 4);
        out.extend_from_slice(&address.octets());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &[u8] = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x03Pkg\x07example\0\0\x01\0\x01";

    #[test]
    fn a_question_is_understood_and_answered() {
        let asked = question(QUERY).unwrap();
        assert_eq!((&*asked.name, asked.addresses), ("pkg.example", true));
        let told = answer(QUERY, &asked, Code::Done, &[Ipv4Addr::new(9, 8, 7, 6)]);
        let mut expected = b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0".to_vec();
        expected.extend_from_slice(&QUERY[12..]);
        expected.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\0\x1e\0\x04\x09\x08\x07\x06");
        assert_eq!(told, expected);
        let refused = answer(QUERY, &asked, Code::NoSuchName, &[]);
        assert_eq!((refused[3] & 15, refused[7]), (3, 0));
        let many = vec![Ipv4Addr::LOCALHOST; 100];
        assert!(answer(QUERY, &asked, Code::Done, &many).len() <= 512);
    }

    /// Any damage is refused or understood, never more.
    #[test]
    fn damaged_queries_are_no_questions() {
        for len in 0..QUERY.len() {
            assert_eq!(question(&QUERY[..len]), None, "{len}");
        }
        let mut response = QUERY.to_vec();
        response[2] |= 0x80;
        assert_eq!(question(&response), None);
        let mut pointer = QUERY.to_vec();
        pointer[12] = 0xc0;
        assert_eq!(question(&pointer), None);
        for at in 0..QUERY.len() {
            for bit in 0..8 {
                let mut damaged = QUERY.to_vec();
                damaged[at] ^= 1 << bit;
                if let Some(asked) = question(&damaged) {
                    answer(&damaged, &asked, Code::Failed, &[]);
                }
            }
        }
    }
}
