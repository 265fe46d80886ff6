//! What the kernel knows about processes and the machine: bytes written, CPU time, memory, the page cache.

use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};

/// Clock ticks per second of `/proc/PID/stat`; fixed in the kernel's user ABI.
const TICKS_PER_S: f64 = 100.0;

/// Writes everything back, then empties the page cache and the caches of names and inodes.
///
/// # Errors
/// Where the bench does not run as root.
pub(crate) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    let control = Path::new("/proc/sys/vm/drop_caches");
    std::fs::write(control, "3\n").on("write (as root)", control)
}

/// Bytes that a process, and the children it has waited for, sent towards a disk: pages made dirty on file
/// systems with a disk below, less what was removed before it was written (`/proc/PID/io`).
///
/// # Errors
/// Where the process is gone.
pub(crate) fn bytes_written(pid: &str) -> Result<u64> {
    let path = PathBuf::from(format!("/proc/{pid}/io"));
    let text = std::fs::read_to_string(&path).on("read", &path)?;
    let field = |name: &str| number_after(&text, name).ok_or_else(|| unexpected(&path, name));
    Ok(field("write_bytes:")?.saturating_sub(field("cancelled_write_bytes:")?))
}

/// CPU time in seconds, user and system, of a process and the children it has waited for.
///
/// # Errors
/// Where the process is gone.
pub(crate) fn cpu_s(pid: &str) -> Result<f64> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = std::fs::read_to_string(&path).on("read", &path)?;
    // The name in parentheses may hold spaces; what follows it starts with field 3. utime is field 14.
    let after_name = text.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks = after_name
        .split(' ')
        .skip(11)
        .take(4)
        .filter_map(|field| field.parse::<f64>().ok());
    Ok(ticks.sum::<f64>() / TICKS_PER_S)
}

/// Proportional share of memory of a process, in bytes.
///
/// # Errors
/// Where the process is gone.
pub(crate) fn pss_bytes(pid: &str) -> Result<u64> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
    let text = std::fs::read_to_string(&path).on("read", &path)?;
    number_after(&text, "Pss:")
        .map(|kib| kib * 1024)
        .ok_or_else(|| unexpected(&path, "Pss:"))
}

/// Size of the page cache in bytes (`Cached` of `/proc/meminfo`).
///
/// # Errors
/// Where `/proc` is not mounted.
pub(crate) fn page_cache_bytes() -> Result<u64> {
    let path = Path::new("/proc/meminfo");
    let text = std::fs::read_to_string(path).on("read", path)?;
    number_after(&text, "Cached:")
        .map(|kib| kib * 1024)
        .ok_or_else(|| unexpected(path, "Cached:"))
}

/// A process and all its descendants that are alive.
///
/// # Errors
/// Where `/proc` cannot be listed.
pub(crate) fn process_tree(pid: u32) -> Result<Vec<u32>> {
    let proc = Path::new("/proc");
    let mut parents = Vec::new();
    for entry in std::fs::read_dir(proc).on("list", proc)?.flatten() {
        let Some(child) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        if let Some(parent) = fields
            .split(' ')
            .nth(1)
            .and_then(|field| field.parse::<u32>().ok())
        {
            parents.push((child, parent));
        }
    }
    let mut tree = vec![pid];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        tree.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(child, _)| *child),
        );
        next += 1;
    }
    Ok(tree)
}

/// The number that follows `name` at the start of a line.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn unexpected(path: &Path, field: &str) -> Error {
    Error::Unexpected(format!("`{}` has no field `{field}`", path.display()))
}
