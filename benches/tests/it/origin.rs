//! The origin simulator: ranges, counters, delay and bandwidth.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Origin {
    child: Child,
    address: String,
}

impl Origin {
    fn start(root: &std::path::Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dsec-bench"))
            .args(["origin", "--delay", "0", "--root"])
            .arg(root)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim_end().strip_prefix("http://").unwrap().to_owned();
        Self { child, address }
    }

    fn connect(&self) -> BufReader<TcpStream> {
        BufReader::new(TcpStream::connect(&self.address).unwrap())
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Sends a request on a connection that stays open, and returns status, head and body.
fn ask(
    connection: &mut BufReader<TcpStream>,
    method: &str,
    target: &str,
    headers: &str,
) -> (u16, String, Vec<u8>) {
    let request = format!("{method} {target} HTTP/1.1\r\nHost: test\r\n{headers}\r\n");
    connection.get_mut().write_all(request.as_bytes()).unwrap();
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(
            connection.read_line(&mut head).unwrap() > 0,
            "closed after {head:?}"
        );
    }
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "))
        .unwrap();
    let mut body = vec![
        0;
        if method == "HEAD" {
            0
        } else {
            length.parse().unwrap()
        }
    ];
    connection.read_exact(&mut body).unwrap();
    (status, head, body)
}

fn content() -> Vec<u8> {
    (0..5_000_000_u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0])
        .collect()
}

#[test]
fn ranges_are_exact_and_everything_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let content = content();
    std::fs::create_dir_all(root.join("packs")).unwrap();
    std::fs::write(root.join("packs/a"), &content).unwrap();
    std::fs::write(folder.path().join("outside"), "secret").unwrap();
    let origin = Origin::start(&root);
    let mut connection = origin.connect();

    let (status, head, body) = ask(
        &mut connection,
        "GET",
        "/packs/a",
        "Range: bytes=1000-4095\r\n",
    );
    assert_eq!(status, 206);
    assert!(
        head.contains("Content-Range: bytes 1000-4095/5000000\r\n"),
        "{head}"
    );
    assert_eq!(body, content[1000..4096]);
    let (status, _, body) = ask(&mut connection, "GET", "/packs/a", "");
    assert_eq!((status, body == content), (200, true));
    let (status, head, _) = ask(&mut connection, "HEAD", "/packs/a", "");
    assert_eq!(status, 200);
    assert!(head.contains("Content-Length: 5000000\r\n"), "{head}");
    assert_eq!(
        ask(
            &mut connection,
            "GET",
            "/packs/a",
            "Range: bytes=5000000-\r\n"
        )
        .0,
        416
    );
    assert_eq!(ask(&mut connection, "GET", "/packs", "").0, 404);
    assert_eq!(ask(&mut connection, "GET", "/../outside", "").0, 404);

    let (_, _, stats) = ask(&mut connection, "GET", "/__stats", "");
    let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
    assert_eq!(stats["requests"], 6);
    assert_eq!(stats["bytes"], 5_003_096);
    ask(&mut connection, "POST", "/__reset", "");
    let (_, _, stats) = ask(&mut connection, "GET", "/__stats", "");
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(&stats).unwrap()["requests"],
        0
    );
}

#[test]
fn an_answer_is_never_earlier_than_delay_and_bandwidth_allow() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("a"), content()).unwrap();
    let origin = Origin::start(root.path());
    let mut connection = origin.connect();
    assert_eq!(
        ask(
            &mut connection,
            "POST",
            "/__set?delay_us=20000&bandwidth=25000000",
            ""
        )
        .0,
        200
    );

    let began = Instant::now();
    ask(&mut connection, "GET", "/a", "Range: bytes=0-0\r\n");
    assert!(
        began.elapsed() >= Duration::from_millis(20),
        "{:?}",
        began.elapsed()
    );

    // Two clients share one link: 10 MB at 25 MB/s take 0.4 s, whoever asks.
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut connection = origin.connect();
            scope.spawn(move || {
                assert_eq!(ask(&mut connection, "GET", "/a", "").2.len(), 5_000_000)
            });
        }
    });
    // A late wake-up may be made good within an answer, by 5 ms at most.
    assert!(
        began.elapsed() >= Duration::from_millis(395),
        "{:?}",
        began.elapsed()
    );
}
