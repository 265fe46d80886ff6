//! Benchmarks of the layer store: cold starts side by side with the other ways to get a root file system,
//! and comparisons with native paths. Everything is compared within one run on one machine.

mod cold_start;
mod command;
mod compare;
mod corpus;
mod disk;
mod error;
mod host;
mod mounts;
mod native;
mod origin;
mod rows;
mod sandbox;
mod say;
mod store;
mod timed;
mod units;
mod workdir;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures the layer store beside eager, whole-image and native ways.
#[derive(Debug, Parser)]
#[command(name = "dsec-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    ColdStart(cold_start::ColdStartArgs),
    Build(compare::build::BuildArgs),
    Read(compare::read::ReadArgs),
    Memory(compare::memory::MemoryArgs),
    Mounts(compare::mount_many::MountsArgs),
    Dedup(compare::dedup::DedupArgs),
    Disk(disk::DiskArgs),
    Kill(compare::kill::KillArgs),
    Sandbox(sandbox::SandboxArgs),
    Origin(origin::OriginArgs),
    #[command(hide = true)]
    Get(origin::GetArgs),
    #[command(hide = true)]
    NativeMount(native::NativeMountArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::ColdStart(args) => cold_start::run(&args),
        Command::Build(args) => compare::build::run(&args),
        Command::Read(args) => compare::read::run(&args),
        Command::Memory(args) => compare::memory::run(&args),
        Command::Mounts(args) => compare::mount_many::run(&args),
        Command::Dedup(args) => compare::dedup::run(&args),
        Command::Disk(args) => disk::run(&args),
        Command::Kill(args) => compare::kill::run(&args),
        Command::Sandbox(args) => sandbox::run(&args),
        Command::Origin(args) => origin::run(&args),
        Command::Get(args) => origin::get(&args),
        Command::NativeMount(args) => native::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done where standard error is closed too; the exit code still tells.
            writeln!(std::io::stderr(), "dsec-bench: {error}").unwrap_or_default();
            ExitCode::FAILURE
        }
    }
}
