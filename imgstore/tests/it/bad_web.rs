//! A real web server on loopback that does to each request what the test tells it: right answers, wrong ones, none.
//!
//! One thread a connection; the server ends with the test's process. The tests of the daemon use this file too.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Longest wait for something that must happen.
const SOON: Duration = Duration::from_secs(30);

/// What a request said, and where it came in.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Counted over all connections, from 0.
    pub(crate) number: usize,
    /// Which connection, from 0.
    pub(crate) connection: usize,
    /// Which request of its connection, from 0.
    pub(crate) nth: usize,
    pub(crate) method: String,
    /// Without the leading slash.
    pub(crate) path: String,
    /// First and last byte.
    pub(crate) range: Option<(usize, usize)>,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// What is done with one request. A range is always answered with 206 unless something else is said.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    Right,
    /// This status with these header lines and no body.
    Status(u16, Vec<String>),
    /// 200 and the whole object, whatever was asked for.
    Whole,
    /// The right length from an offset that is this much lower (or higher, where there is nothing lower), and says so.
    OtherOffset(usize),
    /// The same, but it says what was asked for.
    LyingOffset(usize),
    /// So many bytes fewer, with a matching `Content-Length`.
    Shorter(usize),
    /// So many bytes more, with a matching `Content-Length`.
    Longer(usize),
    /// Announces everything and closes after so many bytes of the body.
    CutOff(usize),
    /// Resets the connection after so many bytes of the body.
    ResetAfter(usize),
    /// No `Content-Length`: the end of the connection is the end; so many bytes are missing.
    NoLength(usize),
    Chunked,
    /// The last chunk is missing, and these bytes.
    ChunkedCut(usize),
    /// With `Content-Encoding: gzip`, also in place of a range.
    Gzip,
    /// As [`Act::Gzip`], but does not say so.
    SecretGzip,
    /// 200 and the page of a proxy.
    Html,
    /// The page, cut or padded to the right length, with the right headers.
    HtmlInPlace,
    /// One bit at this share (of 65,536) of the body is wrong.
    Flip(u16, u8),
    /// A part of the body, from this share on, is zeros.
    Zero(u16),
    Redirect(String),
    /// Resets the connection in place of answering.
    Reset,
    /// Closes it.
    Close,
    /// A right answer, then closes without having said so.
    RightThenClose,
    /// A right answer when [`BadWeb::release`] was called.
    Hold,
    /// As [`Act::Hold`], but then the connection is reset: the server was started again.
    HoldThenReset,
    /// A right answer in pieces of so many bytes of the body with a pause before each.
    Slow(usize, Duration),
    /// One byte of the headers after each pause.
    SlowHead(Duration),
    /// Bytes that are not HTTP.
    Garbage,
}

type Objects = dyn Fn(&str) -> Option<Vec<u8>> + Send + Sync;
type Decide = dyn FnMut(&Request) -> Act + Send;

#[derive(Default)]
struct State {
    seen: Vec<Request>,
    connections: usize,
    held: usize,
    released: bool,
}

struct Shared {
    objects: Box<Objects>,
    decide: Mutex<Box<Decide>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// See the head of this file.
#[derive(Clone)]
pub(crate) struct BadWeb {
    address: String,
    shared: Arc<Shared>,
}

/// What a proxy says when it cannot reach the server.
pub(crate) const PAGE: &[u8] =
    b"<!DOCTYPE html><html><head><title>502</title></head><body>Bad gateway</body></html>\n";

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

impl BadWeb {
    /// Serves these objects.
    pub(crate) fn serve(objects: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::serve_at("127.0.0.1:0", objects)
    }

    pub(crate) fn serve_at(
        listen: &str,
        objects: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(listen).unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            objects: Box::new(objects),
            decide: Mutex::new(Box::new(|_| Act::Right)),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
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

    /// From now on requests are treated like this.
    pub(crate) fn tell(&self, decide: impl FnMut(&Request) -> Act + Send + 'static) {
        *self.shared.decide.lock().unwrap() = Box::new(decide);
    }

    /// From now on all requests are treated like this.
    pub(crate) fn always(&self, act: Act) {
        self.tell(move |_| act.clone());
    }

    /// The next requests are treated like this, the others right.
    pub(crate) fn then_right(&self, acts: impl IntoIterator<Item = Act>) {
        let mut acts: Vec<Act> = acts.into_iter().collect();
        acts.reverse();
        self.tell(move |_| acts.pop().unwrap_or(Act::Right));
    }

    /// All requests so far.
    pub(crate) fn seen(&self) -> Vec<Request> {
        self.shared.state.lock().unwrap().seen.clone()
    }

    /// Forgets them.
    pub(crate) fn forget(&self) {
        self.shared.state.lock().unwrap().seen.clear();
    }

    /// Requests that are being held.
    pub(crate) fn held(&self) -> usize {
        self.shared.state.lock().unwrap().held
    }

    /// Waits until so many requests are held.
    pub(crate) fn wait_for_held(&self, count: usize) {
        let state = self.shared.state.lock().unwrap();
        let (state, timeout) = self
            .shared
            .changed
            .wait_timeout_while(state, SOON, |state| state.held < count)
            .unwrap();
        assert!(!timeout.timed_out(), "only {} are held", state.held);
    }

    /// Lets those go on that are held, and those that will be; `hold_again` ends that.
    pub(crate) fn release(&self) {
        self.shared.state.lock().unwrap().released = true;
        self.shared.changed.notify_all();
    }

    pub(crate) fn hold_again(&self) {
        self.shared.state.lock().unwrap().released = false;
    }
}

/// A reply: where to put which bytes, and how it ends.
struct Reply {
    head: Vec<u8>,
    body: Vec<u8>,
    end: End,
}

#[derive(PartialEq, Eq)]
enum End {
    KeepAlive,
    Close,
    Reset,
}

fn head(status: u16, lines: &[String]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status} X\r\n");
    for line in lines {
        text.push_str(line);
        text.push_str("\r\n");
    }
    text.push_str("\r\n");
    text.into_bytes()
}

fn length(body: &[u8]) -> String {
    format!("Content-Length: {}", body.len())
}

/// The position at a share (of 65,536) of a body.
fn at(body: &[u8], share: u16) -> usize {
    body.len() * usize::from(share) / 65_536
}

/// The part of an object that a request asks for.
struct Part<'a> {
    object: &'a [u8],
    range: Option<(usize, usize)>,
}

impl Part<'_> {
    /// The range, moved; as much of it as there is.
    fn bytes(&self, first: usize) -> Vec<u8> {
        let Some((start, end)) = self.range else {
            return self.object.to_vec();
        };
        let len = end + 1 - start;
        let end = (first + len).min(self.object.len());
        self.object[first.min(end)..end].to_vec()
    }

    fn first(&self) -> usize {
        self.range.map_or(0, |(start, _)| start)
    }

    /// Status and `Content-Range`, as if the range began at `first`.
    fn status(&self, first: usize) -> (u16, Vec<String>) {
        let Some((start, end)) = self.range else {
            return (200, Vec::new());
        };
        let last = first + (end - start);
        let total = self.object.len();
        (
            206,
            vec![format!("Content-Range: bytes {first}-{last}/{total}")],
        )
    }

    fn reply(&self, body: Vec<u8>, end: End) -> Reply {
        let (status, mut lines) = self.status(self.first());
        lines.push(length(&body));
        Reply {
            head: head(status, &lines),
            body,
            end,
        }
    }

    fn right(&self) -> Reply {
        self.reply(self.bytes(self.first()), End::KeepAlive)
    }

    /// All announced, so much sent.
    fn cut(&self, len: usize, end: End) -> Reply {
        let mut reply = self.right();
        reply.body.truncate(len);
        reply.end = end;
        reply
    }

    fn moved(&self, by: usize, honest: bool) -> Reply {
        let first = self.first();
        let other = first.checked_sub(by).unwrap_or(first + by);
        let (status, mut lines) = self.status(if honest { other } else { first });
        let mut body = self.bytes(other);
        body.resize(self.bytes(first).len(), 0xAA);
        lines.push(length(&body));
        Reply {
            head: head(status, &lines),
            body,
            end: End::KeepAlive,
        }
    }

    fn chunked(&self, missing: Option<usize>) -> Reply {
        let (status, mut lines) = self.status(self.first());
        lines.push("Transfer-Encoding: chunked".to_owned());
        let bytes = self.bytes(self.first());
        let kept = bytes.len().saturating_sub(missing.unwrap_or(0));
        let mut body = Vec::new();
        for chunk in bytes[..kept].chunks(1000) {
            body.extend(format!("{:x}\r\n", chunk.len()).bytes());
            body.extend(chunk);
            body.extend(b"\r\n");
        }
        if missing.is_none() {
            body.extend(b"0\r\n\r\n");
        }
        let end = if missing.is_none() {
            End::KeepAlive
        } else {
            End::Close
        };
        Reply {
            head: head(status, &lines),
            body,
            end,
        }
    }

    fn encoded(&self, says_so: bool) -> Reply {
        let body = gzip(&self.bytes(self.first()));
        let (status, mut lines) = self.status(self.first());
        lines.push(length(&body));
        if says_so {
            lines.push("Content-Encoding: gzip".to_owned());
        }
        Reply {
            head: head(status, &lines),
            body,
            end: End::KeepAlive,
        }
    }

    fn damaged(&self, damage: impl FnOnce(&mut [u8])) -> Reply {
        let mut reply = self.right();
        if !reply.body.is_empty() {
            damage(&mut reply.body);
        }
        reply
    }

    /// Everything that needs no waiting; `None` for the others.
    fn act(&self, act: &Act) -> Option<Reply> {
        let with = |status, lines: &[String], body: Vec<u8>, end| Reply {
            head: head(status, lines),
            body,
            end,
        };
        let bytes = || self.bytes(self.first());
        Some(match act {
            Act::Right | Act::Hold | Act::Slow(..) | Act::SlowHead(_) => self.right(),
            Act::Status(status, lines) => {
                let mut lines = lines.clone();
                if !lines.iter().any(|line| line.starts_with("Content-Length")) {
                    lines.push(length(b""));
                }
                with(*status, &lines, Vec::new(), End::KeepAlive)
            }
            Act::Whole => {
                let lines = [length(self.object)];
                with(200, &lines, self.object.to_vec(), End::KeepAlive)
            }
            Act::OtherOffset(by) => self.moved(*by, true),
            Act::LyingOffset(by) => self.moved(*by, false),
            Act::Shorter(by) => {
                let mut body = bytes();
                body.truncate(body.len().saturating_sub(*by));
                self.reply(body, End::KeepAlive)
            }
            Act::Longer(by) => {
                let mut body = bytes();
                body.resize(body.len() + by, 0x55);
                self.reply(body, End::KeepAlive)
            }
            Act::CutOff(len) => self.cut(*len, End::Close),
            Act::ResetAfter(len) => self.cut(*len, End::Reset),
            Act::NoLength(missing) => {
                let (status, lines) = self.status(self.first());
                let mut body = bytes();
                body.truncate(body.len().saturating_sub(*missing));
                with(status, &lines, body, End::Close)
            }
            Act::Chunked => self.chunked(None),
            Act::ChunkedCut(missing) => self.chunked(Some(*missing)),
            Act::Gzip => self.encoded(true),
            Act::SecretGzip => self.encoded(false),
            Act::Html => with(200, &[length(PAGE)], PAGE.to_vec(), End::KeepAlive),
            Act::HtmlInPlace => {
                let len = bytes().len();
                let page = PAGE.iter().copied().cycle().take(len).collect();
                self.reply(page, End::KeepAlive)
            }
            Act::Flip(share, bit) => self.damaged(|body| body[at(body, *share)] ^= 1 << (bit % 8)),
            Act::Zero(share) => self.damaged(|body| {
                let from = at(body, *share);
                body[from..].fill(0);
            }),
            Act::Redirect(to) => {
                let lines = [format!("Location: {to}"), length(b"")];
                with(302, &lines, Vec::new(), End::KeepAlive)
            }
            Act::RightThenClose => Reply {
                end: End::Close,
                ..self.right()
            },
            Act::Garbage => Reply {
                head: b"\x16\x03\x01 nonsense\r\n\r\n".to_vec(),
                body: Vec::new(),
                end: End::Close,
            },
            Act::Reset | Act::Close | Act::HoldThenReset => return None,
        })
    }
}

fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap_or("/"));
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? == 0 {
            return Ok(None);
        }
        let Some((name, value)) = header.split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut request = Request {
        number: 0,
        connection: 0,
        nth: 0,
        method: method.to_owned(),
        path: path.trim_start_matches('/').to_owned(),
        range: None,
        headers,
    };
    request.range = request.header("range").map(|value| {
        // One range, both ends: a server that takes no other must be enough (S70).
        let (start, end) = value
            .strip_prefix("bytes=")
            .unwrap()
            .split_once('-')
            .unwrap();
        (start.parse().unwrap(), end.parse().unwrap())
    });
    Ok(Some(request))
}

fn write_slowly(
    mut stream: &TcpStream,
    bytes: &[u8],
    step: usize,
    pause: Duration,
) -> io::Result<()> {
    for piece in bytes.chunks(step) {
        std::thread::sleep(pause);
        stream.write_all(piece)?;
    }
    Ok(())
}

fn reset(stream: &TcpStream) -> io::Result<()> {
    // Closing then sends a reset.
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    Ok(())
}

impl Shared {
    fn converse(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut state = self.state.lock().unwrap();
        let connection = state.connections;
        state.connections += 1;
        drop(state);
        for nth in 0.. {
            let Some(mut request) = read_request(&mut reader)? else {
                return Ok(());
            };
            let mut state = self.state.lock().unwrap();
            (request.number, request.connection, request.nth) = (state.seen.len(), connection, nth);
            state.seen.push(request.clone());
            drop(state);
            self.changed.notify_all();
            let act = (self.decide.lock().unwrap())(&request);
            match self.answer(stream, &request, &act)? {
                End::KeepAlive => {}
                End::Close => return stream.shutdown(Shutdown::Both),
                End::Reset => {
                    // The clone inside the reader keeps the socket open: it must go for the reset to be sent.
                    drop(reader);
                    return reset(stream);
                }
            }
        }
        Ok(())
    }

    fn hold(&self) {
        let mut state = self.state.lock().unwrap();
        state.held += 1;
        self.changed.notify_all();
        let mut state = self
            .changed
            .wait_while(state, |state| !state.released)
            .unwrap();
        state.held -= 1;
    }

    fn answer(&self, mut stream: &TcpStream, request: &Request, act: &Act) -> io::Result<End> {
        let object = (self.objects)(&request.path);
        let generic = matches!(
            act,
            Act::Status(..) | Act::Html | Act::Redirect(_) | Act::Reset | Act::Close | Act::Garbage
        );
        if object.is_none() && !generic {
            if matches!(act, Act::Hold | Act::HoldThenReset) {
                self.hold();
            }
            stream.write_all(&head(404, &[length(b"")]))?;
            return Ok(End::KeepAlive);
        }
        let object = object.unwrap_or_default();
        let range = request.range.filter(|(_, end)| *end < object.len());
        if request.range.is_some() && range.is_none() && !generic {
            stream.write_all(&head(416, &[length(b"")]))?;
            return Ok(End::KeepAlive);
        }
        let part = Part {
            object: &object,
            range,
        };
        if matches!(act, Act::Hold | Act::HoldThenReset) {
            self.hold();
        }
        let Some(mut reply) = part.act(act) else {
            return Ok(if matches!(act, Act::Reset | Act::HoldThenReset) {
                End::Reset
            } else {
                End::Close
            });
        };
        if request.method == "HEAD" {
            reply.body.clear();
        }
        match act {
            Act::SlowHead(pause) => write_slowly(stream, &reply.head, 1, *pause)?,
            _ => stream.write_all(&reply.head)?,
        }
        match act {
            Act::Slow(step, pause) => write_slowly(stream, &reply.body, *step, *pause)?,
            _ => stream.write_all(&reply.body)?,
        }
        Ok(reply.end)
    }
}
