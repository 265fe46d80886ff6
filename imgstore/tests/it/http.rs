//! The HTTP origin against a real server that misbehaves, by both of its ways: the short one for `http://`, and the general
//! one, which is taken here because the address has a user in it.

use std::time::{Duration, Instant};

use imgstore::origin::http::{HttpLimits, HttpOrigin};
use imgstore::origin::{ByteRange, Origin, OriginError};

use crate::bad_web::{Act, BadWeb, Request};

const OBJECT: &str = "packs/aa/object";
const RANGE: ByteRange = ByteRange {
    start: 100,
    len: 5000,
};

fn object() -> Vec<u8> {
    (0..20_000_u32)
        .flat_map(|n| (n * n).to_le_bytes())
        .collect()
}

fn part() -> Vec<u8> {
    object()[100..5100].to_vec()
}

fn web() -> BadWeb {
    BadWeb::serve(|path| path.ends_with(OBJECT).then(object))
}

/// Short enough to wait for.
fn limits() -> HttpLimits {
    HttpLimits {
        connect: Duration::from_secs(2),
        first_byte: Duration::from_millis(400),
        progress_window: Duration::from_millis(400),
        progress_bytes: 1000,
        ..HttpLimits::default()
    }
}

/// The server by both ways.
fn both(web: &BadWeb) -> [(&'static str, HttpOrigin); 2] {
    let plain = web.url();
    let general = plain.replace("http://", "http://user:word@");
    [
        ("plain", HttpOrigin::open_with(&plain, limits()).unwrap()),
        (
            "general",
            HttpOrigin::open_with(&general, limits()).unwrap(),
        ),
    ]
}

fn variant(error: &OriginError) -> &'static str {
    match error {
        OriginError::NotFound { .. } => "NotFound",
        OriginError::Unavailable { .. } => "Unavailable",
        OriginError::Busy { .. } => "Busy",
        OriginError::Denied { .. } => "Denied",
        OriginError::WrongAnswer { .. } => "WrongAnswer",
        _ => "other",
    }
}

/// Every act by both ways, for a range and for a whole object: refused as this kind of error, or right.
fn expect(act: &Act, range: &str, whole: &str) {
    let web = web();
    for (way, origin) in both(&web) {
        web.always(act.clone());
        let replies = [
            (range, origin.fetch(OBJECT, RANGE), part()),
            (whole, origin.fetch_all(OBJECT, 1 << 20), object()),
        ];
        for (expected, reply, right) in replies {
            match reply {
                Ok(bytes) => {
                    assert_eq!(expected, "right", "{way} {act:?}");
                    assert!(bytes == right, "{way} {act:?}: other bytes");
                }
                Err(error) => assert_eq!(variant(&error), expected, "{way} {act:?}: {error}"),
            }
        }
        // Whatever happened, the origin is none the worse for it.
        web.always(Act::Right);
        assert!(
            origin.fetch(OBJECT, RANGE).unwrap() == part(),
            "{way} {act:?}"
        );
        assert!(origin.fetch_all(OBJECT, 1 << 20).unwrap() == object());
        assert_eq!(origin.size(OBJECT).unwrap(), 80_000);
    }
}

/// Mutation that was seen red: the length of what came, and the announced one, not compared. (`Content-Range`: see S71 below.)
#[test]
fn s69_a_server_that_ignores_the_range_or_gives_another_length_is_refused() {
    let (wrong, unavailable) = ("WrongAnswer", "Unavailable");
    for (act, range, whole) in [
        (Act::Whole, wrong, "right"),
        (Act::Shorter(1), wrong, "right"),
        (Act::Longer(1), wrong, "right"),
        (Act::Longer(1 << 20), wrong, wrong),
        (Act::CutOff(0), unavailable, unavailable),
        (Act::CutOff(4999), unavailable, unavailable),
        (Act::ResetAfter(700), unavailable, unavailable),
        (Act::NoLength(0), "right", "right"),
        (Act::NoLength(1), wrong, "right"),
        (Act::Chunked, "right", "right"),
        (Act::ChunkedCut(0), unavailable, unavailable),
        (Act::ChunkedCut(1200), unavailable, unavailable),
        (Act::Gzip, wrong, wrong),
        (Act::SecretGzip, wrong, "right"),
        (Act::Html, wrong, "right"),
        (Act::Garbage, unavailable, unavailable),
    ] {
        if matches!(
            act,
            Act::Shorter(_) | Act::Longer(1) | Act::NoLength(1) | Act::SecretGzip | Act::Html
        ) {
            // A whole object of another length than it should have is for its digest to notice.
            expect_other_bytes(&act, range);
        } else {
            expect(&act, range, whole);
        }
    }
}

/// As [`expect`], where a whole object may come with other bytes.
fn expect_other_bytes(act: &Act, range: &str) {
    let web = web();
    for (way, origin) in both(&web) {
        web.always(act.clone());
        let error = origin.fetch(OBJECT, RANGE).unwrap_err();
        assert_eq!(variant(&error), range, "{way} {act:?}: {error}");
        assert!(origin.fetch_all(OBJECT, 1 << 20).unwrap() != object());
        web.always(Act::Right);
        assert!(origin.fetch(OBJECT, RANGE).unwrap() == part());
    }
}

/// Mutation that was seen red: as for S69. Each possible shorter length in turn: an error, and the next try gives the right bytes from the right offset.
#[test]
fn s7_short_reads_of_every_length_are_never_data() {
    let web = web();
    let range = ByteRange {
        start: 1000,
        len: 64,
    };
    for (way, origin) in both(&web) {
        for len in 0..64 {
            for act in [
                Act::Shorter(64 - len),
                Act::CutOff(len),
                Act::NoLength(64 - len),
            ] {
                web.then_right([act.clone()]);
                let reply = origin.fetch(OBJECT, range);
                assert!(reply.is_err(), "{way} {act:?} was taken");
                let bytes = origin.fetch(OBJECT, range).unwrap();
                assert!(bytes == object()[1000..1064], "{way} after {act:?}");
            }
        }
    }
}

/// The server's own parser refuses anything but one range with two ends.
#[test]
fn s70_only_single_ranges_are_asked_for() {
    let web = web();
    for (_, origin) in both(&web) {
        origin.fetch(OBJECT, RANGE).unwrap();
    }
    for request in web.seen() {
        assert_eq!(request.header("range"), Some("bytes=100-5099"));
        assert_eq!(request.header("accept-encoding"), Some("identity"));
    }
    // A server that refuses the range itself says so with 400.
    expect(&Act::Status(400, Vec::new()), "Unavailable", "Unavailable");
}

/// Mutation that was seen red: `Content-Range` is parsed and not compared.
#[test]
fn s71_the_right_length_from_another_offset_is_refused() {
    for by in [1, 100, 3000] {
        let web = web();
        for (way, origin) in both(&web) {
            web.always(Act::OtherOffset(by));
            let error = origin.fetch(OBJECT, RANGE).unwrap_err();
            assert_eq!(variant(&error), "WrongAnswer", "{way}");
            let text = error.to_string();
            assert!(text.contains("bytes 100-5099"), "{text}");
        }
    }
}

#[test]
fn statuses_say_what_to_do() {
    let none = Vec::new;
    for (status, kind) in [
        (404, "NotFound"),
        (410, "NotFound"),
        (401, "Denied"),
        (403, "Denied"),
        (407, "Denied"),
        (429, "Busy"),
        (500, "Unavailable"),
        (502, "Unavailable"),
        (503, "Unavailable"),
        (504, "Unavailable"),
        (416, "WrongAnswer"),
        (204, "WrongAnswer"),
    ] {
        expect(&Act::Status(status, none()), kind, kind);
    }
}

#[test]
fn retry_after_is_read_as_seconds_and_as_a_date_of_the_servers_clock() {
    let web = web();
    for (_, origin) in both(&web) {
        for (status, lines, expected) in [
            (503, vec!["Retry-After: 7"], Some(7)),
            (429, vec!["Retry-After: 120"], Some(120)),
            (
                503,
                // A clock that is decades ahead.
                vec![
                    "Date: Fri, 01 Jan 2100 00:00:00 GMT",
                    "Retry-After: Fri, 01 Jan 2100 00:00:09 GMT",
                ],
                Some(9),
            ),
            (429, vec![], None),
            (429, vec!["Retry-After: soon"], None),
        ] {
            let lines = lines.into_iter().map(str::to_owned).collect();
            web.always(Act::Status(status, lines));
            match origin.fetch(OBJECT, RANGE).unwrap_err() {
                OriginError::Busy { retry_after, .. } => {
                    assert_eq!(retry_after, expected.map(Duration::from_secs));
                }
                other => panic!("{other}"),
            }
        }
    }
}

/// Mutation that was seen red (it never ends): a body need not make progress.
#[test]
fn slow_loris_replies_end_by_every_way() {
    let web = web();
    for (way, origin) in both(&web) {
        for act in [
            Act::SlowHead(Duration::from_millis(100)),
            Act::Slow(1, Duration::from_millis(50)),
            Act::Slow(100, Duration::from_millis(100)),
            Act::Hold,
        ] {
            web.always(act.clone());
            let start = Instant::now();
            let reply = origin.fetch_all(OBJECT, 1 << 20).map(|bytes| bytes.len());
            let error = reply.unwrap_err();
            let took = start.elapsed();
            assert_eq!(variant(&error), "Unavailable", "{way} {act:?}");
            assert!(took < Duration::from_secs(5), "{way} {act:?}: {took:?}");
        }
    }
    web.release();
}

/// Mutation that was seen red: the deadline holds for the end of a whole object too. Three times as long as any limit, and more than the deadline: a whole object may take its time if it comes.
#[test]
fn a_slow_but_steady_object_is_not_given_up() {
    let web = web();
    for (way, origin) in both(&web) {
        // 80,000 bytes in 40 pieces of 30 ms: 1.2 s, 26,000 bytes a window.
        web.always(Act::Slow(2000, Duration::from_millis(30)));
        let start = Instant::now();
        let deadline = start + Duration::from_millis(300);
        let bytes = origin.fetch_all_within(OBJECT, 1 << 20, deadline).unwrap();
        assert!(bytes == object(), "{way}");
        assert!(start.elapsed() >= Duration::from_millis(1200), "{way}");
        // A range has a reader who waits for it: the deadline is the deadline.
        let range = ByteRange {
            start: 0,
            len: 80_000,
        };
        let deadline = Instant::now() + Duration::from_millis(300);
        let error = origin.fetch_within(OBJECT, range, deadline).unwrap_err();
        assert!(error.to_string().contains("deadline"), "{way}: {error}");
    }
}

#[test]
fn a_deadline_ends_a_request_that_is_not_answered() {
    let web = web();
    web.always(Act::Hold);
    for (way, origin) in both(&web) {
        let start = Instant::now();
        let deadline = start + Duration::from_millis(100);
        let range = origin.fetch_within(OBJECT, RANGE, deadline).unwrap_err();
        let whole = origin.fetch_all_within(OBJECT, 10, deadline).unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(390), "{way}");
        assert!(
            range.to_string().contains("no answer within 0.1 s"),
            "{range}"
        );
        assert!(whole.to_string().contains("no time is left"), "{whole}");
    }
    web.release();
}

fn last(web: &BadWeb) -> Request {
    web.seen().pop().unwrap()
}

/// Mutation that was seen red: no second try on a new connection.
#[test]
fn a_kept_connection_that_was_closed_or_reset_costs_no_failure() {
    let web = web();
    for (way, origin) in both(&web) {
        for ending in [
            vec![Act::RightThenClose],
            vec![Act::Right, Act::Reset],
            vec![Act::Right, Act::Close],
        ] {
            web.then_right(ending.clone());
            for _ in 0..3 {
                let bytes = origin.fetch(OBJECT, RANGE);
                assert!(bytes.unwrap() == part(), "{way} {ending:?}");
            }
        }
    }
}

#[test]
fn connections_are_used_again_until_they_are_old() {
    let web = web();
    let plain = |limits| HttpOrigin::open_with(&web.url(), limits).unwrap();
    let origin = plain(limits());
    for nth in 0..3 {
        origin.fetch(OBJECT, RANGE).unwrap();
        assert_eq!(last(&web).nth, nth);
    }
    // Neither one that was idle for too long nor one that is too old.
    for limits in [
        HttpLimits {
            idle_max: Duration::ZERO,
            ..limits()
        },
        HttpLimits {
            age_max: Duration::ZERO,
            ..limits()
        },
    ] {
        let origin = plain(limits);
        for _ in 0..3 {
            origin.fetch(OBJECT, RANGE).unwrap();
            assert_eq!(last(&web).nth, 0);
        }
    }
}

#[test]
fn a_body_that_nobody_wants_is_not_downloaded() {
    const SIZE: usize = 64 << 20;
    let huge = BadWeb::serve(|_| Some(Vec::new()));
    // Nothing of the body ever comes: who wanted it would wait for it.
    huge.always(Act::Status(200, vec![format!("Content-Length: {SIZE}")]));
    for (way, origin) in both(&huge) {
        let error = origin.fetch_all(OBJECT, 1000).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("67108864 bytes announced"), "{way}: {text}");
        let error = origin.fetch(OBJECT, RANGE).unwrap_err();
        assert_eq!(variant(&error), "WrongAnswer", "{way}: {error}");
    }
}

/// Credentials stay with their host, and so does where we came from (mutation that was seen red: `Referer` is sent); a range goes
/// along.
#[test]
fn redirects_are_followed_a_few_times_and_take_no_credentials_along() {
    let target = web();
    let source = web();
    let to = format!("{}/{OBJECT}", target.url());
    for (way, origin) in both(&source) {
        source.always(Act::Redirect(to.clone()));
        assert!(origin.fetch(OBJECT, RANGE).unwrap() == part(), "{way}");
        let asked = last(&source);
        let followed = last(&target);
        let sent = asked.header("authorization").is_some();
        assert_eq!(sent, way == "general", "{way}");
        for name in ["authorization", "cookie", "referer", "proxy-authorization"] {
            assert_eq!(followed.header(name), None, "{way}: {name}");
        }
        assert_eq!(followed.header("range"), Some("bytes=100-5099"));
        source.forget();
        source.always(Act::Redirect(format!("{}/{OBJECT}", source.url())));
        let error = origin.fetch(OBJECT, RANGE).unwrap_err();
        assert!(error.to_string().contains("redirect"), "{way}: {error}");
        assert!(source.seen().len() <= 10, "{}", source.seen().len());
    }
}

#[test]
fn s73_s74_credentials_are_sent_named_when_missing_and_used_once_they_are_right() {
    let web = web();
    let challenges = vec![
        "WWW-Authenticate: Bearer realm=\"https://x/token\",service=\"s\"".to_owned(),
        "WWW-Authenticate: Negotiate, Basic realm=\"a, b\"".to_owned(),
    ];
    // user:word
    let right = "Basic dXNlcjp3b3Jk";
    let refuse = challenges.clone();
    web.tell(move |request| {
        if request.header("authorization") == Some(right) {
            Act::Right
        } else {
            Act::Status(401, refuse.clone())
        }
    });
    let [(_, plain), (_, general)] = both(&web);
    assert!(general.fetch(OBJECT, RANGE).unwrap() == part());
    let error = plain.fetch(OBJECT, RANGE).unwrap_err();
    let text = error.to_string();
    assert_eq!(variant(&error), "Denied", "{text}");
    for part in ["Bearer or Negotiate or Basic", "user:password@host"] {
        assert!(text.contains(part), "{text}");
    }
    // They expire, and are valid again: nothing is remembered against the origin.
    web.then_right([Act::Status(401, challenges)]);
    let error = general.fetch(OBJECT, RANGE).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no longer valid"), "{text}");
    assert!(!text.contains("word@"), "{text}");
    assert!(general.fetch(OBJECT, RANGE).unwrap() == part());
}

#[test]
fn an_ipv6_address_is_an_address() {
    let web = BadWeb::serve_at("[::1]:0", |path| path.ends_with(OBJECT).then(object));
    for (way, origin) in both(&web) {
        assert!(origin.fetch(OBJECT, RANGE).unwrap() == part(), "{way}");
    }
    let host = last(&web);
    assert!(host.header("host").unwrap().starts_with("[::1]:"));
}

#[test]
fn nobody_there_and_no_such_host_are_told() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    for (url, part) in [
        (gone.clone(), "refused"),
        (gone.replace("http://", "http://user:word@"), "refused"),
        ("http://host.invalid".to_owned(), "host.invalid"),
    ] {
        let origin = HttpOrigin::open_with(&url, limits()).unwrap();
        let error = origin.fetch(OBJECT, RANGE).unwrap_err();
        assert_eq!(variant(&error), "Unavailable");
        let text = error.to_string();
        assert!(text.contains(part) && !text.contains("word"), "{text}");
    }
}
