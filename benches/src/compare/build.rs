//! `build`: `dsec build` beside `tar | zstd` and `mkfs.erofs` on the same tree, in the page cache.

use std::fmt::Write;

use serde::Serialize;

use super::{Common, Cost, folder_bytes, make_erofs};
use crate::cold_start::{middle, read_all};
use crate::command;
use crate::corpus::{self, file_len};
use crate::error::Result;
use crate::store::Binaries;
use crate::units::megabytes;

/// Compares build time and stored size with tar, zstd and mkfs.erofs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  dsec-bench build --trees base-small,base-go --json build.json")]
pub(crate) struct BuildArgs {
    #[command(flatten)]
    common: Common,
    /// Trees of the corpus.
    #[arg(long, value_delimiter = ',', default_value = "base-small,base-gcc")]
    trees: Vec<String>,
}

/// One tool on one tree.
#[derive(Debug, Serialize)]
struct Row {
    tree: String,
    tool: &'static str,
    wall_s: f64,
    cpu_s: f64,
    stored_bytes: u64,
    /// Wall time as a multiple of `tar | zstd -3 -T0`.
    wall_to_tar_zstd: f64,
    costs: Vec<Cost>,
}

const TOOLS: [&str; 3] = ["tar | zstd -3 -T0", "mkfs.erofs", "dsec build"];

/// Runs the comparison.
///
/// # Errors
/// Where a tree cannot be made or a tool fails.
pub(crate) fn run(args: &BuildArgs) -> Result<()> {
    let (work, binaries) = args.common.open()?;
    let mut rows = Vec::new();
    for tree in &args.trees {
        let source = corpus::ensure_tree(&work, tree)?;
        read_all(&source)?;
        let mut costs: [Vec<Cost>; 3] = Default::default();
        let mut stored = [0; 3];
        for _ in 0..args.common.runs {
            let tools = costs.iter_mut().zip(&mut stored).zip(TOOLS);
            for ((costs, stored), tool) in tools {
                let folder = work.empty_folder("scratch/build")?;
                let target = folder.join("image");
                let (cost, ()) = Cost::of(|| match tool {
                    "mkfs.erofs" => make_erofs(&source, &target),
                    "dsec build" => binaries
                        .build(&source, &Binaries::layer_name(tree), &folder)
                        .map(drop),
                    _ => {
                        let line = "tar -C \"$1\" --sort=name --xattrs --numeric-owner -cf - . | zstd -q -3 -T0 >\"$2\"";
                        command::shell(line, &[source.as_os_str(), target.as_os_str()]).map(drop)
                    }
                })?;
                costs.push(cost);
                *stored = if tool == "dsec build" {
                    folder_bytes(&folder)?
                } else {
                    file_len(&target)?
                };
            }
        }
        let reference = costs.first().map_or(1.0, |costs| {
            middle(costs.iter().map(|c| c.wall_s).collect())
        });
        for ((costs, stored_bytes), tool) in costs.into_iter().zip(stored).zip(TOOLS) {
            let wall_s = middle(costs.iter().map(|cost| cost.wall_s).collect());
            let cpu_s = middle(costs.iter().map(|cost| cost.cpu_s).collect());
            let wall_to_tar_zstd = wall_s / reference;
            rows.push(Row {
                tree: tree.clone(),
                tool,
                wall_s,
                cpu_s,
                stored_bytes,
                wall_to_tar_zstd,
                costs,
            });
        }
    }
    work.empty_folder("scratch")?;
    args.common.publish(&table(&rows), &rows)
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<16}{:<20}{:>9}{:>9}{:>12}{:>12}\n",
        "tree", "tool", "wall s", "CPU s", "stored MB", "x tar|zstd"
    );
    for row in rows {
        // Writing to a string cannot fail.
        writeln!(
            text,
            "{:<16}{:<20}{:>9.2}{:>9.2}{:>12.1}{:>12.2}",
            row.tree,
            row.tool,
            row.wall_s,
            row.cpu_s,
            megabytes(row.stored_bytes),
            row.wall_to_tar_zstd
        )
        .unwrap_or_default();
    }
    text
}
