//! One connection: read a request, wait, answer, again. File bytes go out by `sendfile`.

use std::fs::File;
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::Ordering;

use super::request::{self, Part, Request};
use super::{Shared, now_ns, sleep_until_ns, use_exact_timers};

/// Serves one client until it closes the connection or an answer cannot be sent.
pub(crate) fn serve(stream: &TcpStream, shared: &Shared) {
    use_exact_timers();
    // A client that sends many small requests must not wait for its own acknowledgements.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let mut reader = BufReader::new(stream);
    while let Some(request) = request::read(&mut reader) {
        let arrived_ns = now_ns();
        let answered = if request.target.starts_with("/__") {
            control(stream, shared, &request)
        } else {
            sleep_until_ns(arrived_ns + shared.delay_ns.load(Ordering::Relaxed));
            file(stream, shared, &request)
        };
        if answered.is_err() || request.close {
            return;
        }
    }
}

/// Answers with a file, a part of it, or why not.
fn file(stream: &TcpStream, shared: &Shared, request: &Request) -> std::io::Result<()> {
    shared.requests.fetch_add(1, Ordering::Relaxed);
    let path = resolve(&shared.root, &request.target);
    let opened = path
        .and_then(|path| File::open(path).ok())
        .filter(is_regular);
    let Some(file) = opened else {
        return text(stream, "404 Not Found", "no such file\n");
    };
    let file_len = file.metadata()?.len();
    let (status, first, len, range) = match request::part(request.range.as_deref(), file_len) {
        Part::Whole => ("200 OK", 0, file_len, String::new()),
        Part::Bytes { first, len } => {
            let range = format!(
                "Content-Range: bytes {first}-{}/{file_len}\r\n",
                first + len - 1
            );
            ("206 Partial Content", first, len, range)
        }
        Part::Unsatisfiable => {
            return text(
                stream,
                "416 Range Not Satisfiable",
                "the range is beyond the file\n",
            );
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nAccept-Ranges: bytes\r\n\
         Content-Type: application/octet-stream\r\n{range}\r\n"
    );
    (&*stream).write_all(head.as_bytes())?;
    match request.method.as_str() {
        "HEAD" => Ok(()),
        _ => body(stream, shared, &file, first, len),
    }
}

/// Sends `len` bytes of `file` from `first`, as fast as the link allows.
fn body(
    stream: &TcpStream,
    shared: &Shared,
    file: &File,
    first: u64,
    len: u64,
) -> std::io::Result<()> {
    let mut offset = first;
    let end = first + len;
    while offset < end {
        let piece_end = (offset + shared.link.piece_len()).min(end);
        shared.link.pass(piece_end - offset, offset > first);
        while offset < piece_end {
            let count = usize::try_from(piece_end - offset).unwrap_or(usize::MAX);
            let before = offset;
            if rustix::fs::sendfile(stream, file, Some(&mut offset), count)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            shared.bytes.fetch_add(offset - before, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Statistics and settings; neither delayed nor counted.
fn control(stream: &TcpStream, shared: &Shared, request: &Request) -> std::io::Result<()> {
    let (path, query) = request
        .target
        .split_once('?')
        .unwrap_or((&request.target, ""));
    match (request.method.as_str(), path) {
        ("GET", "/__stats") => {}
        ("POST", "/__reset") => shared.reset(),
        ("POST", "/__set") => {
            for (name, value) in query
                .split('&')
                .filter_map(|setting| setting.split_once('='))
            {
                match (name, value.parse::<u64>()) {
                    ("delay_us", Ok(us)) => shared.delay_ns.store(us * 1000, Ordering::Relaxed),
                    ("bandwidth", Ok(bandwidth)) => shared.link.set_bandwidth(bandwidth),
                    _ => {
                        return text(
                            stream,
                            "400 Bad Request",
                            "expected delay_us=N and bandwidth=N\n",
                        );
                    }
                }
            }
        }
        _ => {
            return text(
                stream,
                "404 Not Found",
                "expected /__stats, /__reset or /__set\n",
            );
        }
    }
    text(stream, "200 OK", &shared.stats())
}

fn text(mut stream: &TcpStream, status: &str, body: &str) -> std::io::Result<()> {
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {len}\r\nContent-Type: text/plain\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes())
}

/// The file that a request's target names; `None` where it leads out of the root.
fn resolve(root: &Path, target: &str) -> Option<PathBuf> {
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let relative = Path::new(path.trim_start_matches('/'));
    let inside = relative
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    inside.then(|| root.join(relative))
}

fn is_regular(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file())
}
