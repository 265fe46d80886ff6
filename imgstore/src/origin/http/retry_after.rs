//! `Retry-After`: seconds, or a date by the server's own clock.

use std::time::{Duration, SystemTime};

use hyper::HeaderMap;
use hyper::header::{DATE, RETRY_AFTER};

fn date(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(name)?.to_str().ok()?.trim()).ok()
}

/// How long the server wants to be left alone. A date is compared with the reply's own, if it has one: the clocks of two
/// hosts may differ by more than the pause. Nonsense counts as nothing said.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = date(headers, RETRY_AFTER)?;
    let from = date(headers, DATE).unwrap_or(now);
    Some(until.duration_since(from).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(retry: &str, date: Option<&str>) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, retry.parse().unwrap());
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        // Fri, 01 Jan 2100 00:00:00 GMT
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(4_102_444_800);
        retry_after(&headers, now).map(|wait| wait.as_secs())
    }

    #[test]
    fn seconds_and_dates_are_understood_and_nonsense_is_nothing() {
        let cases = [
            ("7", None, Some(7)),
            (" 0 ", None, Some(0)),
            ("Fri, 01 Jan 2100 00:00:30 GMT", None, Some(30)),
            ("Thu, 31 Dec 2099 23:00:00 GMT", None, Some(0)),
            ("18446744073709551615", None, Some(u64::MAX)),
            ("18446744073709551616", None, None),
            ("-1", None, None),
            ("1.5", None, None),
            ("soon", None, None),
            ("", None, None),
        ];
        for (text, date, expected) in cases {
            assert_eq!(parse(text, date), expected, "{text}");
        }
    }

    /// With our own clock in place of the server's, the first would be 20 minutes and the second nothing.
    #[test]
    fn a_server_whose_clock_differs_means_its_own_time() {
        let ahead = Some("Fri, 01 Jan 2100 00:20:00 GMT");
        assert_eq!(parse("Fri, 01 Jan 2100 00:20:05 GMT", ahead), Some(5));
        let behind = Some("Thu, 31 Dec 2099 23:40:00 GMT");
        assert_eq!(parse("Thu, 31 Dec 2099 23:40:05 GMT", behind), Some(5));
    }
}
