//! `dsec disk ls`.

use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use disk_server::client;
use imgstore::disk::state;

use super::Disks;
use crate::commands::Failure;
use crate::output;

/// `dsec disk ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    disks: Disks,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One disk as JSON, or what is wrong with it.
fn row(name: &str, folder: &Path) -> serde_json::Value {
    match state::read_state(folder) {
        Ok(state) => {
            let served = match client::status(folder) {
                Ok(status) => serde_json::json!(status),
                Err(error) => serde_json::json!({"error": error.to_string()}),
            };
            serde_json::json!({
                "name": name,
                "folder": folder,
                "virtual_size": state.virtual_size,
                "layers": state.layers.len(),
                "attached": served,
            })
        }
        Err(error) => serde_json::json!({
            "name": name, "folder": folder, "error": error.to_string(),
        }),
    }
}

/// Lists; status 1 when one cannot be read.
pub(crate) fn run(args: &LsArgs) -> Result<ExitCode, Failure> {
    let folder = &args.disks.disks;
    let failed = |error: std::io::Error| format!("cannot list `{}`: {error}", folder.display());
    let mut rows = Vec::new();
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        entries => Some(entries.map_err(failed)?),
    };
    for entry in entries.into_iter().flatten() {
        let path = entry.map_err(failed)?.path();
        if state::is_disk(&path).unwrap_or(false) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            rows.push(row(&name, &path));
        }
    }
    rows.sort_by_key(|row| row["name"].to_string());
    let broken = rows.iter().any(|row| row.get("error").is_some());
    if args.json {
        output::json(&rows);
    } else {
        for row in &rows {
            output::line(&line(row));
        }
    }
    Ok(if broken {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn line(row: &serde_json::Value) -> String {
    let name = row["name"].as_str().unwrap_or_default();
    if let Some(error) = row["error"].as_str() {
        return format!("{name}  damaged: {error}");
    }
    let size = row["virtual_size"].as_u64().unwrap_or(0);
    format!(
        "{name}  {}  {} sealed layers",
        output::bytes(size),
        row["layers"]
    )
}
