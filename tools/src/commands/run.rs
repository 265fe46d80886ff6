//! `dsec run`: a sandbox for one command.

use std::process::ExitCode;

use clap::Args;
use hyper::Method;
use serde_json::Value;

use super::Failure;
use super::sandbox::http::Client;
use super::sandbox::{ExecArgs, MakeArgs, execute, wait};

/// `dsec run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    make: MakeArgs,
    #[command(flatten)]
    exec: ExecArgs,
}

/// Makes a sandbox, runs the command, ends the sandbox, also when this command is interrupted.
///
/// # Errors
/// What the daemon said, or why it was not reached.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, Failure> {
    wait(async {
        let client = Client::from_env();
        let request = args.make.request(None);
        let made = client
            .json(Method::POST, "/v1/sandboxes", Some(&request))
            .await?;
        let id = made.get("id").and_then(Value::as_str).unwrap_or_default();
        let done = tokio::select! {
            done = execute(&client, id, &args.exec) => done,
            _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(130)),
        };
        let path = format!("/v1/sandboxes/{id}");
        client.json(Method::DELETE, &path, None).await?;
        done
    })
}
