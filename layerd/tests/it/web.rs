//! A small web server for one folder: ranges, counters, a delay, and faults on demand.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What the server does wrong.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// One bit of every answer for a pack is wrong.
    pub(crate) flip: AtomicBool,
    /// So many answers are 503.
    pub(crate) refuse: AtomicU64,
    /// Requests for packs wait until this is false again.
    hang: Mutex<bool>,
    freed: Condvar,
    /// Requests for objects whose name has one of these in it wait until it is taken out again.
    held: Mutex<Vec<String>>,
    released: Condvar,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    delay: Duration,
    faults: Faults,
    pack_requests: AtomicU64,
    requests: AtomicU64,
    /// What was asked for, in order: the object and the first byte.
    asked: Mutex<Vec<(String, u64)>>,
    seen: Condvar,
    seen_lock: Mutex<()>,
}

/// See the head of this file. The server ends with the test's process.
#[derive(Debug, Clone)]
pub(crate) struct Web {
    address: String,
    shared: Arc<Shared>,
}

impl Web {
    pub(crate) fn serve(root: &Path, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            root: root.to_owned(),
            delay,
            faults: Faults::default(),
            pack_requests: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            asked: Mutex::default(),
            seen: Condvar::new(),
            seen_lock: Mutex::new(()),
        });
        let server = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let server = Arc::clone(&server);
                // A client that breaks off is no failure of the server.
                std::thread::spawn(move || drop(server.converse(&stream.unwrap())));
            }
        });
        Self { address, shared }
    }

    /// For `--origin`.
    pub(crate) fn url(&self) -> String {
        self.address.clone()
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Requests for packs so far.
    pub(crate) fn pack_requests(&self) -> u64 {
        self.shared.pack_requests.load(Ordering::SeqCst)
    }

    /// All requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Makes requests for packs wait, or lets them go on.
    pub(crate) fn hang(&self, hang: bool) {
        *self.shared.faults.hang.lock().unwrap() = hang;
        self.shared.faults.freed.notify_all();
    }

    /// Has requests for objects with `part` in their name wait.
    pub(crate) fn hold(&self, part: &str) {
        self.shared
            .faults
            .held
            .lock()
            .unwrap()
            .push(part.to_owned());
    }

    /// Lets them go on.
    pub(crate) fn release(&self, part: &str) {
        let mut held = self.shared.faults.held.lock().unwrap();
        held.retain(|h| h != part);
        self.shared.faults.released.notify_all();
    }

    /// First bytes of the requests for objects with `part` in their name, in the order in which they came.
    pub(crate) fn asked(&self, part: &str) -> Vec<u64> {
        let asked = self.shared.asked.lock().unwrap();
        let of = asked.iter().filter(|(object, _)| object.contains(part));
        of.map(|(_, start)| *start).collect()
    }

    /// Waits until so many requests for packs have come.
    pub(crate) fn wait_for_pack_requests(&self, count: u64) {
        let guard = self.shared.seen_lock.lock().unwrap();
        let (guard, timeout) = self
            .shared
            .seen
            .wait_timeout_while(guard, Duration::from_secs(20), |()| {
                self.pack_requests() < count
            })
            .unwrap();
        drop(guard);
        assert!(
            !timeout.timed_out(),
            "only {} requests",
            self.pack_requests()
        );
    }
}

impl Shared {
    fn converse(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let path = line.split(' ').nth(1).unwrap_or("/").to_owned();
            let mut range = None;
            loop {
                let mut header = String::new();
                reader.read_line(&mut header)?;
                if header.trim().is_empty() {
                    break;
                }
                let lower = header.to_ascii_lowercase();
                if let Some(value) = lower.strip_prefix("range: bytes=") {
                    let (start, end) = value.trim().split_once('-').unwrap();
                    range = Some((start.parse::<u64>().unwrap(), end.parse::<u64>().ok()));
                }
            }
            self.answer(stream, &path, range)?;
        }
    }

    fn answer(
        &self,
        mut stream: &TcpStream,
        path: &str,
        range: Option<(u64, Option<u64>)>,
    ) -> std::io::Result<()> {
        let pack = path.starts_with("/packs/");
        self.requests.fetch_add(1, Ordering::SeqCst);
        let start = range.map_or(0, |(start, _)| start);
        self.asked.lock().unwrap().push((path.to_owned(), start));
        let held = self.faults.held.lock().unwrap();
        let is_held = |held: &mut Vec<String>| held.iter().any(|h| path.contains(h));
        drop(self.faults.released.wait_while(held, is_held).unwrap());
        if pack {
            let guard = self.seen_lock.lock().unwrap();
            self.pack_requests.fetch_add(1, Ordering::SeqCst);
            drop(guard);
            self.seen.notify_all();
            let hang = self.faults.hang.lock().unwrap();
            drop(self.faults.freed.wait_while(hang, |hang| *hang).unwrap());
        }
        std::thread::sleep(self.delay);
        let refuse = &self.faults.refuse;
        let refused = refuse.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if refused.is_ok() {
            return stream.write_all(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n");
        }
        let Ok(file) = File::open(self.root.join(path.trim_start_matches('/'))) else {
            return stream.write_all(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n");
        };
        let size = file.metadata()?.len();
        let (start, end) = range.unwrap_or((0, None));
        let end = end.unwrap_or(size - 1).min(size - 1);
        let mut body = vec![0; usize::try_from(end + 1 - start).unwrap()];
        file.read_exact_at(&mut body, start)?;
        if pack && self.faults.flip.load(Ordering::SeqCst) {
            let middle = body.len() / 2;
            body[middle] ^= 1;
        }
        let status = if range.is_some() {
            "206 Part"
        } else {
            "200 OK"
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{end}/{size}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&body)
    }
}
