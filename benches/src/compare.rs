//! Comparisons of one part of the store with the plain tools or native paths beside it: building, reading,
//! memory, mounting, deduplication, and readers whose store is killed. Each prints lines for people and writes the same numbers as JSON.

pub(crate) mod build;
pub(crate) mod dedup;
pub(crate) mod kill;
pub(crate) mod memory;
pub(crate) mod mount_many;
pub(crate) mod read;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::command;
use crate::error::{Context, Result};
use crate::store::Binaries;
use crate::workdir::WorkDir;
use crate::{host, say, units};

/// What all comparisons take.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Common {
    /// Folder for the corpus and everything made from it [default: $XDG_CACHE_HOME/dsec-bench].
    #[arg(long)]
    work: Option<PathBuf>,
    /// Folder with `dsec` and `layerd` [default: where this program is].
    #[arg(long)]
    bin_dir: Option<PathBuf>,
    /// Runs of each measurement; medians are reported.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// The origin's delay per request.
    #[arg(long, default_value = "1ms", value_parser = units::parse_delay)]
    delay: Duration,
    /// Write all numbers to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Common {
    fn open(&self) -> Result<(WorkDir, Binaries)> {
        let work = WorkDir::open(self.work.as_deref())?;
        work.empty_folder("scratch")?;
        Ok((work, Binaries::require(self.bin_dir.as_deref())?))
    }

    /// Prints `text`, and writes `numbers` where JSON was asked for.
    fn publish(&self, text: &str, numbers: &impl Serialize) -> Result<()> {
        say::print(text)?;
        if let Some(path) = &self.json {
            let json = serde_json::to_string_pretty(numbers).during("writing JSON")?;
            std::fs::write(path, json + "\n").on("write", path)?;
        }
        Ok(())
    }
}

/// Wall and CPU time of a program with its children.
#[derive(Debug, Clone, Copy, Serialize)]
struct Cost {
    wall_s: f64,
    cpu_s: f64,
}

impl Cost {
    /// Runs `work` and measures it; CPU time has the kernel's resolution of 10 ms.
    fn of<T>(work: impl FnOnce() -> Result<T>) -> Result<(Self, T)> {
        let cpu_before = host::cpu_s("self")?;
        let began = Instant::now();
        let result = work()?;
        let wall_s = began.elapsed().as_secs_f64();
        Ok((
            Self {
                wall_s,
                cpu_s: host::cpu_s("self")? - cpu_before,
            },
            result,
        ))
    }
}

/// Bytes of all files below a folder.
fn folder_bytes(folder: &Path) -> Result<u64> {
    let line =
        "find \"$1\" -type f -printf '%s\\n' | awk '{ sum += $1 } END { printf \"%d\", sum }'";
    let output = command::shell(line, &[folder.as_os_str()])?;
    String::from_utf8_lossy(&output)
        .trim()
        .parse()
        .during(format!("adding up {}", folder.display()))
}

/// Makes a plain EROFS image of a tree.
fn make_erofs(tree: &Path, image: &Path) -> Result<()> {
    command::run(
        Command::new("mkfs.erofs")
            .arg("--quiet")
            .arg(image)
            .arg(tree),
    )?;
    Ok(())
}
