//! `dsec cache ls`, `pin` and `unpin`: one request to layerd each.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use layerd_client::api::CacheDisk;
use layerd_client::cache::{CacheContents, CachedLayer, PinRequest, Pinned};
use layerd_client::client::Client;

use super::Failure;
use crate::mounts::SocketArg;
use crate::output;

/// `dsec cache`.
#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// List the layers in the cache with the room they take, the largest first.
    #[command(after_help = "Example:\n  dsec cache ls --json")]
    Ls(LsArgs),
    /// Keep what is cached of a layer, now or later, whatever else wants the room. Lasts until `unpin`, also over restarts.
    #[command(after_help = "Example:\n  dsec cache pin base/python:3.11")]
    Pin(PinArgs),
    /// Let a pinned layer be evicted again.
    #[command(after_help = "Example:\n  dsec cache unpin base/python:3.11")]
    Unpin(PinArgs),
}

/// `dsec cache ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

/// `dsec cache pin` and `unpin`.
#[derive(Debug, Args)]
pub(crate) struct PinArgs {
    /// Layer: `axis/name:version` or a digest.
    #[arg(value_name = "REF")]
    layer: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

/// Does it.
pub(crate) fn run(command: &CacheCommand) -> Result<ExitCode, Failure> {
    match command {
        CacheCommand::Ls(args) => return list(args),
        CacheCommand::Pin(args) => {
            let pinned = Client::new(&args.socket.socket).pin(&request(args))?;
            say(args, &pinned);
        }
        CacheCommand::Unpin(args) => {
            let unpinned = Client::new(&args.socket.socket).unpin(&request(args))?;
            say(args, &unpinned);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn request(args: &PinArgs) -> PinRequest {
    PinRequest {
        reference: args.layer.clone(),
    }
}

fn say(args: &PinArgs, pinned: &Pinned) {
    if args.json {
        output::json(pinned);
    }
}

fn list(args: &LsArgs) -> Result<ExitCode, Failure> {
    let contents = Client::new(&args.socket.socket).cache()?;
    if args.json {
        output::json(&contents);
        return Ok(ExitCode::SUCCESS);
    }
    for layer in &contents.layers {
        output::line(&line(layer));
    }
    output::line(&sums(&contents));
    Ok(ExitCode::SUCCESS)
}

fn line(layer: &CachedLayer) -> String {
    let name = if layer.refs.is_empty() {
        layer.layer.clone()
    } else {
        layer.refs.join(", ")
    };
    let marks = match (layer.mounted, layer.pinned) {
        (false, false) => "",
        (true, false) => "  mounted",
        (false, true) => "  pinned",
        (true, true) => "  mounted, pinned",
    };
    format!(
        "{name}  {} of {} segments, {}  description {}{marks}",
        layer.segments_cached,
        layer.segments,
        output::bytes(layer.segment_bytes),
        output::bytes(layer.layer_bytes),
    )
}

fn sums(contents: &CacheContents) -> String {
    let stats = &contents.stats;
    let disk = match stats.disk {
        CacheDisk::Full => "; its disk is FULL: nothing is kept",
        CacheDisk::Failing => "; its disk is FAILING: nothing is kept",
        _ => "",
    };
    let counted = if stats.counted {
        ""
    } else {
        " (still counting)"
    };
    format!(
        "{} of {}{counted}, {} segments evicted, {} not kept{disk}",
        output::bytes(stats.bytes_used),
        output::bytes(stats.bytes_max),
        stats.evicted,
        stats.not_kept,
    )
}
