//! Running a command in a root file system, with the moments of its first output byte and of its end.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::command;
use crate::error::{Context, Error, Result};

/// The search path inside every root.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// When things happened, counted from the start of the clock, and what was said.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    pub(crate) first_output: Duration,
    pub(crate) done: Duration,
    /// Lines of standard output in sorted order: parallel steps may print in any order.
    pub(crate) lines: Vec<String>,
}

/// Runs `line` with `sh -c` by chroot in `root`; the clock began at `began`.
///
/// # Errors
/// Where it does not exit with 0 or prints nothing.
pub(crate) fn chroot(root: &Path, line: &str, began: Instant) -> Result<Timed> {
    let mut command = Command::new("chroot");
    command.arg(root).args(["sh", "-c", line]);
    run(command, began)
}

/// As [`chroot`], in a new network namespace that reaches nothing: shows that the workload needs no network.
///
/// # Errors
/// As [`chroot`].
pub(crate) fn chroot_without_network(root: &Path, line: &str, began: Instant) -> Result<Timed> {
    let mut command = Command::new("unshare");
    command
        .args(["--net", "chroot"])
        .arg(root)
        .args(["sh", "-c", line]);
    run(command, began)
}

fn run(mut command: Command, began: Instant) -> Result<Timed> {
    command.env_clear().env("PATH", PATH).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .during(format!("starting {}", command::shown(&command)))?;
    let stderr = child.stderr.take();
    let errors = std::thread::Builder::new()
        .name("stderr".to_owned())
        .spawn(move || {
            let mut text = Vec::new();
            stderr
                .map(|mut stderr| stderr.read_to_end(&mut text))
                .transpose()
                .unwrap_or_default();
            text
        });
    let errors = errors.during("starting a thread")?;
    let mut output = vec![0];
    let mut first_output = None;
    if let Some(mut stdout) = child.stdout.take() {
        let len = stdout.read(&mut output).during("reading the output")?;
        first_output = (len > 0).then(|| began.elapsed());
        stdout
            .read_to_end(&mut output)
            .during("reading the output")?;
    }
    let status = child.wait().during("waiting for the command")?;
    let done = began.elapsed();
    let said = errors.join().unwrap_or_default();
    match first_output {
        Some(first_output) if status.success() => {
            let mut lines: Vec<_> = String::from_utf8_lossy(&output)
                .lines()
                .map(str::to_owned)
                .collect();
            lines.sort_unstable();
            Ok(Timed {
                first_output,
                done,
                lines,
            })
        }
        _ => Err(Error::Program {
            command: command::shown(&command),
            status: status.to_string(),
            stderr: format!("{}\n{}", command::tail(&said), command::tail(&output)),
        }),
    }
}
