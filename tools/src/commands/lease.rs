//! `dsec lease`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use imgstore::format::lease::{LEASE_SECONDS_MAX, Purpose};
use imgstore::ids::LayerRef;
use imgstore::origin::url::OriginUrl;
use imgstore::store::lease::hold::PATIENCE;
use imgstore::store::lease::{self, Found, clock, pin};

use super::Failure;
use crate::{duration, output};

/// What to do with leases.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Keep layers for a while, whatever happens to their tags; prints the lease's name.
    #[command(
        after_help = "Example:\n  dsec lease create base/python:3.11 --ttl 7d --origin dir:/srv/layers"
    )]
    Create {
        /// Layers: `axis/name:version` or digests.
        #[arg(value_name = "REF", required = true)]
        layers: Vec<LayerRef>,
        /// How long.
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = parse_ttl)]
        ttl: Duration,
        /// Where layers are.
        #[arg(long, value_name = "ORIGIN")]
        origin: OriginUrl,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Let a lease run again from now.
    #[command(
        after_help = "Example:\n  dsec lease renew pin-0123456789abcdef --origin dir:/srv/layers"
    )]
    Renew {
        /// The lease's name.
        name: String,
        /// How long [default: as long as before].
        #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
        ttl: Option<Duration>,
        /// Where layers are.
        #[arg(long, value_name = "ORIGIN")]
        origin: OriginUrl,
    },
    /// End a lease, for instance that of a host that will not come back.
    #[command(
        after_help = "Example:\n  dsec lease release pin-0123456789abcdef --origin dir:/srv/layers"
    )]
    Release {
        /// The lease's name.
        name: String,
        /// Where layers are.
        #[arg(long, value_name = "ORIGIN")]
        origin: OriginUrl,
    },
    /// List leases: of people, publishers and mounts, and of layers that lost a tag.
    #[command(after_help = "Example:\n  dsec lease ls --origin dir:/srv/layers --json")]
    Ls {
        /// Where layers are.
        #[arg(long, value_name = "ORIGIN")]
        origin: OriginUrl,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// How long a lease may run.
fn parse_ttl(text: &str) -> Result<Duration, String> {
    let ttl = duration::parse(text)?;
    let max = Duration::from_secs(LEASE_SECONDS_MAX);
    if ttl.is_zero() || ttl > max {
        let max = duration::text(max);
        return Err(format!(
            "a lease runs for 1s to {max}, not `{text}`; it can be renewed"
        ));
    }
    Ok(ttl)
}

/// A lease as it is listed.
#[derive(Debug, serde::Serialize)]
struct Row {
    name: String,
    purpose: &'static str,
    holder: String,
    layers: Vec<String>,
    objects: usize,
    /// Seconds until it is over; none for layers that lost a tag, whose time is the collector's grace period.
    seconds_left: Option<u64>,
    /// Whether it is over: run out, or its process ended.
    over: bool,
    /// Why it cannot be read.
    damage: Option<String>,
}

/// Does it.
pub(crate) fn run(command: &LeaseCommand) -> Result<ExitCode, Failure> {
    match command {
        LeaseCommand::Create {
            layers,
            ttl,
            origin,
            json,
        } => {
            let name = pin::create(origin.open()?.as_ref(), layers, *ttl, PATIENCE)?;
            if *json {
                output::json(&serde_json::json!({"lease": name, "seconds": ttl.as_secs()}));
            } else {
                output::line(&name);
            }
        }
        LeaseCommand::Renew { name, ttl, origin } => {
            pin::renew(origin.open()?.as_ref(), name, *ttl, PATIENCE)?;
            output::line(&format!("{} runs again from now", pin::object_name(name)));
        }
        LeaseCommand::Release { name, origin } => {
            pin::release(origin.open()?.as_ref(), name)?;
            output::line(&format!("{} is released", pin::object_name(name)));
        }
        LeaseCommand::Ls { origin, json } => list(origin, *json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list(origin: &OriginUrl, json: bool) -> Result<(), Failure> {
    let origin = origin.open()?;
    let leases = lease::read_all(origin.as_ref())?;
    let now = if leases.is_empty() {
        std::time::SystemTime::UNIX_EPOCH
    } else {
        clock::origin_now(origin.as_ref()).unwrap_or_else(|_| std::time::SystemTime::now())
    };
    let row = |found: &Found| {
        let read = found.lease.as_ref();
        let age = now.duration_since(found.info.modified).unwrap_or_default();
        let counted = read.is_ok_and(|l| l.purpose != Purpose::Untagged);
        Row {
            name: found.info.name.clone(),
            purpose: read.map_or("unknown", |l| l.purpose.as_str()),
            holder: read.map_or_else(|_| String::new(), |l| l.holder.clone()),
            layers: read.map_or_else(
                |_| Vec::new(),
                |l| l.layers.iter().map(|d| d.to_hex()).collect(),
            ),
            objects: read.map_or(0, |l| l.objects.len()),
            seconds_left: counted.then(|| found.runs_for().saturating_sub(age).as_secs()),
            over: found.is_over(now),
            damage: read.err().map(ToString::to_string),
        }
    };
    let rows: Vec<Row> = leases.iter().map(row).collect();
    if json {
        output::json(&rows);
        return Ok(());
    }
    for row in rows {
        let left = match (row.over, row.seconds_left, &row.damage) {
            (_, _, Some(damage)) => damage.clone(),
            (true, ..) => "over".to_owned(),
            (false, Some(left), _) => format!("{} left", duration::text(Duration::from_secs(left))),
            (false, None, _) => "until the grace period is over".to_owned(),
        };
        output::line(&format!(
            "{}  {} layers, {} objects, {left}, of {}",
            row.name,
            row.layers.len(),
            row.objects,
            row.holder
        ));
        for layer in &row.layers {
            output::line(&format!("  {layer}"));
        }
    }
    Ok(())
}
