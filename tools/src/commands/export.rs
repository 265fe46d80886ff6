//! `dsec export`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use imgstore::store::export;
use imgstore::store::layer;
use imgstore::store::tar_export::ExportOptions;

use super::Failure;
use crate::cli::OnOrigin;
use crate::{output, progress};

/// Writes the tar.
pub(crate) fn run(on: &OnOrigin, to: &Path, skip_sockets: bool) -> Result<ExitCode, Failure> {
    let origin = on.origin.open()?;
    let digest = layer::resolve(origin.as_ref(), &on.layer)?;
    let bar = progress::bar();
    bar.set_message("exporting");
    let options = ExportOptions { skip_sockets };
    let to_stdout = to == Path::new("-");
    let place = if to_stdout {
        "standard output".to_owned()
    } else {
        format!("`{}`", to.display())
    };
    let inner: Box<dyn Write> = if to_stdout {
        Box::new(std::io::stdout().lock())
    } else {
        Box::new(File::create(to).map_err(|e| format!("cannot create {place}: {e}"))?)
    };
    let mut out = BufWriter::with_capacity(1 << 20, inner);
    let report = export::export(
        origin.as_ref(),
        &digest,
        &mut out,
        &options,
        &|done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    )?;
    out.flush()
        .map_err(|e| format!("cannot write {place}: {e}"))?;
    bar.finish_and_clear();
    for path in &report.skipped_sockets {
        output::note(&format!(
            "left out socket `{}`",
            String::from_utf8_lossy(path)
        ));
    }
    if on.json && !to_stdout {
        output::json(&serde_json::json!({
            "layer": digest, "entries": report.entries, "bytes": report.bytes, "skipped_sockets": report.skipped_sockets.len(),
        }));
    } else if !to_stdout {
        output::line(&format!(
            "{} entries, {} in {place}",
            report.entries,
            output::bytes(report.bytes)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
