//! A `sandboxd` for one run, and a client that keeps its connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::store::{Binaries, Layerd};

/// How long the daemon may take to listen.
const START_MAX: Duration = Duration::from_secs(20);
/// How often its socket is looked for.
const POLL: Duration = Duration::from_millis(2);

/// A running `sandboxd`, ended when this is dropped; its layerd after it.
#[derive(Debug)]
pub(crate) struct Sandboxd {
    child: Child,
    socket: PathBuf,
    program: PathBuf,
    _layerd: Layerd,
}

impl Sandboxd {
    /// Starts one with everything below `folder`.
    ///
    /// # Errors
    /// Where it does not listen in time.
    pub(crate) fn start(binaries: &Binaries, origin: &Path, folder: &Path) -> Result<Self> {
        let origin = format!("dir:{}", origin.display());
        let layerd = Layerd::start(binaries, &origin, &folder.join("cache"))?;
        let program = binaries.dsec.with_file_name("sandboxd");
        let socket = folder.join("sandboxd.sock");
        let log_path = folder.join("sandboxd.log");
        let log = std::fs::File::create(&log_path).on("make", &log_path)?;
        let mut start = Command::new(&program);
        start.arg("--layerd").arg(folder.join("cache.sock"));
        start
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()));
        start.arg("--state").arg(folder.join("state"));
        start
            .args(["--origin", &origin, "--dsec"])
            .arg(&binaries.dsec);
        start.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = start
            .spawn()
            .during(format!("starting {}", command::shown(&start)))?;
        let mut daemon = Self {
            child,
            socket,
            program,
            _layerd: layerd,
        };
        let deadline = Instant::now() + START_MAX;
        while UnixStream::connect(&daemon.socket).is_err() {
            let ended = daemon.child.try_wait().during("looking at sandboxd")?;
            if ended.is_some() || Instant::now() > deadline {
                let said = std::fs::read(&log_path).unwrap_or_default();
                return Err(Error::Program {
                    command: command::shown(&start),
                    status: ended.map_or("does not listen".to_owned(), |s| s.to_string()),
                    stderr: command::tail(&said),
                });
            }
            std::thread::sleep(POLL);
        }
        Ok(daemon)
    }

    /// A connection.
    ///
    /// # Errors
    /// Where it is refused.
    pub(crate) fn client(&self) -> Result<Client> {
        let stream = UnixStream::connect(&self.socket).on("connect to", &self.socket)?;
        Ok(Client(BufReader::new(stream)))
    }

    /// PSS of the daemon and of everything that runs its program: spawner, shells, and what sits in each sandbox.
    ///
    /// # Errors
    /// Where `/proc` cannot be read.
    pub(crate) fn pss_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        let proc = Path::new("/proc");
        for entry in std::fs::read_dir(proc).on("list", proc)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let own = std::fs::read_link(entry.path().join("exe"));
            if own.is_ok_and(|exe| exe == self.program) {
                sum += host::pss_bytes(&name)?;
            }
        }
        Ok(sum)
    }
}

impl Drop for Sandboxd {
    fn drop(&mut self) {
        // What still lives would outlive the daemon.
        if let Ok(mut client) = self.client()
            && let Ok(all) = client.ask("GET", "/v1/sandboxes", &Value::Null)
        {
            let sandboxes = all.get("sandboxes").and_then(Value::as_array);
            for sandbox in sandboxes.into_iter().flatten() {
                let id = sandbox.get("id").and_then(Value::as_str);
                client.kill(id.unwrap_or_default()).unwrap_or_default();
            }
        }
        let pid = i32::try_from(self.child.id()).unwrap_or_default();
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap_or_default();
        }
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// A client that sends one request after the other.
#[derive(Debug)]
pub(crate) struct Client(BufReader<UnixStream>);

impl Client {
    /// One request and its answer.
    ///
    /// # Errors
    /// Where it is not answered with 2xx.
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let during = || format!("{method} {path}");
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let len = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: sandboxd\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}"
        );
        self.0
            .get_mut()
            .write_all(request.as_bytes())
            .during(during())?;
        let mut status = String::new();
        self.0.read_line(&mut status).during(during())?;
        let mut len = 0;
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).during(during())?;
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                len = value.parse().during(during())?;
            }
        }
        let mut answer = vec![0; len];
        self.0.read_exact(&mut answer).during(during())?;
        if status.split(' ').nth(1).is_none_or(|s| !s.starts_with('2')) {
            let said = String::from_utf8_lossy(&answer).into_owned();
            return Err(Error::Unexpected(format!(
                "{method} {path} was answered with {}: {said}",
                status.trim_end()
            )));
        }
        if answer.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&answer).during(during())
    }

    /// A new sandbox; its id.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub(crate) fn create(&mut self, base: &str) -> Result<String> {
        let asked = serde_json::json!({"base": base, "memory_mb": 512});
        let made = self.ask("POST", "/v1/sandboxes", &asked)?;
        let id = made.get("id").and_then(Value::as_str);
        id.map(str::to_owned)
            .ok_or_else(|| Error::Unexpected(format!("a sandbox without id: {made}")))
    }

    /// Runs a program to its end; it must exit with 0.
    ///
    /// # Errors
    /// Where it does not.
    pub(crate) fn exec(&mut self, id: &str, args: &[&str]) -> Result<Value> {
        let asked = serde_json::json!({"args": args});
        let ran = self.ask("POST", &format!("/v1/sandboxes/{id}/execs"), &asked)?;
        if ran.get("exit_code").and_then(Value::as_i64) == Some(0) {
            return Ok(ran);
        }
        Err(Error::Unexpected(format!("{args:?} ended with {ran}")))
    }

    /// Kills a sandbox.
    ///
    /// # Errors
    /// Where that fails.
    pub(crate) fn kill(&mut self, id: &str) -> Result<()> {
        self.ask("DELETE", &format!("/v1/sandboxes/{id}"), &Value::Null)
            .map(drop)
    }
}
