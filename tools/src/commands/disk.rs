//! `dsec disk`: one file a command.

pub(crate) mod create;
pub(crate) mod export;
pub(crate) mod inspect;
pub(crate) mod ls;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::Failure;

/// Commands.
#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Make a disk: empty, or with the contents of layers or of an image.
    #[command(after_help = "Examples:
  dsec disk create vm1 --size 20GiB
  dsec disk create vm1 --from ./debian.qcow2 --size 20GiB
  dsec disk create ./vm2 --from base.lsmt --from top.lsmt
  dsec disk create vm3 --from workspace/vm:1 --socket /run/dsec/layerd.sock")]
    Create(create::CreateArgs),
    /// List the disks of a folder.
    #[command(after_help = "Example:\n  dsec disk ls --json")]
    Ls(ls::LsArgs),
    /// Flatten layer files, bottom first, or a disk that is not attached, into a raw image with holes.
    #[command(after_help = "Examples:
  dsec disk export base.lsmt mid.zfile top.tar --to raw.img
  dsec disk export base.lsmt writable_data --to raw.img
  dsec disk export vm1 --to raw.img")]
    Export(export::ExportArgs),
    /// Show and check a layer file, or a disk; exit status 1 if anything is damaged.
    #[command(after_help = "Examples:
  dsec disk inspect base.lsmt --json
  dsec disk inspect base.zfile --deep
  dsec disk inspect vm1")]
    Inspect(inspect::InspectArgs),
}

/// Runs the command.
pub(crate) fn run(command: &DiskCommand) -> Result<ExitCode, Failure> {
    match command {
        DiskCommand::Create(args) => create::run(args),
        DiskCommand::Ls(args) => ls::run(args),
        DiskCommand::Export(args) => export::run(args),
        DiskCommand::Inspect(args) => inspect::run(args),
    }
}

/// Where disks are that are called by name.
#[derive(Debug, Args)]
pub(crate) struct Disks {
    /// Folder of the disks that are called by name.
    #[arg(
        long,
        value_name = "DIR",
        env = "DSEC_DISKS",
        default_value = "/var/lib/dsec/disks"
    )]
    pub(crate) disks: PathBuf,
}

impl Disks {
    /// The folder of a disk: a path as it is, a name below the folder of disks.
    pub(crate) fn folder(&self, disk: &OsStr) -> Result<PathBuf, Failure> {
        let path = Path::new(disk);
        let text = disk.to_str().unwrap_or("/");
        if text.contains('/') || matches!(text, "." | "..") {
            return Ok(std::path::absolute(path)?);
        }
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fine = text.len() <= 64 && text.bytes().all(allowed) && !text.starts_with(['.', '-']);
        if text.is_empty() || !fine {
            return Err(format!(
                "`{text}` is not a disk: expected a path with `/`, or a name of 1 to 64 letters, digits, `.`, `_` and `-`"
            )
            .into());
        }
        Ok(std::path::absolute(self.disks.join(text))?)
    }
}
