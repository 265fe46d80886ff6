//! One file a command; this one chooses and turns errors into an exit status.

mod bench;
mod build;
pub(crate) mod cache;
pub(crate) mod copy;
pub(crate) mod disk;
mod export;
pub(crate) mod export_set;
pub(crate) mod fsck;
mod fsck_cache;
mod fsck_origin;
pub(crate) mod gc;
pub(crate) mod import;
mod inspect;
mod layers;
pub(crate) mod lease;
pub(crate) mod optimize;
pub(crate) mod repair;
pub(crate) mod run;
pub(crate) mod sandbox;
pub(crate) mod tags;
pub(crate) mod trace;
pub(crate) mod trajectory;
mod verify;

use std::process::ExitCode;

use crate::cli::{Cli, Command};
use crate::output;

/// Any error of a command: its text is for the user.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// Runs the command; 0 = done, 1 = failed (or damage found).
pub(crate) fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Build(args) => build::run(&args),
        Command::Cache { what } => cache::run(&what),
        Command::Import(args) => import::run(&args),
        Command::Layers { origin, json } => layers::run(&origin, json),
        Command::Inspect(on) => inspect::run(&on),
        Command::Verify(on) => verify::run(&on),
        Command::Push(args) => copy::push(&args),
        Command::Pull(args) => copy::pull(&args),
        Command::Repair(args) => repair::run(&args),
        Command::Fsck(args) => fsck::run(&args),
        Command::Export {
            on,
            to,
            skip_sockets,
        } => export::run(&on, &to, skip_sockets),
        Command::Mount(args) => crate::mounts::mount(&args),
        Command::Umount(args) => crate::mounts::umount(&args),
        Command::Stats(args) => crate::mounts::stats(&args),
        Command::Mounts(args) => crate::mounts::mounts(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Tag(args) => tags::tag(&args),
        Command::Untag(args) => tags::untag(&args),
        Command::Rm(on) => tags::remove(&on),
        Command::Lease(command) => lease::run(&command),
        Command::Trace(command) => trace::run(&command),
        Command::Optimize(args) => optimize::run(&args),
        Command::ExportSet(args) => export_set::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Sandbox(command) => sandbox::run(&command),
        Command::Trajectory(command) => trajectory::run(&command),
        Command::Disk { what } => disk::run(&what),
        Command::Bench { args } => bench::run(&args),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            output::note(&format!("dsec: {error}"));
            ExitCode::FAILURE
        }
    }
}
