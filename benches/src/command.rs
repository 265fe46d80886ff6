//! Running programs and shell pipelines, with errors that show what they said.

use std::process::{Command, Output, Stdio};

use crate::error::{Context, Error, Result};

/// How much of a failed program's standard error is shown, in bytes.
const STDERR_SHOWN: usize = 2_000;

/// Runs a program to its end and gives what it wrote to standard output.
///
/// # Errors
/// Where it cannot be started or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .during(format!("starting {}", shown(command)))?;
    checked(command, output)
}

/// Runs a line of bash with `pipefail`; `args` are `$1`, `$2`, … in it.
///
/// # Errors
/// As [`run`].
pub(crate) fn shell(line: &str, args: &[&std::ffi::OsStr]) -> Result<Vec<u8>> {
    run(shell_command(line).args(args))
}

/// The command that [`shell`] runs, without its arguments.
pub(crate) fn shell_command(line: &str) -> Command {
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", line, "dsec-bench"]);
    command
}

fn checked(command: &Command, output: Output) -> Result<Vec<u8>> {
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::Program {
        command: shown(command),
        status: output.status.to_string(),
        stderr: tail(&output.stderr),
    })
}

/// The end of what a program said.
pub(crate) fn tail(text: &[u8]) -> String {
    let start = text.len().saturating_sub(STDERR_SHOWN);
    String::from_utf8_lossy(text.get(start..).unwrap_or_default())
        .trim()
        .to_owned()
}

/// A command line as it would be typed, without quoting.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
