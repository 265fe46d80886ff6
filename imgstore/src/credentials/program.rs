//! Running a helper program that prints credentials: bounded in time and output, and its output is shown to nobody.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::secret::Secret;
use crate::ids::to_u64;

/// Longest time a helper may take: some ask a server, none should ask a person.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Most bytes of its output (tokens of some clouds have several KiB).
const OUTPUT_BYTES_MAX: u64 = 256 << 10;

/// Why a helper gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It could not be run.
    #[error("cannot run `{program}`: {source}")]
    Io {
        /// Its name.
        program: String,
        /// What failed.
        source: std::io::Error,
    },
    /// It ended with a failure.
    #[error("`{program}` failed: {status}")]
    Failed {
        /// Its name.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// What it said.
        output: Secret,
    },
    /// It did not end in time, or said too much.
    #[error("`{program}` {what}")]
    Unbounded {
        /// Its name.
        program: String,
        /// Which bound it broke.
        what: &'static str,
    },
}

/// Ends the helper and what it started; a helper that has ended is no error.
fn stop(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).ok();
    }
    child.wait().ok();
}

/// Runs `command` with `input` as its standard input; gives its standard output.
///
/// # Errors
/// [`ProgramError`]; the text names `program` and never what it printed.
pub fn run(mut command: Command, program: &str, input: &str) -> Result<Secret, ProgramError> {
    let io = |source| ProgramError::Io {
        program: program.to_owned(),
        source,
    };
    let unbounded = |what| ProgramError::Unbounded {
        program: program.to_owned(),
        what,
    };
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(io)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read its input may close it.
        stdin.write_all(input.as_bytes()).ok();
    }
    let (sender, receiver) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        let read = move || {
            let mut output = Vec::new();
            let done = stdout.take(OUTPUT_BYTES_MAX + 1).read_to_end(&mut output);
            // Nobody waits any more after the deadline.
            sender.send(done.map(|_| output)).ok();
        };
        let reader = std::thread::Builder::new().name("helper".to_owned());
        if let Err(error) = reader.spawn(read) {
            stop(&mut child);
            return Err(io(error));
        }
    }
    let Ok(output) = receiver.recv_timeout(TIME_MAX) else {
        stop(&mut child);
        return Err(unbounded("did not end within 20 s"));
    };
    let output = output.map_err(io)?;
    if to_u64(output.len()) > OUTPUT_BYTES_MAX {
        stop(&mut child);
        return Err(unbounded("printed more than 256 KiB"));
    }
    let status = child.wait().map_err(io)?;
    let output = Secret::new(String::from_utf8_lossy(&output));
    if status.success() {
        Ok(output)
    } else {
        Err(ProgramError::Failed {
            program: program.to_owned(),
            status,
            output,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Result<Secret, ProgramError> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, "helper", "input\n")
    }

    #[test]
    fn output_is_given_to_the_caller_and_hidden_in_errors() {
        assert_eq!(sh("read x; echo got $x").unwrap().reveal(), "got input\n");
        let error = sh("echo s3cret; exit 3").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cret"));
        let error = sh("head -c 300000 /dev/zero").unwrap_err();
        assert!(error.to_string().contains("more than 256 KiB"), "{error}");
    }
}
