//! `dsec fsck`: checks what is on a disk without anybody reading it. What is checked decides which file does it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::{Failure, fsck_cache};

/// `dsec fsck`.
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    #[command(flatten)]
    pub(crate) what: What,
    /// Mend what can be mended; without this nothing is changed.
    #[arg(long)]
    pub(crate) repair: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct What {
    /// A cache folder of layerd. What is damaged in it is removed, and fetched again when it is needed.
    #[arg(long, value_name = "DIR")]
    pub(crate) cache: Option<PathBuf>,
}

/// Checks; status 1 when something is (or was) damaged.
pub(crate) fn run(args: &FsckArgs) -> Result<ExitCode, Failure> {
    match &args.what {
        What { cache: Some(cache) } => fsck_cache::run(cache, args.repair, args.json),
        // clap asks for one.
        What { cache: None } => Err("say what to check: `--cache DIR`".into()),
    }
}
