//! Benchmarks of the layer store: cold starts side by side with the other ways to get a root file system,
//! and comparisons with native paths. Everything is compared within one run on one machine.

mod error;
mod origin;
mod units;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures the layer store beside eager, whole-image and native ways.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Origin(origin::OriginArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Origin(args) => origin::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done where standard error is closed too; the exit code still tells.
            drop(writeln!(std::io::stderr(), "dsec-bench: {error}"));
            ExitCode::FAILURE
        }
    }
}
