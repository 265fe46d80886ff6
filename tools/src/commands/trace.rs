//! `dsec trace`: what a start reads first, recorded, shown, and published for the next ones.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::{Args, Subcommand};
use imgstore::format::trace::{TRACE_BYTES_MAX, Trace};
use imgstore::ids::{LayerRef, TagName, to_u64};
use imgstore::origin::Origin;
use imgstore::origin::url::OriginUrl;
use imgstore::store::{layer, touched_files, trace as published};
use layerd_client::client::Client;

use super::Failure;
use crate::mounts::SocketArg;
use crate::output;

/// `dsec trace …`.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Write down what was read of a composition since it was mounted, in the order of first reads.
    ///
    /// Record a first start: mount with layers that nothing else uses, start what will be started later, and record. What the
    /// kernel had in its page cache already (layers of another composition) is not read again and not recorded.
    #[command(after_help = "Examples:
  dsec mount base/python:3.11 /mnt
  dsec trace record /mnt --out start.trace -- chroot /mnt python3 -c 'import ssl'
  dsec trace record /mnt --out start.trace --for 30s")]
    Record(Record),
    /// Show what a trace holds: layers, bytes, and with an origin the files in the order of first reads.
    #[command(after_help = "Examples:
  dsec trace show start.trace
  dsec trace show start.trace --origin dir:/srv/layers --json")]
    Show(Show),
    /// Publish a trace beside layers, so that every mount of their tags fetches ahead by itself.
    ///
    /// The layers stay what they are; `dsec optimize` goes further and lays the traced data out in front.
    #[command(after_help = "Example:
  dsec trace apply base/python:3.11 workspace/repo:a1b2 --trace start.trace --origin dir:/srv/layers")]
    Apply(Apply),
}

/// `dsec trace record`.
#[derive(Debug, Args)]
pub(crate) struct Record {
    /// Where the composition is mounted.
    #[arg(value_name = "MOUNTPOINT")]
    mountpoint: PathBuf,
    /// The trace file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Wait so long before it is written.
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration, conflicts_with = "command")]
    wait: Option<Duration>,
    /// Run this first; its exit status is passed on.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

/// `dsec trace show`.
#[derive(Debug, Args)]
pub(crate) struct Show {
    /// The trace file.
    #[arg(value_name = "FILE")]
    trace: PathBuf,
    /// Where the layers are; with it, files are named.
    #[arg(long, value_name = "ORIGIN")]
    origin: Option<OriginUrl>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `dsec trace apply`.
#[derive(Debug, Args)]
pub(crate) struct Apply {
    /// Tags whose layers the trace is of.
    #[arg(required = true, value_name = "REF")]
    tags: Vec<TagName>,
    /// The trace file; several are joined in this order.
    #[arg(long, required = true, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Where the layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let millis = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60_000),
        _ => None,
    };
    let number: Option<u64> = number.parse().ok();
    let millis = millis.zip(number).and_then(|(m, n)| n.checked_mul(m));
    millis.map(Duration::from_millis).ok_or_else(|| {
        format!("`{text}` is not a duration: expected a number and ms, s or m, as in `30s`")
    })
}

/// Reads a trace file.
pub(crate) fn read(path: &Path) -> Result<Trace, String> {
    let failed = |e: &dyn std::fmt::Display| format!("cannot use trace `{}`: {e}", path.display());
    let len = std::fs::metadata(path).map_err(|e| failed(&e))?.len();
    if len > TRACE_BYTES_MAX {
        let text = format!("expected at most {TRACE_BYTES_MAX} bytes, found {len}");
        return Err(failed(&text));
    }
    let mut bytes = std::fs::read(path).map_err(|e| failed(&e))?;
    // `dsec trace record` ends the line.
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    Trace::parse(&bytes).map_err(|e| failed(&e))
}

/// Reads several trace files as one.
pub(crate) fn read_all(paths: &[PathBuf]) -> Result<Trace, String> {
    let traces: Vec<Trace> = paths.iter().map(|p| read(p)).collect::<Result<_, _>>()?;
    Ok(Trace::merge(&traces))
}

/// Runs one of them.
pub(crate) fn run(command: &TraceCommand) -> Result<ExitCode, Failure> {
    match command {
        TraceCommand::Record(args) => record(args),
        TraceCommand::Show(args) => show(args),
        TraceCommand::Apply(args) => apply(args),
    }
}

fn record(args: &Record) -> Result<ExitCode, Failure> {
    let mountpoint = std::path::absolute(&args.mountpoint)?;
    let client = Client::new(&args.socket.socket);
    // A wrong mountpoint is said before the command has run.
    client.trace(&mountpoint)?;
    let mut code = ExitCode::SUCCESS;
    if let Some((program, arguments)) = args.command.split_first() {
        let status = Command::new(program)
            .args(arguments)
            .status()
            .map_err(|e| format!("cannot run `{}`: {e}", program.display()))?;
        if !status.success() {
            output::note(&format!("`{}` ended with {status}", program.display()));
            code = ExitCode::FAILURE;
        }
    } else if let Some(wait) = args.wait {
        std::thread::sleep(wait);
    }
    let recorded = client.trace(&mountpoint)?;
    let trace = Trace::parse(recorded.trace.as_bytes())?;
    std::fs::write(&args.out, format!("{}\n", recorded.trace))
        .map_err(|e| format!("cannot write `{}`: {e}", args.out.display()))?;
    if recorded.truncated {
        output::note("more was read than is recorded; the trace holds the beginning");
    }
    if args.json {
        output::json(&serde_json::json!({
            "bytes": trace.bytes(), "layers": trace.layers, "runs": trace.runs.len(), "truncated": recorded.truncated,
        }));
    } else {
        output::line(&format!(
            "{} of {} layers in `{}`",
            output::bytes(trace.bytes()),
            trace.layers.len(),
            args.out.display()
        ));
    }
    Ok(code)
}

fn show(args: &Show) -> Result<ExitCode, Failure> {
    let trace = read(&args.trace)?;
    let origin = args.origin.as_ref().map(OriginUrl::open).transpose()?;
    let mut layers = Vec::new();
    for digest in &trace.layers {
        let runs = trace.of_layer(digest);
        let bytes: u64 = runs.iter().map(|run| u64::from(run.count) * 4096).sum();
        let files = origin.as_ref().map(|origin| {
            touched_files::touched_files(origin.as_ref(), digest, &runs)
                .inspect_err(|e| output::note(&format!("dsec: {e}")))
                .ok()
        });
        layers.push((digest, bytes, runs.len(), files.flatten()));
    }
    if args.json {
        let layer = |(digest, bytes, runs, files): &(
            _,
            _,
            _,
            Option<Vec<touched_files::TouchedFile>>,
        )| {
            serde_json::json!({"layer": digest, "bytes": bytes, "runs": runs, "files": files})
        };
        output::json(&serde_json::json!({
            "bytes": trace.bytes(), "digest": trace.digest(), "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    for (digest, bytes, runs, files) in layers {
        output::line(&format!(
            "{digest}  {} in {runs} runs",
            output::bytes(bytes)
        ));
        for file in files.iter().flatten() {
            output::line(&format!(
                "  {:>10} of {:>10}  {}",
                output::bytes(file.bytes_read),
                output::bytes(file.bytes),
                file.path
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn apply(args: &Apply) -> Result<ExitCode, Failure> {
    let trace = read_all(&args.trace)?;
    let origin = args.origin.open()?;
    // All are checked before the first is changed.
    for tag in &args.tags {
        let layer = layer::resolve(origin.as_ref(), &LayerRef::Tag(tag.clone()))?;
        check(origin.as_ref(), tag, &layer, &trace)?;
    }
    let mut digest = trace.digest();
    for tag in &args.tags {
        digest = published::publish(origin.as_ref(), tag, &trace)?;
    }
    if args.json {
        output::json(&serde_json::json!({
            "trace": digest, "bytes": trace.bytes(), "tags": args.tags.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }));
    } else {
        for tag in &args.tags {
            output::line(&format!(
                "{tag}: mounts fetch ahead what trace {digest} names"
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(
    origin: &dyn Origin,
    tag: &TagName,
    digest: &imgstore::ids::Digest,
    trace: &Trace,
) -> Result<(), Failure> {
    let runs = trace.of_layer(digest);
    if runs.is_empty() {
        return Err(format!(
            "the trace has nothing of `{tag}` = {digest}: it was recorded on {} other layers; record it again",
            to_u64(trace.layers.len())
        )
        .into());
    }
    let manifest = layer::read_manifest(origin, digest)?;
    imgstore::format::trace::segments_of(&manifest, &runs)?;
    Ok(())
}
