//! Reading a request's head: the method, the path and the range. Nothing else of HTTP/1.1 matters here.

use std::io::BufRead;

/// Longest request head that is read, in bytes.
const HEAD_LEN_MAX: usize = 16 << 10;

/// A request without its body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Path and query as sent.
    pub(crate) target: String,
    /// The `Range` header's value.
    pub(crate) range: Option<String>,
    /// Whether the client asked to close the connection after the answer.
    pub(crate) close: bool,
}

/// Part of a file that a range asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it, with status 200.
    Whole,
    /// These bytes, with status 206.
    Bytes { first: u64, len: u64 },
    /// Nothing of the file: status 416.
    Unsatisfiable,
}

/// Reads one request head; `None` where the client closed the connection or sent something else.
pub(crate) fn read(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    let mut left = HEAD_LEN_MAX;
    let mut next_line = |line: &mut String| {
        line.clear();
        let len = reader
            .by_ref()
            .read_line(line)
            .ok()
            .filter(|len| *len > 0)?;
        left = left.checked_sub(len)?;
        Some(())
    };
    next_line(&mut line)?;
    let mut words = line.split_ascii_whitespace();
    let mut request = Request {
        method: words.next()?.to_owned(),
        target: words.next()?.to_owned(),
        range: None,
        close: false,
    };
    loop {
        next_line(&mut line)?;
        let header = line.trim_end();
        if header.is_empty() {
            return Some(request);
        }
        let (name, value) = header.split_once(':')?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("range") {
            request.range = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("connection") {
            request.close = value.eq_ignore_ascii_case("close");
        }
    }
}

/// What the `Range` header `range` asks of a file of `len` bytes. More than one range, or another unit, is
/// answered with the whole file, as RFC 9110 allows.
pub(crate) fn part(range: Option<&str>, len: u64) -> Part {
    let Some((first, last)) = range
        .and_then(|range| range.strip_prefix("bytes="))
        .filter(|spec| !spec.contains(','))
        .and_then(|spec| spec.split_once('-'))
    else {
        return Part::Whole;
    };
    match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), _) if first >= len => Part::Unsatisfiable,
        (Ok(first), Ok(last)) if last >= first => Part::Bytes {
            first,
            len: last.min(len - 1) - first + 1,
        },
        (Ok(first), Err(_)) if last.is_empty() => Part::Bytes {
            first,
            len: len - first,
        },
        (Err(_), Ok(0)) if first.is_empty() => Part::Unsatisfiable,
        (Err(_), Ok(suffix)) if first.is_empty() => {
            let first = len.saturating_sub(suffix);
            Part::Bytes {
                first,
                len: len - first,
            }
        }
        _ => Part::Whole,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file_and_refused_beyond_it() {
        let table = [
            (None, Part::Whole),
            (Some("bytes=0-0"), Part::Bytes { first: 0, len: 1 }),
            (Some("bytes=10-19"), Part::Bytes { first: 10, len: 10 }),
            (Some("bytes=90-200"), Part::Bytes { first: 90, len: 10 }),
            (Some("bytes=99-"), Part::Bytes { first: 99, len: 1 }),
            (Some("bytes=-7"), Part::Bytes { first: 93, len: 7 }),
            (Some("bytes=-700"), Part::Bytes { first: 0, len: 100 }),
            (Some("bytes=100-"), Part::Unsatisfiable),
            (Some("bytes=-0"), Part::Unsatisfiable),
            (Some("bytes=0-1,3-4"), Part::Whole),
            (Some("bytes=5-4"), Part::Whole),
            (Some("lines=1-2"), Part::Whole),
        ];
        for (range, expected) in table {
            assert_eq!(part(range, 100), expected, "{range:?}");
        }
    }

    #[test]
    fn a_request_head_gives_method_target_and_range() {
        let mut text: &[u8] = b"GET /packs/a?b HTTP/1.1\r\nHost: x\r\nrange: bytes=1-2\r\n\r\nrest";
        let request = read(&mut text).unwrap();
        assert_eq!(
            (request.method.as_str(), request.target.as_str()),
            ("GET", "/packs/a?b")
        );
        assert_eq!(request.range.as_deref(), Some("bytes=1-2"));
        assert!(!request.close);
        assert_eq!(text, b"rest");
        assert_eq!(read(&mut text), None);
    }
}
