//! `dsec sandbox shell`: a terminal of the sandbox at the terminal of whoever asks.
//!
//! Ours is raw meanwhile: every key goes to the sandbox, Ctrl-C too. It is set back whatever happens, but to a SIGKILL.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use hyper::Method;
use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::http::{Client, Pieces};
use super::{follow, nanos, path_of};
use crate::commands::Failure;

/// What is run if nothing is named.
const SHELL: &str = "command -v bash >/dev/null && exec bash -l; exec sh -l";

/// Our terminal's settings, put back when this goes.
struct Raw(Termios);

impl Raw {
    fn on() -> Result<Self, Failure> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Drain, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If the terminal has gone there is nothing to put back.
        tcsetattr(stdin(), OptionalActions::Drain, &self.0).ok();
    }
}

fn size() -> Result<Value, Failure> {
    let size = tcgetwinsize(stdin())?;
    // A terminal that does not know its size is taken for the usual one.
    let or = |n: u16, usual: u16| if n == 0 { usual } else { n };
    Ok(json!({"cols": or(size.ws_col, 80), "rows": or(size.ws_row, 24)}))
}

/// Runs a program at a terminal of the sandbox.
///
/// # Errors
/// When there is no terminal here, or what the daemon said.
pub(super) async fn run(
    client: &Client,
    id: &str,
    command: &[String],
    (user, cwd): (Option<&str>, Option<&str>),
) -> Result<ExitCode, Failure> {
    if !std::io::stdin().is_terminal() {
        return Err("standard input is no terminal; `dsec sandbox exec -i` passes it on".into());
    }
    let name = format!("shell-{}-{}", std::process::id(), nanos());
    let shell = ["/bin/sh", "-c", SHELL].map(str::to_owned);
    let args = if command.is_empty() {
        &shell[..]
    } else {
        command
    };
    let kind = std::env::var("TERM").unwrap_or_else(|_unset| "xterm".to_owned());
    let body = json!({
        "args": args, "pty": size()?, "stdin": true, "stream": true, "request_id": name,
        "envs": {"TERM": kind}, "user": user, "cwd": cwd,
    });
    let path = path_of(id, "/execs");
    let response = client.stream(Method::POST, &path, Some(&body)).await?;
    let raw = Raw::on()?;
    let input = {
        let client = client.clone();
        let path = path_of(id, &format!("/execs/{name}/stdin"));
        tokio::spawn(async move {
            let keys = Pieces::read(std::io::stdin());
            // A program that has ended takes no more input: its end says so.
            client.upload(Method::POST, &path, keys).await.ok();
        })
    };
    let resized = {
        let client = client.clone();
        let path = path_of(id, &format!("/execs/{name}/resize"));
        let mut changes = signal(SignalKind::window_change())?;
        tokio::spawn(async move {
            while changes.recv().await.is_some() {
                let size = size().ok();
                if let Some(size) = size {
                    // The next change tries again.
                    client.json(Method::POST, &path, Some(&size)).await.ok();
                }
            }
        })
    };
    let (mut term, mut hang_up) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    );
    let ended = tokio::select! {
        exit = follow::follow(response) => exit,
        _ = term.recv() => Err("told to end; the shell runs on (`dsec sandbox logs` follows it)".into()),
        _ = hang_up.recv() => Err("the terminal has gone; the shell runs on".into()),
    };
    input.abort();
    resized.abort();
    drop(raw);
    Ok(follow::status(&ended?))
}
