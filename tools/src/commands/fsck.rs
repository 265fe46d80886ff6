//! `dsec fsck`: checks what is stored without anybody reading it. What is checked decides which file does it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use imgstore::origin::url::OriginUrl;

use super::{Failure, fsck_cache, fsck_origin};

/// `dsec fsck`.
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    #[command(flatten)]
    pub(crate) what: What,
    /// Mend what can be mended; without this nothing is changed.
    #[arg(long)]
    pub(crate) repair: bool,
    /// Read and check every byte of every pack.
    #[arg(long, conflicts_with = "cache")]
    pub(crate) deep: bool,
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
    /// An origin: its tags, and all that they need.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) origin: Option<OriginUrl>,
}

/// Checks; status 1 when something is damaged, with `--repair` when something still is.
pub(crate) fn run(args: &FsckArgs) -> Result<ExitCode, Failure> {
    match &args.what {
        What {
            cache: Some(cache), ..
        } => fsck_cache::run(cache, args.repair, args.json),
        What {
            origin: Some(origin),
            ..
        } => fsck_origin::run(origin, args),
        // clap asks for one.
        What { .. } => Err("say what to check: `--cache DIR` or `--origin ORIGIN`".into()),
    }
}
