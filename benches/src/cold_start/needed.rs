//! The bytes that a workload needs: the distinct 4 KiB blocks of file data that are read.
//!
//! The workload runs once, off the clock, on the native mounts with an empty page cache. What the page cache
//! then holds of the image's files (`fincore`) is what was read, the kernel's read-ahead included: the same
//! reads that reach a remote image. Metadata is not counted. It is done twice and the larger count taken: another
//! program that drops the page cache meanwhile can only make the count smaller.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::cold_start::Setting;
use crate::cold_start::ways;
use crate::cold_start::workload::Workload;
use crate::command;
use crate::error::{Context, Result};
use crate::native::NativeRoot;
use crate::{host, mounts, timed};

/// How many files one `fincore` looks at.
const FILES_PER_CALL: usize = 1_000;

/// File data of an image, and what was read of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Needed {
    /// Bytes of all distinct files.
    pub(crate) image_bytes: u64,
    /// Bytes of the blocks that were read.
    pub(crate) needed_bytes: u64,
}

/// How often it is counted.
const TIMES: usize = 2;

/// Runs a workload natively and counts.
///
/// # Errors
/// Where the native way fails.
pub(crate) fn measure(setting: &Setting<'_>, workload: &Workload) -> Result<Needed> {
    let mut largest = Needed::default();
    for _ in 0..TIMES {
        let needed = measure_once(setting, workload)?;
        if needed.needed_bytes >= largest.needed_bytes {
            largest = needed;
        }
    }
    Ok(largest)
}

fn measure_once(setting: &Setting<'_>, workload: &Workload) -> Result<Needed> {
    setting.work.empty_folder("scratch")?;
    host::drop_caches()?;
    let images: Vec<_> = workload
        .trees
        .iter()
        .map(|tree| setting.native_image(tree))
        .collect();
    let root = NativeRoot::prepare(setting.work, images.len(), workload.writes)?;
    let mut mounted = ways::native_mount(setting, workload, &images, &[])?;
    if workload.writes {
        mounted.insert(0, mounts::proc(&root.at)?);
    }
    timed::chroot_without_network(&root.at, workload.command, Instant::now())?;
    let mut needed = Needed::default();
    for layer in &root.layers {
        let files = distinct_files(layer)?;
        needed.image_bytes += files.iter().map(|(_, len)| len).sum::<u64>();
        needed.needed_bytes += resident_bytes(&files)?;
    }
    mounted.clear();
    Ok(needed)
}

/// Regular files below a folder, one path for each inode, with their lengths.
///
/// # Errors
/// Where a folder cannot be listed.
pub(crate) fn distinct_files(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut seen = HashSet::new();
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).on("list", &folder)? {
            let entry = entry.on("list", &folder)?;
            let metadata = entry.metadata().on("look at", &folder)?;
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.is_file() && metadata.len() > 0 && seen.insert(metadata.ino()) {
                files.push((entry.path(), metadata.len()));
            }
        }
    }
    Ok(files)
}

/// What the page cache holds of these files.
///
/// # Errors
/// Where `fincore` cannot open one.
pub(crate) fn resident_bytes(files: &[(PathBuf, u64)]) -> Result<u64> {
    let mut sum = 0;
    for group in files.chunks(FILES_PER_CALL) {
        let mut fincore = Command::new("fincore");
        fincore.args(["--bytes", "--raw", "--noheadings", "--output", "RES", "--"]);
        fincore.args(group.iter().map(|(path, _)| path));
        let output = command::run(&mut fincore)?;
        let text = String::from_utf8_lossy(&output);
        sum += text
            .lines()
            .filter_map(|line| line.trim().parse::<u64>().ok())
            .sum::<u64>();
    }
    Ok(sum)
}
