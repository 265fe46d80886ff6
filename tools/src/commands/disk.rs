//! `dsec disk`: one file a command.

pub(crate) mod attach;
pub(crate) mod commit;
pub(crate) mod create;
pub(crate) mod export;
pub(crate) mod inspect;
mod lowers;
pub(crate) mod ls;
pub(crate) mod snapshot;

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
    /// Make a disk usable: as a block device, as a file, or at a socket. Prints what to open.
    #[command(after_help = "Examples:
  dsec disk attach vm1
  dsec disk attach vm1 --file /srv/vm1.img && mkfs.ext4 -F /srv/vm1.img
  dsec disk attach vm1 --nbd /run/vm1.sock && qemu-img info nbd:unix:/run/vm1.sock

After a crash of the disk's server, `attach` alone attaches it again as it was: all that was flushed is there.")]
    Attach(attach::AttachArgs),
    /// Flush a disk and take it away.
    #[command(after_help = "Example:\n  dsec disk detach vm1")]
    Detach(attach::DetachArgs),
    /// Seal what was written as one more layer, also while the disk is in use; prints the layer's file.
    #[command(after_help = "Examples:
  dsec disk snapshot vm1
  dsec disk create vm2 --from $(dsec disk snapshot vm1)")]
    Snapshot(snapshot::SnapshotArgs),
    /// Write what a disk holds as one compact layer: a file, or published.
    #[command(after_help = "Examples:
  dsec disk commit vm1 --to vm1.lsmt
  dsec disk commit vm1 --to vm1.zfile --zfile zstd
  dsec disk commit vm1 --publish workspace/vm:1 --origin dir:/srv/layers")]
    Commit(commit::CommitArgs),
    /// Put equal layers in place of the lowest ones of a disk, also while it is in use.
    #[command(after_help = "Example:
  dsec disk merge a.lsmt b.lsmt --to ab.lsmt && dsec disk restack vm1 --lower ab.lsmt")]
    Restack(snapshot::RestackArgs),
    /// Flatten layers into one: those of a disk, also while it is in use, or files.
    #[command(after_help = "Examples:
  dsec disk merge vm1
  dsec disk merge a.lsmt b.lsmt --to ab.lsmt")]
    Merge(snapshot::MergeArgs),
    /// What `attach` starts.
    #[command(hide = true)]
    Serve(attach::ServeArgs),
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
        DiskCommand::Attach(args) => attach::attach(args),
        DiskCommand::Detach(args) => attach::detach(args),
        DiskCommand::Snapshot(args) => snapshot::snapshot(args),
        DiskCommand::Commit(args) => commit::run(args),
        DiskCommand::Restack(args) => snapshot::restack(args),
        DiskCommand::Merge(args) => snapshot::merge(args),
        DiskCommand::Serve(args) => attach::serve(args),
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
