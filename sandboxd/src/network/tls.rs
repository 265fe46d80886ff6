//! The name in the first message of a TLS client. Pure.

/// What the beginning of a stream says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Hello {
    /// More is needed.
    Short,
    /// Not TLS.
    Other,
    /// TLS without a name, with a hidden one, or damaged.
    Nameless,
    /// TLS for this name (lower case).
    Name(String),
}

/// Most bytes that a first message may have.
pub(super) const HELLO_BYTES_MAX: usize = 16 << 10;

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: usize = 0;
/// Encrypted client hello: the name outside is not the one that is asked for.
const ENCRYPTED_HELLO: usize = 0xfe0d;

/// Takes parts off the front of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self, bytes: usize) -> Option<usize> {
        let taken = self.take(bytes)?;
        Some(
            taken
                .iter()
                .fold(0, |number, byte| number << 8 | usize::from(*byte)),
        )
    }

    /// What follows its own length, which has so many bytes.
    fn list(&mut self, bytes: usize) -> Option<Reader<'a>> {
        let len = self.number(bytes)?;
        self.take(len).map(Reader)
    }
}

/// Looks at the beginning of what a client sends.
pub(super) fn hello(bytes: &[u8]) -> Hello {
    match bytes.first() {
        None => return Hello::Short,
        Some(kind) if *kind != HANDSHAKE => return Hello::Other,
        Some(_) => {}
    }
    // The message may be spread over several records.
    let (mut records, mut message) = (Reader(bytes), Vec::new());
    loop {
        let whole = Reader(&message).take(4).map(<[u8]>::len);
        let wanted = whole.and_then(|_| Reader(message.get(1..)?).number(3));
        if wanted.is_some_and(|wanted| message.len() >= wanted + 4) {
            break;
        }
        let record = (|| {
            let kind = records.number(1)?;
            records.take(2)?;
            Some((kind, records.list(2)?.0))
        })();
        match record {
            Some((kind, part)) if kind == usize::from(HANDSHAKE) => message.extend_from_slice(part),
            Some(_) => return Hello::Nameless,
            None if bytes.len() >= HELLO_BYTES_MAX => return Hello::Nameless,
            None => return Hello::Short,
        }
    }
    match name(&message) {
        Some(name) => Hello::Name(name),
        None => Hello::Nameless,
    }
}

fn name(message: &[u8]) -> Option<String> {
    let mut message = Reader(message);
    if message.number(1)? != usize::from(CLIENT_HELLO) {
        return None;
    }
    let mut hello = message.list(3)?;
    // Version, random, session, ciphers, compressions.
    hello.take(34)?;
    hello.list(1)?;
    hello.list(2)?;
    hello.list(1)?;
    let mut extensions = hello.list(2)?;
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let mut extension = extensions.list(2)?;
        match kind {
            ENCRYPTED_HELLO => return None,
            SERVER_NAME => {
                let mut names = extension.list(2)?;
                if names.number(1)? != 0 || found.is_some() {
                    return None;
                }
                let name = std::str::from_utf8(names.list(2)?.0).ok()?;
                found = Some(name.to_ascii_lowercase());
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(len: usize, body: &[u8]) -> Vec<u8> {
        let mut out = body.len().to_string().into_bytes();
        out.clear();
        for shift in (0..len).rev() {
            out.push(u8::try_from(body.len() >> (8 * shift) & 255).unwrap());
        }
        out.extend_from_slice(body);
        out
    }

    fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
        let kind = [
            u8::try_from(kind >> 8).unwrap(),
            u8::try_from(kind & 255).unwrap(),
        ];
        [&kind[..], &list(2, body)].concat()
    }

    fn client_hello(extensions: &[u8]) -> Vec<u8> {
        let body = [
            &[3, 3][..],
            &[7; 32],
            &list(1, b""),
            &list(2, &[19, 1]),
            &list(1, &[0]),
            &list(2, extensions),
        ]
        .concat();
        [&[CLIENT_HELLO][..], &list(3, &body)].concat()
    }

    fn records(message: &[u8], piece: usize) -> Vec<u8> {
        let parts = message.chunks(piece);
        parts
            .flat_map(|part| [&[HANDSHAKE, 3, 1][..], &list(2, part)].concat())
            .collect()
    }

    /// Mutation: without the look at the hidden name, the last assertion but one fails.
    #[test]
    fn the_name_is_found_however_it_is_cut_and_never_guessed() {
        let name = extension(0, &list(2, &[&[0][..], &list(2, b"Pkg.example")].concat()));
        let other = extension(43, &[2, 3, 4]);
        let message = client_hello(&[other.clone(), name.clone()].concat());
        for piece in [1, 7, 1000] {
            let all = records(&message, piece);
            assert_eq!(hello(&all), Hello::Name("pkg.example".to_owned()));
            for len in 0..all.len() {
                assert_eq!(hello(&all[..len]), Hello::Short, "{piece} {len}");
            }
        }
        assert_eq!(hello(b"GET / HTTP/1.1"), Hello::Other);
        assert_eq!(hello(&records(&client_hello(&other), 99)), Hello::Nameless);
        let hidden = [name.clone(), extension(0xfe0d, &[0])].concat();
        assert_eq!(hello(&records(&client_hello(&hidden), 99)), Hello::Nameless);
        let twice = [name.clone(), name].concat();
        assert_eq!(hello(&records(&client_hello(&twice), 99)), Hello::Nameless);
    }
}
