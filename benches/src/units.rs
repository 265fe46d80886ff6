//! Units of the command line: delays, bandwidths and sizes.

use std::time::Duration;

/// Parses `1ms`, `250us`, `2s` or `0`.
pub(crate) fn parse_delay(text: &str) -> Result<Duration, String> {
    let expected =
        || format!("`{text}` is not a delay: expected a number with us, ms or s, as in 1ms");
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().ok().ok_or_else(expected)?;
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "" if number == 0.0 => 1.0,
        _ => return Err(expected()),
    };
    Duration::try_from_secs_f64(number * scale)
        .ok()
        .ok_or_else(expected)
}

/// Parses `25MB/s`, `25` (also MB/s) or `none` into bytes per second; 0 means no cap.
pub(crate) fn parse_bandwidth(text: &str) -> Result<u64, String> {
    if text == "none" {
        return Ok(0);
    }
    let number = text.strip_suffix("MB/s").unwrap_or(text);
    match number.parse::<u64>() {
        Ok(megabytes) if megabytes > 0 => Ok(megabytes * 1_000_000),
        _ => Err(format!(
            "`{text}` is not a bandwidth: expected MB/s as in 25 or 25MB/s, or none"
        )),
    }
}

/// How a bandwidth is written in tables: `no cap` or `25 MB/s`.
pub(crate) fn bandwidth_name(bandwidth: u64) -> String {
    match bandwidth {
        0 => "no cap".to_owned(),
        _ => format!("{} MB/s", bandwidth / 1_000_000),
    }
}

/// Bytes as a number of megabytes (10^6).
#[expect(clippy::cast_precision_loss, reason = "shown to one decimal")]
pub(crate) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_and_bandwidths_parse_with_their_units() {
        assert_eq!(parse_delay("1ms"), Ok(Duration::from_millis(1)));
        assert_eq!(parse_delay("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_delay("0"), Ok(Duration::ZERO));
        assert!(parse_delay("1").is_err());
        assert!(parse_delay("-1ms").is_err());
        assert_eq!(parse_bandwidth("25MB/s"), Ok(25_000_000));
        assert_eq!(parse_bandwidth("125"), Ok(125_000_000));
        assert_eq!(parse_bandwidth("none"), Ok(0));
        assert!(parse_bandwidth("0").is_err());
    }
}
