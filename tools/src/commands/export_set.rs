//! `dsec export-set`: the part of an origin that lets the most workloads run without the rest.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use imgstore::build::coverage::Choice;
use imgstore::build::partial::{self, Plan, Workload, Written};
use imgstore::origin::url::OriginUrl;

use super::{Failure, trace};
use crate::{output, progress};

/// Width of the bars on a terminal.
const BAR: u64 = 40;

/// `dsec export-set`.
#[derive(Debug, Args)]
pub(crate) struct ExportSet {
    /// Trace files: one workload each, named like the file.
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    traces: Vec<PathBuf>,
    /// Most bytes of the part, as in `500MiB`.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bytes: u64,
    /// Where the layers are.
    #[arg(long, value_name = "ORIGIN")]
    origin: OriginUrl,
    /// Write the part here: `dir:/path`, made if it is missing, or any origin that can be written.
    #[arg(long, value_name = "ORIGIN")]
    to: Option<OriginUrl>,
    /// Draw the coverage curve to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => Some(0),
        "KiB" | "K" => Some(10),
        "MiB" | "M" => Some(20),
        "GiB" | "G" => Some(30),
        "TiB" | "T" => Some(40),
        _ => None,
    };
    let number: Option<u64> = number.parse().ok();
    let size = shift.zip(number).and_then(|(s, n)| n.checked_mul(1 << s));
    size.ok_or_else(|| {
        format!(
            "`{text}` is not a size: expected a number and B, KiB, MiB, GiB or TiB, as in `20GiB`"
        )
    })
}

/// Plans, shows, and writes where it was asked to.
pub(crate) fn run(args: &ExportSet) -> Result<ExitCode, Failure> {
    let origin = args.origin.open()?;
    let workload = |path: &PathBuf| -> Result<Workload, Failure> {
        let name = path.file_stem().unwrap_or(path.as_os_str());
        Ok(Workload {
            name: name.to_string_lossy().into_owned(),
            trace: trace::read(path)?,
        })
    };
    let workloads = args
        .traces
        .iter()
        .map(workload)
        .collect::<Result<Vec<_>, _>>()?;
    let plan = partial::plan_part(origin.as_ref(), &workloads)?;
    let choice = plan.curve.best(args.bytes);
    let written = match (&args.to, choice) {
        (Some(to), Some(choice)) => {
            let target = to.open_or_create()?;
            let bar = progress::bar();
            bar.set_message("copying");
            let step = |done, total| {
                bar.set_prefix(format!("{done}/{total} segments"));
                bar.set_length(total);
                bar.set_position(done);
            };
            let written =
                partial::write_part(&plan, choice, origin.as_ref(), target.as_ref(), &step)?;
            bar.finish_and_clear();
            Some(written)
        }
        _ => None,
    };
    if let Some(path) = &args.svg {
        std::fs::write(path, svg(&plan, args.bytes))
            .map_err(|e| format!("cannot write `{}`: {e}", path.display()))?;
    }
    if args.json {
        json(args, &plan, choice, written);
    } else {
        show(args, &plan, choice, written);
    }
    if choice.is_none() {
        let least = plan.curve.points.first().map_or(0, |p| p.bytes);
        output::note(&format!(
            "no workload fits into {}: the smallest needs {}",
            output::bytes(args.bytes),
            output::bytes(least)
        ));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn names<'a>(plan: &'a Plan, choice: &Choice) -> Vec<&'a str> {
    let name = |w: &usize| plan.names.get(*w).map(String::as_str);
    choice.workloads.iter().filter_map(name).collect()
}

fn json(args: &ExportSet, plan: &Plan, choice: Option<&Choice>, written: Option<Written>) {
    let covered = |n: usize| choice.is_some_and(|c| c.workloads.contains(&n));
    let workloads: Vec<_> = plan
        .names
        .iter()
        .zip(&plan.alone)
        .enumerate()
        .map(|(n, (name, bytes))| {
            serde_json::json!({"name": name, "bytes": bytes, "covered": covered(n)})
        })
        .collect();
    let point = |p: &Choice| serde_json::json!({"workloads": p.workloads.len(), "bytes": p.bytes, "names": names(plan, p)});
    output::json(&serde_json::json!({
        "bytes_max": args.bytes,
        "bytes": choice.map_or(0, |c| c.bytes),
        "covered": choice.map_or(0, |c| c.workloads.len()),
        "exact": plan.curve.exact,
        "workloads": workloads,
        "curve": plan.curve.points.iter().map(point).collect::<Vec<_>>(),
        "written": written,
    }));
}

fn show(args: &ExportSet, plan: &Plan, choice: Option<&Choice>, written: Option<Written>) {
    let all = plan.names.len();
    let most = plan.curve.points.last().map_or(1, |p| p.bytes).max(1);
    output::line("workloads  coverage       bytes");
    for point in &plan.curve.points {
        let filled = usize::try_from(u128::from(point.bytes) * u128::from(BAR) / u128::from(most));
        let bar = "#".repeat(filled.unwrap_or(0));
        let mark = if choice == Some(point) {
            " <- chosen"
        } else {
            ""
        };
        output::line(&format!(
            "{:>9}  {:>7} %  {:>10}  {bar}{mark}",
            point.workloads.len(),
            point.workloads.len() * 100 / all.max(1),
            output::bytes(point.bytes),
        ));
    }
    if !plan.curve.exact {
        output::line("(more than 20 workloads: found by two greedy orders, not proven least)");
    }
    if let Some(choice) = choice {
        output::line(&format!(
            "{} of {all} workloads in {}: {}",
            choice.workloads.len(),
            output::bytes(choice.bytes),
            names(plan, choice).join(", ")
        ));
    }
    if let (Some(written), Some(to)) = (written, &args.to) {
        output::line(&format!(
            "{} layers, {} segments in {to} ({} new)",
            written.layers,
            written.segments,
            output::bytes(written.bytes_stored)
        ));
    }
}

/// The curve as a drawing: bytes to the right, workloads up, the limit as a line.
fn svg(plan: &Plan, bytes_max: u64) -> String {
    const WIDTH: u64 = 640;
    const HEIGHT: u64 = 320;
    const LEFT: u64 = 60;
    const BOTTOM: u64 = 40;
    let points = &plan.curve.points;
    let most = points.last().map_or(1, |p| p.bytes).max(1);
    let all = u64::try_from(points.len()).unwrap_or(1).max(1);
    let scaled = |n: u64, of: u64, to: u64| {
        u64::try_from(u128::from(n) * u128::from(to) / u128::from(of)).unwrap_or(to)
    };
    let x = |bytes: u64| LEFT + scaled(bytes.min(most), most, WIDTH - LEFT - 20);
    let y = |count: u64| HEIGHT - BOTTOM - scaled(count, all, HEIGHT - BOTTOM - 20);
    let mut path = format!("M{} {}", x(0), y(0));
    for (n, point) in (1..).zip(points) {
        write!(path, " H{} V{}", x(point.bytes), y(n)).unwrap_or_default();
    }
    let text = |at: (u64, u64), anchor: &str, text: &str| {
        let (x, y) = at;
        format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>\n")
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <path d=\"M{LEFT} 20 V{0} H{1}\" fill=\"none\" stroke=\"#888\"/>\n\
         <path d=\"{path}\" fill=\"none\" stroke=\"#06c\" stroke-width=\"2\"/>\n",
        HEIGHT - BOTTOM,
        WIDTH - 20
    );
    if bytes_max <= most {
        let at = x(bytes_max);
        let end = HEIGHT - BOTTOM;
        writeln!(
            out,
            "<path d=\"M{at} 20 V{end}\" stroke=\"#c30\" stroke-dasharray=\"4\"/>"
        )
        .unwrap_or_default();
        out += &text((at, 14), "middle", &output::bytes(bytes_max));
    }
    out += &text((LEFT - 6, y(all) + 4), "end", &all.to_string());
    out += &text((LEFT - 6, y(0) + 4), "end", "0");
    out += &text((WIDTH - 20, HEIGHT - 22), "end", &output::bytes(most));
    out += &text(
        (LEFT, HEIGHT - 6),
        "start",
        "workloads that run without the origin, by bytes of the part",
    );
    out += "</svg>\n";
    out
}
