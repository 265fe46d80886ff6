//! The bench's side of the origin: starting it, setting it, reading its counters, and plain downloads.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Context, Error, Result};

/// What an origin has served since its counters were reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Served {
    pub(crate) requests: u64,
    /// Body bytes.
    pub(crate) bytes: u64,
}

/// An origin simulator that runs as a child process and ends when this is dropped.
#[derive(Debug)]
pub(crate) struct OriginProcess {
    child: Child,
    url: String,
}

impl OriginProcess {
    /// Starts an origin over `root` and waits until it listens.
    ///
    /// # Errors
    /// Where it does not start.
    pub(crate) fn start(root: &Path) -> Result<Self> {
        let program = std::env::current_exe().during("finding the own program")?;
        let mut child = Command::new(program)
            .args(["origin", "--delay", "0", "--root"])
            .arg(root)
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .during("starting the origin")?;
        let mut line = String::new();
        let stdout = child.stdout.take();
        let mut origin = Self {
            child,
            url: String::new(),
        };
        if let Some(stdout) = stdout {
            BufReader::new(stdout)
                .read_line(&mut line)
                .during("reading the origin's address")?;
        }
        line.trim_end().clone_into(&mut origin.url);
        if origin.url.is_empty() {
            return Err(Error::Unexpected(
                "the origin ended before it listened".to_owned(),
            ));
        }
        Ok(origin)
    }

    /// As in `http://127.0.0.1:4711`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Sets delay and bandwidth (bytes per second; 0 = no cap), and the counters to zero.
    ///
    /// # Errors
    /// Where the origin does not answer.
    pub(crate) fn set(&self, delay: Duration, bandwidth: u64) -> Result<()> {
        let delay_us = delay.as_micros();
        self.ask(
            "POST",
            &format!("/__set?delay_us={delay_us}&bandwidth={bandwidth}"),
        )?;
        self.ask("POST", "/__reset")?;
        Ok(())
    }

    /// What was served since [`Self::set`].
    ///
    /// # Errors
    /// Where the origin does not answer.
    pub(crate) fn served(&self) -> Result<Served> {
        let answer = self.ask("GET", "/__stats")?;
        serde_json::from_slice(&answer).during("reading the origin's counters")
    }

    fn ask(&self, method: &str, target: &str) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        request(method, &format!("{}{target}", self.url), &mut body)?;
        Ok(body)
    }
}

impl Drop for OriginProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// Downloads a URL to `sink`, and nothing more than that.
#[derive(Debug, clap::Args)]
pub(crate) struct GetArgs {
    /// Address of the file, as in http://127.0.0.1:8000/base-gcc.tar.zst
    url: String,
}

/// Prints what `url` holds to standard output.
///
/// # Errors
/// Where the server does not answer with 200.
pub(crate) fn get(args: &GetArgs) -> Result<()> {
    request("GET", &args.url, &mut std::io::stdout().lock())
}

/// One request; the body goes to `sink`. Only what the simulator answers is understood.
fn request(method: &str, url: &str, sink: &mut impl Write) -> Result<()> {
    let during = || format!("{method} {url}");
    let (host, target) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.find('/').map(|slash| rest.split_at(slash)))
        .ok_or_else(|| {
            Error::Unexpected(format!("`{url}` is not of the form http://HOST:PORT/PATH"))
        })?;
    let mut stream = TcpStream::connect(host).during(during())?;
    stream.set_nodelay(true).during(during())?;
    let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).during(during())?;
    let mut reader = BufReader::with_capacity(1 << 16, stream);
    let mut line = String::new();
    let mut status = String::new();
    let mut body_len = None;
    loop {
        line.clear();
        reader.read_line(&mut line).during(during())?;
        let header = line.trim_end();
        if header.is_empty() {
            break;
        }
        if status.is_empty() {
            header.clone_into(&mut status);
        }
        if let Some(len) = header.strip_prefix("Content-Length: ") {
            body_len = len.parse::<u64>().ok();
        }
    }
    if !status.starts_with("HTTP/1.1 200 ") {
        return Err(Error::Unexpected(format!(
            "{method} {url} was answered with `{status}`"
        )));
    }
    let copied = std::io::copy(&mut reader.by_ref().take(u64::MAX), sink).during(during())?;
    sink.flush().during(during())?;
    match body_len {
        Some(len) if len == copied => Ok(()),
        expected => Err(Error::Unexpected(format!(
            "{method} {url} ended after {copied} bytes, expected {expected:?}"
        ))),
    }
}
