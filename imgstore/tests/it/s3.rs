//! `s3://` against `s3s-fs`: the rules of every origin, layers, servers that misbehave, and credentials.

pub(crate) mod server;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use imgstore::build::BuildOptions;
use imgstore::origin::{ByteRange, Created, Origin, OriginError};
use imgstore::store::{layer, tags, verify};

use crate::build::build_as;
use crate::collected::{self, GRACE, collect, objects, publish};
use crate::origin_rules::{keeps_the_rules, one_of_many_writers_wins};
use crate::random_tree::random_tree;
use server::{Canned, KEY, SECRET, Server};

const RANGE: ByteRange = ByteRange { start: 2, len: 3 };

fn error(status: u16, code: &str) -> Canned {
    Canned {
        status,
        body: format!("<Error><Code>{code}</Code><Message>no {code}</Message></Error>")
            .into_bytes(),
        ..Canned::default()
    }
}

fn headers(status: u16, headers: &[(&'static str, &str)], body: &[u8]) -> Canned {
    let own = |(name, value): &(&'static str, &str)| (*name, (*value).to_owned());
    Canned {
        status,
        headers: headers.iter().map(own).collect(),
        body: body.to_vec(),
        ..Canned::default()
    }
}

/// Turned red by: creating without `If-None-Match`.
#[test]
fn a_bucket_keeps_the_rules_of_origins() {
    let server = Server::start();
    let origin = server.origin();
    // The server keeps what it knows of an object in a file with all of the object's name in its own.
    keeps_the_rules(&origin, 40);
    one_of_many_writers_wins(&origin);
    assert!(
        server
            .dir
            .path()
            .join("layers/some/prefix/packs/ab/ten")
            .is_file()
    );
    // Large objects go up in parts, and every request was signed.
    let seen = server.seen();
    let parts = seen
        .iter()
        .filter(|r| r.uri.contains("partNumber="))
        .count();
    assert_eq!(parts, 3, "17 MiB in parts of 8");
    let signed = |r: &server::Seen| r.headers.contains_key("authorization");
    assert!(seen.iter().all(signed));
}

#[test]
fn layers_are_built_listed_and_verified_in_a_bucket() {
    let server = Server::start();
    let origin = server.origin();
    let (tree, _spool) = random_tree(11, 60);
    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let again = build_as(&tree, "2", &origin, &BuildOptions::default());
    assert_eq!(again.layer, built.layer);
    assert_eq!(again.bytes_stored, 0);
    let tags = layer::list_tags(&origin).unwrap().tags;
    assert_eq!(tags.len(), 2);
    let report = verify::verify(&origin, &built.layer, &|_, _| ()).unwrap();
    assert_eq!(report.damage, Vec::new());
    // A flipped byte in the bucket is named.
    let pack = origin.list("packs/").unwrap().remove(0);
    let file = server.dir.path().join("layers/some/prefix").join(&pack);
    let mut bytes = fs::read(&file).unwrap();
    bytes[20] ^= 1;
    fs::write(&file, bytes).unwrap();
    let report = verify::verify(&origin, &built.layer, &|_, _| ()).unwrap();
    assert_eq!(report.damage[0].object, pack);
}

/// Mutation: `S3Origin::remove` leaves manifests.
#[test]
fn garbage_is_collected_in_a_bucket() {
    let server = Server::start();
    let origin = server.origin();
    let kept = publish(&origin, 0b00011, "1").unwrap().layer;
    publish(&origin, 0b00110, "2").unwrap();
    assert_eq!(collected::would_remove(&origin, GRACE), [""; 0]);
    tags::untag(&origin, &collected::tag("2")).unwrap();
    assert_eq!(collected::would_remove(&origin, GRACE), [""; 0], "young");
    let listed = collected::would_remove(&origin, Duration::ZERO);
    let report = collect(&origin, Duration::ZERO).unwrap();
    assert!(report.complete);
    assert_eq!(collected::names(&report), listed);
    assert_eq!(
        objects(&origin),
        collected::needs(&origin, &kept.to_hex()),
        "all of the one layer, nothing of the other"
    );
    collected::tags_are_right(&origin, "collected");
    assert_eq!(origin.list("gc/").unwrap(), [""; 0]);
    assert_eq!(origin.list("leases/").unwrap(), [""; 0]);
    // What is gone can be published again.
    publish(&origin, 0b00110, "2").unwrap();
    collected::tags_are_right(&origin, "published again");
}

/// Every odd answer to a range is an error of the right kind, never bytes. Turned red by: comparing no length.
#[test]
fn wrong_answers_are_errors() {
    let server = Server::start();
    let origin = server.origin();
    origin.create("o", &mut &b"0123456789"[..]).unwrap();
    let modified = ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT");
    let part = |range: &str, body: &[u8]| headers(206, &[modified, ("content-range", range)], body);
    let wrong = [
        headers(200, &[modified], b"0123456789"),
        headers(200, &[modified], b"234"),
        part("bytes 2-4/10", b"23"),
        part("bytes 2-4/10", b"2345"),
        part("bytes 3-5/10", b"345"),
        part("nonsense", b"234"),
        headers(206, &[modified], b"234"),
        headers(
            206,
            &[
                modified,
                ("content-range", "bytes 2-4/10"),
                ("content-encoding", "gzip"),
            ],
            b"234",
        ),
        headers(200, &[("content-type", "text/html")], b"<html>login</html>"),
        error(416, "InvalidRange"),
    ];
    for answer in wrong {
        server.script([answer.clone()]);
        let error = origin.fetch("o", RANGE).unwrap_err();
        assert!(
            matches!(error, OriginError::WrongAnswer { .. }),
            "{answer:?}: {error}"
        );
        assert!(error.is_transient());
        assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234");
    }
    for (answer, text) in [
        (error(500, "InternalError"), "InternalError"),
        (error(502, ""), "502"),
    ] {
        server.script([answer]);
        let error = origin.fetch("o", RANGE).unwrap_err();
        assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    server.script([error(404, "NoSuchBucket")]);
    let text = origin.fetch("o", RANGE).unwrap_err().to_string();
    assert!(text.contains("bucket must be made first"), "{text}");
    let mut slow = error(503, "SlowDown");
    slow.headers.push(("retry-after", "11".to_owned()));
    server.script([slow]);
    let OriginError::Busy { retry_after, .. } = origin.fetch("o", RANGE).unwrap_err() else {
        panic!("a busy server");
    };
    assert_eq!(retry_after, Some(Duration::from_secs(11)));
}

/// Reads are tried once here; writes again. Turned red by: `WRITE_ATTEMPTS_MAX = 1`.
#[test]
fn busy_servers_get_writes_again_and_reads_once() {
    let server = Server::start();
    let origin = server.origin();
    server.script([error(503, "SlowDown"), error(500, "InternalError")]);
    assert_eq!(
        origin.create("o", &mut &b"0123456789"[..]).unwrap(),
        Created::New
    );
    assert_eq!(server.seen().len(), 3);
    server.script([error(503, "SlowDown")]);
    origin.fetch("o", RANGE).unwrap_err();
    assert_eq!(server.seen().len(), 1);
    server.seen();
    server.script(vec![error(503, "SlowDown"); 5]);
    let error = origin.replace("o", b"x").unwrap_err();
    assert!(matches!(error, OriginError::Busy { .. }), "{error}");
    assert_eq!(server.seen().len(), 5);
    assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234");
}

/// An upload that cannot be finished is given up, and no object appears.
#[test]
fn an_unfinished_upload_leaves_nothing() {
    struct Breaks(usize);
    impl std::io::Read for Breaks {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::other("the disk broke"));
            }
            let n = buf.len().min(self.0);
            self.0 -= n;
            Ok(n)
        }
    }
    let server = Server::start();
    let origin = server.origin();
    let text = origin
        .create("o", &mut Breaks(20 << 20))
        .unwrap_err()
        .to_string();
    assert!(text.contains("the disk broke"), "{text}");
    assert_eq!(
        server.seen().last().unwrap().method,
        "DELETE",
        "the upload is given up"
    );
    assert_eq!(origin.list("").unwrap(), Vec::<String>::new());
    let error = origin.size("o").unwrap_err();
    assert!(matches!(error, OriginError::NotFound { .. }), "{error}");
}

/// A server without conditional writes is told from one that fails, and the object there is left alone.
#[test]
fn servers_without_conditions_are_asked_first() {
    let server = Server::start();
    let origin = server.origin();
    origin.create("o", &mut &b"0123456789"[..]).unwrap();
    server.script([error(501, "NotImplemented")]);
    assert_eq!(
        origin.create("o", &mut &b"other"[..]).unwrap(),
        Created::Existed
    );
    assert_eq!(
        origin.create("p", &mut &b"other"[..]).unwrap(),
        Created::New
    );
    assert_eq!(origin.fetch_all("o", 10).unwrap(), b"0123456789");
    let last: Vec<String> = server
        .seen()
        .into_iter()
        .rev()
        .take(3)
        .map(|r| r.method)
        .collect();
    assert_eq!(
        last,
        ["GET", "PUT", "HEAD"],
        "no conditional write after the first refusal"
    );
}

/// Nothing goes to where a redirection points: no signature, no token. Turned red by: reqwest's usual redirect policy.
#[test]
fn redirections_are_not_followed() {
    let (server, elsewhere) = (Server::start(), Server::start());
    let origin = server.origin();
    for status in [301, 302, 307, 308] {
        let to = format!("{}/layers/o?X-Amz-Signature=abc", elsewhere.url());
        server.script([headers(status, &[("location", &to)], b"")]);
        let error = origin.fetch("o", RANGE).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, OriginError::Denied { .. }), "{text}");
        assert!(
            text.contains(&elsewhere.url()) && !text.contains("Signature"),
            "{text}"
        );
    }
    assert_eq!(elsewhere.seen().len(), 0);
}

fn write_files(dir: &Path, secret: &str) {
    let text = format!("[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n");
    fs::write(dir.join("credentials"), text).unwrap();
}

/// Refused credentials are looked up again: a file that is put right serves the next read, without a restart.
/// Turned red by: `changed_since` that does not age what is held (refused until a minute has passed).
#[test]
fn new_keys_in_the_files_are_used_at_once() {
    let server = Server::start();
    server
        .origin()
        .create("o", &mut &b"0123456789"[..])
        .unwrap();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("credentials").display().to_string();
    let config = home.path().join("config").display().to_string();
    let origin = server.origin_with([
        ("AWS_SHARED_CREDENTIALS_FILE", &file),
        ("AWS_CONFIG_FILE", &config),
    ]);
    // None at all: not signed, and refused.
    server.seen();
    let text = origin.fetch("o", RANGE).unwrap_err().to_string();
    assert!(
        text.contains("AccessDenied") && text.contains("~/.aws/credentials"),
        "{text}"
    );
    assert!(
        server
            .seen()
            .iter()
            .all(|r| !r.headers.contains_key("authorization"))
    );
    write_files(home.path(), "wrong-secret-key");
    let error = origin.fetch("o", RANGE).unwrap_err();
    let text = format!("{error} {error:?} {origin:?}");
    assert!(matches!(error, OriginError::Denied { .. }), "{text}");
    assert!(!text.contains("wrong-secret-key"), "{text}");
    write_files(home.path(), SECRET);
    assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234");
    // Refused again later, and nothing else to be found: one try more, not a loop.
    server.seen();
    server.script([error_expired()]);
    let error = origin.fetch("o", RANGE).unwrap_err();
    assert!(matches!(error, OriginError::Denied { .. }), "{error}");
    assert_eq!(server.seen().len(), 1);
    assert!(!format!("{origin:?}").contains(SECRET));
    assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234");
}

fn error_expired() -> Canned {
    error(400, "ExpiredToken")
}

/// 64 readers whose credentials come from a program: it runs once, and once more when they are about to expire.
/// Meant to turn red (not tried): an expiry that is not looked at (never renewed).
#[test]
fn a_credential_process_runs_once_for_all_readers() {
    let server = Server::start();
    server
        .origin()
        .create("o", &mut &b"0123456789"[..])
        .unwrap();
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().display();
    let expires =
        |seconds: i64| (chrono::Utc::now() + chrono::TimeDelta::seconds(seconds)).to_rfc3339();
    let write = |expires: String| {
        let json = format!(
            r#"{{"Version":1,"AccessKeyId":"{KEY}","SecretAccessKey":"{SECRET}","Expiration":"{expires}"}}"#
        );
        fs::write(home.path().join("json"), json).unwrap();
    };
    write(expires(2));
    let config =
        format!("[profile p]\ncredential_process = sh -c 'echo >> {dir}/runs; cat {dir}/json'\n");
    fs::write(home.path().join("config"), config).unwrap();
    let file = format!("{dir}/config");
    let origin = server.origin_with([("AWS_CONFIG_FILE", &file), ("AWS_PROFILE", "p")]);
    let runs = || fs::read(home.path().join("runs")).map_or(0, |bytes| bytes.len());
    let read_all = || {
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234"));
            }
        });
    };
    read_all();
    let first = runs();
    assert!((1..=2).contains(&first), "{first} runs");
    write(expires(3600));
    let deadline = Instant::now() + Duration::from_secs(20);
    while runs() == first {
        origin.fetch("o", RANGE).unwrap();
        assert!(Instant::now() < deadline, "never renewed");
    }
    read_all();
    assert_eq!(runs(), first + 1);
    // A program that prints nonsense or fails is an error that does not repeat what it printed.
    for script in ["echo {SECRET:1}", "echo s3cr3t; exit 1"] {
        fs::write(
            home.path().join("config"),
            format!("[profile p]\ncredential_process = {script}\n"),
        )
        .unwrap();
        let origin = server.origin_with([("AWS_CONFIG_FILE", &file), ("AWS_PROFILE", "p")]);
        let error = origin.fetch("o", RANGE).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, OriginError::Denied { .. }), "{text}");
        assert!(
            text.contains("profile p") && !text.contains("s3cr3t") && !text.contains("SECRET:"),
            "{text}"
        );
    }
}

/// A server that takes a request and says nothing: the reader's deadline ends it. Turned red by: deadlines that are not
/// handed on (30 s).
#[test]
fn a_silent_server_is_left_at_the_deadline() {
    let server = Server::start();
    let origin = server.origin();
    origin.create("o", &mut &b"0123456789"[..]).unwrap();
    let begun = Instant::now();
    let soon = || Instant::now() + Duration::from_millis(300);
    let silent = Canned {
        hang: true,
        ..Canned::default()
    };
    server.script([silent.clone(), silent]);
    let error = origin.fetch_within("o", RANGE, soon()).unwrap_err();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
    let error = origin.fetch_all_within("o", 10, soon()).unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
    let late = begun + Duration::from_secs(15);
    assert!(Instant::now() < late);
    assert_eq!(origin.fetch_within("o", RANGE, late).unwrap(), b"234");
}

/// A clock that is 20 minutes off is named, from the server's own `Date`.
#[test]
fn a_wrong_clock_is_named() {
    let server = Server::start();
    let date = chrono::Utc::now() - chrono::TimeDelta::minutes(20);
    let date = date.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
    let mut answer = error(403, "RequestTimeTooSkewed");
    answer.headers.push(("date", date));
    server.script([answer]);
    let error = server.origin().fetch("o", RANGE).unwrap_err();
    assert!(matches!(error, OriginError::Denied { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("RequestTimeTooSkewed") && text.contains("minutes ahead of the server's"),
        "{text}"
    );
}

/// Without credentials requests are not signed, which is all that a public bucket needs.
#[test]
fn public_buckets_are_read_without_credentials() {
    let server = Server::start_for_all();
    let folder = server.dir.path().join("layers/some/prefix");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("o"), b"0123456789").unwrap();
    let origin = server.origin_with([("HOME", "/nonexistent")]);
    assert_eq!(origin.fetch("o", RANGE).unwrap(), b"234");
    assert_eq!(origin.list("").unwrap(), ["o"]);
    assert!(
        server
            .seen()
            .iter()
            .all(|r| !r.headers.contains_key("authorization"))
    );
}

/// Temporary keys go with their session token.
#[test]
fn session_tokens_are_sent() {
    let server = Server::start();
    let origin = server.origin_with([
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", "the-session"),
    ]);
    server.script([headers(404, &[], b"")]);
    origin.fetch("o", RANGE).unwrap_err();
    assert_eq!(
        server.seen()[0].headers["x-amz-security-token"],
        "the-session"
    );
}
