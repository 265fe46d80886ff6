//! PAX extended headers: the records of one entry, over the records that hold for all.

use std::collections::BTreeMap;

use super::error::{TarFault, shown};
use crate::ids::to_usize;
use crate::tree::Mtime;

/// Records by key. An empty value stands for "as in the header block", except for attributes.
#[derive(Debug, Clone, Default)]
pub(super) struct PaxRecords {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// GNU sparse 0.0 repeats its keys, so these are kept in order.
    sparse_pairs: Vec<(u64, u64)>,
}

impl PaxRecords {
    /// Adds the records of one extended header: `length key=value\n`, the length counting itself and the newline.
    pub(super) fn add(&mut self, mut data: &[u8]) -> Result<(), TarFault> {
        let mut offset = None;
        while !data.is_empty() {
            let (record, rest) = split_record(data)?;
            data = rest;
            let equals = record.iter().position(|b| *b == b'=');
            let (key, value) = equals
                .map(|at| (record.get(..at), record.get(at + 1..)))
                .and_then(|(key, value)| key.zip(value))
                .ok_or_else(|| fault(record, "expected `key=value`"))?;
            match key {
                b"GNU.sparse.offset" => offset = Some(decimal(key, value)?),
                b"GNU.sparse.numbytes" => {
                    let at = offset
                        .take()
                        .ok_or(TarFault::Sparse("expected an offset before each length"))?;
                    self.sparse_pairs.push((at, decimal(key, value)?));
                }
                _ => {
                    self.records.insert(key.to_vec(), value.to_vec());
                }
            }
        }
        Ok(())
    }

    /// These records with `inner` over them.
    pub(super) fn overlaid(&self, inner: Self) -> Self {
        let mut both = self.clone();
        both.records.extend(inner.records);
        both.sparse_pairs = inner.sparse_pairs;
        both
    }

    /// A value that is there and not empty.
    pub(super) fn text(&self, key: &str) -> Option<&[u8]> {
        let value = self.records.get(key.as_bytes())?;
        (!value.is_empty()).then_some(value.as_slice())
    }

    /// A non-negative decimal number.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>, TarFault> {
        self.text(key)
            .map(|value| decimal(key.as_bytes(), value))
            .transpose()
    }

    /// A time in decimal seconds.
    pub(super) fn time(&self, key: &str) -> Result<Option<Mtime>, TarFault> {
        self.text(key)
            .map(|value| {
                parse_time(value).ok_or_else(|| fault(key.as_bytes(), "expected decimal seconds"))
            })
            .transpose()
    }

    pub(super) fn sparse_pairs(&self) -> &[(u64, u64)] {
        &self.sparse_pairs
    }

    /// Extended attributes: `SCHILY.xattr.NAME` (bytes; `%3D` and `%25` in the name as GNU tar writes them), and
    /// `LIBARCHIVE.xattr.NAME` (name URL-encoded, value base64) where the former is missing.
    pub(super) fn xattrs(&self) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, TarFault> {
        let mut xattrs = BTreeMap::new();
        for (key, value) in &self.records {
            if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                let value = base64(value).ok_or_else(|| fault(key, "expected base64"))?;
                xattrs.insert(percent_decoded(name, true), value);
            }
        }
        for (key, value) in &self.records {
            if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                xattrs.insert(percent_decoded(name, false), value.clone());
            }
        }
        Ok(xattrs)
    }
}

fn fault(record: &[u8], what: &'static str) -> TarFault {
    TarFault::Pax {
        record: shown(record.get(..record.len().min(80)).unwrap_or_default()),
        what,
    }
}

/// The first record without its length and newline, and what follows it.
fn split_record(data: &[u8]) -> Result<(&[u8], &[u8]), TarFault> {
    let bad = || {
        fault(
            data,
            "expected its decimal length first and a newline at its end",
        )
    };
    let space = data
        .iter()
        .take(20)
        .position(|b| *b == b' ')
        .ok_or_else(bad)?;
    let (digits, _) = data.split_at(space);
    let len = to_usize(decimal(b"record length", digits)?);
    if len <= space + 1 || len > data.len() {
        return Err(bad());
    }
    let (record, rest) = data.split_at(len);
    let body = record
        .get(space + 1..)
        .and_then(|body| body.strip_suffix(b"\n"))
        .ok_or_else(bad)?;
    Ok((body, rest))
}

pub(super) fn decimal(key: &[u8], value: &[u8]) -> Result<u64, TarFault> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(value)
        .ok()
        .filter(|_| digits)
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| fault(key, "expected a decimal number below 2^64"))
}

/// `-1.5` is one and a half second before 1970: second -2, nanosecond 500,000,000. Digits behind the ninth round down.
fn parse_time(value: &[u8]) -> Option<Mtime> {
    let text = std::str::from_utf8(value).ok()?;
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |t: &str| t.bytes().all(|b| b.is_ascii_digit());
    if !(is_digits(whole) && is_digits(fraction)) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let sec: i64 = if whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    let nine = fraction.get(..fraction.len().min(9))?;
    let nsec: u32 = format!("{nine:0<9}").parse().ok()?;
    if !negative {
        return Some(Mtime { sec, nsec });
    }
    let more = fraction
        .get(nine.len()..)
        .is_some_and(|rest| rest.bytes().any(|b| b != b'0'));
    let below = i64::from(nsec) + i64::from(more);
    if below == 0 {
        return Some(Mtime { sec: -sec, nsec: 0 });
    }
    Some(Mtime {
        sec: (-sec).checked_sub(1)?,
        nsec: u32::try_from(1_000_000_000 - below).ok()?,
    })
}

/// `all`: every `%XX`; else only the two GNU tar writes.
fn percent_decoded(name: &[u8], all: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, tail)) = rest.split_first() {
        let code = match rest {
            [b'%', a, b, ..] => std::str::from_utf8(&[*a, *b])
                .ok()
                .and_then(|hex| u8::from_str_radix(hex, 16).ok())
                .filter(|code| all || matches!(code, b'=' | b'%')),
            _ => None,
        };
        match code {
            Some(byte) => {
                out.push(byte);
                rest = rest.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let (mut bits, mut count) = (0_u32, 0_u32);
    for byte in text.iter().take_while(|b| **b != b'=') {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push(u8::try_from((bits >> count) & 0xff).ok()?);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_count_nanoseconds_forward() {
        let cases: [(&[u8], i64, u32); 8] = [
            (b"0", 0, 0),
            (b"1.5", 1, 500_000_000),
            (b"-1.5", -2, 500_000_000),
            (b"-1", -1, 0),
            (b"-0.000000001", -1, 999_999_999),
            (b"1.0000000019", 1, 1),
            (b"-1.0000000001", -2, 999_999_999),
            (b"9999999999999.000000007", 9_999_999_999_999, 7),
        ];
        for (text, sec, nsec) in cases {
            assert_eq!(parse_time(text), Some(Mtime { sec, nsec }), "{text:?}");
        }
        for bad in [
            b"".as_slice(),
            b"-",
            b"x",
            b"1e3",
            b"1.2.3",
            b"99999999999999999999",
        ] {
            assert_eq!(parse_time(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn damaged_records_are_refused() {
        let mut good = PaxRecords::default();
        good.add(b"10 path=ab\n").unwrap_err();
        good.add(b"11 path=ab\n").unwrap();
        assert_eq!(good.text("path"), Some(b"ab".as_slice()));
        for bad in [
            b"5 a=b\n".as_slice(),
            b"99 a=b\n",
            b"x a=b\n",
            b"6 a=b",
            b"0 a=b\n",
            b"2 \n",
            b"18446744073709551615 a=b\n",
            b"6 abc\n",
        ] {
            assert!(PaxRecords::default().add(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_empty_value_gives_the_header_its_say_again() {
        let mut global = PaxRecords::default();
        global.add(b"11 path=ab\n").unwrap();
        let mut local = PaxRecords::default();
        local.add(b"8 path=\n").unwrap();
        assert_eq!(global.overlaid(local).text("path"), None);
    }

    #[test]
    fn both_spellings_of_attributes_are_read() {
        let mut records = PaxRecords::default();
        records.add(b"33 SCHILY.xattr.user.a%3Db%25c=v\n").unwrap();
        records
            .add(b"38 LIBARCHIVE.xattr.user.%c3%a4=AP8B\n")
            .unwrap_err();
        records
            .add(b"37 LIBARCHIVE.xattr.user.%c3%a4=AP8B\n")
            .unwrap();
        let xattrs = records.xattrs().unwrap();
        assert_eq!(xattrs[b"user.a=b%c".as_slice()], b"v");
        assert_eq!(xattrs["user.ä".as_bytes()], [0, 255, 1]);
    }
}
