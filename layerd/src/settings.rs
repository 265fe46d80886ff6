//! Sizes and durations as people write them.

use std::time::Duration;

/// A setting that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SettingError {
    #[error("`{0}` is not a size: expected a number and B, KiB, MiB, GiB or TiB, as in `20GiB`")]
    Size(String),
    #[error("`{0}` is not a duration: expected a number and ms, s or m, as in `30s`")]
    Duration(String),
}

fn split(text: &str) -> (&str, &str) {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text.split_at(digits)
}

/// A size in bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, SettingError> {
    let bad = || SettingError::Size(text.to_owned());
    let (number, unit) = split(text);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        "TiB" | "T" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().ok().ok_or_else(bad)?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// A duration, at least a millisecond.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, SettingError> {
    let bad = || SettingError::Duration(text.to_owned());
    let (number, unit) = split(text);
    let number: u64 = number.parse().ok().ok_or_else(bad)?;
    let millis = match unit.trim() {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => return Err(bad()),
    };
    let millis = number.checked_mul(millis).filter(|ms| *ms > 0);
    millis.map(Duration::from_millis).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let cases = [
            ("20GiB", Some(20 << 30)),
            ("0", Some(0)),
            ("512 KiB", Some(512 << 10)),
            ("1T", Some(1 << 40)),
            ("7B", Some(7)),
            ("20GB", None),
            ("", None),
            ("-1", None),
            ("99999999999TiB", None),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_size(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn durations() {
        let cases = [
            ("30s", Some(30_000)),
            ("250ms", Some(250)),
            ("2m", Some(120_000)),
            ("0s", None),
            ("30", None),
            ("s", None),
        ];
        for (text, expected) in cases {
            let expected = expected.map(Duration::from_millis);
            assert_eq!(parse_duration(text).ok(), expected, "{text}");
        }
    }
}
