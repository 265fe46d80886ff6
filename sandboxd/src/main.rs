//! `sandboxd`: runs sandboxes composed of layers. See `--help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    if arguments
        .nth(1)
        .is_some_and(|a| a == sandboxd::container::spawner::SUBCOMMAND)
    {
        return match sandboxd::container::spawner::run_inherited() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    ExitCode::FAILURE
}
