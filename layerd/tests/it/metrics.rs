//! `GET /metrics`, read by a strict parser of our own and by the one of Prometheus' Python client.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::daemon::{Daemon, read_cold, read_whole, until};
use crate::fixture::World;
use crate::web::Web;

/// Status line and headers, and body of a reply.
fn get(mut stream: impl Read + Write, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: layerd\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

/// Labels in braces and what follows them. Names, `=`, quoted values with escapes, commas between.
fn labels(text: &str) -> (BTreeMap<String, String>, &str) {
    let mut out = BTreeMap::new();
    let Some(mut rest) = text.strip_prefix('{') else {
        return (out, text);
    };
    loop {
        let (name, after) = rest.split_once("=\"").unwrap();
        assert!(
            name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{text}"
        );
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().unwrap() {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next().unwrap().1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    c => panic!("escape {c} in {text}"),
                }),
                (_, c) => value.push(c),
            }
        };
        assert!(out.insert(name.to_owned(), value).is_none(), "{text}");
        let after = &after[end + 1..];
        match after.strip_prefix(',') {
            Some(more) => rest = more,
            None => return (out, after.strip_prefix('}').unwrap()),
        }
    }
}

/// All samples by name and labels. Fails on anything that the format does not allow: a family without help or type or in two
/// places, a sample outside its family, a sample twice, buckets that fall, a bucket without end that is not the count.
fn parse(text: &str) -> BTreeMap<String, f64> {
    assert!(text.ends_with('\n'));
    let mut samples = BTreeMap::new();
    let mut families: Vec<(String, String)> = Vec::new();
    let mut help = None;
    let mut last_bucket: Option<(String, f64)> = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = Some(rest.split_once(' ').unwrap().0.to_owned());
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(help.take().as_deref(), Some(name));
            assert!(matches!(kind, "counter" | "gauge" | "histogram"), "{line}");
            assert!(
                families.iter().all(|(known, _)| known != name),
                "{name} twice"
            );
            families.push((name.to_owned(), kind.to_owned()));
            continue;
        }
        let at = line.find(['{', ' ']).unwrap();
        let name = &line[..at];
        let (labels, rest) = labels(&line[at..]);
        let value: f64 = rest.strip_prefix(' ').unwrap().parse().unwrap();
        assert!(value.is_finite() && value >= 0.0, "{line}");
        let (family, kind) = families.last().unwrap();
        let inside = match (&**kind, name.strip_prefix(&**family)) {
            ("histogram", Some(ending)) => matches!(ending, "_bucket" | "_sum" | "_count"),
            (_, ending) => ending == Some(""),
        };
        assert!(inside, "{line} in {family}");
        let mut others = labels.clone();
        let le = others.remove("le");
        let key = format!("{name}{others:?}");
        if name.ends_with("_bucket") {
            if let Some((before, count)) = &last_bucket {
                assert!(*before != key || *count <= value, "{line}");
            }
            last_bucket = Some((key.clone(), value));
            if le.as_deref() != Some("+Inf") {
                continue;
            }
        }
        if name.ends_with("_count") {
            let bucket = &last_bucket.as_ref().unwrap().1;
            assert!((bucket - value).abs() < f64::EPSILON, "{line}");
        }
        assert!(samples.insert(key, value).is_none(), "{line} twice");
    }
    samples
}

#[track_caller]
fn check(samples: &BTreeMap<String, f64>, key: &str, expected: u64) {
    let found = samples.get(key).unwrap_or_else(|| panic!("no {key}"));
    let text = format!("{found}");
    assert_eq!(text, expected.to_string(), "{key}");
}

/// The same text read by the parser that Prometheus' own client has; how many families it finds.
fn families_by_python(text: &str) -> usize {
    let script = "import sys\nfrom prometheus_client.parser import text_string_to_metric_families as parse\n\
        families = list(parse(sys.stdin.read()))\n\
        assert all(f.samples and f.documentation and f.type in ('counter', 'gauge', 'histogram') for f in families)\n\
        print(len(families))";
    let mut child = Command::new("/usr/bin/python3")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "tools/setup installs the parser");
    String::from_utf8(out.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

/// Mutations: without the second observation in `finish`, misses are counted and not measured; with `# HELP` left out both
/// parsers say so.
#[test]
fn what_was_done_is_on_the_page_exactly() {
    let world = World::new();
    let (_, data) = world.publish_data(2);
    let web = Web::serve(&world.origin(), Duration::ZERO);
    let args = ["--metrics", "127.0.0.1:0", "--cache-size", "1GiB"];
    let daemon = Daemon::start(world.dir.path(), &[web.url()], &args);
    let page = || get(UnixStream::connect(daemon.socket()).unwrap(), "/metrics").1;
    let before = parse(&page());
    for key in [
        "dsec_layerd_cache_misses_total{}",
        "dsec_layerd_mounts{\"state\": \"alive\"}",
    ] {
        check(&before, key, 0);
    }
    let mnt = world.folder("mnt");
    daemon.mount(&["base/t:1"], &mnt, false);
    daemon
        .try_mount(&["base/none:1"], &world.folder("other"), false)
        .unwrap_err();
    let path = mnt.join("data");
    assert!(read_whole(&path).unwrap() == data);
    assert!(read_cold(&path, 4096, 4096).unwrap() == data[4096..8192]);
    until("everything is cached", || {
        daemon.total().cache_write_bytes >= 2 << 20
    });
    let counters = daemon.total();
    let samples = parse(&page());
    assert!(
        counters.cache_misses > 0 && counters.cache_hits > 0,
        "{counters:?}"
    );
    for (key, expected) in [
        ("dsec_layerd_cache_misses_total{}", counters.cache_misses),
        ("dsec_layerd_cache_hits_total{}", counters.cache_hits),
        (
            "dsec_layerd_read_seconds_count{\"result\": \"miss\"}",
            counters.cache_misses,
        ),
        (
            "dsec_layerd_read_seconds_count{\"result\": \"hit\"}",
            counters.cache_hits,
        ),
        ("dsec_layerd_read_seconds_count{\"result\": \"failed\"}", 0),
        (
            "dsec_layerd_remote_requests_total{}",
            counters.remote_requests,
        ),
        ("dsec_layerd_served_bytes_total{}", counters.served_bytes),
        (
            "dsec_layerd_cache_write_bytes_total{}",
            counters.cache_write_bytes,
        ),
        ("dsec_layerd_mounts{\"state\": \"alive\"}", 1),
        ("dsec_layerd_mount_seconds_count{\"result\": \"ok\"}", 1),
        ("dsec_layerd_mount_seconds_count{\"result\": \"failed\"}", 1),
        ("dsec_layerd_cache_max_bytes{}", 1 << 30),
        ("dsec_layerd_data_plane_up{}", 1),
        ("dsec_layerd_data_plane_starts_total{}", 1),
        ("dsec_layerd_self_test_passed{}", 1),
        ("dsec_layerd_waiting_reads{}", 0),
        ("dsec_layerd_fetch_ranges{\"state\": \"in_flight\"}", 0),
    ] {
        check(&samples, key, expected);
    }
    for process in ["control", "data_plane"] {
        let key = format!("dsec_layerd_resident_bytes{{\"process\": \"{process}\"}}");
        assert!(samples[&key] > 1e6, "{key}");
    }
    let text = page();
    let families = text.lines().filter(|l| l.starts_with("# TYPE")).count();
    assert_eq!(families_by_python(&text), families);
}

#[test]
fn a_tcp_address_gives_metrics_and_nothing_else() {
    let world = World::new();
    world.publish_data(1);
    let args = ["--metrics", "127.0.0.1:0"];
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &args);
    let log = daemon.log();
    let line = log
        .lines()
        .find(|l| l.contains("metrics address="))
        .unwrap();
    let address = line.split("address=").nth(1).unwrap().trim();
    let (head, body) = get(TcpStream::connect(address).unwrap(), "/metrics");
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert!(
        head.contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    assert!(parse(&body).len() > 30);
    for path in ["/v1/mounts", "/v1/stats", "/"] {
        let (head, _) = get(TcpStream::connect(address).unwrap(), path);
        assert!(head.starts_with("http/1.1 404"), "{path}: {head}");
    }
    // The address is taken: a second daemon says so and leaves nothing.
    let other = World::new();
    let refused = Daemon::idle(
        other.dir.path(),
        &[world.origin_url()],
        &["--metrics", address],
    );
    let out = refused.command().stderr(Stdio::piped()).output().unwrap();
    assert!(!out.status.success());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(
        text.contains("cannot serve metrics") && text.contains(address),
        "{text}"
    );
    assert!(!refused.socket().exists());
}

/// Mutation: with the states counted together, a dead composition is alive here.
#[test]
fn a_data_plane_that_died_shows() {
    let world = World::new();
    world.publish_data(1);
    let daemon = Daemon::start(world.dir.path(), &[world.origin_url()], &[]);
    daemon.mount(&["base/t:1"], &world.folder("mnt"), false);
    daemon.kill_plane();
    let samples = parse(&get(UnixStream::connect(daemon.socket()).unwrap(), "/metrics").1);
    check(&samples, "dsec_layerd_data_plane_deaths_total{}", 1);
    check(&samples, "dsec_layerd_data_plane_starts_total{}", 2);
    check(&samples, "dsec_layerd_mounts{\"state\": \"dead\"}", 1);
    check(&samples, "dsec_layerd_mounts{\"state\": \"alive\"}", 0);
}
