//! `oci://` against Debian's `docker-registry`, and against a mock that refuses, redirects and lies.

pub(crate) mod docker_registry;
pub(crate) mod mock;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use imgstore::build::BuildOptions;
use imgstore::credentials::environment::Environment;
use imgstore::origin::oci::OciOrigin;
use imgstore::origin::{ByteRange, Created, Origin, OriginError};
use imgstore::registry::reference::Repository;
use imgstore::store::{layer, verify};
use sha2::{Digest as _, Sha256};

use crate::build::{build_as, tag};
use crate::origin_rules::keeps_the_rules;
use crate::random_tree::random_tree;
use crate::s3::server::Canned;
use docker_registry::{DockerRegistry, Kind, PASSWORD, USER};
use mock::{Auth, Mock};

const RANGE: ByteRange = ByteRange { start: 2, len: 3 };
const BODY: &[u8] = b"0123456789";
/// `me:s3cret`.
const LOGIN: &str = "Basic bWU6czNjcmV0";
const ME: [(&str, &str); 2] = [
    ("DSEC_REGISTRY_USERNAME", "me"),
    ("DSEC_REGISTRY_PASSWORD", "s3cret"),
];

fn open<const N: usize>(at: &str, env: [(&str, &str); N]) -> OciOrigin {
    let repository = Repository::parse(at, false).unwrap();
    OciOrigin::open(&repository, &Environment::of(env)).unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    let hex: Vec<String> = Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{}", hex.concat())
}

/// The registry's own garbage collection, as its operators run it.
fn collect_garbage(dir: &Path) {
    let output = Command::new("docker-registry")
        .args(["garbage-collect", "--delete-untagged"])
        .arg(dir.join("registry.yml"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}

#[test]
fn a_registry_keeps_the_rules_of_origins() {
    let dir = tempfile::tempdir().unwrap();
    let kind = Kind {
        delete: true,
        login: false,
    };
    let registry = DockerRegistry::start(dir.path(), kind);
    keeps_the_rules(&open(&registry.at("team/layers"), []), 128);
}

/// The registry's own garbage collection keeps what we keep and drops what we removed.
#[test]
fn layers_survive_the_garbage_collection_of_their_registry() {
    let dir = tempfile::tempdir().unwrap();
    let kind = Kind {
        delete: true,
        login: true,
    };
    let registry = DockerRegistry::start(dir.path(), kind);
    let login = [
        ("DSEC_REGISTRY_USERNAME", USER),
        ("DSEC_REGISTRY_PASSWORD", PASSWORD),
    ];
    let origin = open(&registry.at("layers"), login);
    let (tree, _spool) = random_tree(12, 60);
    let built = build_as(&tree, "1", &origin, &BuildOptions::default());
    let again = build_as(&tree, "2", &origin, &BuildOptions::default());
    assert_eq!((again.layer, again.bytes_stored), (built.layer, 0));
    // Somebody's image in the same repository is none of ours.
    let names = origin.list("").unwrap();
    let infos = origin.list_info("").unwrap();
    assert_eq!(
        infos.iter().map(|i| &i.name).collect::<Vec<_>>(),
        names.iter().collect::<Vec<_>>()
    );
    assert!(names.contains(&"index.json".to_owned()), "{names:?}");
    origin
        .create("packs/00/gone", &mut &[7; 100_000][..])
        .unwrap();
    let size = || {
        let walk = Command::new("du")
            .args(["-s", "-B1"])
            .arg(dir.path())
            .output();
        let text = String::from_utf8(walk.unwrap().stdout).unwrap();
        text.split_whitespace()
            .next()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let before = size();
    origin.remove("packs/00/gone").unwrap();
    collect_garbage(dir.path());
    assert!(size() + 100_000 <= before, "{} {before}", size());
    let origin = open(&registry.at("layers"), login);
    assert_eq!(origin.list("").unwrap(), names);
    let report = verify::verify(&origin, &built.layer, &|_, _| ()).unwrap();
    assert_eq!(report.damage, Vec::new());
    assert_eq!(
        layer::read_tag(&origin, &tag("2")).unwrap().layer,
        built.layer
    );
    // Without the password nobody reads or writes.
    for env in [
        [("HOME", "/nonexistent"); 2],
        [login[0], ("DSEC_REGISTRY_PASSWORD", "wrong")],
    ] {
        let origin = open(&registry.at("layers"), env);
        let error = origin.fetch_all("index.json", 1 << 20).unwrap_err();
        assert!(matches!(error, OriginError::Denied { .. }), "{error}");
        assert!(error.to_string().contains("docker login"), "{error}");
        let error = origin.create("packs/00/x", &mut &b"x"[..]).unwrap_err();
        assert!(matches!(error, OriginError::Denied { .. }), "{error}");
    }
}

#[test]
fn a_registry_without_deletes_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let registry = DockerRegistry::start(dir.path(), Kind::default());
    let origin = open(&registry.at("layers"), []);
    assert_eq!(origin.list("").unwrap(), Vec::<String>::new());
    origin.create("packs/00/x", &mut &b"x"[..]).unwrap();
    let error = origin.remove("packs/00/x").unwrap_err();
    assert!(matches!(error, OriginError::Unsupported { .. }), "{error}");
    assert!(
        error.to_string().contains("storage.delete.enabled"),
        "{error}"
    );
}

/// An object as the origin stores it, written out: what is on registries must be readable for ever.
fn manifest(object: &str, body: &[u8]) -> String {
    format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","artifactType":"application/vnd.dsec.object.v1","config":{{"mediaType":"application/vnd.oci.empty.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2}},"layers":[{{"mediaType":"application/vnd.dsec.object.v1","digest":"{}","size":{}}}],"annotations":{{"dev.dsec.object":"{object}","org.opencontainers.image.created":"2026-01-02T03:04:05.678Z"}}}}"#,
        sha256(body),
        body.len()
    )
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A mock with the object `packs/o`.
fn mock() -> Mock {
    let mock = Mock::start();
    mock.put(
        "manifests/packs_.o",
        MANIFEST,
        manifest("packs/o", BODY).as_bytes(),
    );
    mock.put(
        &format!("blobs/{}", sha256(BODY)),
        "application/octet-stream",
        BODY,
    );
    mock
}

fn with_tokens(mock: &Mock, life: Duration) {
    let mut state = mock.state();
    state.auth = Auth::Token;
    state.token_login = LOGIN.to_owned();
    state.token_life = life;
}

/// 64 readers, one token: one call when it is first needed, one per renewal, none by those who wait. Turned red by: no
/// single flight in `Tokens` (a `renewing` that is never set).
#[test]
fn a_token_is_renewed_once_for_all_readers() {
    let mock = mock();
    let life = Duration::from_secs(2);
    with_tokens(&mock, life);
    let origin = mock.origin(ME);
    let begun = Instant::now();
    let stop = begun + life * 3;
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                while Instant::now() < stop && mock.state().token_calls.len() < 3 {
                    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
                }
            });
        }
    });
    let calls = mock.state().token_calls.clone();
    let due = begun.elapsed().as_secs_f64() / (life.as_secs_f64() * 0.7) + 1.0;
    assert!(calls.len() >= 3 || begun.elapsed() >= life * 3, "{calls:?}");
    assert!(
        (2.0..=due).contains(&f64::from(u32::try_from(calls.len()).unwrap())),
        "{calls:?} {due}"
    );
    assert!(
        calls[0].contains("scope=repository%3Aa%2Fb%3Apull&service=mock"),
        "{calls:?}"
    );
    // At the start, readers ask as nobody until they know better; after that no token is refused.
    let seen = mock.seen();
    let nobody = seen
        .iter()
        .filter(|r| !r.headers.contains_key("authorization"))
        .count();
    assert!((1..=64).contains(&nobody), "{nobody}");
    let good = |r: &crate::s3::server::Seen| {
        r.headers["authorization"]
            .to_str()
            .unwrap()
            .starts_with("Bearer tok-")
    };
    assert!(
        seen.iter()
            .filter(|r| r.headers.contains_key("authorization"))
            .all(good)
    );
}

/// A token that is refused before its time, a token server that refuses and comes back: the next read succeeds.
/// Meant to turn red (not tried): `Tokens::reject` that does nothing.
#[test]
fn reads_go_on_when_tokens_are_good_again() {
    let mock = mock();
    with_tokens(&mock, Duration::from_secs(600));
    let origin = mock.origin(ME);
    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    mock.revoke();
    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    assert_eq!(mock.state().token_calls.len(), 2);
    mock.revoke();
    mock.state().token_refused = true;
    for _ in 0..2 {
        let error = origin.fetch("packs/o", RANGE).unwrap_err();
        let text = format!("{error} {error:?} {origin:?}");
        assert!(matches!(error, OriginError::Denied { .. }), "{text}");
        assert!(
            text.contains("UNAUTHORIZED: who?") && text.contains("docker login"),
            "{text}"
        );
        assert!(
            !text.contains("s3cret") && !text.contains("bWU6") && !text.contains("tok-"),
            "{text}"
        );
    }
    mock.state().token_refused = false;
    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    // The token server is busy, as servers are.
    mock.revoke();
    mock.state().auth = Auth::Nobody;
    mock.state().script.push_back(Canned {
        status: 429,
        headers: vec![("retry-after", "9".to_owned())],
        ..Canned::default()
    });
    let error = origin.fetch("packs/o", RANGE).unwrap_err();
    let OriginError::Busy { retry_after, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(retry_after, Some(Duration::from_secs(9)));
}

#[test]
fn every_way_to_say_who_asks() {
    let mock = mock();
    let realm = format!("{}/token", mock.url());
    let bearer = format!(r#"Bearer realm="{realm}",service="mock""#);
    let basic = r#"Basic realm="x""#.to_owned();
    for challenges in [
        vec![basic.clone(), bearer.clone()],
        vec![bearer.clone(), basic.clone()],
        vec!["Negotiate".to_owned(), format!("{basic}, {bearer}")],
    ] {
        with_tokens(&mock, Duration::from_secs(600));
        mock.state().challenges = challenges.clone();
        assert_eq!(
            mock.origin(ME).fetch("packs/o", RANGE).unwrap(),
            b"234",
            "{challenges:?}"
        );
    }
    mock.state().challenges = vec![basic];
    mock.state().auth = Auth::Exactly(LOGIN.to_owned());
    mock.state().token_calls.clear();
    assert_eq!(mock.origin(ME).fetch("packs/o", RANGE).unwrap(), b"234");
    assert_eq!(mock.state().token_calls.len(), 0);
    // Nobody gets a token that anybody can have.
    with_tokens(&mock, Duration::from_secs(600));
    mock.state().challenges.clear();
    mock.state().token_login = String::new();
    assert_eq!(mock.origin([]).fetch("packs/o", RANGE).unwrap(), b"234");
    // An identity token buys others.
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"auths":{{"127.0.0.1:{}":{{"identitytoken":"ident1ty"}}}}}}"#,
        mock.port
    );
    std::fs::write(home.path().join("config.json"), config).unwrap();
    let dir = home.path().display().to_string();
    let origin = mock.origin([("DOCKER_CONFIG", dir.as_str())]);
    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    let last = mock.state().token_calls.last().unwrap().clone();
    assert!(
        last.starts_with("POST grant_type=refresh_token&refresh_token=ident1ty&"),
        "{last}"
    );
    // A ways that nobody knows, and a token server that must not be told.
    for challenge in [
        "Digest realm=\"x\"",
        "Bearer realm=\"http://token.example/\"",
    ] {
        mock.state().challenges = vec![challenge.to_owned()];
        let error = mock.origin(ME).fetch("packs/o", RANGE).unwrap_err();
        assert!(
            matches!(error, OriginError::Denied { .. }),
            "{challenge}: {error}"
        );
    }
}

/// Blobs lie on another server: it is asked for the right range and is not told who asks. Turned red by: sending what
/// `show` added along to every host (`ours` always true).
#[test]
fn credentials_stay_with_their_host() {
    let (mock, cdn) = (mock(), mock());
    with_tokens(&mock, Duration::from_secs(600));
    mock.state().blobs_at = Some(cdn.url());
    let origin = mock.origin(ME);
    assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    assert_eq!(origin.fetch_all("packs/o", 10).unwrap(), BODY);
    let seen = cdn.seen();
    assert_eq!(seen.len(), 2);
    for request in &seen {
        assert!(request.uri.ends_with("?sig=s1gnature"));
        for name in ["authorization", "cookie", "referer"] {
            assert!(!request.headers.contains_key(name), "{name}: {request:?}");
        }
    }
    assert_eq!(seen[0].headers["range"], "bytes=2-4");
    // Nor does it come back when the other server wants to know.
    cdn.state().auth = Auth::Exactly(LOGIN.to_owned());
    let error = origin.fetch("packs/o", RANGE).unwrap_err();
    assert!(matches!(error, OriginError::Denied { .. }), "{error}");
    assert!(!error.to_string().contains("s1gnature"), "{error}");
    assert_eq!(cdn.seen().len(), 1);
    assert_eq!(cdn.state().token_calls.len(), 0);
    // A ring of redirections ends.
    mock.state().blobs_at = Some(mock.url());
    let error = origin.fetch("packs/o", RANGE).unwrap_err();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
}

/// Turned red by: no comparison of the digest. Not tried: none of `Content-Range`, of the object's name.
#[test]
fn wrong_answers_are_errors() {
    let mock = mock();
    let origin = mock.origin([]);
    origin.fetch("packs/o", RANGE).unwrap();
    let canned = |status: u16, headers: &[(&'static str, &str)], body: &[u8]| Canned {
        status,
        headers: headers.iter().map(|(n, v)| (*n, (*v).to_owned())).collect(),
        body: body.to_vec(),
        ..Canned::default()
    };
    // The place is remembered, so each answer is to the range.
    for answer in [
        canned(200, &[], BODY),
        canned(200, &[], b"234"),
        canned(206, &[("content-range", "bytes 3-5/10")], b"345"),
        canned(206, &[("content-range", "bytes 2-4/10")], b"23"),
        canned(206, &[("content-range", "bytes 2-4/10")], b"2345"),
        canned(206, &[], b"234"),
        canned(
            206,
            &[
                ("content-range", "bytes 2-4/10"),
                ("content-encoding", "gzip"),
            ],
            b"234",
        ),
        canned(200, &[("content-type", "text/html")], b"<html>"),
        canned(307, &[], b""),
        canned(307, &[("location", "ftp://127.0.0.1/x")], b""),
    ] {
        mock.state().script.push_back(answer.clone());
        let error = origin.fetch("packs/o", RANGE).unwrap_err();
        assert!(
            matches!(error, OriginError::WrongAnswer { .. }),
            "{answer:?}: {error}"
        );
        assert_eq!(origin.fetch("packs/o", RANGE).unwrap(), b"234");
    }
    let past = ByteRange { start: 8, len: 3 };
    assert!(matches!(
        origin.fetch("packs/o", past),
        Err(OriginError::WrongAnswer { .. })
    ));
    // Whole objects are compared with their digest.
    mock.state()
        .script
        .push_back(canned(200, &[], b"0123456780"));
    let error = origin.fetch_all("packs/o", 10).unwrap_err();
    assert!(error.to_string().contains(&sha256(BODY)), "{error}");
    // Manifests: of another object, with another digest than announced, of something else.
    mock.put(
        "manifests/tags_.o",
        MANIFEST,
        manifest("packs/o", BODY).as_bytes(),
    );
    mock.put("manifests/tags_.p", MANIFEST, b"{\"layers\":[]}");
    mock.put("manifests/tags_.q", "text/html", b"<html>log in</html>");
    for object in ["tags/o", "tags/p", "tags/q"] {
        let error = origin.fetch_all(object, 10).unwrap_err();
        assert!(
            matches!(error, OriginError::WrongAnswer { .. }),
            "{object}: {error}"
        );
    }
    let lie = sha256(b"another");
    mock.state().script.push_back(canned(
        200,
        &[("docker-content-digest", &lie)],
        manifest("tags/o", BODY).as_bytes(),
    ));
    let error = origin.fetch_all("tags/o", 10).unwrap_err();
    assert!(error.to_string().contains(&lie), "{error}");
}

/// A registry or token server that takes a request and says nothing: the reader's deadline ends it, also for those who
/// wait for another's token. Turned red by: deadlines that are not handed on (30 s).
#[test]
fn a_silent_registry_is_left_at_the_deadline() {
    let mock = mock();
    let origin = mock.origin(ME);
    let soon = || Instant::now() + Duration::from_millis(300);
    let late = Duration::from_secs(15);
    let silent = || Canned {
        hang: true,
        ..Canned::default()
    };
    let begun = Instant::now();
    mock.state().script.push_back(silent());
    let error = origin.fetch_within("packs/o", RANGE, soon()).unwrap_err();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error}");
    mock.state().script.push_back(silent());
    let error = origin.fetch_all_within("packs/o", 10, soon()).unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
    with_tokens(&mock, Duration::from_secs(600));
    mock.state().token_hangs = true;
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| origin.fetch_within("packs/o", RANGE, soon()).unwrap_err());
        }
    });
    assert!(begun.elapsed() < late, "{:?}", begun.elapsed());
    mock.state().token_hangs = false;
    assert_eq!(
        origin
            .fetch_within("packs/o", RANGE, begun + late * 2)
            .unwrap(),
        b"234"
    );
}

/// What was remembered and has moved is looked up again.
#[test]
fn a_blob_that_moved_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let kind = Kind {
        delete: true,
        login: false,
    };
    let registry = DockerRegistry::start(dir.path(), kind);
    let (one, two) = (open(&registry.at("l"), []), open(&registry.at("l"), []));
    assert_eq!(
        one.create("packs/o", &mut &b"damaged..."[..]).unwrap(),
        Created::New
    );
    assert_eq!(one.fetch("packs/o", RANGE).unwrap(), b"mag");
    two.replace("packs/o", BODY).unwrap();
    collect_garbage(dir.path());
    // The registry forgets blobs that it served before when it starts again only.
    drop(registry);
    let registry = DockerRegistry::start(dir.path(), kind);
    let three = open(&registry.at("l"), []);
    assert_eq!(three.fetch("packs/o", RANGE).unwrap(), b"234");
    assert_eq!(three.fetch_all("packs/o", 10).unwrap(), BODY);
}
