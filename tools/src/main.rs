//! `dsec`: the command line of the layer store.
//!
//! `cli` says what can be typed, `commands` has one file a command, `output` is the only place that prints.

mod cli;
mod commands;
mod duration;
mod mounts;
mod output;
mod progress;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
                .with_env_var("DSEC_LOG")
                .from_env_lossy(),
        )
        .with_writer(std::io::stderr)
        .without_time()
        .init();
    commands::run(cli::Cli::parse())
}
