//! Durations as people write them: `24h`, `7d`, `90s`.

use std::time::Duration;

/// Parses a duration; a bare `0` is one too.
///
/// # Errors
/// Says what is expected.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let bad =
        || format!("`{text}` is not a duration: expected a number and s, m, h or d, as in `24h`");
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok().ok_or_else(bad)?;
    let seconds = match unit {
        "" if number == 0 => 0,
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(bad()),
    };
    let seconds = number.checked_mul(seconds).ok_or_else(bad)?;
    Ok(Duration::from_secs(seconds))
}

/// A duration for people, in its largest whole unit.
pub(crate) fn text(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let found = units
        .iter()
        .find(|(n, _)| seconds > 0 && seconds.is_multiple_of(*n));
    found.map_or_else(
        || format!("{seconds}s"),
        |(n, unit)| format!("{}{unit}", seconds / n),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for (written, seconds) in [
            ("24h", Some(86_400)),
            ("7d", Some(604_800)),
            ("0", Some(0)),
            ("0s", Some(0)),
            ("90s", Some(90)),
            ("5m", Some(300)),
            ("5", None),
            ("h", None),
            ("-1h", None),
            ("1.5h", None),
            ("99999999999999999d", None),
        ] {
            assert_eq!(
                parse(written).ok(),
                seconds.map(Duration::from_secs),
                "{written}"
            );
        }
        for (seconds, written) in [
            (86_400, "1d"),
            (90_000, "25h"),
            (90, "90s"),
            (0, "0s"),
            (120, "2m"),
        ] {
            assert_eq!(text(Duration::from_secs(seconds)), written);
        }
    }
}
