//! `dsec bench`: hands over to `dsec-bench`, which lies beside this program.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use super::Failure;

/// Replaces this process.
pub(crate) fn run(args: &[OsString]) -> Result<ExitCode, Failure> {
    let program = std::env::current_exe()?.with_file_name("dsec-bench");
    let error = Command::new(&program).args(args).exec();
    Err(format!(
        "cannot run `{}`: {error}; build it with `cargo build --release -p benches`",
        program.display()
    )
    .into())
}
