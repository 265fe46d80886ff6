//! `dedup`: ten related real images, each built into an empty origin, and all into one.
//!
//! The images are the small base with other Debian packages. In the shared origin an image stores only segments
//! that are not there yet; with the first image as `--dict` its chunks are referred to as well. Every image is
//! exported from the shared origin and compared with its tree.

use std::ffi::OsStr;
use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use super::{Common, folder_bytes};
use crate::command;
use crate::corpus;
use crate::error::{Context, Result};
use crate::mounts;
use crate::say::progress;
use crate::store::Binaries;
use crate::units::megabytes;
use crate::workdir::WorkDir;

/// The packages that make the images differ.
const PACKAGES: [&str; 10] = [
    "git",
    "curl",
    "vim",
    "ruby",
    "php-cli",
    "nginx",
    "redis-server",
    "gdb",
    "cmake",
    "postgresql-client",
];
/// Largest share of the separate sizes that all in one origin may take.
const SHARE_MAX: f64 = 0.71;
/// The layer that the others name with `--dict`.
const DICT: &str = "base/small:1";

/// Builds ten related images into one origin and compares the size with separate origins.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench dedup --json dedup.json")]
pub(crate) struct DedupArgs {
    #[command(flatten)]
    common: Common,
    /// How many of the ten images to take.
    #[arg(long, default_value_t = PACKAGES.len())]
    images: usize,
}

/// One image.
#[derive(Debug, Serialize)]
struct Row {
    image: String,
    plain_bytes: u64,
    /// Size of an origin that holds only this image.
    alone_bytes: u64,
    /// What it added to the shared origin.
    added_bytes: u64,
    /// What it added to the shared origin where the base is a dictionary.
    added_with_dict_bytes: u64,
    restored_equal: bool,
}

/// All of them.
#[derive(Debug, Serialize)]
struct Report {
    images: Vec<Row>,
    shared_to_separate: f64,
    shared_with_dict_to_separate: f64,
    limit: f64,
}

/// Runs the comparison.
///
/// # Errors
/// Where an image cannot be made, built or exported.
pub(crate) fn run(args: &DedupArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    // Nothing here is about the disk: origins and restored trees lie in memory.
    let _memory = mounts::tmpfs(&work.folder("scratch")?)?;
    let shared = work.folder("scratch/shared")?;
    let with_dict = work.folder("scratch/with-dict")?;
    let base = corpus::ensure_tree(&work, "base-small")?;
    binaries.build(&base, DICT, &with_dict)?;
    // The base is there for the dictionary's sake and counts for that way.
    let dict_bytes = folder_bytes(&with_dict)?;
    let mut rows = Vec::new();
    for package in PACKAGES.iter().take(args.images) {
        let tree = corpus::ensure_tree(&work, &format!("image-{package}"))?;
        let layer = format!("base/image-{package}:1");
        let alone = work.empty_folder("scratch/alone")?;
        let built = binaries.build(&tree, &layer, &alone)?;
        let added_bytes = added(&shared, || binaries.build(&tree, &layer, &shared).map(drop))?;
        let added_with_dict_bytes = added(&with_dict, || {
            binaries
                .build_with_dict(&tree, &layer, &with_dict, DICT)
                .map(drop)
        })?;
        let expected = tree_digest(&tree)?;
        let equal = restored(&work, &binaries, &layer, &shared)? == expected
            && restored(&work, &binaries, &layer, &with_dict)? == expected;
        progress!(
            "{layer}: {}",
            if equal {
                "restored equal"
            } else {
                "RESTORED DIFFERENT"
            }
        );
        rows.push(Row {
            image: layer,
            plain_bytes: built.bytes_in,
            alone_bytes: folder_bytes(&alone)?,
            added_bytes,
            added_with_dict_bytes,
            restored_equal: equal,
        });
        // A tree of the corpus is kept; these are many and quickly made again.
        std::fs::remove_dir_all(&tree).on("remove", &tree)?;
    }
    let separate: u64 = rows.iter().map(|row| row.alone_bytes).sum();
    let together: u64 = rows.iter().map(|row| row.added_bytes).sum();
    let with_dict: u64 = dict_bytes
        + rows
            .iter()
            .map(|row| row.added_with_dict_bytes)
            .sum::<u64>();
    let report = Report {
        images: rows,
        shared_to_separate: megabytes(together) / megabytes(separate),
        shared_with_dict_to_separate: megabytes(with_dict) / megabytes(separate),
        limit: SHARE_MAX,
    };
    args.common.publish(&table(&report), &report)
}

/// What `build` adds to a folder, in bytes.
fn added(folder: &Path, build: impl FnOnce() -> Result<()>) -> Result<u64> {
    let before = folder_bytes(folder)?;
    build()?;
    Ok(folder_bytes(folder)?.saturating_sub(before))
}

/// The digest of a layer that is exported and extracted.
fn restored(work: &WorkDir, binaries: &Binaries, layer: &str, origin: &Path) -> Result<Vec<u8>> {
    let folder = work.empty_folder("scratch/restored")?;
    let line = "\"$1\" export \"$2\" --origin \"dir:$3\" --to - |
                tar -xp --numeric-owner --xattrs --xattrs-include='*' -C \"$4\"";
    command::shell(
        line,
        &[
            binaries.dsec.as_os_str(),
            OsStr::new(layer),
            origin.as_os_str(),
            folder.as_os_str(),
        ],
    )?;
    tree_digest(&folder)
}

/// The digest of a tree as a tar with everything that a layer keeps.
fn tree_digest(tree: &Path) -> Result<Vec<u8>> {
    let line = "tar --sort=name --format=pax --pax-option=delete=atime,delete=ctime --xattrs --xattrs-include='*' \
                --numeric-owner -C \"$1\" -cf - . | sha256sum";
    command::shell(line, &[tree.as_os_str()])
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{:<28}{:>10}{:>10}{:>10}{:>12}  {}\n",
        "image", "plain MB", "alone MB", "added MB", "with dict", "restored"
    );
    for row in &report.images {
        // Writing to a string cannot fail.
        writeln!(
            text,
            "{:<28}{:>10.1}{:>10.1}{:>10.1}{:>12.1}  {}",
            row.image,
            megabytes(row.plain_bytes),
            megabytes(row.alone_bytes),
            megabytes(row.added_bytes),
            megabytes(row.added_with_dict_bytes),
            if row.restored_equal {
                "equal"
            } else {
                "DIFFERENT"
            },
        )
        .unwrap_or_default();
    }
    let verdict = |share: f64| if share <= SHARE_MAX { "met" } else { "NOT MET" };
    text + &format!(
        "stored together / separately: {:.3} ({} at most {SHARE_MAX}); with --dict {DICT}: {:.3} ({})\n",
        report.shared_to_separate,
        verdict(report.shared_to_separate),
        report.shared_with_dict_to_separate,
        verdict(report.shared_with_dict_to_separate),
    )
}
